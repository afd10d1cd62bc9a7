"""MXFP4 by MXFP8 through DeepGEMM as a backend, which was never run; results want SM100.

The calls that DeepGEMM gets, and layers around a model of it, are tested on a CPU in
tests/kernels/deepgemm/test_sm100_fp4_deepgemm.py; its layout with the others in
test_every_backend.py.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moequant.act_fn import RELU2, SILU, SWIGLUOAI
from moequant.benchmarks.experts import calc_diff
from moequant.conversion import convert
from moequant.errors import UnsupportedError
from moequant.formats import quantize
from moequant.preparation import prepare
from moequant.runtime import ExpertWeights, FusedExperts, load_experts
from moequant.runtime.activations import SCHEMES
from moequant.runtime.backends import REGISTRY, Workload, deepgemm_fp4
from moequant.runtime.backends.deepgemm import why_no_deep_gemm
from moequant.storage.headers import DTYPES, read_header

NAMES = ("deepgemm_fp4", "deepgemm_fp4_batched")
BACKEND = REGISTRY["deepgemm_fp4"]
WORKLOAD = Workload(
    format="mxfp4",
    activations="mxfp8",
    experts=8,
    hidden=256,
    intermediate=128,
    device=torch.device("cuda", 0),
)
WHY_NOT = BACKEND.supports(WORKLOAD)

# As tests/kernels/deepgemm/test_sm100_fp4_deepgemm.py derives it.
CALC_DIFF = 4.5e-4


def weights_of(act_fn=SILU, *, device="cpu", H=256, I=128, format="mxfp4", biases=False):
    g = torch.Generator().manual_seed(0)
    shapes = {"gate": (8, I, H), "up": (8, I, H), "down": (8, H, I)}
    if not act_fn.gated:
        del shapes["gate"]
    parts, added = {}, {}
    for name, shape in shapes.items():
        w = torch.randn(shape, generator=g) * shape[2] ** -0.5
        parts[name] = quantize(w.to(device), format)
        if biases:
            added[f"{name}_bias"] = torch.randn(shape[:2], generator=g).to(device)
    return ExpertWeights.of(parts, act_fn, **added)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "nvfp4"}, "runs only mxfp4"),
        ({"activations": "mxfp4"}, "takes only activations in mxfp8"),
        ({"activations": "none"}, "takes only activations in mxfp8"),
        ({"hidden": 320}, "needs H to be a multiple of 128, not 320"),
        ({"intermediate": 96}, "needs I to be a multiple of 128, not 96"),
        ({"experts": 0}, "needs at least one expert"),
        ({"device": torch.device("cpu")}, "needs a CUDA device"),
    ],
)
def test_it_says_what_it_does_not_run(change, reason, name):
    assert REGISTRY[name].supports(replace(WORKLOAD, **change)) == reason


@pytest.fixture
def gpu_of(monkeypatch):
    """gpu_of(capability): as if CUDA device 0 had it."""

    def patch(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        deepgemm_fp4._why_not_on.cache_clear()

    yield patch
    deepgemm_fp4._why_not_on.cache_clear()


@pytest.mark.parametrize("capability", [(9, 0), (10, 1), (12, 0)])
def test_other_generations_of_gpu_do_not_run_it(gpu_of, capability):
    gpu_of(capability)
    want = "needs compute capability 10.0 or 10.3, and cuda:0 has {}.{}".format(*capability)
    assert BACKEND.supports(WORKLOAD) == want


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
@pytest.mark.parametrize(
    ("package", "nvcc", "want"),
    [
        (None, "nvcc", "needs the package deep_gemm"),
        (
            SimpleNamespace(m_grouped_fp8_fp4_gemm_nt_masked=None),
            "nvcc",
            "needs a newer deep_gemm: this one has no m_grouped_fp8_fp4_gemm_nt_contiguous",
        ),
        (
            SimpleNamespace(**dict.fromkeys(deepgemm_fp4._GEMMS)),
            None,
            "needs nvcc, with which deep_gemm compiles: set CUDA_HOME",
        ),
        (SimpleNamespace(**dict.fromkeys(deepgemm_fp4._GEMMS)), "nvcc", None),
    ],
    ids=["absent", "old", "no nvcc", "whole"],
)
def test_it_says_what_is_not_installed(gpu_of, monkeypatch, capability, package, nvcc, want):
    pytest.importorskip("triton")
    gpu_of(capability)
    monkeypatch.setitem(sys.modules, "deep_gemm", package)
    monkeypatch.setattr(shutil, "which", lambda name: nvcc)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    assert BACKEND.supports(WORKLOAD) == want
    assert want is None or "newer" in want or why_no_deep_gemm() == want


def test_it_is_no_default():
    assert BACKEND.default_on == ()


def test_it_serves_sm100_with_activations_in_mxfp8():
    serves = {s: list(BACKEND.serves("sm100", s)) for s in SCHEMES}
    assert {s: f for s, f in serves.items() if f} == {"mxfp8": ["mxfp4"]}
    assert not any(BACKEND.serves("sm90", s) for s in SCHEMES)


@pytest.mark.parametrize(("H", "I"), [(192, 128), (128, 160)])
def test_its_layout_holds_rows_that_tma_reads(H, I):
    with pytest.raises(UnsupportedError, match=rf"multiples of 128, not H {H} and I {I}; without"):
        BACKEND.layout.pack(weights_of(H=H, I=I))


def test_its_layout_holds_mxfp4_alone():
    with pytest.raises(UnsupportedError, match="stacked_words holds mxfp4, not mxfp8"):
        BACKEND.layout.pack(weights_of(format="mxfp8"))


def test_its_layout_is_what_deep_gemm_takes():
    tensors = BACKEND.layout.pack(weights_of(biases=True))
    found = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    assert found == {
        "w13_qdata": (torch.uint8, (8, 256, 128)),
        "w13_scale": (torch.int32, (8, 2, 256)),
        "w13_bias": (torch.float32, (8, 256)),
        "w2_qdata": (torch.uint8, (8, 256, 64)),
        "w2_scale": (torch.int32, (8, 1, 256)),
        "w2_bias": (torch.float32, (8, 256)),
    }


def test_a_prepared_layer_is_handed_over_as_it_lies_on_disk(make_checkpoint, tmp_path, monkeypatch):
    path = convert(make_checkpoint(), tmp_path / "out", format="mxfp4").output
    result = prepare(path, target="sm100", activations="mxfp8")
    assert {entry.layout for entry in result.manifest.layers.values()} == {"stacked_words"}
    monkeypatch.setattr(type(BACKEND), "supports", lambda self, workload: None)

    def packs(self, weights):
        assert weights.experts == 0, "a layer was packed again"
        return pack(self, weights)

    pack = type(BACKEND.layout).pack
    monkeypatch.setattr(type(BACKEND.layout), "pack", packs)
    experts = load_experts(result.folder, 1, activations="mxfp8", backend="deepgemm_fp4")
    held = experts.packed().tensors
    file = result.folder / result.manifest.layers[1].file
    header = read_header(file, file.name)
    assert set(header) == {f"layers.1.{name}" for name in held}
    with file.open("rb") as stream:
        for name, tensor in held.items():
            info = header[f"layers.1.{name}"]
            assert DTYPES[info.dtype] == tensor.dtype
            stream.seek(info.start)
            assert bytes(tensor.view(torch.uint8).flatten().tolist()) == stream.read(tensor.nbytes)


def gpu(test):
    test = pytest.mark.skipif(WHY_NOT is not None, reason=f"deepgemm_fp4 {WHY_NOT}")(test)
    return pytest.mark.gpu(test)


def call_of(M, device="cuda"):
    g = torch.Generator(device).manual_seed(M)
    hidden = torch.randn(M, 256, generator=g, device=device).bfloat16()
    router = torch.rand(M, 2, generator=g, device=device)
    return hidden, router, torch.rand(M, 8, generator=g, device=device).topk(2).indices


@gpu
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("act_fn", [SILU, SWIGLUOAI, RELU2], ids=str)
@pytest.mark.parametrize("M", [0, 1, 33, 700])
@pytest.mark.parametrize("name", NAMES)
def test_it_agrees_with_the_reference(act_fn, biases, M, name):
    weights, call = weights_of(act_fn, device="cuda", biases=biases), call_of(M)
    got, want = (
        FusedExperts(weights, activations="mxfp8", backend=n)(*call)
        for n in (name, "torch_reference")
    )
    assert got.shape == want.shape
    assert bool(got.isfinite().all())
    assert M == 0 or calc_diff(got, want) <= CALC_DIFF


@gpu
def test_a_captured_call_is_replayed_on_new_inputs_to_the_same_bits():
    module = FusedExperts(weights_of(device="cuda"), activations="mxfp8", backend="deepgemm_fp4")
    static = call_of(64)
    module(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    for seed in (64, 65):
        new = tuple(t[:64] for t in call_of(seed))
        for to, value in zip(static, new, strict=True):
            to.copy_(value)
        graph.replay()
        assert torch.equal(out, module(*new))
