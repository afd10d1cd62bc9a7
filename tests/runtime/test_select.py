from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from moequant.errors import UnsupportedError
from moequant.formats import CONVERTIBLE
from moequant.runtime import FusedExperts, select
from moequant.runtime.activations import SCHEMES
from moequant.runtime.backends import REGISTRY as BACKENDS
from moequant.runtime.backends import STACKED, Workload

WORKLOAD = Workload(
    format="nvfp4",
    activations="none",
    experts=8,
    hidden=256,
    intermediate=128,
    device=torch.device("cpu"),
)
ON_CUDA = replace(WORKLOAD, device=torch.device("cuda", 0))


def test_the_reference_is_the_default_on_a_cpu_for_every_format():
    for name, fmt in CONVERTIBLE.items():
        for activations in ("none", fmt.activations):
            workload = replace(WORKLOAD, format=name, activations=activations)
            assert select(workload).name == "torch_reference"


def test_a_refusal_says_which_activations_a_default_backend_takes(monkeypatch):
    def supports(self, workload):
        return None if workload.activations == "none" and workload.experts else "no"

    monkeypatch.setattr(type(BACKENDS["triton"]), "supports", supports)
    said = r"activations=\"none\" runs the same weights .*--activations none$"
    with pytest.raises(UnsupportedError, match=said):
        select(replace(ON_CUDA, activations="nvfp4_static"))
    with pytest.raises(UnsupportedError) as error:
        select(replace(ON_CUDA, activations="nvfp4_static", experts=0))
    assert "runs the same weights" not in str(error.value)
    with pytest.raises(UnsupportedError) as error:
        select(ON_CUDA, "deepgemm")
    assert "runs the same weights" not in str(error.value)
    monkeypatch.setattr(
        type(BACKENDS["triton"]),
        "supports",
        lambda self, workload: None if workload.activations == "fp8_token" else "no",
    )
    with pytest.raises(UnsupportedError, match=r"--activations fp8_token$"):
        select(replace(ON_CUDA, activations="nvfp4_static"))


@pytest.mark.parametrize(
    ("backend", "format", "scheme", "helps"),
    [
        ("naive_batched", "nvfp4", "nvfp4", True),
        ("cutlass_fp4", "nvfp4", "nvfp4", False),
        ("deepgemm_fp4", "mxfp4", "mxfp8", False),
    ],
)
def test_other_activations_are_advised_only_where_the_named_backend_runs_them(
    backend, format, scheme, helps
):
    with pytest.raises(UnsupportedError) as error:
        select(replace(WORKLOAD, format=format, activations=scheme), backend)
    assert ("runs the same weights" in str(error.value)) == helps


def test_the_activations_that_a_named_backend_takes_are_advised(monkeypatch):
    def supports(self, workload):
        return None if workload.activations == "fp8_token" else "takes only fp8_token"

    monkeypatch.setattr(type(BACKENDS["sm90_mxfp4_fp8"]), "supports", supports)
    with pytest.raises(UnsupportedError) as error:
        select(replace(WORKLOAD, format="mxfp4"), "sm90_mxfp4_fp8")
    assert str(error.value).splitlines()[1:] == [
        'activations="fp8_token" runs the same weights; where a command has it, '
        "--activations fp8_token"
    ]
    monkeypatch.setattr(
        type(BACKENDS["sm90_mxfp4_fp8"]),
        "supports",
        lambda self, workload: "no" if workload.activations == "fp8_token" else None,
    )
    with pytest.raises(
        UnsupportedError, match=r"activations=\"none\" runs the same weights without"
    ):
        select(replace(WORKLOAD, format="mxfp4", activations="fp8_token"), "sm90_mxfp4_fp8")


def test_the_reference_runs_on_cuda_only_when_named():
    with pytest.raises(UnsupportedError, match=r"(?s)on cuda:0.*runs on cuda only when named"):
        select(ON_CUDA)
    assert select(ON_CUDA, "torch_reference").name == "torch_reference"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_refuses_sizes_that_are_no_multiples_of_those_that_it_names(name):
    backend = BACKENDS[name]

    def reasons(**sizes):
        layers = (
            replace(ON_CUDA, format=format, activations=scheme, **sizes)
            for format, scheme in product(CONVERTIBLE, SCHEMES)
        )
        return {backend.supports(layer) for layer in layers}

    fits = {"hidden": 384, "intermediate": 384}
    assert not any("to be a multiple of" in str(reason) for reason in reasons(**fits))
    for axis, size, multiple in zip("HI", fits, backend.multiples, strict=True):
        if multiple > 1:
            other = 384 + multiple // 2
            said = f"needs {axis} to be a multiple of {multiple}, not {other}"
            assert said in reasons(**fits | {size: other})


def test_a_layout_leaves_out_the_backends_that_read_another():
    assert select(WORKLOAD, layout=STACKED).name == "torch_reference"
    panels = BACKENDS["sm90_w4a8"].layout
    with pytest.raises(
        UnsupportedError,
        match=r"torch_reference: reads weights as stacked version \d, but these are w4a8_panels",
    ):
        select(WORKLOAD, layout=panels)


def test_an_unknown_backend_is_refused_with_the_names_there_are_and_the_nearest():
    with pytest.raises(UnsupportedError, match=r"^unknown backend 'cutlas_fp4'; use one") as error:
        select(WORKLOAD, "cutlas_fp4")
    assert all(name in str(error.value) for name in BACKENDS)
    assert str(error.value).endswith(". Did you mean cutlass_fp4?")
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(UnsupportedError, match=r"^unknown backend 'xxx.*\.\.\..*xxx'; use one of"):
        select(WORKLOAD, "x" * 10000)


def test_without_a_backend_every_one_says_why_it_does_not_run():
    with pytest.raises(UnsupportedError, match=r"^no backend runs nvfp4") as error:
        select(ON_CUDA)
    first, *lines = str(error.value).splitlines()
    assert first.endswith("on cuda:0:")
    for b, line in zip(BACKENDS.values(), lines, strict=True):
        mark = r" \(compiled, never run\)" if b.never_run else ""
        assert re.match(f"  {b.name}{mark}: .", line)
    with pytest.raises(UnsupportedError, match=r"'cutlass_fp4' \(compiled, never run\) does not"):
        select(ON_CUDA, "cutlass_fp4")


def test_a_backend_that_is_named_says_its_own_reason_and_which_would_run():
    with pytest.raises(UnsupportedError) as error:
        select(WORKLOAD, "triton")
    assert str(error.value) == (
        "backend 'triton' does not run nvfp4 with activations none, E 8, H 256, I 128, silu on "
        f"cpu: {BACKENDS['triton'].supports(WORKLOAD)}; torch_reference, naive_batched would run it"
    )
    panels = BACKENDS["sm90_w4a8"].layout
    with pytest.raises(UnsupportedError) as error:
        select(WORKLOAD, "naive_batched", layout=panels)
    first, end = str(error.value).split(": ")
    assert first.startswith("backend 'naive_batched' does not run nvfp4")
    assert end.startswith("reads weights as stacked version")
    assert end.endswith("but these are w4a8_panels version 1; no other backend runs it here")


@pytest.mark.parametrize("backend", [None, "torch_reference"])
def test_a_backend_that_cannot_run_it_says_why(backend):
    with pytest.raises(UnsupportedError, match="cannot quantize activations to fp4_group16"):
        select(replace(WORKLOAD, activations="fp4_group16"), backend)


def test_a_module_is_refused_when_it_is_made_and_again_when_it_has_moved(layers):
    layer = layers.make()
    with pytest.raises(UnsupportedError, match="unknown backend 'fast'"):
        FusedExperts(layer.weights, backend="fast")
    moved = FusedExperts(layer.weights).to("meta")
    with pytest.raises(UnsupportedError, match="needs a device that holds numbers"):
        moved(*(t.to("meta") for t in layer.call))
