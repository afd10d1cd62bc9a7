"""Against compressed-tensors 0.20 and the parts of transformers that read its config."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)

from moequant.dialects import get_dialect
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import dequantize, get_format, quantize

CT = get_dialect("compressed-tensors")
PRESETS = {
    "fp8_block": "FP8_BLOCK",
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
    "w4a8": "W4AFP8",
    "fp8_channel": "FP8_DYNAMIC",
    "mxfp8": "MXFP8A16",
    "fp8_tensor": "FP8",
}
STATIC = ("fp8_tensor",)
"""Formats whose preset has static scales of activations."""
EXPERT = "model.layers.1.mlp.experts.0.up_proj"


def config_of(formats, kept=()):
    static = {module for module, format in formats.items() if format in STATIC}
    return CT.quantization_config(formats, kept, static)


def decompress(format, tensors):
    scheme = QuantizationConfig.model_validate(config_of({"m": format})).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    local = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
    return compressor.decompress(local, scheme)["weight"]


def random_weight():
    generator = torch.Generator().manual_seed(3)
    w = torch.randn((256, 512), generator=generator) * 0.02
    w[:128] *= torch.exp2(torch.randint(-20, 20, (128, 1), generator=generator).float())
    w[:, 128:256] = 0
    return w


def test_every_format_carried_has_a_preset_here():
    assert PRESETS.keys() == set(CT.carried)


@pytest.mark.parametrize("format", PRESETS)
@pytest.mark.parametrize("choice", [0, -1])
def test_the_library_decompresses_to_our_dequantize(format, choice):
    chosen = {key: values[choice] for key, values in get_format(format).options.items()}
    # Its own test below: the library divides where we multiply.
    chosen.pop("global_scale", None)
    weighted = chosen.get("search") == "weighted"
    mean_square = torch.rand(512, generator=torch.Generator().manual_seed(1))
    q = get_format(format).quantize(
        random_weight(), chosen, mean_square=mean_square if weighted else None
    )
    theirs = decompress(format, CT.to_disk("m", q))
    # float-quantized comes back in the scale's FP32, an exact product. The others come back in
    # BF16: mxfp4 and nvfp4 products have 2 and 6 significant bits, so BF16's 8 hold them; w4a8's
    # have 12 and are rounded once, on either side. mxfp8 has 4 significant bits.
    assert theirs.dtype == (torch.float32 if format.startswith("fp8") else torch.bfloat16)
    assert torch.equal(theirs, dequantize(q).to(theirs.dtype))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "w4a8"])
def test_the_library_agrees_on_every_pair_of_codes_and_every_scale(format):
    q = quantize(torch.zeros(256, 512), format)
    q.qdata.copy_(torch.arange(256, dtype=torch.uint8).repeat(256, 1)[:, : q.qdata.shape[1]])
    if format == "nvfp4":
        # The positive finite E4M3 numbers, one a row.
        scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    elif format == "mxfp4":
        # Byte 255 is NaN to us and 2**128, infinite, to the library.
        scales = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    else:
        # A binade of BF16.
        scales = (2.0**-10 * (1 + torch.arange(128) / 128)).to(torch.bfloat16)
    q.scale[: len(scales)].copy_(scales[:, None].expand(-1, q.scale.shape[1]))
    theirs = decompress(format, CT.to_disk("m", q))
    assert torch.equal(theirs, dequantize(q).to(torch.bfloat16))


@pytest.mark.parametrize("rows", [576, 192])
def test_the_library_agrees_on_ragged_rows_of_fp8_blocks(rows):
    # Scales differ from block to block, so that blocks of even shares would show.
    w = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0))
    q = quantize(w * torch.logspace(0, 4, rows)[:, None], "fp8_block")
    assert torch.equal(decompress("fp8_block", CT.to_disk("m", q)), dequantize(q))


def test_the_library_agrees_on_an_exact_global_scale_to_one_bfloat16_step():
    q = quantize(random_weight(), "nvfp4", global_scale="exact")
    ours = dequantize(CT.from_disk("m", "nvfp4", CT.to_disk("m", q)))
    theirs = decompress("nvfp4", CT.to_disk("m", q)).double()
    # Four roundings to float32 of 2**-24 each may move a value across one BF16 rounding, 2**-8.
    assert ((theirs - ours).abs() <= (2.0**-8 + 4 * 2.0**-24) * ours.abs()).all()


@pytest.mark.parametrize(("format", "preset"), PRESETS.items())
def test_each_scheme_is_the_librarys_preset(format, preset):
    group = QuantizationConfig.model_validate(config_of({"m": format})).config_groups["group_0"]
    wanted = preset_name_to_scheme(preset, ["Linear"])
    assert group.targets == ["Linear"]
    assert group.weights.model_dump() == wanted.weights.model_dump()
    assert (group.input_activations is None) == (wanted.input_activations is None)
    if wanted.input_activations is not None:
        found, preset = (each.input_activations.model_dump() for each in (group, wanted))
        if format in STATIC:
            # How llm-compressor finds scales; here they are given.
            preset.pop("observer")
        assert found.items() >= preset.items()


def test_static_scales_of_activations_are_the_librarys_preset():
    config = CT.quantization_config({EXPERT: "nvfp4"}, [], {EXPERT})
    parsed = QuantizationConfig.model_validate(config)
    group, wanted = parsed.config_groups["group_0"], preset_name_to_scheme("NVFP4", ["Linear"])
    for part in ("weights", "input_activations"):
        found, preset = (getattr(scheme, part).model_dump() for scheme in (group, wanted))
        # How llm-compressor finds scales; here they are given.
        for each in (found, preset):
            each.pop("observer", None)
        assert found == preset
    assert (group.format, group.targets) == ("nvfp4-pack-quantized", ["Linear"])


def test_modules_with_and_without_static_scales_have_groups_of_their_own():
    formats = {m: f for m, f in layers(experts=["nvfp4"] * 2, shared="nvfp4").items() if f}
    static = {module for module in formats if ".experts." in module}
    config = CT.quantization_config(formats, [], static)
    model = linears(*formats)
    apply_quantization_config(model, QuantizationConfig.model_validate(config), show_progress=False)
    for module in formats:
        found = model.get_submodule(module).quantization_scheme.input_activations
        assert (found is not None) == (module in static), module
    activations = CT.activations_reader(config)
    assert {m for m in formats if activations(m) == "nvfp4_static"} == static
    assert config["format"] == "nvfp4-pack-quantized"


def test_formats_without_static_scales_refuse_them_by_name():
    able = "nvfp4, fp8_tensor"
    with pytest.raises(UnsupportedError, match=rf"{EXPERT}: the dialect .* only for {able}, and n"):
        CT.quantization_config({EXPERT: "mxfp4"}, [], {EXPERT})
    with pytest.raises(UnsupportedError, match=r"the dialect gpt-oss .* for no format"):
        get_dialect("gpt-oss").quantization_config({EXPERT: "mxfp4"}, [], {EXPERT})


def linears(*names):
    """A tree of modules with a linear layer at each name."""
    root = torch.nn.Module()
    for name in names:
        parent = root
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(leaf, torch.nn.Linear(128, 128, device="meta"))
    return root


def schemes_applied(config, names):
    """The format the library itself gives each module."""
    model = linears(*names)
    apply_quantization_config(model, QuantizationConfig.model_validate(config), show_progress=False)
    schemes = {n: getattr(model.get_submodule(n), "quantization_scheme", None) for n in names}
    return {name: scheme and scheme.format for name, scheme in schemes.items()}


def layers(*, experts, shared=None, attention=None):
    """Modules of three DeepSeek-like layers with their format; `experts` is one for each layer."""
    formats = {}
    for i, expert in enumerate(experts):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            formats[f"model.layers.{i}.mlp.shared_experts.{leaf}"] = shared
            for e in range(2):
                formats[f"model.layers.{i}.mlp.experts.{e}.{leaf}"] = expert
        formats[f"model.layers.{i}.self_attn.o_proj"] = attention
        formats[f"model.layers.{i}.mlp.gate"] = None
    return formats


MIXTURES = {
    "one format": layers(experts=["mxfp4"] * 3),
    "a layer kept": layers(experts=[None, "w4a8", "w4a8"]),
    "routed and shared": layers(experts=["nvfp4"] * 3, shared="fp8_block"),
    "w4a8 experts": layers(experts=["w4a8"] * 3, shared="fp8_block", attention="fp8_block"),
    "w4a8 around": layers(experts=["mxfp4"] * 3, shared="w4a8", attention="w4a8"),
    "by layer": layers(experts=["fp8_block", "nvfp4", "w4a8"], shared="fp8_block"),
    "three": layers(experts=["nvfp4"] * 3, shared="mxfp4", attention="fp8_block"),
}


@pytest.mark.parametrize("formats", MIXTURES.values(), ids=MIXTURES)
def test_the_library_gives_each_module_its_scheme(formats):
    converted = {m: f for m, f in formats.items() if f}
    config = config_of(converted, [m for m, f in formats.items() if not f])
    stated = {f: config_of({"m": f})["format"] for f in PRESETS}
    applied = schemes_applied(config, formats)
    assert applied == {m: f and stated[f] for m, f in formats.items()}
    read = CT.reader(config)
    assert {m: read(m) for m in formats} == formats


@pytest.mark.parametrize("formats", MIXTURES.values(), ids=MIXTURES)
def test_names_engines_make_of_several_modules_find_the_same_scheme(formats):
    converted = {m: f for m, f in formats.items() if f}
    read = CT.reader(config_of(converted, [m for m, f in formats.items() if not f]))
    for i in range(3):
        shared = f"model.layers.{i}.mlp.shared_experts"
        if formats[f"{shared}.up_proj"]:
            assert read(f"{shared}.gate_up_proj") == formats[f"{shared}.up_proj"]
        # SGLang's names, whatever the file calls the projections.
        experts = f"model.layers.{i}.mlp.experts.0"
        assert read(f"{experts}.w1") == formats[f"{experts}.up_proj"]


@pytest.mark.parametrize(
    ("experts", "dense"),
    [("nvfp4", "fp8_block"), ("mxfp4", "w4a8"), ("w4a8", "fp8_block"), ("w4a8", "mxfp4")],
)
def test_transformers_tells_routed_experts_from_the_rest(experts, dense):
    from transformers.integrations.compressed_tensors import get_dense_scheme, get_experts_scheme

    formats = {m: f for m, f in layers(experts=[experts] * 3, shared=dense).items() if f}
    config = QuantizationConfig.model_validate(config_of(formats))
    assert get_experts_scheme(config).format == config_of({"m": experts})["format"]
    assert get_dense_scheme(config).format == config_of({"m": dense})["format"]


def test_w4a8_names_the_whole_checkpoint_beside_other_formats():
    config = config_of({EXPERT: "w4a8", "model.layers.1.mlp.shared_expert.up_proj": "fp8_block"})
    assert config["format"] == "pack-quantized"
    assert list(config["config_groups"].values())[-1]["targets"] == ["Linear"]
    config = config_of({EXPERT: "mxfp4", "model.layers.1.mlp.shared_expert.up_proj": "fp8_block"})
    assert config["format"] == "mixed-precision"


@pytest.mark.parametrize("formats", MIXTURES.values(), ids=MIXTURES)
def test_a_mixture_does_not_depend_on_the_order_of_modules(formats):
    converted = {m: f for m, f in formats.items() if f}
    assert json.dumps(config_of(converted)) == json.dumps(
        config_of(dict(reversed(converted.items())))
    )


def edited(format, **changes):
    config = config_of({EXPERT: format})
    group = config["config_groups"]["group_0"]
    for path, value in changes.items():
        place, _, field = path.rpartition("__")
        target = {"": config, "group": group}.get(place) or group[place]
        target[field] = value
    return config


UNKNOWN = [
    ("w4a8", {"weights__num_bits": 8}, r"group_0\.weights\.num_bits is 8"),
    ("w4a8", {"weights__group_size": 32}, r"weights\.group_size is 32"),
    ("w4a8", {"weights__symmetric": False}, r"weights\.symmetric is False"),
    ("w4a8", {"weights__actorder": "group"}, r"weights\.actorder is 'group'"),
    ("w4a8", {"group__input_activations": None}, r"input_activations is None"),
    ("w4a8", {"input_activations__type": "int"}, r"input_activations\.type is 'int'"),
    ("w4a8", {"group__format": "int-quantized"}, r"group_0\.format is 'int-quantized'"),
    ("w4a8", {"group__weights": None}, r"weights is None"),
    (
        "nvfp4",
        {"group__input_activations": {"num_bits": 4}},
        r"input_activations is {'num_bits': 4",
    ),
    ("nvfp4", {"weights__strategy": "group"}, r"weights\.strategy is 'group'"),
    ("mxfp4", {"group__output_activations": {"num_bits": 8}}, r"output_activations is "),
    ("mxfp4", {"weights__dynamic": True}, r"weights\.dynamic is True"),
    ("fp8_block", {"weights__block_structure": [64, 64]}, r"block_structure is \[64, 64\]"),
    ("fp8_block", {"weights__strategy": None}, r"input_activations\.strategy is 'group'"),
    ("mxfp4", {"quantization_status": "frozen"}, r"quantization_status is 'frozen'"),
    ("mxfp4", {"transform_config": {"config_groups": {}}}, r"transform_config is set"),
]


@pytest.mark.parametrize(("format", "changes", "message"), UNKNOWN)
def test_a_scheme_we_have_no_format_for_is_refused_by_field(format, changes, message):
    config = edited(format, **changes)
    with pytest.raises(UnsupportedError, match=rf"{EXPERT}: .*{message}"):
        CT.reader(config)(EXPERT)
    assert CT.reader(config)("lm_head") is None


@pytest.mark.parametrize(
    ("format", "changes"),
    [
        ("w4a8", {"group__format": None}),
        ("w4a8", {"weights__strategy": None, "weights__type": "INT"}),
        ("w4a8", {"weights__actorder": "weight", "weights__observer": "minmax"}),
        ("nvfp4", {"weights__scale_dtype": None, "quantization_status": None}),
        ("mxfp4", {"group__input_activations": {}, "ignore": None}),
        ("mxfp4", {"transform_config": {}, "sparsity_config": None, "version": "0.9"}),
    ],
)
def test_what_other_writers_leave_out_or_add_is_read(format, changes):
    config = edited(format, **changes)
    QuantizationConfig.model_validate({k: v for k, v in config.items() if v is not None})
    assert CT.reader(config)(EXPERT) == format


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ignore": "lm_head"}, r"quantization_config\.ignore is 'lm_head', not a list"),
        ({"ignore": ["re:("]}, r"quantization_config\.ignore: '\('"),
        ({"config_groups": []}, r"config_groups is \[\], not an object"),
        ({"config_groups": {"W4A16": ["Linear"]}}, r"config_groups\.W4A16 is \['Linear'\]"),
        ({"group__targets": [3]}, r"group_0\.targets is \[3\]"),
        ({"group__weights": 4}, r"group_0\.weights is 4"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        CT.reader(edited("w4a8", **changes))(EXPERT)


def test_a_name_goes_before_the_class_of_the_module():
    config = config_of({EXPERT: "mxfp4"})
    config["config_groups"]["group_1"] = edited(
        "w4a8", group__targets=[r"re:.*down_proj$", "lm_head"]
    )["config_groups"]["group_0"]
    assert CT.reader(config)("model.layers.0.mlp.experts.0.down_proj") == "w4a8"
    assert CT.reader(config)("model.layers.0.mlp.experts.0.up_proj") == "mxfp4"


def test_a_module_that_nothing_targets_is_kept():
    config = edited("w4a8", group__targets=[r"re:.*experts.*"])
    assert CT.reader(config)("model.layers.0.self_attn.q_proj") is None
    assert CT.reader(config)(EXPERT) == "w4a8"


def test_an_unknown_scheme_beside_ours_does_not_matter():
    config = edited("w4a8", group__targets=[r"re:.*experts.*"])
    config["config_groups"]["int8"] = {
        "targets": [r"re:.*self_attn.*"],
        "format": "int-quantized",
        "weights": {"num_bits": 8, "strategy": "channel"},
    }
    assert CT.reader(config)(EXPERT) == "w4a8"
    with pytest.raises(UnsupportedError, match=r"config_groups\.int8\.format"):
        CT.reader(config)("model.layers.0.self_attn.q_proj")
