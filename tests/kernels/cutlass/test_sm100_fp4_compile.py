"""Variants for SM100 compile on a CPU, as what `Fp4GroupedGemm` launches; none was ever run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: the extra moequant[cutlass]")

import triton

from moequant.kernels.cutlass.compiled import entry_of
from moequant.kernels.cutlass.sm100_fp4_grouped_gemm import compile_variant
from moequant.kernels.cutlass.sm100_fp4_launch import PARAMETER_BYTES
from moequant.kernels.cutlass.sm100_fp4_variant import MMA_K, MXFP4, NVFP4, STEP, VARIANTS

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
MMAS = STEP // MMA_K


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: v.name)
def compiled(request, tmp_path_factory):
    """A variant, its PTX, and the path of its cubin."""
    made = compile_variant(request.param)
    path = tmp_path_factory.mktemp("cutlass") / "kernel.cubin"
    path.write_bytes(made.cubin)
    return request.param, made.ptx, path


def dump(path, *options):
    return subprocess.run(
        [CUOBJDUMP, *options, path], capture_output=True, text=True, check=True
    ).stdout


def test_it_is_one_kernel_for_sm_100a_with_the_parameters_that_are_passed(compiled):
    _, ptx, path = compiled
    assert ".target sm_100a" in ptx
    assert entry_of(path.read_bytes()) == "cutlass_sm100_fp4_grouped_gemm_0"
    elf = dump(path, "-elf")
    assert re.search(r"\bsm=100a?,", elf)  # cuobjdump of CUDA 13.0 leaves the letter out
    parameters = re.findall(r"Ordinal : (0x\w+)\s+Offset\s+: 0x\w+\s+Size\s+: (0x\w+)", elf)
    sizes = {int(ordinal, 16): int(size, 16) for ordinal, size in parameters}
    assert tuple(sizes[i] for i in range(len(sizes))) == PARAMETER_BYTES


def test_it_fits_and_spills_nothing(compiled):
    variant, _, path = compiled
    used = dump(path, "--dump-resource-usage")
    stack, static, local = (
        int(re.search(rf"{name}:(\d+)", used)[1]) for name in ("STACK", "SHARED", "LOCAL")
    )
    assert (stack, local) == (0, 0)
    assert not re.search(r"\b(LDL|STL)\b", dump(path, "-sass"))
    assert static + variant.shared_bytes <= 227 * 1024
    assert variant.stages >= 4


def test_each_step_has_four_block_scaled_mmas_of_the_right_kind(compiled):
    variant, ptx, path = compiled
    # PTX ISA: block16 is another name of scale_vec::4X, and block32 of 2X.
    kind = {
        NVFP4: r"kind::mxf4nvf4\.block_scale\.(block16|scale_vec::4X)",
        MXFP4: r"kind::mxf4(nvf4)?\.block_scale\.(block32|scale_vec::2X)",
    }[variant]
    mmas = re.findall(r"tcgen05\.mma\.(\S+)", ptx)
    assert len(mmas) == MMAS
    assert all(re.match(rf"cta_group::1\.{kind}\b", mma) for mma in mmas)
    assert "mma.sync" not in ptx
    sass = dump(path, "-sass")
    assert len(re.findall(r"\bUTCOMMA\b", sass)) == MMAS
    assert sass.count("UTCOMMA.4X") == (MMAS if variant is NVFP4 else 0)


def test_the_mma_s_descriptor_says_128_by_128_of_e2m1_and_the_scales_format(compiled):
    variant, ptx, _ = compiled
    # tcgen05.mma [sums], x, w, descriptor, ...
    registers = re.findall(r"tcgen05\.mma\S+\s+\[%r\d+\], %rd\d+, %rd\d+, (%r\d+)", ptx)
    assert len(set(registers)) == MMAS
    for register in registers:
        # The scales' places within a word of tensor memory are put into bits 4, 5, 29 and 30.
        (constant,) = re.findall(rf"or\.b32\s+{register}, %r\d+, (\d+);", ptx)
        # PTX ISA, "Instruction descriptor": types of x and w (1: E2M1), N / 8, format of scales
        # (0: E4M3, 1: E8M0), M / 128.
        want = 1 << 7 | 1 << 10 | 128 // 8 << 17 | (variant is MXFP4) << 23 | 128 // 128 << 27
        assert int(constant) == want


def test_scales_lie_in_tensor_memory_behind_the_accumulators(compiled):
    variant, ptx, _ = compiled
    copies = re.findall(r"tcgen05\.cp\.cta_group::1\.32x128b\.warpx4\s+\[(%r\d+)\]", ptx)
    columns = []
    for register in copies:
        (column,) = re.findall(rf"add\.s32\s+{register}, %r\d+, (\d+);", ptx)
        columns.append(int(column))
    # 128 rows by 4 scales are 4 columns: x's in 16 columns from 256 on, then w's.
    tiles = STEP // variant.group // 4
    assert columns == [256 + 16 * operand + 4 * i for operand in range(2) for i in range(tiles)]
    assert "tcgen05.alloc" in ptx
    assert "tcgen05.dealloc" in ptx


def test_it_loads_with_four_tma_boxes_and_stores_16_bytes_a_thread(compiled):
    _, ptx, path = compiled
    sass = dump(path, "-sass")
    # The boxes of `Fp4GroupedGemm` are what a single instruction reads.
    assert sass.count("UTMALDG.2D") == 4
    assert sass.count("STG.E.128") == 128 // 8
    assert "STG.E.U16" not in sass
    # Sums are waited for before they are used.
    assert re.findall(r"tcgen05\.(ld|wait::ld)\b", ptx) == ["ld", "wait::ld"] * 4
    # Programmatic launches: waits for the kernel in front.
    assert "ACQBULK" in sass
