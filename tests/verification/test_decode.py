from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from moequant.errors import UnsupportedError
from moequant.formats import CONVERTIBLE, QuantizedWeight, dequantize, get_format, quantize
from moequant.verification.decode import decode

# numpy has no view of nibbles as int4; astype takes two's complement apart.
ELEMENTS = {
    "fp8_block": lambda codes: codes.view(ml_dtypes.float8_e4m3fn),
    "nvfp4": lambda codes: codes.view(ml_dtypes.float4_e2m1fn),
    "mxfp4": lambda codes: codes.view(ml_dtypes.float4_e2m1fn),
    "w4a8": lambda codes: codes.astype(ml_dtypes.int4),
    "fp8_channel": lambda codes: codes.view(ml_dtypes.float8_e4m3fn),
    "fp8_tensor": lambda codes: codes.view(ml_dtypes.float8_e4m3fn),
    "mxfp8": lambda codes: codes.view(ml_dtypes.float8_e4m3fn),
}


def all_codes(format):
    """Every code of the format's element in one row, under the scale 1."""
    f = get_format(format)
    shape = torch.Size((1, 256 * f.codes_per_byte))
    specs = f.specs(shape)
    qdata = torch.arange(256, dtype=torch.uint8).view(f.qdata_dtype)
    return QuantizedWeight(
        format=format,
        qdata=qdata.reshape(specs["qdata"].shape),
        scale=torch.ones(specs["scale"].shape).to(specs["scale"].dtype),
        global_scale=torch.tensor(1.0) if "global_scale" in specs else None,
        shape=shape,
    )


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_every_code_point_is_what_ml_dtypes_makes_of_it(format):
    codes = np.arange(256, dtype=np.uint8)
    if get_format(format).codes_per_byte == 2:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(-1)
    wanted = ELEMENTS[format](codes)
    np.testing.assert_array_equal(decode(all_codes(format))[0].numpy(), wanted.astype(np.float64))


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_decoding_in_float64_agrees_with_the_format(format):
    w = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)) * 0.02
    q = quantize(w, format)
    # Default scales are powers of two, or leave room in float32: nothing is rounded.
    assert torch.equal(decode(q), dequantize(q).double())


def test_a_float32_scale_is_not_rounded_again():
    w = torch.randn(128, 256, generator=torch.Generator().manual_seed(2)) * 0.02
    q = quantize(w, "fp8_block", scale="float32")
    exact = q.qdata.double() * q.scale.double().repeat_interleave(128, 1)
    assert torch.equal(decode(q), exact)


def test_every_e8m0_scale_is_what_ml_dtypes_makes_of_it():
    q = quantize(torch.ones(1, 256 * 32), "mxfp4")
    q = QuantizedWeight(
        format="mxfp4",
        qdata=torch.full_like(q.qdata, 0x22),
        scale=torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)[None],
        global_scale=None,
        shape=q.shape,
    )
    wanted = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(decode(q)[0, ::32].numpy(), wanted)


def test_a_format_that_is_not_defined_is_refused():
    q = quantize(torch.ones(1, 32), "mxfp4")
    with pytest.raises(UnsupportedError, match=r"fp3: .*decode\.py"):
        decode(replace(q, format="fp3"))
