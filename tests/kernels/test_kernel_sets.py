"""Names of sets of kernels, against the launches of calls, which are noted instead of made."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from moequant.act_fn import SILU
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.calls import MAX_PAIRS, part_tokens
from moequant.kernels.cutlass.sm90_fp8_channel_fused import CutlassPlan
from moequant.kernels.cutlass.sm100_fp4_fused import Fp4Gemms
from moequant.kernels.deepgemm import library
from moequant.kernels.deepgemm.sm90_fp8_deepgemm import DeepGemmPlan
from moequant.kernels.deepgemm.sm100_fp4_deepgemm import ContiguousGemms
from moequant.kernels.launch import INTERPRETED, launch
from moequant.kernels.sm90 import plan as sm90_plan
from moequant.kernels.sm90 import weights as sm90_weights
from moequant.kernels.sm90.tiling import TuningProblem
from moequant.kernels.sm90.weights import Sm90Weights
from moequant.runtime.backends import REGISTRY, Workload
from moequant.runtime.weights import weights_without_data

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="notes what the interpreter is given")

META = torch.device("meta")
H, I = 1024, 512
# E and T.
ROUTINGS = [(8, 2), (1, 1), (32, 3), (128, 8), (4, 16)]
CALLS = [
    ("triton", "nvfp4", "none"),
    ("triton", "fp8_block", "fp8_group128"),
    ("triton", "fp8_channel", "fp8_tensor"),
    ("sm90_fp8_block", "fp8_block", "fp8_group128"),
    ("sm90_fp8_channel", "fp8_channel", "fp8_token"),
    ("sm90_fp8_channel", "fp8_channel", "fp8_tensor"),
    ("sm90_w4a8", "w4a8", "fp8_token"),
    ("sm90_mxfp4_fp8", "mxfp4", "fp8_token"),
    ("sm90_w4a16", "nvfp4", "none"),
    ("deepgemm", "fp8_block", "fp8_group128"),
    ("cutlass_fp8", "fp8_channel", "fp8_token"),
    ("cutlass_fp8", "fp8_channel", "fp8_tensor"),
    ("cutlass_fp4", "nvfp4", "nvfp4"),
    ("cutlass_fp4", "mxfp4", "mxfp4"),
    ("deepgemm_fp4", "mxfp4", "mxfp8"),
]


def numbers_of_tokens(topk):
    """All small ones, and larger ones about powers of two and multiples of 16, up to 8192."""
    powers = [1 << i for i in range(14)]
    edges = (-16, -8, -1, 0, 1, 8, 16)
    near = {M // part + edge for M in powers for part in (1, topk) for edge in edges}
    return sorted(M for M in {*range(1, 70), *range(70, 8193, 97), *near} if 1 <= M <= 8192)


@pytest.fixture
def launched(monkeypatch):
    """What was launched since it was cleared, as far as kernels are compiled for it."""
    found = []

    def note(kernel, grid, *args, num_warps, overlap, **constants):
        unspecialized = kernel.kwargs.get("do_not_specialize") or ()
        kinds = [
            a.dtype if isinstance(a, torch.Tensor) else (a == 1, a % 16 == 0)
            for name, a in zip(kernel.arg_names, args, strict=False)
            if name not in unspecialized
        ]
        found.append((kernel.fn.__name__, num_warps, *kinds, *sorted(constants.items())))

    for name, module in [*sys.modules.items()]:
        if name.startswith("moequant.kernels.") and getattr(module, "launch", None) is launch:
            monkeypatch.setattr(module, "launch", note)

    class Gemm:
        def __init__(self, config, **arguments):
            self.config = config

        def __call__(self, stream):
            found.append(self.config)

        def route(self, topk_ids, expert_map):
            """Launches nothing."""

        def gather_from(self, hidden):
            """Likewise."""

    monkeypatch.setattr(sm90_weights, "GroupedGemm", Gemm)
    monkeypatch.setattr(sm90_plan, "stream_of", lambda device: 0)
    monkeypatch.setattr(sm90_plan, "_kinds", lambda *tensors: None)
    monkeypatch.setattr(sm90_plan, "_to_gather", lambda hidden: hidden)
    monkeypatch.setattr(library, "row_alignment", lambda: 128)

    def problem(self, tokens, topk):
        return TuningProblem(
            gpu="NVIDIA H200", sms=132, experts=self.experts, hidden=H, intermediate=I, topk=topk,
            tokens=tokens,
        )  # fmt: skip

    monkeypatch.setattr(Sm90Weights, "problem", problem)
    for gemms, compiled_for in (
        (DeepGemmPlan, lambda plan, x: x.shape[0]),
        (CutlassPlan, lambda plan, x: plan.variant),
        (Fp4Gemms, lambda gemms, x: gemms.variant),
        (ContiguousGemms, lambda gemms, x: None),  # one kernel for any number of rows
    ):

        def multiply(self, weight, x, *others, compiled_for=compiled_for):
            found.append((weight, compiled_for(self, x)))

        monkeypatch.setattr(gemms, "multiply", multiply)
    return found


def experts_of(backend, format, activations, E):
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    weights = weights_without_data(format, shapes, SILU)
    workload = Workload(
        format=format, activations=activations, experts=E, hidden=H, intermediate=I, device=META
    )
    return REGISTRY[backend].load(REGISTRY[backend].pack(weights), workload)


def run(experts, tokens, topk):
    """A call in bfloat16 of no more tokens than are sorted at a time."""
    empty = partial(torch.empty, device=META)
    if isinstance(weights := getattr(experts, "kernel_weights", None), Sm90Weights):
        plan = weights.plan(tokens, topk, tiling=None, workspace=None)
    else:
        plan = experts.plan(tokens, topk, WorkspaceArena(), torch.bfloat16)
    hidden = empty(tokens, H, dtype=torch.bfloat16)
    plan(hidden, empty(tokens, topk), empty(tokens, topk, dtype=torch.int32), hidden)


@pytest.mark.parametrize(("E", "topk"), ROUTINGS)
@pytest.mark.parametrize(("backend", "format", "activations"), CALLS)
def test_calls_of_one_name_launch_the_same_kernels(launched, backend, format, activations, E, topk):
    experts, named = experts_of(backend, format, activations, E), {}
    for M in numbers_of_tokens(topk):
        launched.clear()
        run(experts, part_tokens(M, topk), topk)
        first, kernels = named.setdefault(experts.kernels_for(M, topk), (M, [*launched]))
        assert kernels == launched, f"{first} and {M} tokens have one name"
    assert all(kernels for _, kernels in named.values())


def test_more_tokens_than_are_sorted_at_a_time_have_the_name_of_a_part():
    experts = experts_of("triton", "nvfp4", "none", 8)
    assert experts.kernels_for(MAX_PAIRS, 2) == experts.kernels_for(MAX_PAIRS // 2, 2)
