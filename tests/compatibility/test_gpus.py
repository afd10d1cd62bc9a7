"""GPUs by name: every one that users have, with capability, memory and source."""

from __future__ import annotations

import pytest

from moequant.compatibility import GPUS, find_gpu
from moequant.errors import UnsupportedError


@pytest.mark.parametrize(
    ("name", "capability", "memory_gb"),
    [
        ("a100", (8, 0), 80),
        ("A100-40GB", (8, 0), 40),
        ("l40s", (8, 9), 48),
        ("RTX 4090", (8, 9), 24),
        ("h100", (9, 0), 80),
        ("NVIDIA H100 80GB HBM3", (9, 0), 80),
        ("NVIDIA A100-SXM4-40GB", (8, 0), 40),
        ("h200", (9, 0), 141),
        ("b200", (10, 0), 180),
        ("gb200", (10, 0), 186),
        ("b300", (10, 3), 288),
        ("rtx-5090", (12, 0), 32),
        ("NVIDIA RTX PRO 6000", (12, 0), 96),
        ("rtxpro6000", (12, 0), 96),
    ],
)
def test_a_gpu_is_found_in_any_spelling(name, capability, memory_gb):
    gpu = find_gpu(name)
    assert (gpu.capability, gpu.memory_gb) == (capability, memory_gb)
    assert gpu.memory_bytes == memory_gb * 1_000_000_000


@pytest.mark.parametrize("gpu", GPUS.values(), ids=[*GPUS])
def test_every_gpu_has_a_source_and_a_name_of_its_own(gpu):
    assert gpu.source
    assert gpu.memory_bytes < gpu.most_memory_bytes
    assert all(find_gpu(name) is gpu for name in (gpu.name, *gpu.aliases))


def test_sizes_that_no_page_of_the_maker_was_read_for_are_marked():
    for gpu in GPUS.values():
        assert gpu.read == ("nvidia.com" in gpu.source)


def test_what_the_driver_shows_lies_between_the_least_and_the_most():
    """MiB by nvidia-smi, from the page that gpus.toml names."""
    shown = {"h200": 143_771, "h100": 81_559, "a100": 81_920, "a100-40gb": 40_960, "a10": 23_028,
             "l40s": 46_068, "l4": 23_034}  # fmt: skip
    for name, mib in shown.items():
        assert GPUS[name].memory_bytes <= mib << 20 <= GPUS[name].most_memory_bytes


@pytest.mark.parametrize(
    ("name", "reason"),
    [("mi300x", "a GPU of AMD"), ("MI-355X", "a GPU of AMD"), ("gaudi3", "Intel"), ("t4", "7,")],
)
def test_other_accelerators_are_refused_with_the_reason(name, reason):
    with pytest.raises(UnsupportedError, match=reason) as refused:
        find_gpu(name)
    assert "known GPUs: a100, " in str(refused.value)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedError, match="voodoo"):
        find_gpu("voodoo")
