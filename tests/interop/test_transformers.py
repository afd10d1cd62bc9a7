"""What transformers makes of converted checkpoints: the weights it loads are ours, exactly."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FineGrainedFP8Config,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moequant.conversion import convert
from moequant.formats import CONVERTIBLE, dequantize
from moequant.models import PROJECTIONS
from moequant.runtime import load_experts
from moequant.verification.reference import evaluate_layer
from moequant.weights.converted import ConvertedCheckpoint

EXPERTS = 4
SIZES = {
    "vocab_size": 96,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}
MODELS = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES,
            intermediate_size=512,
            moe_intermediate_size=256,
            num_experts=EXPERTS,
            head_dim=64,
        )
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SIZES, intermediate_size=256, num_local_experts=EXPERTS)
    ),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SIZES,
            intermediate_size=512,
            moe_intermediate_size=256,
            n_routed_experts=EXPERTS,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=32,
            num_nextn_predict_layers=0,
        )
    ),
}
UE8M0 = "fp8-ue8m0"
LOADED = ("fp8_block", "mxfp4", "w4a8", "fp8_channel", "fp8_tensor")
"""Formats that transformers 5.24 loads right; nvfp4 it loads without the global scale."""
STATIC = {"fp8_tensor": 0.25}
"""Static scales of activations, of formats that come with them."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Each model saved by transformers itself, in BF16."""
    paths = {}
    for name, build in MODELS.items():
        torch.manual_seed(0)
        paths[name] = tmp_path_factory.mktemp(name)
        build().to(torch.bfloat16).save_pretrained(paths[name], max_shard_size="1MB")
    return paths


@pytest.fixture(scope="module")
def converted(sources, tmp_path_factory):
    """`converted(model, format, dialect)`: the folder of a converted checkpoint, made once."""
    made = {}

    def make(model, format, dialect=None):
        key = model, format, dialect
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{model}-{format}") / "out"
            result = convert(
                sources[model],
                folder,
                format=format,
                dialect=dialect,
                activation_scales=STATIC.get(format),
            )
            made[key] = result.output
        return made[key]

    return make


@pytest.fixture(scope="module")
def loaded(sources, converted):
    """`loaded(model, format, dialect)`: what transformers loads; format None is the source."""
    models = {}

    def load(name, format, dialect=None):
        key = name, format, dialect
        if key not in models:
            path = converted(name, format, dialect) if format else sources[name]
            # Where it sees a GPU, transformers keeps FP8 as it is unless told to decode it.
            decode = (
                {"quantization_config": FineGrainedFP8Config(dequantize=True)}
                if (format == "fp8_block" or dialect == UE8M0) and torch.cuda.is_available()
                else {}
            )
            model, report = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.bfloat16, output_loading_info=True, **decode
            )
            if format in STATIC:
                # It does not use them, and says so.
                unused = {name.rpartition(".")[2] for name in report.pop("unexpected_keys")}
                assert unused == {"input_scale"}
            assert not any(report.values()), report
            models[key] = model
        return models[key]

    return load


def experts_of(model, layer):
    """transformers' fused experts of a layer: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    block = model.model.layers[layer].mlp
    return block, block.experts.gate_up_proj, block.experts.down_proj


def opened(path):
    return ConvertedCheckpoint.open(path, quantized_activations=True)


def decoded(path, layer, expert, projection):
    return dequantize(opened(path).read_expert(layer, expert, projection))


WAYS = [*((format, None) for format in LOADED), ("fp8_block", UE8M0), ("mxfp4", UE8M0)]


@pytest.mark.parametrize(("format", "dialect"), WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_loads_our_weights_exactly(converted, loaded, name, format, dialect):
    path = converted(name, format, dialect)
    model = loaded(name, format, dialect)
    layers = opened(path).expert_layers()
    assert layers
    for layer in layers:
        _, gate_up, down = experts_of(model, layer)
        for expert in range(EXPERTS):
            wanted = torch.cat([decoded(path, layer, expert, p) for p in ("gate", "up")])
            assert torch.equal(gate_up[expert], wanted.bfloat16())
            assert torch.equal(down[expert], decoded(path, layer, expert, "down").bfloat16())
    source = loaded(name, None).state_dict()
    for (key, ours), (_, theirs) in zip(model.state_dict().items(), source.items(), strict=True):
        if ".mlp.experts." not in key:
            assert torch.equal(ours, theirs), key


@pytest.mark.parametrize("format", ["fp8_channel", "w4a8"])
def test_the_format_at_the_top_of_quantization_config_does_not_count(
    converted, loaded, tmp_path, format
):
    """Beside the one of a group; `check` relies on it."""
    path = shutil.copytree(converted("qwen3_moe", format), tmp_path / "c")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["format"] = "nvfp4-pack-quantized"
    (path / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    wanted = loaded("qwen3_moe", format).state_dict()
    assert all(torch.equal(found, wanted[name]) for name, found in model.state_dict().items())


def decoded_by_libraries(path, layer, format, loaded_model):
    """gate_up_proj [E, 2I, H] and down_proj [E, H, I] in BF16, as nobody here decoded them."""
    if format in LOADED:
        _, gate_up, down = experts_of(loaded_model(), layer)
        return gate_up.detach(), down.detach()
    converted = ConvertedCheckpoint.open(path)
    config = QuantizationConfig.model_validate(converted.checkpoint.config["quantization_config"])
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)

    def decompress(expert, projection):
        module = converted.expert_module(layer, expert, projection)
        names = converted.tensor_names(module, format)
        tensors = {n.removeprefix(f"{module}."): converted.checkpoint.read(n) for n in names}
        return compressor.decompress(tensors, scheme)["weight"]

    gate_up = [torch.cat([decompress(e, p) for p in ("gate", "up")]) for e in range(EXPERTS)]
    return torch.stack(gate_up), torch.stack([decompress(e, "down") for e in range(EXPERTS)])


def run_block(model, layer, hidden, gate_up, down):
    """Output, ids and weights of transformers' own experts, in float32 on the given weights."""
    block, _, _ = experts_of(model, layer)
    block = copy.deepcopy(block).float()
    block.experts.gate_up_proj.data = gate_up.float()
    block.experts.down_proj.data = down.float()
    seen = {}
    run = block.experts.forward

    def spy(hidden_states, ids, weights):
        seen["output"] = run(hidden_states, ids, weights)
        seen["ids"], seen["weights"] = ids, weights
        return seen["output"]

    block.experts.forward = spy
    with torch.no_grad():
        block(hidden[None])
    M = len(hidden)
    return seen["output"].reshape(M, -1), seen["ids"].reshape(M, -1), seen["weights"].reshape(M, -1)


@pytest.mark.parametrize("format", CONVERTIBLE)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_the_runtime_equals_transformers_own_block(converted, loaded, name, format):
    """Within the rounding of float32 accumulation, whatever its order, on the block's own routing.

    Either side is held against a dense FP64 loop over its own weights, whose bound is derived in
    verification/reference.py: the block's were decoded to BF16 by the libraries, the runtime's by
    `dequantize`. They are the same numbers but for w4a8, whose products BF16 has to round.
    """
    path = converted(name, format)
    layer = opened(path).expert_layers()[0]
    gate_up, down = decoded_by_libraries(path, layer, format, lambda: loaded(name, format))
    hidden = torch.randn(9, 256, generator=torch.Generator().manual_seed(1))
    theirs, ids, weights = run_block(loaded(name, None), layer, hidden, gate_up, down)
    ours = load_experts(path, layer, activations="none")(hidden, weights, ids)

    ours_gate, ours_up, ours_down = (
        [decoded(path, layer, e, p) for e in range(EXPERTS)] for p in PROJECTIONS
    )
    half = gate_up.shape[1] // 2
    if format != "w4a8":
        assert torch.equal(gate_up[:, :half].float(), torch.stack(ours_gate))
        assert torch.equal(gate_up[:, half:].float(), torch.stack(ours_up))
        assert torch.equal(down.float(), torch.stack(ours_down))
    for output, matrices in (
        (ours, (ours_gate, ours_up, ours_down)),
        (theirs, (gate_up[:, :half], gate_up[:, half:], down)),
    ):
        decoded_by = dict(zip(PROJECTIONS, matrices, strict=True))
        expected, bound = evaluate_layer(
            hidden.double(), ids, weights.double(), lambda p, e, w=decoded_by: w[p][e].double()
        )
        # The worst case of all roundings stays far below any mistake in weights or routing.
        assert bound.max() < 0.01 * expected.abs().max()
        assert ((output.double() - expected).abs() <= bound).all()


def test_the_transformers_that_reads_nvfp4_right_will_be_noticed(converted, loaded):
    """`convert` warns that transformers drops the global scale; this fails when it no longer does.

    Then the warning goes, and nvfp4 joins LOADED.
    """
    path = converted("qwen3_moe", "nvfp4")
    _, _, down = experts_of(loaded("qwen3_moe", "nvfp4"), 0)
    ours = decoded(path, 0, 0, "down")
    global_scale = ConvertedCheckpoint.open(path).read_expert(0, 0, "down").global_scale
    assert torch.equal(down[0].float() * global_scale, ours)
    assert not torch.equal(down[0].float(), ours)


def test_the_dialect_modelopt_stops_transformers(sources, tmp_path):
    """`convert` warns of it; it takes the codes for weights."""
    convert(sources["qwen3_moe"], tmp_path / "out", format="nvfp4", dialect="modelopt")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
