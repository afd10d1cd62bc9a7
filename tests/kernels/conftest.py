from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Reads(TorchDispatchMode):
    """Notes what torch reads of tensors on the host, or whose result has a size that it reads."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
            self.found.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.fixture
def host_reads():
    """What is read within it is in its `found`, by operation."""
    return Reads()


@pytest.fixture
def compiled_by(tmp_path):
    """compiled_by(script, *arguments): what a script beside this prints of each kernel."""

    def run(script, *arguments):
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, Path(__file__).parent / script, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.fixture
def compiled_for_hopper(tmp_path):
    """compiled_for_hopper(config): what ptxas says of a kernel, and its machine code."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    triton = Path(pytest.importorskip("triton").__file__).parent
    disassemble = triton / "backends" / "nvidia" / "bin" / "nvdisasm"
    source, cubin = tmp_path / "kernel.cu", tmp_path / "kernel.cubin"

    def run(config):
        source.write_text(config.source())
        macros = [f"-D{name}={value}" for name, value in config.defines().items()]
        command = [nvcc, "-arch=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v", *macros]
        done = subprocess.run(
            [*command, source, "-o", cubin], capture_output=True, text=True, check=False
        )
        log = done.stdout + done.stderr
        assert done.returncode == 0, (config, log)
        sass = subprocess.run(
            [disassemble, "-c", cubin], capture_output=True, text=True, check=True
        ).stdout
        return log, sass

    return run


@pytest.fixture
def compiles_well(compiled_for_hopper):
    """compiles_well(configs): for Hopper, with all products, and without spills or waiting ones."""

    def check(configs):
        for config in configs:
            log, sass = compiled_for_hopper(config)
            assert "0 bytes spill stores, 0 bytes spill loads" in log, (config, log)
            # What ptxas says of WGMMA that it makes wait for each other.
            assert "serialized" not in log, (config, log)
            for rows in config.classes:
                found = re.findall(rf"GMMA\.64x{rows}x(\d+)", sass)
                # Two blocks of 128 columns; ptxas has left out those of one.
                assert len(found) >= 2 * 128 // int(found[0]), (config, rows, len(found))

    return check


@pytest.fixture
def agree_in_fp8():
    """agree_in_fp8(codes, scale, want): as `want`, but for the few ulp of float32 that exp is off.

    Eight ulp are 1e-6, and scales are off by as much. A value that lies that close to the middle
    of two codes, which are 2**-4 of it or more apart, has the other one: 3 in 100000 values, so of
    a few thousand hardly two.
    """

    def check(codes, scale, want):
        torch.testing.assert_close(scale, want.scale, rtol=1e-6, atol=0)
        got, wanted = codes.float(), want.qdata.float()
        assert bool(((got - wanted).abs() <= 0.125 * got.abs() + 2.0**-9).all())
        assert int((got != wanted).sum()) <= 1

    return check


@pytest.fixture
def held_rows():
    """Which weight rows threads hold of a panel, as `moequant.kernels.sm90.panels` says."""

    def every(*, gated):
        """Of each thread of a warpgroup, block and half: the matrix, and the row of a panel."""
        for thread in range(128):
            warp, f = thread // 32, thread % 32 // 4
            for block in range(2):
                for half in range(2):
                    if gated:
                        matrix, row = block, 16 * warp + f // 2 * 4 + half * 2 + f % 2
                    else:
                        matrix, row = 0, 32 * warp + f // 2 * 8 + block * 4 + half * 2 + f % 2
                    yield thread, block, half, matrix, row

    return every
