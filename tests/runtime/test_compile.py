"""FusedExperts under torch.compile: one operator, whole graph, the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import TorchRuntimeError, Unsupported

from moequant.errors import UnsupportedError
from moequant.runtime import FusedExperts


class Block(nn.Module):
    """Experts with something on either side for the compiler to work on."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, weights, ids):
        return x + self.experts(x * 2, weights.sqrt(), ids)


def compiled(module):
    torch._dynamo.reset()
    return torch.compile(module, backend="aot_eager", fullgraph=True)


def test_a_whole_graph_gives_the_same_bits(layers, every_format):
    layer = layers.make(every_format)
    block = Block(FusedExperts(layer.weights))
    assert torch.equal(compiled(block)(*layer.call), block(*layer.call))


def compiled_with_out(layer, *, fullgraph):
    experts = FusedExperts(layer.weights)
    torch._dynamo.reset()
    return torch.compile(
        lambda x, weights, ids, out: experts(x, weights, ids, out=out),
        backend="aot_eager",
        fullgraph=fullgraph,
    )


def test_the_result_is_written_to_out(layers):
    layer = layers.make()
    expected = FusedExperts(layer.weights)(*layer.call)
    out = torch.full_like(expected, torch.nan)
    assert compiled_with_out(layer, fullgraph=True)(*layer.call, out) is out
    assert torch.equal(out, expected)


def test_out_may_be_the_hidden_states(layers):
    layer = layers.make()
    expected = FusedExperts(layer.weights)(*layer.call)
    hidden = layer.hidden.clone()
    compiled_with_out(layer, fullgraph=True)(hidden, layer.topk_weights, layer.ids, hidden)
    assert torch.equal(hidden, expected)


@pytest.mark.parametrize(
    ("out", "found"),
    [
        (torch.empty(13, 256, dtype=torch.float64), r"out is torch\.float64"),
        (torch.empty(12, 256), r"out is \[12, 256\]"),
        (torch.empty(3, 13, 256), r"out is \[3, 13, 256\]"),
        (torch.empty(13, 512)[:, ::2], r"out is \[13, 256\] with strides \[512, 2\]"),
    ],
    ids=["dtype", "rows", "broadcast", "strides"],
)
@pytest.mark.parametrize(
    ("fullgraph", "error"),
    [(False, UnsupportedError), (True, Unsupported)],  # Dynamo wraps what leaves a whole graph
)
# Of the call without a graph, which raises the error.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_an_out_that_a_call_refuses_is_refused(layers, out, found, fullgraph, error):
    layer = layers.make()
    with pytest.raises(error, match=found):
        compiled_with_out(layer, fullgraph=fullgraph)(*layer.call, out)


def test_tokens_may_be_a_symbol(layers):
    layer = layers.make()
    block = Block(FusedExperts(layer.weights))
    fast = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for M in (1, 5, 13):
        call = tuple(t[:M] for t in layer.call)
        assert torch.equal(fast(*call), block(*call))


def test_the_operator_keeps_torch_s_rules(layers):
    layer = layers.make()
    module = FusedExperts(layer.weights)
    arguments = (module._handle, *layer.call, None, False, None, None)
    torch.library.opcheck(torch.ops.moequant.fused_experts, arguments)


@torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True)
def test_layers_compiled_one_by_one_may_share_their_code(layers):
    layer = layers.make()
    blocks = [Block(FusedExperts(layers.make(seed=seed).weights)) for seed in range(10)]
    torch._dynamo.reset()
    forward = torch.compile(Block.forward, backend="aot_eager", fullgraph=True)
    for block in blocks:  # more than torch compiles one piece of code
        assert torch.equal(forward(block, *layer.call), block(*layer.call))


@pytest.mark.parametrize(
    ("strict", "error"),
    [(False, UnsupportedError), (True, TorchRuntimeError)],  # Dynamo wraps what fakes raise
)
def test_export_is_refused(layers, strict, error):
    layer = layers.make()
    with pytest.raises(error, match=r"torch\.export of experts"):
        torch.export.export(Block(FusedExperts(layer.weights)), layer.call, strict=strict)


def test_a_copy_is_called_by_its_own_handle(layers):
    module = FusedExperts(layers.make().weights)
    other = copy.deepcopy(module)
    layer = layers.make()
    for tensor in other.buffers():
        tensor.zero_()
    assert not compiled(other)(*layer.call).any()
    assert compiled(module)(*layer.call).any()


@pytest.fixture
def skipped_forward():
    """torch.compile has given up on FusedExperts.forward, as after its recompile limit."""
    code = FusedExperts.forward.__code__
    torch._dynamo.reset()
    skip_code(code)
    yield
    reset_code(code)
    torch._dynamo.reset()


def test_nothing_is_traced_where_torch_compile_has_given_up(layers, skipped_forward):
    """It traces what a function calls that it runs as it is: addresses cannot be traced."""
    for T in (2, 3, 4):
        layer = layers.make(T=T)
        experts = FusedExperts(layer.weights)
        # The result lies behind all that is read, so that extents of all are compared with it.
        memory = torch.zeros(1 << 16, dtype=torch.uint8)
        places = range(0, 1 << 16, 1 << 14)
        *call, out = (
            memory[at : at + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
            for at, t in zip(places, (*layer.call, layer.hidden), strict=True)
        )
        compiled = torch.compile(experts, backend="eager")
        assert compiled(*call, out=out) is out
        assert torch.equal(out, experts(*layer.call))
