"""The norm that the table names is the one whose output experts get, in transformers' classes."""

from __future__ import annotations

import pytest
import torch

from moequant.act_fn import SILU
from moequant.conversion import Recipe, convert, plan_checkpoint
from moequant.integrations.expert_modules import expert_blocks
from moequant.models import architectures
from moequant.statistics import intermediate_mean_square
from moequant.verification import verify

NORMS = {
    model_type: (a.model_types[0], a.expert_norm)
    for a in architectures()
    if a.expert_norm is not None
    for model_type in (*a.model_types, *a.flat_model_types)
}
PROMPT = torch.tensor([[3, 14, 15, 9, 26, 53, 58, 9]])


@pytest.mark.parametrize("model_type", NORMS)
def test_experts_get_what_the_norm_returns(models, model_type):
    norm, case = NORMS[model_type][1], models[model_type]
    torch.manual_seed(0)
    model = case.model(case.config).eval()
    with torch.no_grad():
        for name, w in model.named_parameters():
            if "norm" in name and w.ndim == 1:
                w.copy_(torch.rand_like(w) * 2 + 0.1 - norm.offset)
            if "embed" in name or "wte" in name:
                w.mul_(50)  # so that the epsilon of norms does not matter
    parameters, seen = dict(model.named_parameters()), {}

    def keep(layer):
        def hook(module, arguments, named):
            seen[layer] = [*arguments, *named.values()][0]

        return hook

    for layer, block in expert_blocks(model).items():
        block.experts.register_forward_pre_hook(keep(layer), with_kwargs=True)
    with torch.no_grad():
        getattr(model, "thinker", model)(input_ids=PROMPT, use_cache=False)
    assert {*case.layers} <= seen.keys()
    for layer in case.layers:
        tail = norm.tensor(layer).partition(".")[2].split("layers.")[-1].split("blocks.")[-1]
        (weight,) = (w for name, w in parameters.items() if name.endswith(f"s.{tail}"))
        x = seen[layer].reshape(-1, len(weight)) / (weight + norm.offset)
        assert torch.allclose(x.square().mean(1), torch.ones(len(x)), atol=1e-3), layer


@pytest.mark.parametrize(
    ("model_type", "transposed"), [("qwen3_5_moe", False), ("qwen3_vl_moe", True)]
)
def test_gate_and_up_of_a_stack_predict_the_input_of_down(save, tmp_path, model_type, transposed):
    source = save(model_type).checkpoint
    rule = Recipe.for_format("nvfp4", {"search": "gaussian"})
    units = {unit.name: unit for unit in plan_checkpoint(source, rule).units}
    at = "model.language_model.layers.1"
    norm = source.read(f"{at}.post_attention_layernorm.weight").float()
    hidden = (norm + NORMS[model_type][1].offset) ** 2
    stack = source.read(f"{at}.mlp.experts.gate_up_proj")[2]
    gate, up = (stack.T if transposed else stack).chunk(2)
    first, second = (units[f"{at}.mlp.experts.2.{p}_proj.weight"] for p in ("gate", "down"))
    assert torch.equal(first.predicted.mean_square(source), hidden)
    wanted = intermediate_mean_square(gate, up, hidden, SILU)
    assert torch.equal(second.predicted.mean_square(source), wanted)
    convert(source.path, tmp_path / "out", recipe=rule)
    assert verify(tmp_path / "out", against=source.path, layers=0).ok
