"""Against transformers 5.24, and what strangers write."""

from __future__ import annotations

import pytest
import torch

from moequant.dialects import get_dialect
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import dequantize, quantize

FP8 = get_dialect("fp8")
EXPERT = "model.layers.1.mlp.experts.0.up_proj"


def config_of(modules, kept=()):
    return FP8.quantization_config(dict.fromkeys(modules, "fp8_block"), kept)


@pytest.mark.parametrize("scale", ["power_of_two", "float32"])
def test_transformers_dequantizes_to_the_same_numbers(scale):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    w = torch.randn((256, 384), generator=torch.Generator().manual_seed(4)) * 0.02
    q = quantize(w, "fp8_block", scale=scale)
    tensors = FP8.to_disk("m", q)
    parts = {name.removeprefix("m."): [tensor] for name, tensor in tensors.items()}
    for dtype in (torch.float32, torch.bfloat16):
        operation = Fp8Dequantize(None)
        operation._get_target_dtype = lambda *_, dtype=dtype: dtype
        theirs = operation.convert(parts)["weight"]
        # Both multiply in float32 and round to `dtype` once.
        assert torch.equal(theirs, dequantize(q).to(dtype))


def tiny(model_type):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    experts = {"num_experts": 2, "num_local_experts": 2, "num_hidden_layers": 2}
    config = AutoConfig.for_model(model_type, **sizes, **heads, **experts)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("model_type", "parent", "leaves"),
    [
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
    ],
)
@pytest.mark.parametrize("converted_layers", [(0, 1), (1,)])
def test_transformers_makes_fp8_modules_of_the_converted_experts_only(
    model_type, parent, leaves, converted_layers
):
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    model = tiny(model_type)
    experts = {
        f"model.layers.{i}.{parent}.experts.{e}.{leaf}": i
        for i in range(2)
        for e in range(2)
        for leaf in leaves
    }
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    kept = [m for m, i in experts.items() if i not in converted_layers]
    config = config_of(
        [m for m, i in experts.items() if i in converted_layers],
        [
            *kept,
            *linear,
            "model.embed_tokens",
            *(f"model.layers.{i}.{parent}.gate" for i in (0, 1)),
        ],
    )
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(**config), pre_quantized=True)
    quantizer._process_model_before_weight_loading(model)
    replaced = {n for n, m in model.named_modules() if type(m).__name__.startswith("FP8")}
    assert replaced == {f"model.layers.{i}.mlp.experts" for i in converted_layers}


def test_every_kept_module_is_listed_by_its_full_name_and_experts_by_their_block():
    kept = ["model.layers.0.mlp.experts.0.up_proj", "model.layers.0.mlp.gate"]
    assert config_of([EXPERT], kept) == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "lm_head",
            "model.layers.0.mlp.experts",
            "model.layers.0.mlp.gate",
        ],
    }


@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    ("name", "module", "kept"),
    [
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate", True),
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("mlp.gate", "model.layers.1.mlp.gate", True),
        ("gate", "model.layers.1.mlp.gate", True),
        ("gate", "model.layers.1.mlp.investigate", False),
        (r"model\.layers\.\d+\.self_attn", "model.layers.7.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.7.mlp.up_proj", False),
        ("model.layers.*.mlp.gate", "model.layers.7.mlp.gate_proj", False),
    ],
)
def test_a_kept_name_covers_what_it_covers_in_transformers(field, name, module, kept):
    config = config_of([EXPERT])
    del config["modules_to_not_convert"]
    assert FP8.reader(config | {field: [name]})(module) == (None if kept else "fp8_block")


def test_lm_head_is_kept_even_where_nothing_is_listed():
    config = config_of([EXPERT]) | {"modules_to_not_convert": None}
    assert FP8.reader(config)("lm_head") is None
    assert FP8.reader(config)(EXPERT) == "fp8_block"


def test_fields_with_defaults_may_be_missing():
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
    assert FP8.reader(config | {"weight_block_size": [128, 128]})(EXPERT) == "fp8_block"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight_block_size", None),
        ("weight_block_size", [1, 128]),
        ("weight_block_size", "128"),
        ("activation_scheme", "static"),
        ("fmt", "e5m2"),
        ("expert_dtype", "fp4"),
        ("store_dtype", "mxfp4"),
        ("moe_quant_algo", "NVFP4"),
        ("routed_experts_quant_method", "mxfp4"),
    ],
)
def test_another_kind_of_fp8_checkpoint_is_refused_by_field(field, value):
    config = config_of([EXPERT]) | {field: value}
    with pytest.raises(UnsupportedError, match=rf"{EXPERT}: quantization_config\.{field} is "):
        FP8.reader(config)(EXPERT)
    assert FP8.reader(config)("lm_head") is None


@pytest.mark.parametrize("value", ["lm_head", [1], {"a": 1}])
def test_a_list_of_names_that_is_none_is_refused(value):
    with pytest.raises(CheckpointError, match=r"modules_to_not_convert is .*not a list of names"):
        FP8.reader(config_of([EXPERT]) | {"modules_to_not_convert": value})(EXPERT)


def test_a_broken_pattern_is_refused():
    with pytest.raises(CheckpointError, match="modules_to_not_convert"):
        FP8.reader(config_of([EXPERT]) | {"modules_to_not_convert": ["(layers"]})(EXPERT)
