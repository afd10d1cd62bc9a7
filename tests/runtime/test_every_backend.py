"""Every backend of the registry: what it says of itself, its layout, and its results on a CPU.

Backends that need a GPU are compared with the reference in files of their own.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from moequant.act_fn import RELU2, SILU, SITU, SWIGLUOAI, ActFn
from moequant.errors import UnsupportedError
from moequant.formats import RUNNABLE, get_format
from moequant.runtime import ExpertWeights, FusedExperts, pack_experts
from moequant.runtime.activations import SCHEMES, quantize_activations
from moequant.runtime.backends import REGISTRY, TARGETS, Backend, Workload
from moequant.runtime.packing import workload_of
from moequant.runtime.weights import weights_without_data

DOCS = Path(__file__).parents[2] / "docs"
CPU = torch.device("cpu")
WORKLOAD = Workload(
    format="bf16", activations="none", experts=6, hidden=256, intermediate=128, device=CPU
)
ON_CPU = [
    (name, format, activations)
    for format, activations in product(RUNNABLE, ("format", "none"))
    if activations == "none" or (scheme := get_format(format).activations) != "none"
    for name, backend in REGISTRY.items()
    if name != "torch_reference"
    and not backend.supports(
        replace(WORKLOAD, format=format, activations="none" if activations == "none" else scheme)
    )
]
LAYOUTS = list({layout: None for backend in REGISTRY.values() for layout in backend.layouts})
# What test_act_fn_and_biases.py derives for float32 sums, and test_triton_backend.py for codes that
# flip between the GEMMs.
TOLERANCE = {"none": 1e-5, "format": 5e-3}

STATIC = [name for name, fmt in RUNNABLE.items() if fmt.static_activations]

every_backend = pytest.mark.parametrize("name", REGISTRY)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
on_cpu = pytest.mark.parametrize(("name", "format", "activations"), ON_CPU)


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def weights_of(layers, format, act_fn=SILU, *, biases=False, static=False):
    layer, fmt = layers.make(), get_format(format)
    projections = {
        name: fmt.quantize(w) for name, w in layer.source.items() if act_fn.gated or name != "gate"
    }
    tensors = {}
    if biases:
        g = torch.Generator().manual_seed(1)
        tensors = {
            f"{n}_bias": torch.randn(q.shape[:2], generator=g) for n, q in projections.items()
        }
    if static:
        tensors["gate_up_input_scale"] = torch.tensor([0.01])
        tensors["down_input_scale"] = torch.tensor([0.005])
    return ExpertWeights.of(projections, act_fn, **tensors)


@every_backend
def test_it_is_registered_under_its_name_and_makes_experts(name):
    backend = REGISTRY[name]
    assert backend.name == name
    assert set(backend.default_on) <= {"cpu", "cuda"}
    if type(backend).load is Backend.load:
        assert not inspect.isabstract(backend.experts)
    for target in TARGETS:
        assert all(set(backend.serves(target, scheme)) <= RUNNABLE.keys() for scheme in SCHEMES)


@every_backend
def test_the_documents_list_it_and_its_layouts(name):
    assert f"\n| `{name}` |" in (DOCS / "runtime.md").read_text()
    for layout in REGISTRY[name].layouts:
        assert f"\n| `{layout.name}` |" in (DOCS / "layouts.md").read_text()


@every_backend
def test_its_first_layout_is_the_usual_one_and_says_no_reason(name):
    first, *others = REGISTRY[name].layouts
    assert first == REGISTRY[name].layout
    assert not first.why
    assert all(other.why for other in others)


@every_backend
def test_it_answers_for_any_workload_in_a_short_phrase(name):
    devices = [CPU, torch.device("meta"), torch.device("cuda", 0)]
    for format, scheme, device in product(RUNNABLE, SCHEMES, devices):
        workload = replace(WORKLOAD, format=format, activations=scheme, device=device)
        reason = REGISTRY[name].supports(workload)
        assert reason is None or (reason and "\n" not in reason and not reason.endswith("."))


@pytest.mark.parametrize("act_fn", [SILU, RELU2], ids=str)
@pytest.mark.parametrize("extra", [{}, {"biases": True}, {"static": True}], ids=str)
@every_layout
def test_a_layout_is_lossless_and_packs_expert_by_expert(layers, layout, extra, act_fn):
    held = 0
    for format in STATIC if "static" in extra else RUNNABLE:
        weights = weights_of(layers, format, act_fn, **extra)
        parts = weights.tensors()
        try:
            packed = layout.pack(weights)
        except UnsupportedError:
            continue
        held += 1
        back = layout.unpack(packed, workload_of(weights, "none")).tensors()
        assert back.keys() == parts.keys()
        assert all(torch.equal(bytes_of(back[n]), bytes_of(t)) for n, t in parts.items())

        meta = layout.pack(weights.replace({n: t.to("meta") for n, t in parts.items()}))
        no_experts = weights_without_data(
            format,
            {n: (0, *q.shape[1:]) for n, q in weights.projections().items()},
            act_fn,
            biased="biases" in extra,
            static="static" in extra,
            device="cpu",
        )
        none = layout.pack(no_experts)
        assert none.keys() == packed.keys()
        first = {n: t if "input_scale" in n else t[:1] for n, t in parts.items()}
        alone = layout.pack(
            ExpertWeights.of(
                {
                    n: q.map(lambda t: t[:1], torch.Size((1, *q.shape[1:])))
                    for n, q in weights.projections().items()
                },
                act_fn,
                **{n: first[n] for n in (*weights.biases(), *weights.input_scales())},
            )
        )
        for name, tensor in packed.items():
            assert tensor.is_contiguous()
            assert (meta[name].dtype, meta[name].shape) == (tensor.dtype, tensor.shape)
            assert (none[name].dtype, none[name].shape[1:]) == (tensor.dtype, tensor.shape[1:])
            if "input_scale" not in name:
                assert tensor.shape[0] == weights.experts
                assert torch.equal(bytes_of(alone[name]), bytes_of(tensor[:1]))
        # By these names the runtime sees what there is.
        assert ("w2_bias" in packed) == ("biases" in extra)
        assert ("w13_input_scale" in packed) == ("static" in extra)
    assert held or "static" in extra


@pytest.mark.parametrize("act_fn", [SILU, RELU2], ids=str)
@pytest.mark.parametrize("extra", [{}, {"biases": True}, {"static": True}], ids=str)
@every_layout
def test_a_layout_packs_the_same_bytes_whatever_torchs_default_dtype_is(
    layers, layout, extra, act_fn
):
    for format in STATIC if "static" in extra else RUNNABLE:
        weights = weights_of(layers, format, act_fn, **extra)
        try:
            wanted = layout.pack(weights)
        except UnsupportedError:
            continue
        torch.set_default_dtype(torch.bfloat16)
        try:
            packed = layout.pack(weights)
            back = layout.unpack(packed, workload_of(weights, "none")).tensors()
        finally:
            torch.set_default_dtype(torch.float32)
        parts = weights.tensors()
        for found, expected in ((packed, wanted), (back, parts)):
            assert found.keys() == expected.keys()
            for name, tensor in found.items():
                assert tensor.dtype == expected[name].dtype
                assert torch.equal(bytes_of(tensor), bytes_of(expected[name]))


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    "act_fn", [SILU, SWIGLUOAI, SITU, RELU2, ActFn(name="gelu", gated=False)], ids=str
)
@on_cpu
def test_it_computes_every_function_and_biases(layers, name, format, activations, act_fn, biases):
    layer = layers.make()
    weights = weights_of(layers, format, act_fn, biases=biases)
    want, got = (
        FusedExperts(weights, backend=b, activations=activations)(*layer.call)
        for b in ("torch_reference", name)
    )
    assert (got - want).norm() <= TOLERANCE[activations] * want.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@on_cpu
def test_it_takes_every_call_that_the_reference_takes(layers, name, format, activations, dtype):
    layer = layers.make(T=2, dtype=dtype)
    hidden, topk_weights, ids = layer.call
    ids = ids.int()
    ids[2:5] = -1
    ids[7, 1] = -1
    strided = hidden.t().contiguous().t()
    elsewhere = torch.tensor([1, -1, 0, 5, -1, 2])
    calls = [
        ((hidden, topk_weights, ids), {}),
        ((strided, topk_weights.bfloat16(), ids.long()), {"expert_map": elsewhere}),
        ((hidden, topk_weights[:, :1], ids[:, :1]), {"apply_router_weight_on_input": True}),
        ((hidden[:1], topk_weights[:1].half(), ids[:1]), {"expert_map": elsewhere.int()}),
        ((hidden[:0], topk_weights[:0], ids[:0]), {}),
        ((hidden, topk_weights[:, :0], ids[:, :0]), {}),
        ((hidden[2:5], topk_weights[2:5], ids[2:5]), {}),
    ]
    weights = weights_of(layers, format)
    reference, experts = (
        FusedExperts(weights, backend=b, activations=activations) for b in ("torch_reference", name)
    )
    tensors = {n: t.clone() for n, t in experts.state_dict().items()}
    # As in test_act_fn_and_biases.py; the output is rounded to `dtype`, in which neighbours differ
    # by eps.
    tolerance = TOLERANCE[activations] + (0 if dtype == torch.float32 else torch.finfo(dtype).eps)
    for call, options in calls:
        want = reference(*call, **options)
        out = torch.full_like(want, torch.nan)
        size_bytes = experts.workspace_bytes(*call[2].shape)
        workspace = torch.full((size_bytes,), 255, dtype=torch.uint8)
        assert experts(*call, **options, out=out, workspace=workspace) is out
        assert (out - want).float().norm() <= tolerance * want.float().norm()
        assert torch.equal(experts(*call, **options), out)
    for n, tensor in experts.state_dict().items():
        assert torch.equal(bytes_of(tensor), bytes_of(tensors[n]))


@on_cpu
def test_it_takes_hidden_states_that_come_quantized(layers, name, format, activations):
    layer, weights = layers.make(), weights_of(layers, format)
    packed = pack_experts(weights, backend=name, activations=activations)
    scheme = packed.workload.activations
    if scheme == "none" or not packed.takes_quantized:
        return
    x = quantize_activations(layer.hidden, scheme)
    experts = FusedExperts(packed, backend=name)
    got = experts(x.qdata, *layer.call[1:], hidden_scale=x.scale)
    assert torch.equal(got, experts(*layer.call).bfloat16())


@pytest.mark.parametrize("name", sorted({name for name, _, _ in ON_CPU}))
def test_a_rank_without_experts_gives_zeros(layers, name):
    backend = REGISTRY[name]
    for format in RUNNABLE:
        if backend.supports(replace(WORKLOAD, format=format, experts=0)) is None:
            none = {
                n: q.map(lambda t: t[:0], torch.Size((0, *q.shape[1:])))
                for n, q in weights_of(layers, format).projections().items()
            }
            experts = FusedExperts(
                ExpertWeights(**none),
                backend=name,
                activations="none",
                expert_map=torch.full((6,), -1),
            )
            assert not experts(*layers.make().call).any()
