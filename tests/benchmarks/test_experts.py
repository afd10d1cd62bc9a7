"""`bench experts` without a GPU: shapes, floors worked out by hand, the table, the plot."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moequant.benchmarks import tune
from moequant.benchmarks.contenders import contender_names, make_contender
from moequant.benchmarks.cuda_timing import Ceilings
from moequant.benchmarks.experts import bench_experts, calc_diff
from moequant.benchmarks.floor import Work, work_of
from moequant.benchmarks.layers import Inputs, random_experts, random_inputs
from moequant.benchmarks.plot import plot_experts
from moequant.benchmarks.shapes import SHAPES, LayerShape, parse_shape
from moequant.errors import UnsupportedError
from moequant.runtime import FusedExperts
from moequant.runtime.act_fn import SWIGLUOAI
from moequant.runtime.backends import backends

SMALL = LayerShape(experts=6, hidden=256, intermediate=128, topk=2)
CPU = torch.device("cpu")
CEILINGS = Ceilings(read_tb_per_s=4.0, fp8_tflops=1000.0, bf16_tflops=500.0)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_known_by_its_name_and_by_its_sizes(name):
    assert parse_shape(name) == SHAPES[name]
    assert str(parse_shape(str(SHAPES[name]))) == str(SHAPES[name])


@pytest.mark.parametrize("text", ["qwen", "8x256x128", "0x256x128x2", "8x256x128x2x1", "8x8x8x9"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(UnsupportedError, match=text):
        parse_shape(text)


def test_work_counts_active_experts_input_output_and_products():
    weights = random_experts(SMALL, "fp8_block", CPU)
    ids = torch.tensor([[0, 1], [1, 4], [0, 1]], dtype=torch.int32)
    call = Inputs(hidden=torch.zeros(3, 256).bfloat16(), ids=ids, topk_weights=torch.ones(3, 2))
    work = work_of(weights, [call, call])
    # 3 experts of 3 matrices of 256 x 128 bytes with 2 scales of 4 bytes; 3 tokens in and out.
    assert work.bytes_moved == 3 * 3 * (256 * 128 + 2 * 4) + 2 * 3 * 256 * 2
    assert work.flop == 6 * 3 * 2 * 256 * 128


def test_the_floor_is_the_longer_of_bytes_and_products():
    moves = Work(bytes_moved=8e6, flop=1e9)
    assert moves.floor_us(CEILINGS, fp8=True) == pytest.approx(2.0)
    multiplies = Work(bytes_moved=8e6, flop=1e10)
    assert multiplies.floor_us(CEILINGS, fp8=True) == pytest.approx(10.0)
    assert multiplies.floor_us(CEILINGS, fp8=False) == pytest.approx(20.0)
    without = Ceilings(read_tb_per_s=4.0, fp8_tflops=None, bf16_tflops=500.0)
    assert multiplies.floor_us(without, fp8=True) == pytest.approx(20.0)


def test_random_layers_run_and_repeat(every_format):
    weights = random_experts(SMALL, every_format, CPU)
    call = random_inputs(SMALL, 5, CPU, seed=3)
    assert call.ids.sort(1).values.diff(dim=1).ne(0).all()  # distinct experts a token
    first = FusedExperts(weights)(*call.arguments)
    again = random_inputs(SMALL, 5, CPU, seed=3)
    assert torch.equal(
        FusedExperts(random_experts(SMALL, every_format, CPU))(*again.arguments), first
    )
    assert first.isfinite().all()
    assert first.norm() > 0


def test_calc_diff_is_zero_for_the_same_and_nan_for_nan():
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    assert calc_diff(x, x) == pytest.approx(0, abs=1e-15)
    assert calc_diff(x, -x) == pytest.approx(2)
    assert not calc_diff(x * float("nan"), x) <= 1


def test_every_backend_is_known_and_what_cannot_be_timed_says_why():
    weights = random_experts(SMALL, "mxfp4", CPU)
    assert set(backends()) < set(contender_names())
    for name, reason in (
        ("grouped_mm", "wants a CUDA device"),
        ("vllm", "fp8_block, not mxfp4"),
        ("cutlas", "nothing called 'cutlas'"),
        ("sm90_fp8_block", "runs fp8_block alone"),
        ("torch_reference", "waits for the device, which no CUDA graph captures"),
        ("naive_batched", "waits for the device, which no CUDA graph captures"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            make_contender(name, weights)


def test_it_is_refused_without_a_cuda_device():
    with pytest.raises(UnsupportedError, match="device 'cpu': experts are timed by"):
        bench_experts(SMALL, [1], device="cpu")


def test_tuning_refuses_more_tokens_than_run_at_once_before_it_times_any(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(tune, "cuda_device", lambda device: CPU)
    with pytest.raises(UnsupportedError, match="40000 tokens run in parts of 32768"):
        tune.tune(SMALL, [1, 40000])


def document():
    time = {"median_us": 20.0, "p20_us": 19.0, "p80_us": 21.0}
    cell = {
        "tokens": 1, "times": {"moequant": time, "triton": time}, "refusals": {},
        "bytes_moved": 4e7, "tb_per_s": 2.0, "tflops": 3.0, "floor_us": 10.0, "share_of_floor": 0.5,
    }  # fmt: skip
    return {
        "shape": "qwen3-30b", "format": "fp8_block", "backend": "sm90_fp8_block",
        "machine": {"gpu": "a GPU", "torch": "2"}, "ceilings": vars(CEILINGS),
        "cells": [cell, {**cell, "tokens": 8, "times": {"moequant": time}}],
    }  # fmt: skip


def test_a_plot_is_a_png(tmp_path):
    plot_experts(document(), tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_gpt_oss_is_timed_with_its_function_and_biases_and_without_peers_that_have_none():
    assert SHAPES["gpt-oss-120b"].act_fn == SWIGLUOAI
    shape = dataclasses.replace(SHAPES["gpt-oss-120b"], experts=2, hidden=32, intermediate=32)
    weights = random_experts(shape, "mxfp4", CPU)
    assert weights.act_fn == SWIGLUOAI
    assert list(weights.biases()) == ["gate_bias", "up_bias", "down_bias"]
