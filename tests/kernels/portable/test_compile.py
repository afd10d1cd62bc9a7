from __future__ import annotations

import pytest

from moequant.formats import RUNNABLE

# Kilobytes a block may have, from the CUDA C++ programming guide's table of compute capabilities.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
HEAVIEST = ("fp8_block/format/bfloat16", "nvfp4/none/bfloat16", "w4a8/none/float32")
EVERY = tuple(
    f"{format}/{activations}/{dtype}"
    for format in RUNNABLE
    for activations, dtype in (
        ("format", "bfloat16"),
        ("fp8_tensor", "bfloat16"),
        ("none", "float32"),
    )
)


@pytest.mark.parametrize(
    ("capability", "cases"),
    [
        (80, HEAVIEST),
        (90, ("fp8_tensor/fp8_tensor/bfloat16",)),
        (120, HEAVIEST[:1]),
        *(pytest.param(capability, EVERY, marks=pytest.mark.full) for capability in SHARED),
    ],
)
def test_kernels_compile_for_every_architecture_and_fit_it(compiled_by, capability, cases):
    kernels = compiled_by("compile_portable.py", str(capability), *cases)
    assert len(kernels) >= 4 * len(cases)
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[capability] * 1024, kernel
