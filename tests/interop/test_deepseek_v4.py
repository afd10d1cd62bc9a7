"""A DeepSeek-V4 converted to the dialect of the releases, and loaded by transformers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from moequant.compatibility import check_checkpoint
from moequant.conversion import Recipe, convert
from moequant.errors import UnsupportedError
from moequant.formats import dequantize
from moequant.storage.hub_folder import open_headers
from moequant.verification import verify
from moequant.weights.converted import ConvertedCheckpoint

KINDS = ("sliding", "compressed_sparse", "heavily_compressed")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "index_topk": 8,
    "layer_types": [f"{kind}_attention" for kind in KINDS],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "partial_rotary_factor": 0.5,
    "sliding_window": 16,
    "pad_token_id": 0,
}
RENAMED = {"embed_tokens.weight": "embed.weight", "hc_head.hc_": "hc_head_"}
"""Names of the release where transformers 5.24 saves others, besides `model.` in front."""
OTHERS = ("attention", "shared_experts")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("deepseek_v4") / "source"
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for old, new in RENAMED.items():
        tensors = {name.replace(old, new): w for name, w in tensors.items()}
    tensors = {name.removeprefix("model."): w for name, w in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def tensors_of(folder):
    found = (load_file(path) for path in folder.glob("*.safetensors"))
    return {name: w for file in found for name, w in file.items()}


def recipe(experts, others="fp8_block"):
    rules = [
        {"roles": ["routed_experts"], "format": experts},
        {"roles": OTHERS, "format": others},
    ]
    return Recipe.model_validate({"rules": rules, "output": {"dialect": "deepseek-v4"}})


@pytest.mark.parametrize("experts", ["mxfp4", "fp8_block"])
def test_transformers_loads_it_exactly_and_check_says_so(source, tmp_path, experts):
    out = tmp_path / "out"
    convert(source, out, recipe=recipe(experts))
    assert verify(out, against=source).ok
    config = json.loads((out / "config.json").read_text())
    assert config["expert_dtype"] == config["quantization_config"]["expert_dtype"]
    report = check_checkpoint(open_headers(str(out)))
    assert [engine.key for engine in report.engines if engine.loads] == [
        "transformers", "vllm", "sglang", "moequant",
    ]  # fmt: skip
    assert report.examined.facts.defects == ()

    plain = dict(DeepseekV4ForCausalLM.from_pretrained(source, dtype="bfloat16").named_parameters())
    model, info = DeepseekV4ForCausalLM.from_pretrained(
        out, dtype="bfloat16", output_loading_info=True
    )
    assert not any(info.values()), info
    loaded = dict(model.named_parameters())
    converted = ConvertedCheckpoint.open(out)
    decoded = {
        module: dequantize(converted.read(module)).bfloat16()
        for module in {name.removesuffix(".scale") for name in tensors_of(out)
                       if name.endswith(".scale")}
    }  # fmt: skip
    changed = {name for name, w in loaded.items() if not torch.equal(w, plain[name])}
    assert len(changed) == 3 * (5 + 3 + 2) + 1, "attention, shared and routed experts, an indexer"
    for layer in range(3):
        experts_of = f"model.layers.{layer}.mlp.experts"
        for e in range(4):
            w1, w2, w3 = (decoded[f"layers.{layer}.ffn.experts.{e}.w{i}"] for i in (1, 2, 3))
            assert torch.equal(loaded[f"{experts_of}.gate_up_proj"][e], torch.cat([w1, w3]))
            assert torch.equal(loaded[f"{experts_of}.down_proj"][e], w2)
    alone = {
        "layers.1.attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
        "layers.1.attn.wo_a": "self_attn.o_a_proj",
        "layers.1.ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    }
    for module, name in alone.items():
        assert torch.equal(loaded[f"model.layers.1.{name}.weight"], decoded[module]), module


def test_the_release_becomes_another_without_a_change_of_kept_bytes(source, tmp_path):
    """As of a release with FP8 experts, whose other layers no rule names."""
    convert(source, tmp_path / "fp8", recipe=recipe("fp8_block"))
    rules = [{"roles": ["routed_experts"], "format": "mxfp4"}]
    only = Recipe.model_validate({"rules": rules, "output": {"dialect": "deepseek-v4"}})
    convert(tmp_path / "fp8", tmp_path / "out", recipe=only)
    assert verify(tmp_path / "out", against=tmp_path / "fp8").ok
    before = tensors_of(tmp_path / "fp8")
    after = tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    for name in before.keys() - {n for n in before if ".experts." in n}:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["expert_dtype"] == "fp4"


def test_what_engines_would_take_for_quantized_is_refused(source, tmp_path):
    with pytest.raises(UnsupportedError, match=r"stays unquantized.*give attention, shared_expert"):
        convert(source, tmp_path / "out", recipe=recipe("mxfp4", others="keep"))


def test_other_models_are_not_written_in_it(make_checkpoint, tmp_path):
    with pytest.raises(UnsupportedError, match="deepseek-v4 does not support qwen3_moe"):
        convert(make_checkpoint(), tmp_path / "out", format="mxfp4", dialect="deepseek-v4")


def test_check_reads_a_release(source, tmp_path):
    """Without a list of kept modules, and with `expert_dtype` at the top alone."""
    path = tmp_path / "release"
    convert(source, path, recipe=recipe("mxfp4"))
    config = json.loads((path / "config.json").read_text())
    for field in ("expert_dtype", "modules_to_not_convert"):
        del config["quantization_config"][field]
    (path / "config.json").write_text(json.dumps(config))
    report = check_checkpoint(open_headers(str(path)))
    assert report.examined.facts.dialect == "deepseek-v4"
    assert report.examined.facts.defects == ()
    assert all(engine.loads for engine in report.engines)
