"""NVFP4 as Model-Optimizer has it: names, config, lists of kept modules, and compressed-tensors."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch

import pytest
import torch
from click.testing import CliRunner
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

import moequant
from moequant.cli import cli
from moequant.conversion import Recipe, convert
from moequant.dialects import get_dialect
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import dequantize, quantize
from moequant.verification import verify
from moequant.weights.converted import ConvertedCheckpoint

MODELOPT = get_dialect("modelopt")
EXPERT = "model.layers.0.mlp.experts.1"
NVFP4 = {"format": "nvfp4"}
EXACT = {"rules": [{"roles": ["routed_experts"], **NVFP4, "options": {"global_scale": "exact"}}]}
DTYPES = {"weight": torch.uint8, "weight_scale": torch.float8_e4m3fn}


@pytest.fixture
def plain(make_checkpoint):
    return make_checkpoint(experts=2, layers=2)


@pytest.fixture
def written(plain, tmp_path):
    """write(dialect, source, recipe): a conversion of experts to NVFP4."""

    def write(dialect, source=plain, recipe=None):
        what = {"recipe": Recipe.model_validate(recipe)} if recipe else NVFP4
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}-{dialect}"
        return convert(source, out, dialect=dialect, **what)

    return write


def read_all(path):
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def same_bytes(one, other):
    return one.keys() == other.keys() and all(
        (t.dtype, t.shape) == (other[n].dtype, other[n].shape)
        and torch.equal(raw(t), raw(other[n]))
        for n, t in one.items()
    )


def test_tensors_and_config_are_model_optimizers(written, plain):
    out = written("modelopt").output
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    # As Model-Optimizer 0.47, convert_hf_quant_config_format, has W4A16_NVFP4.
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert config == {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": sorted(
            ["lm_head", "model.embed_tokens"]
            + [f"model.layers.{i}.self_attn.{n}_proj" for i in range(2) for n in "qkvo"]
            + [f"model.layers.{i}.mlp.gate" for i in range(2)]
        ),
    }
    assert not (out / "hf_quant_config.json").exists()
    found, source = read_all(out), read_all(plain)
    for name, tensor in source.items():
        if ".experts." not in name:
            assert torch.equal(found[name], tensor), name
            continue
        module, (N, K) = name.removesuffix(".weight"), tensor.shape
        assert {n: found[f"{module}.{n}"].dtype for n in DTYPES} == DTYPES
        assert found[f"{module}.weight"].shape == (N, K // 2)
        assert found[f"{module}.weight_scale"].shape == (N, K // 16)
        assert found[f"{module}.weight_scale_2"].shape == ()
        assert found[f"{module}.weight_scale_2"].dtype == torch.float32
    assert not any(name.endswith("input_scale") for name in found)


def test_the_librarys_converter_takes_it_and_decodes_the_same(written):
    out = written("modelopt").output
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    converter = ModelOptNvfp4Converter(
        ignore=config["ignore"], targets=["Linear", "re:.*experts.*"]
    )
    theirs = converter.validate(dict(read_all(out)))
    library = QuantizationConfig.model_validate(
        get_dialect("compressed-tensors").quantization_config({EXPERT: "nvfp4"}, [])
    ).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(library.format)
    ours = ConvertedCheckpoint.open(out)
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        module = f"{EXPERT}.{leaf}"
        local = {n.removeprefix(f"{module}."): t for n, t in theirs.items() if module in n}
        assert local.keys() == {"weight_packed", "weight_scale", "weight_global_scale"}
        decoded = compressor.decompress(local, library)["weight"]
        # A power-of-two global scale: six significant bits, which BF16 holds.
        assert torch.equal(decoded, dequantize(ours.read(module)).bfloat16())


def test_the_librarys_converter_takes_static_scales_and_inverts_them(plain, tmp_path):
    out = tmp_path / "w4a4"
    settings = {"format": "nvfp4", "activation_scales": 0.1}
    convert(plain, out, dialect="modelopt", **settings)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    # As Model-Optimizer 0.47, convert_hf_quant_config_format, has NVFP4.
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"targets": ["Linear"], "weights": numbers, "input_activations": numbers}
    assert config["quant_algo"] == "NVFP4"
    assert config["config_groups"] == {"group_0": group}
    converter = ModelOptNvfp4Converter(
        ignore=config["ignore"], targets=["Linear", "re:.*experts.*"]
    )
    theirs = converter.validate(dict(read_all(out)))
    convert(plain, tmp_path / "ct", dialect="compressed-tensors", **settings)
    ours = read_all(tmp_path / "ct")
    names = {name for name in ours if name.endswith("input_global_scale")}
    assert len(names) == 2 * 2 * 3
    assert names == {name for name in theirs if name.endswith("input_global_scale")}
    assert all(theirs[n].item() == ours[n].item() for n in names)


def test_a_power_of_two_goes_there_and_back_byte_for_byte(written):
    there = written("compressed-tensors")
    across = written("modelopt", there.output)
    back = written("compressed-tensors", across.output)
    for result in (across, back):
        (error,) = result.requantization_errors
        assert (error.source, error.format, error.noise) == ("nvfp4", "nvfp4", 0)
        assert error.exact == error.weights
    one, other = read_all(there.output), read_all(across.output)
    for name in one:
        if name.endswith("weight_packed"):
            module = name.removesuffix(".weight_packed")
            assert torch.equal(one[name], other[f"{module}.weight"])
            scales = (t[f"{module}.weight_scale"] for t in (one, other))
            assert torch.equal(*map(raw, scales))
            divisor = one[f"{module}.weight_global_scale"].double()
            assert divisor.item() * other[f"{module}.weight_scale_2"].double().item() == 1
    assert same_bytes(one, read_all(back.output))
    # Straight from BF16 gives what comes by way of the other dialect.
    assert same_bytes(other, read_all(written("modelopt").output))
    assert verify(across.output, against=there.output).ok
    assert verify(back.output, against=across.output).ok


@pytest.mark.parametrize(
    ("first", "second"), [("compressed-tensors", "modelopt"), ("modelopt", "compressed-tensors")]
)
def test_a_reciprocal_that_rounds_is_an_error_in_the_report(written, first, second):
    there = written(first, recipe=EXACT)
    across = written(second, there.output)
    one, other = read_all(there.output), read_all(across.output)
    codes = {"compressed-tensors": "weight_packed", "modelopt": "weight"}
    worst = signal = noise = 0.0
    for name in one:
        module, _, leaf = name.rpartition(".")
        if leaf != codes[first] or ".experts." not in name:
            continue
        assert torch.equal(one[name], other[f"{module}.{codes[second]}"])
        scales = [raw(t[f"{module}.weight_scale"]) for t in (one, other)]
        assert torch.equal(*scales)
        before, after = global_scale(one, module), global_scale(other, module)
        off = abs(after / before - 1)
        worst = max(worst, off)
        numbers = dequantize(ConvertedCheckpoint.open(there.output).read(module)).double()
        signal += numbers.square().sum().item()
        noise += numbers.square().sum().item() * off**2
    # One rounding to float32.
    assert 0 < worst <= 2.0**-24
    (error,) = across.requantization_errors
    assert error.exact < error.weights
    true = (noise / signal) ** 0.5
    if first == "compressed-tensors":
        # Each weight's is a ratio less 1, off by two roundings of float64 on either side; the
        # mean of their squares is off by no more.
        assert error.relative_error == pytest.approx(true, rel=0, abs=2.0**-51)
    else:
        # Reading makes another reciprocal. The squares of two errors are added, of which that sum
        # is at least half the square: at most one unit, 2**-23, for it, and half of one.
        assert true / 2**0.5 <= error.relative_error <= (2.0**-46 + 2.0**-48) ** 0.5
    report = verify(across.output, against=there.output)
    assert report.ok, report.problems
    assert list(report.requantization_errors) == list(across.requantization_errors)


def global_scale(tensors, module):
    """What multiplies on disk, as an exact number to 53 bits."""
    if f"{module}.weight_scale_2" in tensors:
        return tensors[f"{module}.weight_scale_2"].double().item()
    return 1 / tensors[f"{module}.weight_global_scale"].double().item()


def test_the_command_says_exact_or_how_far_off(written, tmp_path):
    args = ["--format", "nvfp4", "--dialect", "modelopt"]
    for recipe, said in ((None, "exact"), (EXACT, "e-08")):
        source = written("compressed-tensors", recipe=recipe).output
        out = tmp_path / said
        result = CliRunner().invoke(cli, ["convert", str(source), str(out), *args])
        assert result.exit_code == 0, result.output
        row = next(line for line in result.output.splitlines() if line.startswith("routed_experts"))
        assert row.split()[-1].endswith(said), row


def test_it_is_looked_at_loaded_prepared_and_given_back(written, plain, tmp_path):
    out, twin = written("modelopt").output, written("compressed-tensors").output
    shown = CliRunner().invoke(cli, ["inspect", str(out), "--json"])
    assert json.loads(shown.stdout)["formats"] == ["nvfp4"]
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    topk = torch.full((5, 2), 0.5), torch.tensor([[0, 1]] * 5)
    layers = [moequant.load_experts(path, layer=1, device="cpu") for path in (out, twin)]
    one, other = (layer(x, *topk) for layer in layers)
    assert torch.equal(one, other)
    result = CliRunner().invoke(cli, ["prepare", str(out), "--target", "sm100"])
    assert result.exit_code == 0, result.output
    prepared = moequant.load_experts(out, layer=1, device="cpu")(x, *topk)
    assert torch.equal(prepared, one)
    back = convert(out, tmp_path / "back", format="bf16")
    (error,) = back.requantization_errors
    assert error.exact == error.weights
    found, decoded = read_all(back.output), ConvertedCheckpoint.open(out)
    for name in read_all(plain):
        if ".experts." in name:
            q = decoded.read(name.removesuffix(".weight"))
            assert torch.equal(found[name].float(), dequantize(q)), name


def test_all_zeros_with_a_global_scale_of_zero_become_a_scale_that_has_a_reciprocal():
    zero = quantize(torch.zeros(128, 128), "nvfp4")
    tensors = MODELOPT.to_disk("m", zero) | {"m.weight_scale_2": torch.tensor(0.0)}
    q = MODELOPT.from_disk("m", "nvfp4", tensors)
    assert torch.equal(dequantize(q), torch.zeros(128, 128))
    assert moequant.formats.requantize_losslessly([q, q], "nvfp4") is None


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_global_scale_that_is_no_scale_is_refused(value):
    tensors = MODELOPT.to_disk("m", quantize(torch.ones(128, 128), "nvfp4"))
    with pytest.raises(CheckpointError, match=r"m\.weight_scale_2: .*must be finite"):
        MODELOPT.from_disk("m", "nvfp4", tensors | {"m.weight_scale_2": torch.tensor(value)})


# How engines match lists of kept modules, from their sources; `asked` is what they build.


def vllm_keeps(module, names):
    """vLLM 0.33: the name, that a name is a part of it, a wildcard; of experts the reverse too."""
    return (
        any(name in module for name in names)
        or any(fnmatch(module, name) for name in names)
        or ("experts" in module and any(module in name for name in names if "experts" in name))
    )


def sglang_keeps(module, names):
    """SGLang 0.5.23: whole components, wildcards, and by the last component of MLA's."""
    parts = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
    for name in names:
        pattern = re.compile(name.replace(".", r"\.").replace("*", ".*"))
        tail = name.rpartition(".")[2]
        if (
            f".{name}." in f".{module}."
            or any(map(pattern.fullmatch, (module, *module.split("."))))
            or (tail in parts and tail in module.rpartition(".")[2])
        ):
            return True
    return False


def test_engines_keep_what_is_kept_and_nothing_else():
    leaves = ("gate_proj", "up_proj", "down_proj")
    shared = [f"model.layers.1.mlp.shared_expert.{leaf}" for leaf in leaves]
    converted = [
        f"model.layers.{i}.mlp.experts.{e}.{n}" for i in (1, 11) for e in (0, 1) for n in leaves
    ]
    kept = [
        "model.embed_tokens",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.shared_expert_gate",
        "model.layers.1.self_attn.q_proj",
        "model.layers.11.mlp.gate",
        *(f"model.layers.2.mlp.experts.{e}.{n}" for e in (0, 1) for n in leaves),
    ]
    ignore = MODELOPT.quantization_config(dict.fromkeys(converted + shared, "nvfp4"), kept)[
        "ignore"
    ]
    asked = ["model.layers.1.mlp.experts", "model.layers.11.mlp.experts", *shared]
    asked.append("model.layers.1.mlp.shared_expert.gate_up_proj")
    for keeps in (vllm_keeps, sglang_keeps):
        assert not [module for module in asked if keeps(module, ignore)]
        assert all(keeps(m, ignore) for m in ("model.layers.2.mlp.experts", "lm_head", *kept[:5]))


@pytest.mark.parametrize(
    ("converted", "kept", "asked", "keeps"),
    [
        ("0.mlp.gate_proj", "0.mlp.gate", "0.mlp.gate_up_proj", vllm_keeps),
        ("0.mlp.up_proj", "0.mlp.gate", "0.mlp.gate_up_proj", vllm_keeps),
        ("10.mlp.down_proj", "0.mlp.down", "10.mlp.down_proj", vllm_keeps),
        ("3.mlp.experts.0.up_proj", "3.mlp.experts.router", "3.mlp.experts", vllm_keeps),
        ("3.attn.kv_b_proj", "0.attn.kv_b_proj", "3.attn.kv_b_proj", sglang_keeps),
    ],
)
def test_a_list_by_which_an_engine_would_leave_out_a_converted_module_is_refused(
    converted, kept, asked, keeps
):
    assert keeps(asked, [kept])
    message = rf"^{converted} is converted and {kept} is kept, .* choose the dialect"
    with pytest.raises(UnsupportedError, match=message):
        MODELOPT.quantization_config({converted: "nvfp4"}, [kept])


# Mixtures. How engines look up the algorithm of a layer, from their sources.


def algorithm_in(module, layers, packed):
    """vLLM 0.22.1 and SGLang 0.5.23: the name, the parts that a model lists, what begins so.

    vLLM 0.33 also looks for the parts of qkv_proj and gate_up_proj where a model lists none.
    """
    parent, _, leaf = module.rpartition(".")
    if module in layers:
        return layers[module]["quant_algo"]
    found = {layers.get(f"{parent}.{part}", {}).get("quant_algo") for part in packed.get(leaf, ())}
    if found - {None}:
        (algorithm,) = found - {None}
        return algorithm
    below = (entry for name, entry in layers.items() if name.startswith(f"{module}."))
    return next(below, {}).get("quant_algo")


LEAVES = ("gate_proj", "up_proj", "down_proj")
BLOCKS = [f"model.layers.{layer}.mlp.experts" for layer in (1, 11)]
ROUTED = [f"{block}.{e}.{leaf}" for block in BLOCKS for e in (0, 1) for leaf in LEAVES]
SHARED = [f"model.layers.1.mlp.shared_experts.{leaf}" for leaf in LEAVES]
QKVO = [f"model.layers.1.self_attn.{n}_proj" for n in "qkvo"]
LATENT = [f"model.layers.1.self_attn.{n}" for n in ("q_a_proj", "kv_a_proj_with_mqa")]
MERGED = [
    "model.layers.1.self_attn.qkv_proj",
    "model.layers.1.self_attn.fused_qkv_a_proj",
    "model.layers.1.self_attn.fused_qkv_a_proj_with_mqa",
    "model.layers.1.mlp.shared_experts.gate_up_proj",
]


@pytest.mark.parametrize("activations", ["all", "of fp8"])
@pytest.mark.parametrize("experts", ["nvfp4", "fp8_tensor"])
def test_engines_find_the_algorithm_of_every_layer_that_they_build(experts, activations):
    other = {"nvfp4": "fp8_tensor", "fp8_tensor": "nvfp4"}[experts]
    formats = dict.fromkeys(ROUTED, experts) | dict.fromkeys(SHARED + QKVO + LATENT, other)
    static = {m for m, format in formats.items() if activations == "all" or format != "nvfp4"}
    kept = ["model.layers.1.mlp.gate", "model.layers.11.self_attn.q_proj"]
    config = MODELOPT.quantization_config(formats, kept, static)
    assert config["quant_algo"] == "MIXED_PRECISION"
    layers = config["quantized_layers"]
    name = {"fp8_tensor": "FP8", "nvfp4": "NVFP4" if activations == "all" else "W4A16_NVFP4"}
    for packed in ({}, {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}):
        found = {
            m: algorithm_in(m, layers, packed) for m in [*BLOCKS, *MERGED, SHARED[-1], QKVO[-1]]
        }
        assert found == {m: name[experts if m in BLOCKS else other] for m in found}
        assert not any(algorithm_in(module, layers, packed) for module in kept)
    for keeps in (vllm_keeps, sglang_keeps):
        assert not [m for m in [*BLOCKS, *MERGED] if keeps(m, config["ignore"])]
    # Both take the group size of NVFP4 from the first entry, and SGLang, which takes a mixture
    # without NVFP4 for w4afp8, finds one.
    sizes = [e.get("group_size") for e in layers.values() if "NVFP4" in e["quant_algo"]]
    assert {*sizes} == {16}
    # And read again.
    read = MODELOPT.reader(config, weights_only=True)
    assert {module: read(module) for module in formats} == formats
    assert not any(map(read, kept))
    scheme = MODELOPT.activations_reader(config)
    of_format = {"nvfp4": "nvfp4_static", "fp8_tensor": "fp8_static"}
    wanted = {m: of_format[f] if m in static else None for m, f in formats.items()}
    assert {module: scheme(module) for module in formats} == wanted


@pytest.mark.parametrize(
    ("static", "message"),
    [
        ((), rf"^{QKVO[0]}: fp8_tensor without a static scale .* Give it activation_scales"),
        (ROUTED, rf"^{QKVO[0]}: fp8_tensor without a static scale"),
        (QKVO[1:], rf"^{QKVO[1]} has a static scale .* and {QKVO[0]} has none"),
        ([*QKVO, ROUTED[0]], rf"^{ROUTED[0]} has a static scale .* all modules in nvfp4"),
    ],
)
def test_a_mixture_that_engines_would_run_with_scales_that_are_not_there_is_refused(
    static, message
):
    formats = dict.fromkeys(ROUTED, "nvfp4") | dict.fromkeys(QKVO, "fp8_tensor")
    with pytest.raises(UnsupportedError, match=message):
        MODELOPT.quantization_config(formats, [], {*static})


def test_a_mixture_goes_there_and_back(plain, tmp_path, written):
    recipe = {
        "rules": [
            {"roles": ["routed_experts"], **NVFP4},
            {"roles": ["attention"], "format": "fp8_tensor", "activation_scales": 0.25},
        ]
    }
    out = written("modelopt", recipe=recipe | {"output": {"dialect": "modelopt"}}).output
    assert verify(out, against=plain).ok
    shown = CliRunner().invoke(cli, ["inspect", str(out), "--json"])
    assert json.loads(shown.stdout)["formats"] == ["fp8_tensor", "nvfp4"]
    tensors = read_all(out)
    scales = {n: t for n, t in tensors.items() if n.endswith("input_scale")}
    assert len(scales) == 2 * 4
    assert {t.item() for t in scales.values()} == {0.25}
    # The weights are those of compressed-tensors, and dequantize to the same numbers.
    twin = written(
        "compressed-tensors", recipe=recipe | {"output": {"dialect": "compressed-tensors"}}
    )
    plain_of = []
    for number, path in enumerate((out, twin.output)):
        back = convert(path, tmp_path / f"back{number}", format="bf16")
        assert verify(back.output, against=path).ok
        plain_of.append(read_all(back.output))
    assert same_bytes(*plain_of)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    topk = torch.full((5, 2), 0.5), torch.tensor([[0, 1]] * 5)
    layers = [moequant.load_experts(path, layer=1, device="cpu") for path in (out, twin.output)]
    assert torch.equal(*(layer(x, *topk) for layer in layers))


READ = {
    "weights alone": ({"quant_algo": "W4A16_NVFP4"}, "nvfp4"),
    "in small letters": ({"quant_algo": "w4a16_nvfp4"}, "nvfp4"),
    "no group quantizes activations": (
        {"quant_algo": "NVFP4", "config_groups": {"group_0": {"input_activations": None}}},
        "nvfp4",
    ),
    "kept": ({"quant_algo": "W4A16_NVFP4", "ignore": [EXPERT]}, None),
    "kept by a wildcard": ({"quant_algo": "W4A16_NVFP4", "ignore": ["model.layers.0*"]}, None),
    "kept by a component": (
        {"quant_algo": "W4A16_NVFP4", "exclude_modules": ["mlp.experts"]},
        None,
    ),
    "not kept by a part of a component": (
        {"quant_algo": "W4A16_NVFP4", "ignore": ["mlp.expert"]},
        "nvfp4",
    ),
}


@pytest.mark.parametrize("case", READ)
def test_what_config_says_of_a_module(case):
    config, format = READ[case]
    assert MODELOPT.reader({"quant_method": "modelopt"} | config)(EXPERT) == format


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8", "FP8_PB_WO"])
def test_what_quantizes_activations_is_read_as_a_source_alone(algorithm):
    config = {"quant_method": "modelopt", "quant_algo": algorithm}
    with pytest.raises(
        UnsupportedError, match=f"{algorithm}, which moequant reads only as a source"
    ):
        MODELOPT.reader(config)(EXPERT)
    assert MODELOPT.reader(config, weights_only=True)(EXPERT)
