from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from moequant.dialects import get_dialect
from moequant.errors import UnsupportedError
from moequant.formats import CONVERTIBLE, QuantizedWeight, get_format, quantize
from moequant.formats.elements import pack_nibbles
from moequant.verification.bounds import MAX_LOST_DB, find_out_of_bound
from moequant.verification.decode import decode

# Under this budget clipping never pays.
NO_LOSS = -1000.0


def block_of(format, codes, scale=1.0):
    """One block [1, K] that begins with `codes`; the rest is zero."""
    f = get_format(format)
    row = torch.zeros(1, min(f.block[1], 128), dtype=torch.uint8)
    row[0, : len(codes)] = torch.tensor(codes)
    specs = f.specs(row.shape)
    return QuantizedWeight(
        format=format,
        qdata=row.view(f.qdata_dtype) if f.codes_per_byte == 1 else pack_nibbles(row),
        scale=torch.full(specs["scale"].shape, scale).to(specs["scale"].dtype),
        global_scale=torch.tensor(1.0) if "global_scale" in specs else None,
        shape=row.shape,
    )


def weight_of(format, *values):
    w = torch.zeros(1, min(get_format(format).block[1], 128))
    w[0, : len(values)] = torch.tensor(values)
    return w


def allows(format, value, code, scale=1.0, others=(), loss_db=NO_LOSS):
    """Whether a weight that begins with `value` may be a block that begins with `code`."""
    w = weight_of(format, value, *(v for v, _ in others))
    q = block_of(format, [code, *(c for _, c in others)], scale)
    return find_out_of_bound(w, q, quantize(w, format), loss_db) is None


CASES = [
    (name, {key: value})
    for name, format in CONVERTIBLE.items()
    for key, values in format.options.items()
    for value in values
    # Scales of w4a8's search are rounded after the search, so that clipping may just not pay.
    if (name, value) != ("w4a8", "mse")
    # Weighted searches clip where channels matter less, whatever that does to the weight's error.
    and value != "weighted"
]


@pytest.mark.parametrize(("format", "options"), CASES)
def test_what_our_quantizer_makes_with_any_option_is_within_the_bound(format, options):
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    q = quantize(w, format, **options)
    assert find_out_of_bound(w, q, quantize(w, format)) is None


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_the_bound_lies_halfway_between_neighbouring_codes(format):
    codes = range(256 if get_format(format).codes_per_byte == 1 else 16)
    values = {decode(block_of(format, [code]))[0, 0].item(): code for code in codes}
    ordered = sorted(item for item in values.items() if math.isfinite(item[0]))
    for (low, low_code), (high, high_code) in itertools.pairwise(ordered):
        middle = (low + high) / 2
        # The allowance is 2**-8 of the weight.
        slack = 1.5 * 2.0**-8 * max(abs(low), abs(high))
        assert allows(format, middle, low_code)
        assert allows(format, middle, high_code)
        assert not allows(format, middle + slack, low_code)
        assert not allows(format, middle - slack, high_code)


@pytest.mark.parametrize(
    ("format", "farthest", "code", "scale"),
    [
        ("fp8_block", 448.0, 0x7E, 1.0),
        ("mxfp4", 8.0, 7, 1.0),
        ("mxfp4", -8.0, 15, 1.0),
        # 1 + u / s: E4M3 has eight steps an octave, so the scale 1 may have been 17/16.
        ("nvfp4", 6 * 17 / 16, 7, 1.0),
        # 1.875 is the last number of its octave: 31/16 rounds to it.
        ("nvfp4", 6 * 31 / 16, 7, 1.875),
        # 2**-9, the smallest, may have been 1.5 times that.
        ("nvfp4", 9 * 2.0**-9, 7, 2.0**-9),
        ("w4a8", 8 * 17 / 16, 7, 1.0),
        ("w4a8", -9 * 17 / 16, 8, 1.0),
    ],
)
def test_clipping_is_allowed_as_far_as_rules_for_the_scale_clip(format, farthest, code, scale):
    assert allows(format, farthest * 0.999, code, scale)
    # Beyond the allowance of 2**-8.
    assert not allows(format, farthest * 1.01, code, scale)


def test_a_scale_that_underflowed_to_zero_clips_up_to_half_the_smallest():
    assert allows("nvfp4", 5.9 * 2.0**-10, 0, scale=0.0)
    assert not allows("nvfp4", 6.1 * 2.0**-10, 0, scale=0.0)


def test_zeros_under_a_zero_scale_are_fine():
    for format in ("fp8_block", "nvfp4", "w4a8"):
        assert allows(format, 0.0, 0, scale=0.0)


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4", "mxfp4", "w4a8"])
def test_a_scale_that_is_not_a_number_is_beyond_the_bound(format):
    assert not allows(format, 1.0, 1, scale=float("nan"))


def test_clipping_further_is_allowed_where_it_pays():
    # With scale 1, 31 weights of 0.5 are exact and the first is clipped to 6. Our scale is 2, where
    # 0.5 is a tie that becomes 0: 31 * 0.25 squared. 1.5 dB is a factor of 1.41.
    small = [(0.5, 1)] * 31
    # 9 becomes 8 under scale 2 and costs 1: 8.75, and 9 against it is within the budget.
    assert allows("mxfp4", 9.0, 7, others=small, loss_db=MAX_LOST_DB)
    assert not allows("mxfp4", 9.0, 7, others=small, loss_db=0.0)
    # 12 is exact under scale 2: 36 against 7.75.
    assert not allows("mxfp4", 12.0, 7, others=small, loss_db=MAX_LOST_DB)


def test_the_first_element_beyond_its_bound_is_named():
    w = torch.zeros(2, 32)
    w[1, 3], w[1, 5] = 3.0, 4.0
    q = quantize(w, "mxfp4")
    damaged = q.map(torch.clone)
    damaged.qdata[1, 1:3] ^= 0x80
    found = find_out_of_bound(w, damaged, q)
    assert found is not None
    assert (found.index, found.weight, found.decoded, found.count) == ((1, 3), 3.0, -3.0, 2)


def test_a_format_without_a_bound_is_refused():
    w = torch.zeros(1, 32)
    q = quantize(w, "mxfp4")
    with pytest.raises(UnsupportedError, match=r"'fp3'"):
        find_out_of_bound(w, replace(q, format="fp3"), q)


@pytest.mark.parametrize(
    ("format", "preset", "stored_as"),
    [
        ("fp8_block", "FP8_BLOCK", "float-quantized"),
        ("nvfp4", "NVFP4A16", "nvfp4-pack-quantized"),
        ("mxfp4", "MXFP4A16", "mxfp4-pack-quantized"),
        ("w4a8", "W4AFP8", "pack-quantized"),
    ],
)
@pytest.mark.parametrize("outliers", [1.0, 20.0])
def test_what_compressed_tensors_makes_of_a_weight_is_within_the_bound(
    format, preset, stored_as, outliers
):
    w = torch.randn(256, 512, generator=torch.Generator().manual_seed(4)) * 0.02
    w[:, :3] *= outliers
    w = w.bfloat16()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    state = {"weight": w}
    if format == "nvfp4":
        state["weight_global_scale"] = generate_gparam(w.min().reshape(1), w.max().reshape(1))
    block_n, block_k = get_format(format).block
    blocks = w.reshape(256 // block_n, block_n, 512 // block_k, block_k)
    state["weight_scale"], _ = calculate_qparams(
        blocks.amin((1, 3)),
        blocks.amax((1, 3)),
        scheme.weights,
        global_scale=state.get("weight_global_scale"),
    )
    stored = BaseCompressor.get_value_from_registry(stored_as).compress(state, scheme)
    dialect = get_dialect("compressed-tensors")
    q = dialect.from_disk("m", format, {f"m.{name}": tensor for name, tensor in stored.items()})
    assert find_out_of_bound(w.float(), q, quantize(w, format)) is None
