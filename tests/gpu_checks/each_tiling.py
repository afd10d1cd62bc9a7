"""Small calls with every tiling that test_sm90.py has for a case, for compute-sanitizer.

    each_tiling.py CASE

CASE is a key of TILINGS there, such as w4a8 or mxfp4_far_fp8. Outputs are compared, too. A call
runs experts with a gate and without biases, and experts with biases and without a gate.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "shared"))

from load_module import load_module

from moequant.act_fn import SILU, ActFn
from moequant.benchmarks.experts import calc_diff

_TESTS = Path(__file__).parents[1] / "runtime" / "test_sm90.py"
# H and I are odd multiples of what a kernel takes.
_SHAPES = {
    "fp8_block": (4, 720, 336, 2),
    "nvfp4": (4, 592, 336, 2),
    "w4a8": (4, 640, 384, 2),
}
_SHAPE = (4, 608, 352, 2)
_LAYERS = ({"act_fn": SILU}, {"act_fn": ActFn(name="gelu", gated=False), "bias": True})
_FEW = 5


def _load_tests():
    return load_module(_TESTS)


def call_of(shape, M):
    """Random inputs of M tokens; of few, one has no expert."""
    E, H, _, T = shape
    g = torch.Generator("cuda").manual_seed(M)
    hidden = torch.randn(M, H, generator=g, device="cuda").bfloat16()
    ids = torch.rand(M, E, generator=g, device="cuda").topk(T).indices.int()
    if M == _FEW:
        ids[2] = -1
    return hidden, torch.full((M, T), 1 / T, device="cuda"), ids


def run(tests, case, **layer):
    """Run a layer with every tiling.

    Raises:
        AssertionError: an output is not the reference's.
    """
    shape = _SHAPES.get(case, _SHAPE)
    layer = tests.layer_on("cuda", case, shape, quantized=case == "fp8_block", **layer)
    reference = tests.experts(case, layer, backend="torch_reference")
    for tiling in tests.TILINGS[case]:
        for M in (_FEW, 3 * tiling.rows):
            call = call_of(shape, M)
            out = tests.run_plan(case, layer, call, tiling, byte=0x7F)
            found = calc_diff(out, reference(*call))
            assert found <= tests.CALC_DIFF[case], (layer.act_fn, tiling, M, found)


def main():
    """See the head of this file."""
    (case,) = sys.argv[1:]
    tests = _load_tests()
    for layer in _LAYERS:
        run(tests, case, **layer)
    torch.cuda.synchronize()
    print(f"{case}: {len(tests.TILINGS[case])} tilings")


if __name__ == "__main__":
    main()
