"""The stacked layout: gate over up in one tensor, which all backends here read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moequant.act_fn import RELU2, SILU, SWIGLUOAI
from moequant.formats import CONVERTIBLE, RUNNABLE, get_format
from moequant.runtime import ExpertWeights, FusedExperts
from moequant.runtime.backends.stacked import STACKED, padded_rows
from moequant.runtime.packing import workload_of

FORMATS = list(RUNNABLE)


def weights_of(format="fp8_block", I=144, act_fn=SILU, bias_dtype=None, E=3):
    g = torch.Generator().manual_seed(0)
    sizes = {"gate": (E, I, 256), "up": (E, I, 256), "down": (E, 256, I)}
    if not act_fn.gated:
        del sizes["gate"]
    fmt = get_format(format)
    parts = {n: fmt.quantize(torch.randn(s, generator=g)) for n, s in sizes.items()}
    biases = {f"{n}_bias": torch.randn(s[:2], generator=g).to(bias_dtype) for n, s in sizes.items()}
    return ExpertWeights(**{"gate": None, **parts, **(biases if bias_dtype else {})}, act_fn=act_fn)


def unstacked(tensors, weights):
    return STACKED.unpack(tensors, workload_of(weights, "format"))


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(got, want):
    assert got.tensors().keys() == want.tensors().keys()
    for name, tensor in want.tensors().items():
        other = got.tensors()[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(as_bytes(other), as_bytes(tensor)), name


@pytest.mark.parametrize("act_fn", [SILU, RELU2], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_unstacking_gives_the_bits_of_every_part_as_views(format, act_fn):
    I = 144 if get_format(format).ragged else 256
    weights = weights_of(format, I=I, act_fn=act_fn)
    tensors = STACKED.pack(weights)
    views = unstacked(tensors, weights)
    assert_same(views, weights)
    storages = {t.untyped_storage().data_ptr() for t in tensors.values()}
    assert {t.untyped_storage().data_ptr() for t in views.tensors().values()} <= storages
    assert len(storages) == len(tensors)
    assert all(t.is_contiguous() and t.shape[0] == 3 for t in tensors.values())


@pytest.mark.parametrize("act_fn", [SILU, RELU2], ids=str)
@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("I", [128, 144])
@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel", "fp8_tensor", "bf16"])
def test_what_is_stacked_already_is_not_copied(format, I, experts, act_fn):
    weights = weights_of(format, I, act_fn, torch.float32, E=experts)
    first = STACKED.pack(weights)
    again = STACKED.pack(unstacked(first, weights))
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        assert again[name].data_ptr() == tensor.data_ptr(), name
        assert again[name].shape == tensor.shape
    moved = weights.replace({name: t.clone() for name, t in weights.tensors().items()})
    assert STACKED.pack(moved)["w13_qdata"].data_ptr() != first["w13_qdata"].data_ptr()


def test_rows_are_padded_with_zeros_to_whole_scale_blocks():
    w13 = STACKED.pack(weights_of())["w13_qdata"]
    assert w13.shape == (3, 512, 256)
    assert not as_bytes(w13[:, 144:256]).any()
    assert not as_bytes(w13[:, 400:]).any()
    assert padded_rows("fp8_block", 144) == 256
    for format in set(FORMATS) - {"fp8_block"}:
        assert padded_rows(format, 144) == 144


def test_rows_of_another_tensor_are_no_padding():
    weights = weights_of(act_fn=RELU2)
    padded = torch.ones(3, 256, 256).to(torch.float8_e4m3fn)
    padded[:, :144] = weights.up.qdata
    up = replace(weights.up, qdata=padded[:, :144])
    w13 = STACKED.pack(replace(weights, up=up))["w13_qdata"]
    assert w13.data_ptr() != padded.data_ptr()
    assert not as_bytes(w13[:, 144:]).any()


def test_biases_of_gate_lie_over_those_of_up_in_float32():
    weights = weights_of(act_fn=SWIGLUOAI, bias_dtype=torch.bfloat16)
    tensors = STACKED.pack(weights)
    bias = tensors["w13_bias"]
    assert bias.dtype == tensors["w2_bias"].dtype == torch.float32
    assert torch.equal(bias[:, :144], weights.gate_bias.float())
    assert torch.equal(bias[:, 256:400], weights.up_bias.float())
    assert not bias[:, 144:256].any()
    assert not bias[:, 400:].any()
    one = STACKED.pack(replace(weights, gate_bias=None, down_bias=None))
    assert not one["w13_bias"][:, :256].any()
    assert "w2_bias" not in one


def test_gate_and_up_keep_global_scales_of_their_own():
    weights = weights_of("nvfp4")
    up = replace(weights.up, global_scale=weights.up.global_scale * 2)
    weights = replace(weights, up=up)
    assert_same(unstacked(STACKED.pack(weights), weights), weights)


@pytest.mark.parametrize("format", FORMATS)
def test_meta_tensors_show_what_will_be_packed(format):
    weights = weights_of(format, I=256, bias_dtype=torch.bfloat16)
    meta = weights.replace({name: t.to("meta") for name, t in weights.tensors().items()})
    shown, packed = STACKED.pack(meta), STACKED.pack(weights)
    assert {n: (t.dtype, t.shape) for n, t in shown.items()} == {
        n: (t.dtype, t.shape) for n, t in packed.items()
    }


@pytest.mark.parametrize("act_fn", [SILU, RELU2], ids=str)
@pytest.mark.parametrize("format", CONVERTIBLE)
def test_a_state_dict_goes_through_safetensors(format, act_fn, tmp_path):
    from safetensors.torch import load_file, save_file

    I = 144 if get_format(format).ragged else 256
    module = FusedExperts(weights_of(format, I, act_fn, torch.float32))
    call = (
        torch.randn(5, 256, generator=torch.Generator().manual_seed(1)),
        torch.full((5, 2), 0.5),
        torch.tensor([[0, 1], [2, 0], [1, 2], [-1, 0], [2, 2]]),
    )
    want = module(*call)
    save_file(module.state_dict(), tmp_path / "experts.safetensors")
    other = FusedExperts(
        weights_of(format, I, act_fn, torch.float32).replace(
            {name: torch.zeros_like(t) for name, t in module.weights.tensors().items()}
        )
    )
    other.load_state_dict(load_file(tmp_path / "experts.safetensors"))
    assert torch.equal(other(*call), want)
