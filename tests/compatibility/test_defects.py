"""Defects of other converters, planted in outputs of ours: each found, and the engine named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moequant import load_experts
from moequant.compatibility.rules import ENGINES, rules
from moequant.compatibility.scale_values import values_of_scale
from moequant.conversion import Recipe
from moequant.errors import MoequantError

AT = "model.layers.0.mlp"
EXPERT = f"{AT}.experts.1"


def against(engines, key):
    """The rules by which an engine does not load a checkpoint, and what they name."""
    return {said.rule: said.names for said in engines[key].against}


def notes(engines, key):
    """What is said of single modules."""
    return {said.rule: said.names for said in engines[key].remarks if said.names}


def drop(*names):
    def change(tensors):
        for name in names:
            del tensors[name]

    return change


def put(name, value):
    """Replace every number of tensor `name` by a value, kept in its dtype."""

    def change(tensors):
        was = tensors[name]
        tensors[name] = torch.full(was.shape, value).to(was.dtype)

    return change


def plain(*modules):
    """Store modules in BF16, without scales."""

    def change(tensors):
        for module in modules:
            for name in [n for n in tensors if n.rpartition(".")[0] == module]:
                del tensors[name]
            tensors[f"{module}.weight"] = torch.zeros(256, 256, dtype=torch.bfloat16)

    return change


def of_model_optimizer(config):
    """FP8 as Model-Optimizer says it, of what compressed-tensors called by another name."""
    kept = [*config["ignore"]]
    config.clear()
    config |= {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": kept}


@pytest.mark.parametrize("rows", [False, True])
def test_fp8_of_model_optimizer_is_loaded_with_one_scale_and_not_with_one_for_each_row(
    planted, check, rows
):
    def one_scale(tensors):
        for name in [n for n in tensors if n.endswith("weight_scale")]:
            tensors[name] = tensors[name][0, 0].clone()

    tensors = None if rows else one_scale
    engines = check(planted("fp8_channel", tensors=tensors, config=of_model_optimizer))
    for key in ("vllm", "sglang"):
        assert engines[key].loads is not rows
        assert ("modelopt-row-scales" in against(engines, key)) is rows
    # It does not take 1 for a scale of activations that is missing, as the engines do.
    assert "missing-fp8-input-scales-own" in against(engines, "moequant")
    assert ("modelopt-row-scales" in against(engines, "moequant")) is rows
    assert not engines["transformers"].loads


def as_mixture(algorithm, *others):
    """Experts in FP8 blocks or MXFP8 as MIXED_PRECISION says it, and `others` in NVFP4."""

    def change(config):
        kept = config.get("modules_to_not_convert") or config["ignore"]
        experts = {f"model.layers.{n}.mlp.experts": {"quant_algo": algorithm} for n in (0, 1)}
        config.clear()
        config |= {
            "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
            "ignore": [name for name in kept if name not in others],
            "quantized_layers": experts | {name: {"quant_algo": "NVFP4"} for name in others},
        }  # fmt: skip

    return change


def as_nvfp4(module):
    """Zeros in NVFP4, as Model-Optimizer stores it."""

    def change(tensors):
        rows, columns = tensors[f"{module}.weight"].shape
        tensors[f"{module}.weight"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        scale = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale"] = scale
        tensors[f"{module}.weight_scale_2"] = torch.tensor(1.0)
        tensors[f"{module}.input_scale"] = torch.tensor(1.0)

    return change


OUTPUT = "model.layers.0.self_attn.o_proj"


def test_fp8_blocks_of_a_mixture_are_loaded_beside_nvfp4(planted, check):
    config = as_mixture("FP8_PB_WO", OUTPUT)
    engines = check(planted("fp8_block", tensors=as_nvfp4(OUTPUT), config=config))
    assert engines["vllm"].loads
    assert engines["sglang"].loads
    assert [*against(engines, "moequant")] == ["modelopt-sources-own"]


def test_a_mixture_without_nvfp4_breaks_sglang(planted, check):
    engines = check(planted("fp8_block", config=as_mixture("fp8_pb_wo")))
    assert engines["vllm"].loads
    assert [*against(engines, "sglang")] == ["modelopt-no-nvfp4-layer-sglang"]


def as_model_optimizer_spreads(tensors):
    """Scales of blocks as `weight_scale` [N/128, 1, K/128, 1]."""
    for name in [n for n in tensors if n.endswith("weight_scale_inv")]:
        scale = tensors.pop(name)
        tensors[name.removesuffix("_inv")] = scale[:, None, :, None].clone()


def test_fp8_blocks_of_a_whole_checkpoint_break_vllm_and_sglang(planted, check):
    def of_blocks(config):
        kept = [*config["modules_to_not_convert"]]
        config.clear()
        config |= {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo", "ignore": kept}

    path = planted("fp8_block", tensors=as_model_optimizer_spreads, config=of_blocks)
    engines = check(path)
    for key in ("vllm", "sglang"):
        assert [*against(engines, key)] == [f"modelopt-blocks-alone-{key}"]


def test_scales_under_another_name_break_the_engine_that_does_not_look_there(planted, check):
    def both(tensors):
        as_model_optimizer_spreads(tensors)
        as_nvfp4(OUTPUT)(tensors)

    path = planted("fp8_block", tensors=both, config=as_mixture("FP8_PB_WO", OUTPUT))
    engines = check(path)
    for key in ("vllm", "sglang"):
        (names,) = against(engines, key).values()
        assert [*against(engines, key)] == ["modelopt-scale-names"]
        assert len(names) == 2 * 4 * 3


def test_mxfp8_of_model_optimizer_is_read_by_sglang_on_blackwell(planted, check):
    def alone(config):
        kept = [name for name in config["ignore"] if not name.startswith("re:")]
        config.clear()
        config |= {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": kept}

    path = planted("mxfp8", config=alone)
    assert check(path, gpu="b200")["sglang"].loads
    assert check(path, gpu="h100")["vllm"].loads
    said = against(check(path, gpu="h100"), "sglang")
    assert "modelopt-mxfp8-before-blackwell-sglang" in said


def test_mxfp8_of_a_mixture_breaks_sglang_by_the_names_of_its_scales(planted, check):
    path = planted("mxfp8", tensors=as_nvfp4(OUTPUT), config=as_mixture("MXFP8", OUTPUT))
    engines = check(path, gpu="b200")
    assert engines["vllm"].loads
    assert [*against(engines, "sglang")] == ["modelopt-scale-names"]


@pytest.mark.parametrize(
    ("dialect", "name", "sglang"),
    [
        ("compressed-tensors", "weight_global_scale", "gate-up-global-scales-sglang"),
        ("modelopt", "weight_scale_2", "gate-up-global-scales-modelopt-sglang"),
    ],
)
def test_gate_and_up_with_different_global_scales_break_vllm_and_sglang(
    planted, check, dialect, name, sglang
):
    def double(tensors):
        tensors[f"{EXPERT}.up_proj.{name}"] *= 2

    path = planted("nvfp4", dialect, tensors=double)
    engines = check(path, gpu="h100")
    names = (f"{EXPERT}.gate_proj",)
    assert against(engines, "vllm") == {"gate-up-global-scales-vllm": names}
    assert against(engines, "sglang") == {sglang: names}
    assert engines["moequant"].loads
    # On Blackwell SGLang multiplies gate and up by scales of their own, in the dialect modelopt.
    on_blackwell = check(path, gpu="b200")
    assert on_blackwell["sglang"].loads == (dialect == "modelopt")
    assert not on_blackwell["vllm"].loads


def test_a_difference_that_vllm_takes_for_none_stops_sglang_alone(planted, check):
    def move(tensors):
        name = f"{EXPERT}.up_proj.weight_global_scale"
        tensors[name] = torch.nextafter(tensors[name], torch.tensor(torch.inf))

    engines = check(planted("nvfp4", tensors=move))
    assert engines["vllm"].loads
    assert [*against(engines, "sglang")] == ["gate-up-global-scales-sglang"]


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_a_missing_input_scale_breaks_blackwell(planted, check, dialect):
    leaf = "input_global_scale" if dialect == "compressed-tensors" else "input_scale"
    lost = f"{EXPERT}.down_proj"
    path = planted("nvfp4", dialect, tensors=drop(f"{lost}.{leaf}"), activation_scales=0.01)
    engines = check(path, gpu="b200")
    assert against(engines, "vllm") == {"missing-input-scales": (lost,)}
    if dialect == "compressed-tensors":
        assert against(engines, "sglang") == {"missing-input-scales-sglang": (lost,)}
    else:
        assert notes(engines, "sglang") == {"missing-input-scales-modelopt-sglang": (lost,)}
    on_hopper = check(path, gpu="h100")
    assert on_hopper["vllm"].loads
    assert notes(on_hopper, "vllm") == {"missing-input-scales-before-blackwell": (lost,)}
    assert check(path)["vllm"].loads, "on some GPU"
    assert "missing-input-scales" in against(check(path), "vllm")


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 0.0])
def test_an_input_scale_of_an_expert_without_tokens_breaks_blackwell(planted, check, value):
    name = f"{EXPERT}.gate_proj.input_global_scale"
    path = planted("nvfp4", tensors=put(name, value), activation_scales=0.01)
    engines = check(path, gpu="b200")
    for key in ("vllm", "sglang"):
        assert against(engines, key) == {"bad-input-scales": (name,)}
        assert f"{name} ({value:g})" in engines[key].against[0].text
    on_hopper = check(path, gpu="h100")
    for key in ("vllm", "sglang"):
        assert on_hopper[key].loads
        assert notes(on_hopper, key) == {"bad-input-scales-before-blackwell": (name,)}


def every_scale(leaf, value, layer=0, leaves=("gate_proj", "up_proj", "down_proj")):
    """The scales of inputs of all experts of a layer, and a change that replaces them."""
    at = f"model.layers.{layer}.mlp.experts"
    names = [f"{at}.{expert}.{one}.{leaf}" for expert in range(4) for one in leaves]
    return names, lambda tensors: [put(name, value)(tensors) for name in names]


def test_a_missing_scale_of_fp8_inputs_is_1_in_vllm_and_sglang_and_stops_moequant(planted, check):
    lost = f"{EXPERT}.down_proj"
    path = planted("fp8_tensor", tensors=drop(f"{lost}.input_scale"), activation_scales=0.01)
    engines = check(path)
    for key in ("vllm", "sglang"):
        assert engines[key].loads
        assert notes(engines, key) == {"missing-fp8-input-scales": (lost,)}
    assert against(engines, "moequant") == {"missing-fp8-input-scales-own": (lost,)}
    assert engines["transformers"].loads


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_scale_of_fp8_inputs_that_is_not_finite_breaks_its_layer(planted, check, value):
    name = f"{EXPERT}.down_proj.input_scale"
    engines = check(planted("fp8_tensor", tensors=put(name, value), activation_scales=0.01))
    for key in ("vllm", "sglang"):
        assert against(engines, key) == {"bad-fp8-input-scales": (name,)}
        assert f"{name} ({value:g})" in engines[key].against[0].text
    assert against(engines, "moequant") == {"bad-fp8-input-scales-own": (name,)}
    assert engines["transformers"].loads, "it does not read them"


@pytest.mark.parametrize("value", [0.0, -0.01])
def test_scales_of_fp8_inputs_that_are_not_positive_in_a_whole_layer_break_it(
    planted, check, value
):
    names, change = every_scale("input_scale", value, leaves=("down_proj",))
    engines = check(planted("fp8_tensor", tensors=change, activation_scales=0.01))
    for key in ("vllm", "sglang"):
        assert against(engines, key) == {"bad-fp8-input-scales": tuple(names)}
        assert f"{names[0]} ({value:g}) and 3 more" in engines[key].against[0].text
    assert against(engines, "moequant") == {"bad-fp8-input-scales-own": tuple(names)}


def test_a_scale_of_0_of_one_expert_s_fp8_inputs_does_not_count(planted, check):
    name = f"{EXPERT}.down_proj.input_scale"
    engines = check(planted("fp8_tensor", tensors=put(name, 0.0), activation_scales=0.01))
    said = dict.fromkeys(("vllm", "sglang"), "zero-fp8-input-scales")
    for key, rule in {**said, "moequant": "zero-fp8-input-scales-own"}.items():
        assert engines[key].loads
        assert notes(engines, key) == {rule: (name,)}
        (said,) = [said for said in engines[key].remarks if said.rule == rule]
        assert f"{name} (0)" in said.text


@pytest.mark.parametrize("value", [-0.01, -torch.inf])
def test_a_negative_scale_of_one_expert_s_fp8_inputs_stops_moequant_alone(planted, check, value):
    name = f"{EXPERT}.down_proj.input_scale"
    engines = check(planted("fp8_tensor", tensors=put(name, value), activation_scales=0.01))
    for key in ("vllm", "sglang"):
        assert engines[key].loads
        assert notes(engines, key) == {"unused-fp8-input-scales": (name,)}
    assert against(engines, "moequant") == {"unused-fp8-input-scales-own": (name,)}


def test_gate_and_up_with_different_scales_of_their_input_stop_vllm(planted, check):
    name = f"{EXPERT}.gate_proj.input_scale"
    engines = check(planted("fp8_tensor", tensors=put(name, 0.02), activation_scales=0.01))
    assert against(engines, "vllm") == {"gate-up-input-scales": (name,)}
    assert "(0.02 and 0.01)" in engines["vllm"].against[0].text
    assert engines["moequant"].loads, "it takes the larger"


@pytest.mark.parametrize(("value", "loads"), [(torch.nan, False), (0.01, True)])
def test_scales_of_fp8_inputs_are_read_of_model_optimizer_too(planted, check, value, loads):
    name = f"{EXPERT}.down_proj.input_scale"

    def as_model_optimizer(tensors):
        for scale in [n for n in tensors if n.endswith("weight_scale")]:
            tensors[scale] = tensors[scale][0, 0].clone()
        names = [n for layer in (0, 1) for n in every_scale("input_scale", 0.01, layer)[0]]
        tensors |= {n: torch.tensor(0.01) for n in names} | {name: torch.tensor(value)}

    engines = check(planted("fp8_channel", tensors=as_model_optimizer, config=of_model_optimizer))
    for key in ("vllm", "sglang"):
        assert engines[key].loads is loads
        assert against(engines, key) == ({} if loads else {"bad-fp8-input-scales": (name,)})
    assert against(engines, "moequant") == ({} if loads else {"bad-fp8-input-scales-own": (name,)})


def test_scales_of_inputs_of_w4afp8_are_read_by_the_names_of_its_releases(planted, check):
    """`experts.E.w2.input_scale` beside `experts.E.down_proj.weight`, as DeepSeek-R1-W4AFP8."""
    names, _ = every_scale("input_scale", 0.25, leaves=("w1", "w2", "w3"))
    name = f"{EXPERT}.w2.input_scale"

    def calibrated(tensors):
        tensors |= {n: torch.tensor([0.25]) for n in names} | {name: torch.tensor([torch.inf])}

    rules = ({"roles": ["routed_experts"], "format": "w4a8"},
             {"roles": ["attention"], "format": "fp8_block"})  # fmt: skip
    recipe = Recipe.model_validate({"rules": rules})
    engines = check(planted(None, "w4afp8", tensors=calibrated, recipe=recipe))
    assert against(engines, "sglang") == {"bad-fp8-input-scales": (name,)}
    assert engines["moequant"].loads, "it computes scales of its own"


@pytest.mark.parametrize(
    ("format", "leaf", "value", "word"),
    [
        ("nvfp4", "weight_scale", torch.nan, "4096 of 4096 NaN"),
        ("nvfp4", "weight_global_scale", torch.inf, "infinite"),
        ("nvfp4", "weight_global_scale", 0.0, "all zero"),
        ("fp8_block", "weight_scale_inv", torch.nan, "4 of 4 NaN"),
        ("mxfp4", "weight_scale", 255, "2048 of 2048 NaN"),
        ("w4a8", "weight_scale", torch.inf, "512 of 512 infinite"),
    ],
)
def test_a_scale_that_is_no_positive_number_breaks_every_engine(
    planted, check, format, leaf, value, word
):
    name = f"{EXPERT}.down_proj"
    engines = check(planted(format, tensors=put(f"{name}.{leaf}", value)))
    for key in ("transformers", "vllm", "sglang", "moequant"):
        assert against(engines, key)["bad-weight-scales"] == (name,)
        (said,) = [s for s in engines[key].against if s.rule == "bad-weight-scales"]
        assert f"{name} ({leaf}: {word})" in said.text


@pytest.mark.parametrize(
    ("format", "dialect", "leaf", "value", "said"),
    [
        ("fp8_block", None, "weight_scale_inv", 2.0**120, "1.32923e+36, and codes up to 448"),
        ("fp8_tensor", None, "weight_scale", 1e37, "1e+37, and codes up to 448"),
        ("mxfp4", None, "weight_scale", 253, "8.50706e+37, and codes up to 6"),
        ("mxfp8", None, "weight_scale", 247, "1.32923e+36, and codes up to 448"),
        ("w4a8", None, "weight_scale", 1e38, "9.96921e+37, and codes up to 7"),
        ("nvfp4", "modelopt", "weight_scale_2", 1e37, "and codes up to 6"),
        ("nvfp4", None, "weight_global_scale", 1e-37, "and codes up to 6"),
    ],
)
def test_scales_whose_products_with_codes_are_infinite_break_every_engine(
    planted, check, format, dialect, leaf, value, said
):
    path = planted(format, dialect, tensors=put(f"{DOWN}.{leaf}", value))
    engines = check(path)
    for key in ENGINES:
        assert against(engines, key)["large-weight-scales"] == (DOWN,)
        (found,) = [s for s in engines[key].against if s.rule == "large-weight-scales"]
        assert f"{DOWN} (a scale of " in found.text
        assert said in found.text


@pytest.mark.parametrize(
    ("format", "leaf", "value"),
    [("fp8_block", "weight_scale_inv", 2.0**119), ("mxfp4", "weight_scale", 252)],
)
def test_the_largest_scales_whose_products_are_finite_are_no_defect(
    planted, check, format, leaf, value
):
    engines = check(planted(format, tensors=put(f"{DOWN}.{leaf}", value)))
    assert engines["moequant"].loads


def test_scales_of_other_layers_are_read_too(planted, check):
    """moequant itself runs routed experts alone."""
    recipe = Recipe.model_validate({
        "rules": [{"roles": ["routed_experts", "attention"], "format": "fp8_block"}],
    })  # fmt: skip
    scale = f"{OUTPUT}.weight_scale_inv"
    engines = check(planted(None, tensors=put(scale, torch.nan), recipe=recipe))
    for key in ("transformers", "vllm", "sglang"):
        assert against(engines, key) == {"bad-weight-scales": (OUTPUT,)}
    assert engines["moequant"].loads


def test_scales_of_stacked_experts_are_read(planted, check):
    name = "model.layers.1.mlp.experts.down_proj_scales"

    def plant(tensors):
        tensors[name][0, 0, :2] = 255

    path = planted("mxfp4", "gpt-oss", model_type="gpt_oss", tensors=plant)
    engines = check(path)
    for key in ENGINES:
        assert against(engines, key)["bad-weight-scales"] == (name,)
        (said,) = [s for s in engines[key].against if s.rule == "bad-weight-scales"]
        assert f"{name} (2 of " in said.text
    path = planted.original("mxfp4", "gpt-oss", model_type="gpt_oss")
    assert check(path)["vllm"].loads


def as_float32(name, value):
    """Store tensor `name` as float32, with one value everywhere."""

    def change(tensors):
        tensors[name] = torch.full(tensors[name].shape, value)

    return change


DOWN = f"{EXPERT}.down_proj"
REFUSED = {
    "negative divisor": (
        "nvfp4", None, put(f"{DOWN}.weight_global_scale", -4096.0),
        "weight_global_scale: -4096.0, but a divisor",
    ),
    "subnormal divisor": (
        "nvfp4", None, put(f"{DOWN}.weight_global_scale", 1e-40),
        "weight_global_scale: 9.99994",
    ),
    "negative multiplier": (
        "nvfp4", "modelopt", put(f"{DOWN}.weight_scale_2", -0.5),
        "weight_scale_2: -0.5, but must be finite and not negative",
    ),
    "logical shape": (
        "w4a8", None, put(f"{DOWN}.weight_shape", 128),
        "weight_shape: [128, 128], but the codes have shape [256, 256]",
    ),
    "scale that BF16 cannot hold": (
        "w4a8", None, as_float32(f"{DOWN}.weight_scale", 0.1),
        "weight_scale: float32 values that bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("format", "dialect", "change", "text"), REFUSED.values(), ids=REFUSED)
def test_what_the_loader_refuses_is_said_in_its_words(
    planted, check, format, dialect, change, text
):
    path = planted(format, dialect, tensors=change)
    with pytest.raises(MoequantError) as refusal:
        load_experts(path, layer=0)
    engines = check(path, gpu="h100")
    assert against(engines, "moequant")["refused-weights-own"] == (DOWN,)
    (said,) = [s for s in engines["moequant"].against if s.rule == "refused-weights-own"]
    assert f"{DOWN}.{text}" in said.text
    assert str(refusal.value) in said.text
    for key in ("vllm", "sglang"):
        if "large-weight-scales" not in against(engines, key):
            assert notes(engines, key)["refused-weights"] == (DOWN,)


def test_what_headers_already_say_is_not_said_again_by_the_decoder(planted, check):
    path = planted("nvfp4", tensors=drop(f"{DOWN}.weight_scale"))
    assert against(check(path), "moequant") == {"missing-weight-scales-own": (DOWN,)}


@pytest.mark.parametrize(
    ("format", "dialect", "leaf"),
    [
        ("nvfp4", "compressed-tensors", "weight_scale"),
        ("nvfp4", "modelopt", "weight_scale_2"),
        ("fp8_block", "fp8", "weight_scale_inv"),
        ("w4a8", "compressed-tensors", "weight_scale"),
        ("fp8_tensor", "compressed-tensors", "weight_scale"),
    ],
)
def test_scales_of_zero_decode_to_zeros_which_may_be_right(planted, check, format, dialect, leaf):
    name = f"{EXPERT}.down_proj"
    given = {"activation_scales": 0.01} if format == "fp8_tensor" else {}
    path = planted(format, dialect, tensors=put(f"{name}.{leaf}", 0.0), **given)
    engines = check(path, gpu="h100")
    untouched = check(planted.original(format, dialect, **given), gpu="h100")
    for key in ("transformers", "vllm", "sglang", "moequant"):
        assert engines[key].loads == untouched[key].loads
        assert against(engines, key) == against(untouched, key)
    assert notes(engines, "vllm")["zero-weight-scales"] == (name,)


@pytest.mark.parametrize(
    ("format", "dialect"),
    [("fp8_block", "fp8"), ("nvfp4", "compressed-tensors"), ("nvfp4", "modelopt")],
)
def test_one_of_merged_layers_in_another_form_breaks_what_merges_them(
    planted, check, format, dialect
):
    """k_proj stays in BF16 and is listed, beside q_proj and v_proj in FP8 or FP4."""
    at = "model.layers.1.self_attn"
    changed = tuple(f"{at}.{leaf}" for leaf in ("q_proj", "v_proj"))
    donor = f"{EXPERT}.up_proj"

    def quantize(tensors):
        for module in changed:
            del tensors[f"{module}.weight"]
            for name in [n for n in tensors if n.startswith(f"{donor}.")]:
                tensors[name.replace(donor, module)] = tensors[name].clone()

    listed = without(*changed, f"{at}.qkv_proj")
    engines = check(planted(format, dialect, tensors=quantize, config=listed))
    for key in ("vllm", "sglang"):
        assert against(engines, key) == {f"mixed-merged-{key}": (f"{at}.k_proj",)}
        assert "(beside q_proj in" in engines[key].against[0].text
    assert engines["moequant"].loads, "it reads experts alone"
    assert "mixed-merged" not in "".join(against(engines, "transformers"))


@pytest.mark.parametrize(
    ("model_type", "merged", "parts"),
    [
        ("mixtral", "model.layers.1.self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("deepseek_v3", "model.layers.0.mlp.gate_up_proj", ("gate_proj", "up_proj")),
    ],
)
def test_a_list_with_the_parts_of_a_merged_layer_alone_breaks_classes_of_sglang(
    planted, check, model_type, merged, parts
):
    """As llm-compressor writes it: `ignore` has every kept module, and no merged layer."""
    path = planted("nvfp4", model_type=model_type, config=without(merged))
    engines = check(path)
    names = {f"{merged.rpartition('.')[0]}.{leaf}" for leaf in parts}
    assert {*against(engines, "sglang").pop("plain-linears-sglang")} == names
    assert [*against(engines, "sglang")] == ["plain-linears-sglang"]
    assert engines["vllm"].loads
    assert engines["moequant"].loads


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("dialect", ["modelopt", "fp8"])
def test_lists_of_other_dialects_may_name_the_parts_alone(planted, check, model_type, dialect):
    path = planted("fp8_block" if dialect == "fp8" else "nvfp4", dialect, model_type=model_type)
    engines = check(path)
    assert engines["vllm"].loads
    assert engines["sglang"].loads


MIXED_RULES = (
    {"roles": ["routed_experts"], "format": "nvfp4", "activation_scales": 0.01},
    {"roles": ["attention", "dense_mlp"], "format": "fp8_tensor", "activation_scales": 0.05},
)


def of_parts_alone(config):
    """`quantized_layers` as Model-Optimizer writes it, without merged layers."""
    layers = config["quantized_layers"]
    merged = ("qkv_proj", "gate_up_proj", "fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa")
    config["quantized_layers"] = {n: v for n, v in layers.items() if not n.endswith(merged)}


@pytest.mark.parametrize(
    ("model_type", "broken"),
    [
        ("qwen3_moe", ()),
        ("mixtral", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("deepseek_v3", ("mlp.gate_proj", "mlp.up_proj")),
    ],
)
def test_a_mixture_of_model_optimizer_breaks_sglang_where_its_class_lists_no_parts(
    planted, check, model_type, broken
):
    recipe = Recipe.model_validate({"rules": MIXED_RULES})
    settings = {"model_type": model_type, "recipe": recipe}
    assert check(planted.original(None, "modelopt", **settings))["sglang"].loads
    engines = check(planted(None, "modelopt", config=of_parts_alone, **settings))
    assert engines["vllm"].loads
    found = against(engines, "sglang")
    assert [*found] == (["unmatched-linears"] if broken else [])
    names = {name.split(".", 3)[3] for name in found.get("unmatched-linears", ())}
    assert names == {*broken}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_one_plain_part_of_a_merged_layer_of_a_mixture_is_found(planted, check, model_type):
    lost = "model.layers.1.self_attn.k_proj"

    def leave_out(config):
        of_parts_alone(config)
        del config["quantized_layers"][lost]
        config["ignore"].append(lost)

    recipe = Recipe.model_validate({"rules": MIXED_RULES})
    settings = {"model_type": model_type, "recipe": recipe}
    path = planted(None, "modelopt", config=leave_out, tensors=plain(lost), **settings)
    engines = check(path)
    for key in ("vllm", "sglang"):
        assert against(engines, key)[f"mixed-merged-{key}"] == (lost,)
        assert "(beside q_proj in fp8_tensor)" in engines[key].against[0].text


def test_a_dense_mlp_whose_gate_alone_is_quantized_breaks_what_merges_it(planted, check):
    at = "model.layers.0.mlp"

    def quantize(tensors):
        shape = tensors[f"{at}.gate_proj.weight"].shape
        tensors[f"{at}.gate_proj.weight"] = torch.zeros(shape, dtype=torch.float8_e4m3fn)
        tensors[f"{at}.gate_proj.weight_scale_inv"] = torch.ones(shape[0] // 128, shape[1] // 128)

    path = planted(
        "fp8_block", model_type="deepseek_v3", tensors=quantize, config=without(f"{at}.gate_proj")
    )
    engines = check(path)
    for key in ("vllm", "sglang"):
        assert against(engines, key) == {f"mixed-merged-{key}": (f"{at}.up_proj",)}


def test_a_lost_scale_is_an_initial_one_in_vllm(planted, check):
    engines = check(planted("fp8_block", tensors=drop(f"{EXPERT}.up_proj.weight_scale_inv")))
    names = (f"{EXPERT}.up_proj",)
    assert against(engines, "vllm") == {"missing-weight-scales": names}
    assert against(engines, "sglang") == {"missing-weight-scales": names}
    assert against(engines, "transformers") == {"missing-weight-scales-transformers": names}
    assert against(engines, "moequant") == {"missing-weight-scales-own": names}


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4"])
def test_an_expert_left_in_bf16_inside_a_quantized_layer_breaks_every_engine(
    planted, check, format
):
    lost = f"{EXPERT}.down_proj"
    engines = check(planted(format, tensors=plain(lost)))
    for key in ("transformers", "vllm", "sglang", "moequant"):
        assert against(engines, key)["mixed-experts"] == (lost,)


def test_a_layer_left_in_bf16_that_config_json_calls_quantized_breaks_every_engine(planted, check):
    leaves = ("gate_proj", "up_proj", "down_proj")
    modules = [f"{AT}.experts.{expert}.{leaf}" for expert in range(4) for leaf in leaves]
    engines = check(planted("nvfp4", tensors=plain(*modules)))
    for key in ("vllm", "sglang"):
        assert {*against(engines, key)[f"plain-experts-{key}"]} == {*modules}
    assert "plain-experts-transformers" in against(engines, "transformers")
    assert "plain-experts-own" in against(engines, "moequant")


def without(*names):
    """Take names out of the list of kept modules."""

    def change(config):
        for key in ("ignore", "modules_to_not_convert"):
            if key in config:
                config[key] = [entry for entry in config[key] if entry not in names]

    return change


@pytest.mark.parametrize(
    ("format", "dialect"),
    [("fp8_block", "fp8"), ("nvfp4", "compressed-tensors"), ("nvfp4", "modelopt")],
)
def test_an_incomplete_ignore_breaks_every_engine(planted, check, format, dialect):
    lost = "model.layers.1.self_attn.o_proj"
    path = planted(format, dialect, config=without(lost))
    engines = check(path, gpu="h100")
    assert against(engines, "vllm") == {"plain-linears-vllm": (lost,)}
    assert against(engines, "sglang") == {"plain-linears-sglang": (lost,)}
    fp8 = dialect == "fp8"
    rule = "plain-linears-fp8-transformers" if fp8 else "plain-linears-transformers"
    assert against(engines, "transformers")[rule] == (lost,)
    # Where it has no FP8 kernels it dequantizes what is quantized, and leaves the rest.
    assert check(path, gpu="a100")["transformers"].loads == fp8
    assert engines["moequant"].loads, "it reads experts alone"


def test_a_list_that_only_transformers_understands_breaks_vllm(planted, check):
    """vLLM compares whole names of FP8 layers; transformers and SGLang also their ends."""

    def abbreviate(config):
        leaves = ("q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate")
        config["modules_to_not_convert"] = ["lm_head", *leaves]

    engines = check(planted("fp8_block", config=abbreviate))
    (names,) = [n for rule, n in against(engines, "vllm").items() if rule == "plain-linears-vllm"]
    assert "model.layers.0.self_attn.q_proj" in names
    assert engines["sglang"].loads
    assert engines["transformers"].loads


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_a_router_that_is_not_kept_breaks_vllm_where_it_quantizes_routers(
    planted, check, model_type
):
    lost = "model.layers.1.mlp.gate"
    engines = check(planted("nvfp4", model_type=model_type, config=without(lost)))
    vllm = {"plain-router-vllm": (lost,)} if model_type == "qwen3_moe" else {}
    assert against(engines, "vllm") == vllm
    assert engines["sglang"].loads


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_a_quantized_router_breaks_what_builds_it_unquantized(planted, check, model_type):
    router = "model.layers.1.mlp.gate"

    def quantize(tensors):
        tensors[f"{router}.weight"] = torch.zeros(4, 256, dtype=torch.float8_e4m3fn)
        tensors[f"{router}.weight_scale_inv"] = torch.ones(1, 2)

    path = planted("fp8_block", model_type=model_type, tensors=quantize, config=without(router))
    engines = check(path, gpu="h100")
    assert against(engines, "sglang") == {"quantized-router-sglang": (router,)}
    assert against(engines, "transformers") == {"quantized-router-fp8-transformers": (router,)}
    vllm = {} if model_type == "qwen3_moe" else {"quantized-router-vllm": (router,)}
    assert against(engines, "vllm") == vllm


def test_a_quantized_correction_bias_breaks_every_engine(planted, check):
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"

    def quantize(tensors):
        tensors[bias] = tensors[bias].to(torch.float8_e4m3fn)

    engines = check(planted("nvfp4", "modelopt", model_type="deepseek_v3", tensors=quantize))
    for key in ("transformers", "vllm", "sglang"):
        assert against(engines, key)["quantized-router-bias"] == (bias,)


def test_an_mtp_layer_that_is_not_kept_is_said_where_it_is_read(planted, check):
    """Layer 2 follows the last one; its shared expert is kept, but no longer in the list."""
    lost = "model.layers.2.mlp.shared_experts.down_proj"
    engines = check(planted("nvfp4", model_type="deepseek_v3", config=without(lost)))
    for key in ("vllm", "sglang"):
        assert engines[key].loads
        assert notes(engines, key) == {"plain-mtp": (lost,)}
        assert any("speculative decoding" in said.text for said in engines[key].remarks)


@pytest.mark.parametrize("layer", [1, 2])
def test_a_quantized_layer_that_a_list_keeps_breaks_vllm_and_sglang(planted, check, layer):
    """Layer 2 is one of multi-token prediction, whose fault speculative decoding alone meets."""
    kept = f"model.layers.{layer}.mlp.shared_experts.down_proj"

    def quantize(tensors):
        tensors[f"{kept}.weight"] = tensors[f"{kept}.weight"].to(torch.float8_e4m3fn)
        tensors[f"{kept}.weight_scale_inv"] = torch.ones(2, 2)

    path = planted("fp8_block", model_type="deepseek_v3", tensors=quantize)
    engines = check(path)
    of_transformers = against(check(path, gpu="h100"), "transformers")
    assert ("unmatched-linears-fp8-transformers" in of_transformers) is (layer == 1)
    for key in ("vllm", "sglang"):
        said = against(engines, key) if layer == 1 else notes(engines, key)
        assert said == {"unmatched-linears" if layer == 1 else "unmatched-mtp": (kept,)}


def retarget(*targets, **fields):
    def change(config):
        config["config_groups"]["group_0"]["targets"] = [*targets]
        config.update(fields)

    return change


@pytest.mark.parametrize(
    ("targets", "vllm", "sglang"),
    [
        # A class that only SGLang 0.5.23 has (its issue in llm-compressor is 2163).
        (["FusedMoE"], "unmatched-experts-vllm", None),
        (["RoutedExperts"], None, "unmatched-experts-sglang"),
        (["re:.*experts.*"], None, None),
        (["re:.*shared_expert.*"], "unmatched-experts-vllm", "unmatched-experts-sglang"),
    ],
)
def test_targets_that_an_engine_does_not_match(planted, check, targets, vllm, sglang):
    engines = check(planted("nvfp4", config=retarget(*targets)))
    assert [*against(engines, "vllm")] == ([] if vllm is None else [vllm])
    assert [*against(engines, "sglang")] == ([] if sglang is None else [sglang])
    assert engines["vllm"].loads is (vllm is None)
    assert engines["sglang"].loads is (sglang is None)


@pytest.mark.parametrize(
    "config", [retarget("re:.*experts.*"), retarget("Linear", format="mixed-precision")]
)
def test_w4a8_without_the_target_linear_breaks_sglang(planted, check, config):
    engines = check(planted("w4a8", config=config))
    assert "w4a8-target-sglang" in against(engines, "sglang")
    assert engines["vllm"].loads


def format_at_top(format, **group):
    def change(config):
        config["format"] = format
        config["config_groups"]["group_0"].update(group)

    return change


@pytest.mark.parametrize("at_top", ["float-quantized", "mixed-precision"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8_channel"])
def test_the_format_of_a_group_counts_and_not_that_at_the_top(planted, check, format, at_top):
    before = {k: engine.loads for k, engine in check(planted.original(format)).items()}
    engines = check(planted(format, config=format_at_top(at_top)))
    assert {key: engine.loads for key, engine in engines.items()} == before


@pytest.mark.parametrize("at_top", ["float-quantized", "mixed-precision", None])
def test_int4_experts_without_pack_quantized_at_the_top_break_sglang(planted, check, at_top):
    weight_only = format_at_top(at_top, input_activations=None)
    engines = check(planted("w4a8", config=weight_only))
    assert [*against(engines, "sglang")] == ["int4-format-sglang"]
    assert engines["vllm"].loads


def test_int4_experts_with_pack_quantized_at_the_top_do_not(planted, check):
    weight_only = format_at_top("pack-quantized", input_activations=None)
    assert check(planted("w4a8", config=weight_only))["sglang"].loads


def one_code_in_a_byte(tensors):
    for name in [n for n in tensors if n.endswith("weight_packed")]:
        words = tensors.pop(name).long()
        codes = [(words >> 4 * i & 15) - 8 for i in range(8)]
        packed = torch.stack(codes, dim=-1).flatten(1).to(torch.int8)
        tensors[f"{name.removesuffix('_packed')}"] = packed
        del tensors[name.replace("weight_packed", "weight_shape")]


@pytest.mark.parametrize("activations", ["float", "int"])
def test_int4_codes_that_lie_one_in_a_byte_break_every_engine(planted, check, activations):
    """What llm-compressor's W4AFP8 and W4A8 write."""

    def unpacked(config):
        config["format"] = config["config_groups"]["group_0"]["format"] = "int-quantized"
        config["config_groups"]["group_0"]["input_activations"]["type"] = activations

    engines = check(planted("w4a8", tensors=one_code_in_a_byte, config=unpacked))
    for key in ("transformers", "vllm", "sglang"):
        assert [*against(engines, key)] == [f"ct-unpacked-codes-{key}"]
        assert len(against(engines, key)[f"ct-unpacked-codes-{key}"]) == 2 * 4 * 3
    assert [*against(engines, "moequant")] == ["ct-int4-own"]


def test_int8_activations_of_packed_int4_experts_break_vllm_and_are_fp8_in_sglang(planted, check):
    def integers(config):
        config["config_groups"]["group_0"]["input_activations"]["type"] = "int"

    path = planted("w4a8", config=integers)
    engines = check(path, gpu="h100")
    assert [*against(engines, "vllm")] == ["ct-int8-activations-vllm"]
    assert engines["sglang"].loads
    assert [*notes(engines, "sglang")] == ["ct-int8-activations-sglang"]
    before, after = (against(check(path, gpu=gpu), "sglang") for gpu in ("a100", "b200"))
    assert "ct-int8-activations-before-hopper-sglang" in before
    assert "ct-int8-activations-after-hopper-sglang" in after


def test_mixtral_targets_by_its_own_names_break_sglang(planted, check):
    """SGLang looks up gate_proj, up_proj and down_proj, whatever the model calls them."""
    config = retarget(r"re:.*experts\.\d+\.w[123]$")
    engines = check(planted("nvfp4", model_type="mixtral", config=config))
    assert engines["vllm"].loads
    assert [*against(engines, "sglang")] == ["unmatched-experts-sglang"]


def test_a_short_name_in_modelopts_list_keeps_more_in_vllm(planted, check):
    """vLLM also matches any part of a name."""

    def shorten(config):
        config["ignore"].append("mlp.experts")

    engines = check(planted("nvfp4", "modelopt", config=shorten))
    assert "unmatched-experts-vllm" in against(engines, "vllm")
    assert not engines["vllm"].loads
    assert "unmatched-experts-own" in against(engines, "moequant")


def test_a_ragged_layer_before_one_that_is_merged_with_it_breaks_vllm_and_sglang(planted, check):
    """q_a_proj of 192 rows, whose last block is incomplete, before kv_a_proj_with_mqa."""
    first, second = (
        f"model.layers.0.self_attn.{leaf}" for leaf in ("q_a_proj", "kv_a_proj_with_mqa")
    )

    def quantize(tensors):
        for module in (first, second):
            tensors[f"{module}.weight"] = torch.zeros(192, 256, dtype=torch.float8_e4m3fn)
            tensors[f"{module}.weight_scale_inv"] = torch.ones(2, 2)

    path = planted(
        "fp8_block", model_type="deepseek_v3", tensors=quantize, config=without(first, second)
    )
    engines = check(path)
    for key in ("vllm", "sglang"):
        assert against(engines, key) == {"fp8-ragged-merged-rows": (first,)}


def test_codes_without_a_quantization_config_are_an_error(planted, check):
    from moequant.errors import CheckpointError

    path = planted("fp8_block")
    config = (path / "config.json").read_text().replace("quantization_config", "other")
    (path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"stored as F8_E4M3, .* no quantization_config"):
        check(path)


def test_scales_of_which_only_the_first_rows_were_read_are_not_called_zero():
    zeros = torch.zeros(4)
    assert values_of_scale(zeros, whole=True).is_zero
    assert not values_of_scale(zeros, whole=False).is_zero
    zeros[:2] = float("nan")
    assert values_of_scale(zeros, whole=False).bad == "2 of the first 4 NaN"


def test_a_layer_left_in_bf16_misses_its_scales_in_transformers_where_it_has_fp8_kernels(
    planted, check
):
    leaves = ("gate_proj", "up_proj", "down_proj")
    modules = [f"{AT}.experts.{expert}.{leaf}" for expert in range(4) for leaf in leaves]
    path = planted("fp8_block", tensors=plain(*modules))
    said = against(check(path, gpu="h100"), "transformers")
    assert {*said["plain-experts-fp8-transformers"]} == {*modules}
    assert check(path, gpu="a100")["transformers"].loads, "it dequantizes what is quantized"


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        ("model.layers.1.self_attn.o_proj", "unmatched-linears-transformers"),
        ("model.layers.1.mlp.gate", "quantized-router-transformers"),
    ],
)
def test_codes_of_a_kept_module_and_of_a_router_become_random_weights_in_transformers(
    planted, check, module, rule
):
    """The module stays in the list of kept ones, or is a router, which is never looked up."""
    donor = f"{EXPERT}.down_proj"

    def quantize(tensors):
        del tensors[f"{module}.weight"]
        for name in [n for n in tensors if n.startswith(f"{donor}.")]:
            tensors[name.replace(donor, module)] = tensors[name].clone()

    engines = check(planted("mxfp4", tensors=quantize))
    assert against(engines, "transformers")[rule] == (module,)


def test_every_rule_about_a_defect_is_planted_here():
    text = Path(__file__).read_text()
    for rule in rules():
        ids = (rule.id, *(rule.id.removesuffix(key) + "{key}" for key in ENGINES))
        assert not rule.defect or any(f'"{id}"' in text for id in ids), rule.id


HEAD = "lm_head"


@pytest.mark.parametrize("module", ["model.layers.1.self_attn.o_proj", HEAD])
@pytest.mark.parametrize(("format", "leaf"), [("nvfp4", "weight_scale"), ("mxfp4", "weight_scale")])
def test_another_layer_in_another_format_than_config_json_says_is_refused(
    planted, check, module, format, leaf
):
    """Not experts alone: `convert` and `inspect` read every quantized weight."""
    from moequant.errors import CheckpointError

    donor = f"{EXPERT}.down_proj"

    def quantize(tensors):
        del tensors[f"{module}.weight"]
        for name in [n for n in tensors if n.startswith(f"{donor}.")]:
            tensors[name.replace(donor, module)] = tensors[name].clone()
        scale = tensors[f"{module}.{leaf}"]
        tensors[f"{module}.{leaf}"] = scale[:, ::2].contiguous()

    path = planted(format, tensors=quantize, config=without(module))
    with pytest.raises(CheckpointError, match=rf"{module}\.{leaf}: shape"):
        check(path)


def test_a_head_in_a_scheme_that_is_not_read_is_refused_by_name(planted, check):
    from moequant.errors import UnsupportedError

    def add_group(config):
        without(HEAD)(config)
        config["config_groups"]["group_1"] = {
            "targets": [HEAD], "format": "int-quantized",
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        }  # fmt: skip

    def quantize(tensors):
        rows, columns = tensors[f"{HEAD}.weight"].shape
        tensors[f"{HEAD}.weight"] = torch.zeros(rows, columns, dtype=torch.int8)
        tensors[f"{HEAD}.weight_scale"] = torch.ones(rows, 1)

    path = planted("nvfp4", tensors=quantize, config=add_group)
    with pytest.raises(UnsupportedError, match=r"lm_head: .*group_1\.weights\.num_bits is 8"):
        check(path)


def test_a_quantized_head_that_config_json_keeps_breaks_every_engine(planted, check):
    def quantize(tensors):
        rows, columns = tensors[f"{HEAD}.weight"].shape
        tensors[f"{HEAD}.weight"] = torch.zeros(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{HEAD}.weight_scale_inv"] = torch.ones(rows // 128, columns // 128)

    engines = check(planted("fp8_block", tensors=quantize), gpu="h100")
    for key in ("vllm", "sglang"):
        assert against(engines, key) == {"unmatched-linears": (HEAD,)}
    assert against(engines, "transformers") == {"unmatched-linears-fp8-transformers": (HEAD,)}
