"""Every kernel compiles for Hopper without spilled registers and with products that overlap."""

from __future__ import annotations

import shutil
import subprocess
from itertools import product

import pytest

pytest.importorskip("triton")

from moequant.errors import MoequantError
from moequant.kernels.sm90.grouped_gemm import ACT_FNS
from moequant.kernels.sm90.tiling import Tiling
from moequant.kernels.sm90_fp8_channel.sm90_fp8_channel_fused import (
    Fp8ChannelGemmConfig,
    Fp8ChannelTilings,
)

NVCC = shutil.which("nvcc")
H, I, T = 2880, 1536, 8


def gemms(tiling, *, act="silu", gated=True, **fields):
    """The first and the second GEMM of a tiling."""
    shared = {"rows": tiling.rows, "pair": tiling.pair, **fields}
    yield Fp8ChannelGemmConfig(
        act=act, gated=gated, gather=T if tiling.gather else 0, routed=tiling.rows == 8,
        split=tiling.split13, K=H, n_out=I, **shared,
    )  # fmt: skip
    yield Fp8ChannelGemmConfig(act=None, split=tiling.split2, K=I, n_out=H, **shared)


def every_tiling():
    family = Fp8ChannelTilings()
    flags = (False, True)
    for rows, split, pair, gather in product(family.rows, (1, 2, 4), flags, flags):
        try:
            tiling = Tiling(rows=rows, split13=split, split2=split, pair=pair, gather=gather)
            yield family.check(tiling)
        except MoequantError:
            continue


def every_epilogue():
    """With most registers: the largest tiles, gathered."""
    for rows, act, gated in product((96, 128), ACT_FNS, (True, False)):
        tiling = Tiling(rows=rows, pair=True, gather=True)
        # swiglustep and situ have a gate, relu2 mostly has none.
        yield from gemms(tiling, act=act, gated=gated, limited=True, bias=True, per_matrix=gated)


EVERY = list(dict.fromkeys(c for tiling in every_tiling() for c in gemms(tiling)))
EPILOGUES = list(dict.fromkeys(every_epilogue()))
FEW = [*gemms(Tiling(rows=8)), *gemms(Tiling(rows=128, pair=True, gather=True))]


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "configs",
    [
        pytest.param(FEW, id="few"),
        pytest.param(EVERY, id="every tiling", marks=pytest.mark.full),
        pytest.param(EPILOGUES, id="every function", marks=pytest.mark.full),
    ],
)
def test_kernels_compile_without_spills_and_their_products_overlap(tmp_path, configs):
    source, cubin = tmp_path / "kernel.cu", tmp_path / "kernel.cubin"
    for config in configs:
        source.write_text(config.source())
        macros = [f"-D{name}={value}" for name, value in config.defines().items()]
        command = [NVCC, "-arch=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v", *macros]
        done = subprocess.run(
            [*command, str(source), "-o", str(cubin)], capture_output=True, text=True, check=False
        )
        log = done.stdout + done.stderr
        assert done.returncode == 0, (config, log)
        assert "0 bytes spill stores, 0 bytes spill loads" in log, (config, log)
        # What ptxas says of WGMMA that it makes wait for each other.
        assert "serialized" not in log, (config, log)
