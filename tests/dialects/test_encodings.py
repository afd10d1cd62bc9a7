"""Bytes on disk, computed by hand, and what strangers write."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moequant.dialects import get_dialect
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import QuantizedWeight, dequantize, quantize

CT = get_dialect("compressed-tensors")
FP8 = get_dialect("fp8")


def weight(format, shape=(128, 128), **options):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 0.02
    return quantize(w, format, **options)


def test_int4_codes_are_stored_plus_eight_the_first_column_in_the_lowest_bits():
    # Columns 0 to 7 hold -8, -7 .. -1, columns 8 to 15 hold 0 .. 7; two's complement nibbles,
    # even column low: bytes 98 BA DC FE, 10 32 54 76.
    codes = torch.tensor([0x98, 0xBA, 0xDC, 0xFE, 0x10, 0x32, 0x54, 0x76], dtype=torch.uint8)
    q = QuantizedWeight(
        format="w4a8",
        qdata=codes.repeat(8)[None],
        scale=torch.tensor([[0.5]], dtype=torch.bfloat16),
        global_scale=None,
        shape=torch.Size((1, 128)),
    )
    assert dequantize(q)[0, :16].tolist() == [x / 2 for x in range(-8, 8)]
    tensors = CT.to_disk("m", q)
    words = tensors["m.weight_packed"]
    assert words.shape == (1, 16)
    # Offset codes 0 .. 7 from the lowest bits up read 0x76543210; 8 .. 15 read 0xFEDCBA98.
    assert [word & 0xFFFFFFFF for word in words[0, :2].tolist()] == [0x76543210, 0xFEDCBA98]
    assert tensors["m.weight_shape"].tolist() == [1, 128]


@pytest.mark.parametrize("stored", [[128, 256], [0, 0], [-1, 128]])
def test_a_logical_shape_that_contradicts_the_codes_is_refused(stored):
    tensors = CT.to_disk("m", weight("w4a8")) | {"m.weight_shape": torch.tensor(stored)}
    with pytest.raises(CheckpointError, match=r"m\.weight_shape: .*\[128, 128\]"):
        CT.from_disk("m", "w4a8", tensors)


def test_the_logical_shape_may_be_missing():
    q = weight("w4a8")
    tensors = CT.to_disk("m", q)
    del tensors["m.weight_shape"]
    assert torch.equal(dequantize(CT.from_disk("m", "w4a8", tensors)), dequantize(q))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_int4_scale_in_another_dtype_is_read_if_bfloat16_holds_it(dtype):
    tensors = CT.to_disk("m", weight("w4a8"))
    scale = torch.full((128, 1), 2.0**-7 * 1.5, dtype=dtype)
    q = CT.from_disk("m", "w4a8", tensors | {"m.weight_scale": scale})
    assert q.scale.dtype == torch.bfloat16
    assert torch.equal(q.scale.to(dtype), scale)
    scale[5] = 1 + 2**-9
    with pytest.raises(UnsupportedError, match=r"m\.weight_scale: .*bfloat16, .* cannot represent"):
        CT.from_disk("m", "w4a8", tensors | {"m.weight_scale": scale})


def test_an_mxfp4_scale_is_the_exponent_byte():
    q = weight("mxfp4")
    stored = CT.to_disk("m", q)["m.weight_scale"]
    assert torch.equal(torch.exp2(stored.float() - 127), q.scale.float())
    tensors = CT.to_disk("m", q) | {"m.weight_scale": q.scale}
    assert torch.equal(dequantize(CT.from_disk("m", "mxfp4", tensors)), dequantize(q))


@pytest.mark.parametrize("exponent", [-126, -12, 0, 116])
def test_a_power_of_two_global_scale_is_stored_as_its_exact_reciprocal(exponent):
    q = weight("nvfp4")
    scaled = QuantizedWeight(
        format="nvfp4",
        qdata=q.qdata,
        scale=q.scale,
        global_scale=torch.tensor(2.0**exponent),
        shape=q.shape,
    )
    tensors = CT.to_disk("m", scaled)
    assert tensors["m.weight_global_scale"].tolist() == [2.0**-exponent]
    assert CT.from_disk("m", "nvfp4", tensors).global_scale.item() == 2.0**exponent


# Within these, the value and its reciprocal are normal float32 numbers.
@given(st.floats(min_value=2.0**-125, max_value=2.0**125, width=32))
def test_any_other_global_scale_is_stable_from_the_first_writing_on(value):
    q = weight("nvfp4", (16, 32))
    first = QuantizedWeight(
        format="nvfp4",
        qdata=q.qdata,
        scale=q.scale,
        global_scale=torch.tensor(value),
        shape=q.shape,
    )
    written = CT.to_disk("m", first)
    read = CT.from_disk("m", "nvfp4", written)
    # Two roundings of at most 2**-24 each.
    assert math.isclose(read.global_scale.item(), value, rel_tol=2.0**-23)
    again = CT.to_disk("m", read)
    assert torch.equal(again["m.weight_global_scale"], written["m.weight_global_scale"])


def test_a_global_scale_may_be_a_scalar():
    q = weight("nvfp4")
    tensors = CT.to_disk("m", q)
    tensors["m.weight_global_scale"] = tensors["m.weight_global_scale"].reshape(())
    assert torch.equal(dequantize(CT.from_disk("m", "nvfp4", tensors)), dequantize(q))


@pytest.mark.parametrize("divisor", [0.0, -0.0, -2.0, math.inf, math.nan, 2.0**-149])
def test_a_global_scale_that_divides_into_nonsense_is_refused(divisor):
    tensors = CT.to_disk("m", weight("nvfp4")) | {"m.weight_global_scale": torch.tensor([divisor])}
    with pytest.raises(CheckpointError, match=r"m\.weight_global_scale: .*divisor"):
        CT.from_disk("m", "nvfp4", tensors)


@pytest.mark.parametrize(("dialect", "name"), [(FP8, "weight_scale_inv"), (CT, "weight_scale")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_an_fp8_scale_in_a_narrower_dtype_is_read(dialect, name, dtype):
    q = weight("fp8_block")
    tensors = dialect.to_disk("m", q)
    tensors[f"m.{name}"] = tensors[f"m.{name}"].to(dtype)
    read = dialect.from_disk("m", "fp8_block", tensors)
    assert read.scale.dtype == torch.float32
    assert torch.equal(dequantize(read), dequantize(q))


@pytest.mark.parametrize("dialect", [FP8, CT], ids=lambda dialect: dialect.name)
def test_ragged_fp8_blocks_of_experts_are_read_but_not_written(dialect):
    q = weight("fp8_block", (192, 320))
    names = dialect.encoding("fp8_block").suffixes
    tensors = {f"a.experts.0.up.{n}": t for n, t in zip(names, (q.qdata, q.scale), strict=True)}
    read = dialect.from_disk("a.experts.0.up", "fp8_block", tensors)
    assert torch.equal(dequantize(read), dequantize(q))
    with pytest.raises(UnsupportedError, match=r"up: N = 192 is not a multiple .* for an expert\."):
        dialect.to_disk("a.experts.0.up", q)


@pytest.mark.parametrize("dialect", [FP8, CT], ids=lambda dialect: dialect.name)
def test_rows_of_linear_layers_may_end_in_a_ragged_fp8_block(dialect):
    """As DeepSeek's kv_a_proj_with_mqa, whose 576 rows engines merge as the last."""
    q = weight("fp8_block", (576, 256))
    tensors = dialect.to_disk("m", q)
    assert tensors[f"m.{dialect.encoding('fp8_block').suffixes[1]}"].shape == (5, 2)
    assert torch.equal(dequantize(dialect.from_disk("m", "fp8_block", tensors)), dequantize(q))
    with pytest.raises(
        UnsupportedError, match=r"N = 576 is .* that they merge with a following one"
    ):
        dialect.check("m", "fp8_block", (576, 256), rows_follow=True)
    with pytest.raises(UnsupportedError, match=r"K = 576 is .* for a linear layer"):
        dialect.check("m", "fp8_block", (256, 576))


@pytest.mark.parametrize(
    ("format", "columns"), [("nvfp4", 12), ("mxfp4", 24), ("w4a8", 8 * 8)], ids=str
)
def test_codes_that_do_not_fill_their_groups_are_refused(format, columns):
    tensors = CT.to_disk("m", weight(format))
    packed = tensors["m.weight_packed"]
    per_item = 128 // packed.shape[1]
    tensors["m.weight_packed"] = packed[:, : columns // per_item]
    with pytest.raises(CheckpointError, match=rf"m\.weight_packed: {columns} columns"):
        CT.from_disk("m", format, tensors)


def test_a_byte_that_is_no_int4_code_is_refused():
    dialect = get_dialect("compressed-tensors")
    codes = torch.zeros(4, 256, dtype=torch.int8)
    tensors = {"m.weight": codes, "m.weight_scale": torch.ones(4, 2)}
    assert dialect.from_disk("m", "int4", tensors).shape == (4, 256)
    codes[2, 7] = 8
    with pytest.raises(CheckpointError, match=r"m\.weight: codes from 0 to 8, but INT4 has -8"):
        dialect.from_disk("m", "int4", tensors)
