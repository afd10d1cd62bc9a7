"""The kernels that calls of sm100_fp4_deepgemm.py make deep_gemm compile, compiled for SM100.

Wants nvcc, and the headers of the package, which need not be importable here. The arguments of the
template are those that DeepGEMM 54e2261 gives it for such calls: `csrc/jit_kernels/impls/
sm100_fp8_fp4_gemm_1d1d.hpp` has their order, `csrc/jit_kernels/heuristics/sm100.hpp` the numbers.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

SPEC = find_spec("deep_gemm")
INCLUDE = None if SPEC is None else Path(SPEC.origin).parent / "include"

pytestmark = [
    pytest.mark.skipif(INCLUDE is None, reason="needs the package deep_gemm"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]

SHARED_BYTES, SMS, EXPERTS = 232448, 148, 128
SOURCE = """\
#include <deep_gemm/impls/sm100_fp8_fp4_gemm_1d1d.cuh>
using namespace deep_gemm;
static void instantiate() {{
  auto kernel = reinterpret_cast<void*>(&sm100_fp8_fp4_gemm_1d1d_impl<
    cute::UMMA::Major::K, cute::UMMA::Major::K, 32, 32, 32, 0, {N}, {K}, {rows}, 128, 128,
    {experts}, 128, 128, 128, {stages}, 128, 128, {cluster}, {multicast}, {sms}, true, {zeros},
    GemmType::{kind}, false, cutlass::float_e4m3_t, cutlass::detail::float_e2m1_unpacksmem_t,
    cutlass::bfloat16_t, epilogue::transform::EpilogueIdentity>);
}}
"""


def stages(rows, cluster):
    """Those that fit shared memory: of both operands, a byte an element, and of their scales."""
    stored, barriers, pointer = 16 * 128 * 2 * 2, 32 * 8 * 3 + 2 * 8 * 2 + 8, 4
    scales = (-(-rows // 128) * 128 + 128) * 4
    each = rows // cluster * 128 + 128 * 128 + scales
    return min((SHARED_BYTES - stored - barriers - pointer) // each, 32)


@pytest.mark.parametrize("rows", [32, 128, 224])
@pytest.mark.parametrize(
    ("kind", "zeros"),
    [("MGroupedContiguousWithPsumLayout", "false"), ("MGroupedMasked", "true")],
    ids=["contiguous", "masked"],
)
def test_they_compile_to_block_scaled_products_without_spills(tmp_path, kind, zeros, rows):
    N, K = 1536, 2048
    cluster = 2 if -(-N // 128) % 2 == 0 and SMS % 2 == 0 else 1
    source = tmp_path / "kernel.cu"
    source.write_text(
        SOURCE.format(
            N=N,
            K=K,
            rows=rows,
            experts=EXPERTS,
            stages=stages(rows, cluster),
            cluster=cluster,
            multicast=str(cluster == 2).lower(),
            sms=SMS,
            zeros=zeros,
            kind=kind,
        )
    )
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda"]
    flags += ["--diag-suppress=39,161,174,177,186,940", "--gpu-architecture=sm_100f", "-cubin"]
    flags += ["--ptxas-options=--verbose", "--keep", f"--keep-dir={tmp_path}", f"-I{INCLUDE}"]
    done = subprocess.run(
        ["nvcc", *flags, source, "-o", tmp_path / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in done.stderr
    ptx = (tmp_path / "kernel.ptx").read_text()
    assert f"tcgen05.mma.cta_group::{cluster}.kind::mxf8f6f4.block_scale" in ptx
