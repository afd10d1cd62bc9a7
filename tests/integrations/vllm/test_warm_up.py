"""What the first call of a layer runs, with a backend that has kernels and keeps its calls."""

from __future__ import annotations

import pytest
import torch

from moequant.runtime import backends
from moequant.runtime.backends import Backend, PackedExperts


class KernelsExperts(PackedExperts):
    """Has a kernel for up to 4 tokens, one for up to 16, and one for more."""

    calls = ()
    ahead = ()

    def compile_ahead(self, tokens, topk):
        type(self).ahead += ((tokens, topk, len(self.calls)),)

    def kernels_for(self, tokens, topk):
        return (tokens > 4, tokens > 16, topk)

    def run(self, hidden_states, topk_weights, topk_ids, *, out, expert_map, **options):
        dtypes = (hidden_states.dtype, topk_weights.dtype, topk_ids.dtype)
        type(self).calls += ((len(topk_ids), *dtypes, expert_map is not None),)
        out.copy_(hidden_states)


class Kernels(Backend):
    name = "kernels"
    default_on = ()

    def supports(self, workload):
        return None

    def load(self, tensors, workload):
        return KernelsExperts(self, tensors, workload=workload)


@pytest.fixture
def calls(monkeypatch, engine):
    """calls(): numbers of tokens since the last time; no layer has been warmed up before."""
    from moequant.integrations.vllm import warm_up

    monkeypatch.setitem(backends.backends(), "kernels", Kernels())
    monkeypatch.setattr(warm_up, "_warm", set())
    monkeypatch.setattr(KernelsExperts, "calls", ())
    monkeypatch.setattr(KernelsExperts, "ahead", ())

    def calls():
        found, KernelsExperts.calls = KernelsExperts.calls, ()
        return [tokens for tokens, *_ in found]

    return calls


def run(layer, tokens, ids=torch.int32):
    hidden = torch.zeros(tokens, 256, dtype=torch.bfloat16)
    weights = torch.full((tokens, 2), 0.5)
    chosen = torch.tensor([[0, 3]], dtype=ids).expand(tokens, 2).contiguous()
    layer.quant_method.apply(layer, hidden, weights, chosen, None, None)


def loaded(engine, converted, format="mxfp4", dialect="compressed-tensors", **arguments):
    options = {"backend": "kernels", **arguments.pop("options", {})}
    return engine.loaded(converted(format, dialect), options=options, **arguments)


@pytest.mark.parametrize(
    ("mode", "sizes"), [("full", [17, 5, 1]), ("relax", [32, 8, 1]), ("skip", [])]
)
def test_the_first_call_runs_each_set_of_kernels_of_its_mode(engine, converted, calls, mode, sizes):
    layer = loaded(engine, converted, options={"warm_up": mode})
    run(layer, 40)
    assert calls() == [40, *sizes]
    run(layer, 40)
    assert calls() == [40]


def test_what_compiles_at_once_does_so_before_the_calls(engine, converted, calls):
    run(loaded(engine, converted, options={"warm_up": "relax"}), 40)
    assert KernelsExperts.ahead == (([1, 8, 32], 2, 1),)
    run(loaded(engine, converted), 40)
    assert len(KernelsExperts.ahead) == 1


def test_by_default_all_sizes_count_up_to_that_of_the_first_call(engine, converted, calls):
    run(loaded(engine, converted), 9)
    assert calls() == [9, 5, 1]


def test_layers_of_one_kind_are_warmed_up_once(engine, converted, calls):
    for _ in range(2):
        run(loaded(engine, converted), 9)
    assert calls() == [9, 5, 1, 9]
    run(loaded(engine, converted, "nvfp4", "modelopt"), 9)
    run(loaded(engine, converted), 9, ids=torch.int64)
    assert calls() == [9, 5, 1] * 2


def test_it_calls_as_vllm_does_with_its_dtypes_and_the_expert_map(engine, converted, calls):
    run(loaded(engine, converted, ep=(2, 1)), 6)
    as_vllm = (torch.bfloat16, torch.float32, torch.int32, True)
    assert KernelsExperts.calls == ((6, *as_vllm), (5, *as_vllm), (1, *as_vllm))


def test_a_call_without_tokens_leaves_it_to_the_next(engine, converted, calls):
    layer = loaded(engine, converted)
    run(layer, 0)
    calls()
    run(layer, 3)
    assert calls() == [3, 1]


def test_it_says_how_many_calls_it_ran(engine, converted, calls, monkeypatch):
    from moequant.integrations.vllm.warm_up import logger

    said = []
    monkeypatch.setattr(logger, "info", lambda message, *values: said.append(message % values))
    layer = loaded(engine, converted)
    run(layer, 40)
    run(layer, 40)
    (line,) = said
    assert line.startswith(
        "moequant ran 3 calls for steps of up to 40 tokens, one a set of kernels, in "
    )


def test_a_backend_that_does_not_say_what_it_compiles_runs_the_call_alone(
    engine, converted, calls, monkeypatch
):
    monkeypatch.setattr(KernelsExperts, "kernels_for", PackedExperts.kernels_for)
    run(loaded(engine, converted), 12)
    assert calls() == [12]


def test_a_backend_that_compiles_nothing_runs_the_call_alone(engine, converted, monkeypatch):
    from moequant.runtime.backends.torch_reference import ReferenceExperts

    sizes, original = [], ReferenceExperts.run

    def counted(self, hidden_states, *arguments, **options):
        sizes.append(len(hidden_states))
        return original(self, hidden_states, *arguments, **options)

    monkeypatch.setattr(ReferenceExperts, "run", counted)
    run(engine.loaded(converted("mxfp4", "compressed-tensors")), 12)
    assert sizes == [12]
