"""Claims that hold for every format in every dialect, read from the registries."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moequant import dialects, formats
from moequant.dialects import default_dialect, find_dialect, get_dialect
from moequant.errors import CheckpointError, MoequantError, UnsupportedError
from moequant.formats.base import WHOLE

NOT_OF_EXPERTS = [("w4afp8", "fp8_block")]
"""What dialects carry for other linear layers alone."""
PAIRS = [
    (d, f)
    for d in dialects.REGISTRY
    for f in dialects.REGISTRY[d].carried
    if (d, f) not in NOT_OF_EXPERTS
]
NOT_CARRIED = [
    (d, f)
    for d in dialects.REGISTRY
    for f in formats.CONVERTIBLE
    if f not in dialects.REGISTRY[d].carried
]
EXPERT = "model.layers.3.mlp.experts.7.down_proj"
KEPT = [
    "model.embed_tokens",
    "model.layers.0.mlp.experts.0.gate_proj",
    "model.layers.0.mlp.experts.0.down_proj",
    "model.layers.3.self_attn.q_proj",
    "model.layers.3.mlp.gate",
]

every_pair = pytest.mark.parametrize(("dialect", "format"), PAIRS)


def quantized(format, shape=(256, 384)):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    w[..., :1, :] = 0
    w[..., 1:2, :3] = torch.tensor([3e-39, -1e30, -0.0])
    return formats.quantize(w, format)


def raw(tensor):
    return tensor.contiguous().view(torch.uint8)


def assert_same_weight(a, b):
    assert (a.format, a.shape) == (b.format, b.shape)
    assert a.tensors().keys() == b.tensors().keys()
    for name, part in a.tensors().items():
        other = b.tensors()[name]
        assert (part.dtype, part.shape) == (other.dtype, other.shape), name
        assert torch.equal(raw(part.reshape(-1)), raw(other.reshape(-1))), name


@pytest.mark.parametrize("format", formats.CONVERTIBLE)
def test_every_format_has_a_default_dialect_that_carries_it(format):
    assert format in get_dialect(default_dialect(format)).carried


def test_unknown_names_are_refused_with_those_there_are():
    with pytest.raises(UnsupportedError, match="'gguf'; use one of: fp8, compressed-tensors"):
        get_dialect("gguf")
    with pytest.raises(UnsupportedError, match="int3"):
        default_dialect("int3")


@every_pair
@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (0, 256)])
def test_specs_are_what_to_disk_writes(dialect, format, shape):
    dialect = get_dialect(dialect)
    written = dialect.to_disk(EXPERT, quantized(format, shape))
    specs = dialect.specs(EXPERT, format, shape)
    assert list(specs) == list(written)
    assert list(specs) == [f"{EXPERT}.{suffix}" for suffix in dialect.encoding(format).suffixes]
    for name, spec in specs.items():
        assert (written[name].dtype, tuple(written[name].shape)) == (spec.dtype, spec.shape)


@every_pair
@pytest.mark.parametrize("shape", [(256, 384), (0, 256)])
def test_from_disk_inverts_to_disk(tmp_path, dialect, format, shape):
    q = quantized(format, shape)
    dialect = get_dialect(dialect)
    written = {k: v.contiguous() for k, v in dialect.to_disk(EXPERT, q).items()}
    save_file(written, tmp_path / "one.safetensors")
    on_disk = load_file(tmp_path / "one.safetensors")
    on_disk["model.norm.weight"] = torch.ones(3)
    assert_same_weight(dialect.from_disk(EXPERT, format, on_disk), q)


@every_pair
def test_a_weight_of_a_batch_is_written_like_a_single_one(dialect, format):
    q = quantized(format, (3, 128, 128))[1]
    dialect = get_dialect(dialect)
    assert_same_weight(dialect.from_disk(EXPERT, format, dialect.to_disk(EXPERT, q)), q)


@every_pair
def test_a_batch_is_refused(dialect, format):
    with pytest.raises(UnsupportedError, match=r"down_proj.*\[2, 128, 128\]"):
        get_dialect(dialect).to_disk(EXPERT, quantized(format, (2, 128, 128)))


RAGGED = [
    ("moequant", "fp8_block"),
    *(pair for pair in PAIRS if formats.get_format(pair[1]).block[1] == WHOLE),
]


@pytest.mark.parametrize(("dialect", "format"), [pair for pair in PAIRS if pair not in RAGGED])
def test_a_shape_the_format_or_its_consumers_cannot_hold_is_refused(dialect, format):
    # One row and column beyond the largest block there is.
    with pytest.raises(UnsupportedError, match=r"down_proj.*129"):
        get_dialect(dialect).check(EXPERT, format, (129, 129))


@pytest.mark.parametrize(("dialect", "format"), NOT_CARRIED)
def test_a_format_the_dialect_does_not_carry_is_refused(dialect, format):
    dialect = get_dialect(dialect)
    message = f"down_proj: .*{dialect.name} does not support {format}, only .*choose another"
    with pytest.raises(UnsupportedError, match=message):
        dialect.check(EXPERT, format, (128, 128))
    with pytest.raises(UnsupportedError, match=message):
        dialect.specs(EXPERT, format, (128, 128))
    with pytest.raises(UnsupportedError, match=message):
        dialect.to_disk(EXPERT, quantized(format))
    if format not in dialect.encodings:  # else it is read-only
        with pytest.raises(UnsupportedError, match=message):
            dialect.from_disk(EXPERT, format, {})
    with pytest.raises(UnsupportedError, match=message):
        dialect.quantization_config({EXPERT: format}, [])


@pytest.mark.parametrize("dialect", dialects.REGISTRY)
def test_an_unknown_format_is_refused_with_those_the_dialect_carries(dialect):
    dialect = get_dialect(dialect)
    with pytest.raises(UnsupportedError, match=rf"support int3, only {', '.join(dialect.carried)}"):
        dialect.check(EXPERT, "int3", (128, 128))


@every_pair
def test_every_encoding_stands_under_the_name_of_its_format(dialect, format):
    encoding = get_dialect(dialect).encodings[format]
    assert encoding.format is formats.get_format(format)


REQUIRED = [
    (d, f, suffix)
    for d, f in PAIRS
    for suffix in dialects.REGISTRY[d].encoding(f).suffixes
    if suffix != "weight_shape"
]


@pytest.mark.parametrize(("dialect", "format", "suffix"), REQUIRED)
def test_a_missing_tensor_is_named(dialect, format, suffix):
    dialect = get_dialect(dialect)
    tensors = dialect.to_disk(EXPERT, quantized(format))
    del tensors[f"{EXPERT}.{suffix}"]
    with pytest.raises(CheckpointError, match=rf"{EXPERT}\.{suffix} is missing"):
        dialect.from_disk(EXPERT, format, tensors)


EVERY_TENSOR = [(d, f, s) for d, f in PAIRS for s in dialects.REGISTRY[d].encoding(f).suffixes]


@pytest.mark.parametrize(("dialect", "format", "suffix"), EVERY_TENSOR)
def test_a_wrong_dtype_is_named_with_the_one_wanted(dialect, format, suffix):
    dialect = get_dialect(dialect)
    tensors = dialect.to_disk(EXPERT, quantized(format))
    name = f"{EXPERT}.{suffix}"
    wanted = formats.dtype_text(tensors[name].dtype)
    tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.float64)
    with pytest.raises(CheckpointError, match=rf"{name}: dtype float64, not .*{wanted}"):
        dialect.from_disk(EXPERT, format, tensors)


@pytest.mark.parametrize(("dialect", "format", "suffix"), EVERY_TENSOR)
def test_a_wrong_shape_is_refused(dialect, format, suffix):
    dialect = get_dialect(dialect)
    tensors = dialect.to_disk(EXPERT, quantized(format))
    name = f"{EXPERT}.{suffix}"
    good = tensors[name]
    others = [torch.cat([good, good]), good[:0]] if good.ndim else [torch.stack([good, good])]
    if formats.get_format(format).shares_scale and good.ndim == 2 and good.numel() > 1:
        others = []  # the scale says nothing about the shape of the codes
    # Of a scalar [1] is as good.
    for bad in (good[None] if good.ndim else good[None, None], *others):
        with pytest.raises(CheckpointError, match=rf"{EXPERT}\.\w+: .*not "):
            dialect.from_disk(EXPERT, format, tensors | {name: bad})


@every_pair
def test_the_config_says_of_every_module_what_was_done(dialect, format):
    writer = get_dialect(dialect)
    config = writer.quantization_config({EXPERT: format}, KEPT)
    config = json.loads(json.dumps(config))
    assert find_dialect(config, writer.specs(EXPERT, format, (128, 128))) is writer
    read = writer.reader(config)
    assert read(EXPERT) == format
    assert [read(module) for module in [*KEPT, "lm_head"]] == [None] * (len(KEPT) + 1)


@every_pair
def test_the_config_does_not_depend_on_the_order_of_modules(dialect, format):
    dialect = get_dialect(dialect)
    modules = [f"model.layers.{i}.mlp.experts.{i}.up_proj" for i in range(1, 5)]
    one = dialect.quantization_config(dict.fromkeys(modules, format), KEPT)
    two = dialect.quantization_config(dict.fromkeys(modules[::-1], format), KEPT[::-1])
    assert json.dumps(one) == json.dumps(two)


@pytest.mark.parametrize("config", [[], "fp8", 3, {1: 2}])
def test_a_quantization_config_that_is_no_object_is_refused(config):
    with pytest.raises(CheckpointError, match="quantization_config is"):
        find_dialect(config)


def test_a_plain_checkpoint_is_told_how_it_becomes_a_converted_one():
    with pytest.raises(CheckpointError, match=r"no quantization_config.*moequant convert"):
        find_dialect(None)


@pytest.mark.parametrize("method", ["awq", None, ["fp8"], {}])
def test_an_unknown_method_is_refused_with_what_was_found(method):
    with pytest.raises(UnsupportedError, match=r"quant_method is .*; moequant reads fp8, .*Take"):
        find_dialect({"quant_method": method})


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


def paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in items:
        yield from paths(inner, (*path, key))


def replaced(value, path, junk):
    if not path:
        return junk
    key, *rest = path
    return value | {key: replaced(value[key], rest, junk)}


# Odd but valid regular expressions make `re` announce changes to its syntax.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@every_pair
@given(data=st.data())
def test_a_hostile_config_gives_no_other_error_than_ours(dialect, format, data):
    dialect = get_dialect(dialect)
    config = dialect.quantization_config({EXPERT: format}, KEPT)
    path = data.draw(st.sampled_from(list(paths(config))))
    config = replaced(config, path, data.draw(junk | st.lists(st.text().map("re:".__add__))))
    try:
        read = find_dialect(config).reader(config)
        found = [read(module) for module in (EXPERT, *KEPT)]
    except MoequantError:
        return
    assert set(found) <= {*formats.CONVERTIBLE, None}
