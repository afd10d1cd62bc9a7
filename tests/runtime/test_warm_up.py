from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moequant.act_fn import SILU, ActFn
from moequant.conversion import convert
from moequant.errors import UnsupportedError
from moequant.runtime import FusedExperts, backends
from moequant.runtime.backends import Backend, BatchedExperts, PackedExperts
from moequant.runtime.backends.sm90 import Sm90Experts
from moequant.runtime.call import MAX_TOKENS
from moequant.runtime.warm_up import (
    _one_of_each_kind,
    tokens_of,
    warm_up,
    warm_up_checkpoint,
)

LIMITED = ActFn(name="silu", limit=7.0)


class CompilesExperts(PackedExperts):
    """Has a kernel for up to 16 tokens and one for more."""

    calls = ()

    def compile_ahead(self, tokens, topk):
        type(self).calls += (("ahead", tokens, topk),)

    def kernels_for(self, tokens, topk):
        return ("few" if tokens <= 16 else "many", topk)

    def run(self, hidden_states, topk_weights, topk_ids, *, out, **options):
        type(self).calls += (tuple(topk_ids.shape),)
        out.copy_(hidden_states)


class Compiles(Backend):
    name = "compiles"
    default_on = ()

    def supports(self, workload):
        return None

    def load(self, tensors, workload):
        return CompilesExperts(self, tensors, workload=workload)


class Told:
    def __init__(self):
        self.messages = []

    def start(self, description, total, *, unit="bytes"):
        self.messages.append((description, total, unit))

    def advance(self, done, current):
        self.messages.append((done, current))

    def finish(self):
        self.messages.append("done")


@pytest.fixture
def compiles(monkeypatch):
    monkeypatch.setitem(backends.backends(), "compiles", Compiles())
    monkeypatch.setattr(CompilesExperts, "calls", ())
    return CompilesExperts


def test_each_set_of_kernels_is_run_once_and_reported(layers, compiles):
    experts = FusedExperts(layers.make().weights, backend="compiles")
    told = Told()
    assert warm_up(experts, range(1, 65), 3, progress=told) == [1, 17]
    assert compiles.calls == (("ahead", [1, 17], 3), *((1, 3),) * 6, *((17, 3),) * 6)
    assert told.messages == [
        ("compiling", 2, "kernel sets"), (1, "1 tokens"), (1, "17 tokens"), "done",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "most", "tokens"),
    [
        ("full", 5, [1, 2, 3, 4, 5]),
        ("relax", 5, [1, 2, 4, 5]),
        ("relax", 64, [1, 2, 4, 8, 16, 32, 64]),
        ("relax", 1, [1]),
        ("skip", 5, []),
    ],
)
def test_a_mode_chooses_among_the_tokens(mode, most, tokens):
    assert tokens_of(mode, most) == tokens


def test_a_mode_that_is_none_is_refused():
    with pytest.raises(UnsupportedError, match="'sparse', but must be one of: full, relax, skip"):
        tokens_of("sparse", 5)


def test_a_warm_up_of_a_checkpoint_runs_the_tokens_of_its_mode(
    make_checkpoint, tmp_path, compiles, monkeypatch
):
    path = convert(make_checkpoint(), tmp_path / "out", format="nvfp4").output
    monkeypatch.setattr(compiles, "kernels_for", lambda self, tokens, topk: tokens // 10)
    how = {"max_tokens": 35, "device": "cpu", "backend": "compiles"}
    for mode, tokens in (("full", [1, 10, 20, 30]), ("relax", [1, 16, 32]), ("skip", [])):
        found = warm_up_checkpoint(path, mode=mode, **how)
        assert [kind.tokens for kind in found] == ([tokens] if tokens else [])


def test_a_layer_of_every_kind_is_loaded():
    """Layers of Step-3.5 differ in their activation function; kept ones have no format."""
    kinds = [
        (None, SILU, "none"), ("mxfp4", SILU, "none"), ("mxfp4", LIMITED, "none"),
        ("mxfp4", SILU, "mxfp4"), ("mxfp4", LIMITED, "none"), ("nvfp4", SILU, "none"),
    ]  # fmt: skip
    checkpoint = SimpleNamespace(
        expert_layers=lambda: range(len(kinds)),
        format_of_experts=lambda layer: kinds[layer][0],
        moe=SimpleNamespace(act_fn_of=lambda layer: kinds[layer][1]),
        activations_of_experts=lambda layer: kinds[layer][2],
    )
    assert _one_of_each_kind(checkpoint) == [1, 2, 3, 5]


def test_calls_in_parts_need_the_kernels_of_a_part(layers, compiles):
    experts = FusedExperts(layers.make().weights, backend="compiles", max_tokens=16)
    assert warm_up(experts, [64], 2) == [64]
    assert compiles.calls == (("ahead", [16], 2), *((16, 2),) * 4 * 6)


def test_parts_of_two_sizes_need_the_kernels_of_both(layers, compiles):
    """33 tokens run as 17 and 16, of which each has kernels of its own here."""
    experts = FusedExperts(layers.make().weights, backend="compiles", max_tokens=32)
    assert experts.part_sizes(33, 2) == (17, 16)
    assert experts.kernels_for(33, 2) != experts.kernels_for(17, 2)
    assert warm_up(experts, [33], 2) == [33]
    assert compiles.calls == (("ahead", [17, 16], 2), *((17, 2), (16, 2)) * 6)
    assert warm_up(experts, [17, 16, 33], 2) == [16, 17, 33]


def test_a_backend_that_compiles_nothing_runs_nothing(layers):
    experts = FusedExperts(layers.make().weights)
    assert warm_up(experts, range(1, 9), 2) == []


def test_a_backend_that_does_not_say_what_it_compiles_is_refused(layers, compiles, monkeypatch):
    monkeypatch.setattr(compiles, "kernels_for", PackedExperts.kernels_for)
    experts = FusedExperts(layers.make().weights, backend="compiles")
    said = "^backend 'compiles' cannot be warmed up: it does not .* name another backend, such as"
    with pytest.raises(UnsupportedError, match=said):
        warm_up(experts, range(1, 9), 2)
    assert compiles.calls == ()


@pytest.mark.parametrize("name", backends.REGISTRY)
def test_what_compiles_says_so_and_what_does_not_names_no_kernels(name):
    experts = getattr(backends.REGISTRY[name], "experts", Sm90Experts)
    nothing = name in ("torch_reference", "naive_batched")
    assert experts.compiles is not nothing
    says = experts.kernels_for is not PackedExperts.kernels_for
    assert says is not (nothing or issubclass(experts, BatchedExperts))


def test_ids_are_experts_that_are_there(layers, compiles, monkeypatch):
    seen = []
    monkeypatch.setattr(compiles, "run", lambda self, x, w, ids, **options: seen.append(ids))
    warm_up(FusedExperts(layers.make().weights, backend="compiles"), [20], 6)
    assert seen[0].unique().equal(torch.arange(6, dtype=torch.int32))


def test_every_dtype_of_ids_weights_and_maps_is_called(layers, compiles, monkeypatch):
    ids_and_maps, weights = set(), set()

    def seen(self, x, topk_weights, ids, *, expert_map, **options):
        ids_and_maps.add((ids.dtype, None if expert_map is None else expert_map.dtype))
        weights.add(topk_weights.dtype)

    monkeypatch.setattr(compiles, "run", seen)
    warm_up(FusedExperts(layers.make().weights, backend="compiles"), [20], 6)
    integers = (torch.int32, torch.int64)
    assert ids_and_maps == {(i, m) for i in integers for m in (None, *integers)}
    assert weights == {torch.float32, torch.bfloat16, torch.float16}


@pytest.mark.parametrize("mode", ["full", "relax", "skip"])
@pytest.mark.parametrize("max_tokens", [0, -1])
def test_a_call_has_a_token(mode, max_tokens):
    with pytest.raises(UnsupportedError, match=f"max_tokens is {max_tokens}, but must be a whole"):
        tokens_of(mode, max_tokens)


def test_tokens_that_run_in_parts_want_no_kernels_of_their_own():
    assert tokens_of("full", 10**12) == list(range(1, MAX_TOKENS + 1))
