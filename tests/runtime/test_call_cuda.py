"""What FusedExperts does around any backend, on a GPU: compilers, parts, memory."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from moequant.benchmarks.layers import random_experts, random_inputs
from moequant.benchmarks.shapes import LayerShape
from moequant.runtime import FusedExperts, workspace
from moequant.runtime.workspace import shared_workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
SHAPE = LayerShape(experts=16, hidden=1024, intermediate=512, topk=4)


def experts_of(format, **options):
    return FusedExperts(random_experts(SHAPE, format, CUDA), **options)


class Block(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, weights, ids):
        return x + self.experts(x * 2, weights, ids)


# torch's compiler uses what torch itself deprecates, and captures an empty graph first.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_gives_the_same_bits(every_format, mode):
    # x * 2 is exact in BF16, and x + y is one rounding, compiled or not.
    call = random_inputs(SHAPE, 24, CUDA, 0).arguments
    want = Block(experts_of(every_format))(*call)
    torch._dynamo.reset()
    # The weights' layout and the workspace are made in a compiled call.
    workspace._BUFFERS.by_stream.clear()
    compiled = torch.compile(Block(experts_of(every_format)), fullgraph=True, mode=mode)
    for _ in range(4):  # reduce-overhead captures a CUDA graph in its second call
        got = compiled(*call).clone()
        assert torch.equal(got, want)


@pytest.mark.parametrize("max_tokens", [512, 1000, 1999])
def test_parts_are_calls_of_their_tokens(every_format, max_tokens):
    experts = experts_of(every_format)
    call = random_inputs(SHAPE, 2000, CUDA, 1).arguments
    parts = zip(*(t.tensor_split(-(-2000 // max_tokens)) for t in call), strict=True)
    want = torch.cat([experts(*part) for part in parts])
    experts.max_tokens = max_tokens
    assert torch.equal(experts(*call), want)


def test_parts_bound_the_memory(every_format):
    experts = experts_of(every_format, max_tokens=256)
    call = random_inputs(SHAPE, 8192, CUDA, 2).arguments
    experts(*(t[:256] for t in call))  # weights laid out, workspace taken
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = experts(*call)
    # Beside the workspace: the parts' outputs and their concatenation.
    assert torch.cuda.max_memory_allocated() - before <= 2 * out.nbytes + (4 << 20)


def test_layers_share_a_workspace_of_the_size_that_was_said(every_format):
    workspace._BUFFERS.by_stream.clear()
    gc.collect()
    layers = [experts_of(every_format) for _ in range(3)]
    call = random_inputs(SHAPE, 300, CUDA, 3).arguments
    size = layers[0].workspace_bytes(300, SHAPE.topk)
    assert size > 0
    for layer in layers:
        layer(*call)
    assert shared_workspace(CUDA, 0).numel() == size


def test_a_workspace_that_holds_anything_changes_no_bit(every_format):
    experts = experts_of(every_format)
    call = random_inputs(SHAPE, 40, CUDA, 4).arguments
    want = experts(*call)
    for poison in (0xFF, 0x7F):
        shared_workspace(CUDA, 0).fill_(poison)
        assert torch.equal(experts(*call), want)


def test_calls_on_two_streams_do_not_meet(every_format):
    experts = experts_of(every_format)
    calls = [random_inputs(SHAPE, 512, CUDA, seed).arguments for seed in (5, 6)]
    want = [experts(*call) for call in calls]
    streams = [torch.cuda.Stream(CUDA) for _ in calls]
    torch.cuda.synchronize()
    got = []
    for _ in range(20):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                got.append(experts(*call))
    torch.cuda.synchronize()
    for i, result in enumerate(got):
        assert torch.equal(result, want[i % 2])


def test_threads_do_not_share_a_workspace():
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(shared_workspace, CUDA, 256).result()
    assert other.data_ptr() != shared_workspace(CUDA, 256).data_ptr()


def test_experts_are_there_once():
    # I is a multiple of 128: gate and up are views of what the kernels read.
    gc.collect()
    before = torch.cuda.memory_allocated()
    experts = experts_of("fp8_block")
    size = sum(t.nbytes for t in experts.weights.tensors().values())
    experts(*random_inputs(SHAPE, 8, CUDA, 7).arguments)
    workspace._BUFFERS.by_stream.clear()
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 1.1 * size


def test_weights_written_into_after_a_call_count(every_format):
    experts = experts_of(every_format)
    call = random_inputs(SHAPE, 8, CUDA, 8).arguments
    first = experts(*call)
    # Packed by that call, maybe into tensors of other names.
    state = {
        k: torch.flip(v.view(torch.uint8), [0]).view(v.dtype).clone()
        for k, v in experts.state_dict().items()
    }
    experts.load_state_dict(state)
    fresh = experts_of(every_format)
    fresh(*call)
    fresh.load_state_dict(state, assign=True)
    assert not torch.equal(experts(*call), first)
    assert torch.equal(experts(*call), fresh(*call))
