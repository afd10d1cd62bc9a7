"""Every variant compiles for sm_90a on a CPU, as what `CutlassGroupedGemm` launches."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: the extra moequant[cutlass]")

import triton

from moequant.kernels.cutlass.compiled import entry_of
from moequant.kernels.cutlass.grouped_gemm import PARAMETER_BYTES, cubin_of
from moequant.kernels.cutlass.variant import COLUMNS, TILE_ROWS, VARIANTS, WEIGHT_ROWS, GemmVariant

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@pytest.fixture(scope="module")
def cubin(tmp_path_factory):
    """cubin(variant): the path of a cubin, compiled once."""
    folder = tmp_path_factory.mktemp("cutlass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEQUANT_CACHE_DIR", str(folder / "cache"))

        def make(variant):
            path = folder / f"{variant.tile_rows}_{variant.bias}.cubin"
            path.write_bytes(cubin_of(variant))
            return path

        yield make


def dump(path, *options):
    return subprocess.run(
        [CUOBJDUMP, *options, path], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_it_is_one_kernel_for_sm_90a_with_the_parameters_that_are_passed(cubin, variant):
    path = cubin(variant)
    assert entry_of(path.read_bytes()) == "cutlass_sm90_fp8_channel_grouped_gemm_0"
    elf = dump(path, "-elf")
    assert re.search(r"\bsm=90a?,", elf)  # cuobjdump of CUDA 13.0 leaves the letter out
    parameters = re.findall(r"Ordinal : (0x\w+)\s+Offset\s+: 0x\w+\s+Size\s+: (0x\w+)", elf)
    sizes = {int(ordinal, 16): int(size, 16) for ordinal, size in parameters}
    assert tuple(sizes[i] for i in range(len(sizes))) == PARAMETER_BYTES


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_it_fits_and_spills_nothing(cubin, variant):
    used = dump(cubin(variant), "--dump-resource-usage")
    registers, stack, static, local = (
        int(re.search(rf"{name}:(\d+)", used)[1]) for name in ("REG", "STACK", "SHARED", "LOCAL")
    )
    assert registers <= 65536 // 384  # before the warpgroups divide them
    assert (stack, local) == (0, 0)
    assert static + variant.shared_bytes <= 227 * 1024
    assert variant.stages >= 4


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_it_has_one_wgmma_for_every_32_columns_and_one_tma_load_an_operand(cubin, variant):
    sass = dump(cubin(variant), "-sass")
    products = re.findall(r"QGMMA\.(\w+)\.F32\.E4M3\.E4M3", sass)
    assert products == [f"64x{variant.tile_rows}x32"] * (COLUMNS // 32)
    # The boxes of `CutlassGroupedGemm` are what a single instruction reads.
    assert sass.count("UTMALDG.2D") == 2
    # Results leave as 16 bytes a thread, 16 threads a row.
    assert sass.count("STG.E.128") == -(-variant.tile_rows // (256 // (WEIGHT_ROWS // 8)))
    assert "STG.E.U16" not in sass
    # Programmatic launches: waits for the kernel in front.
    assert "ACQBULK" in sass
    # Sums of each step are added up in float32; a bias is added by FFMA.
    assert sass.count("FADD") == variant.tile_rows // 2


def test_a_second_process_finds_it_on_disk(cubin, monkeypatch):
    cubin(GemmVariant(tile_rows=8))
    monkeypatch.setattr("moequant.kernels.cutlass.grouped_gemm._compile", lambda variant: 1 / 0)
    assert cubin_of(GemmVariant(tile_rows=8)) == cubin(GemmVariant(tile_rows=8)).read_bytes()


def test_another_version_of_the_compiler_compiles_again(cubin, monkeypatch):
    cubin(GemmVariant(tile_rows=8))
    package = "moequant.kernels.cutlass"
    monkeypatch.setattr(f"{package}.compiled.version", lambda name: "0.0.0")
    monkeypatch.setattr(f"{package}.grouped_gemm._compile", lambda variant: b"new")
    assert cubin_of(GemmVariant(tile_rows=8)) == b"new"


def test_there_is_a_variant_for_every_tile():
    assert {v.tile_rows for v in VARIANTS} == set(TILE_ROWS)
