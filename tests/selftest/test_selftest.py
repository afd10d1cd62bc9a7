"""The self-test: what it runs, and that it finds what is wrong."""

from __future__ import annotations

import os
from importlib.metadata import distributions
from itertools import count, product

import pytest
import torch

from moequant.errors import UnsupportedError
from moequant.formats import RUNNABLE
from moequant.runtime.backends import REGISTRY, TARGETS, backends, torch_reference
from moequant.runtime.backends.naive_batched import NaiveBatched
from moequant.runtime.packing import ACTIVATIONS, scheme_of
from moequant.selftest import run, selftest
from moequant.selftest.layers import EVEN, FAR, ODD, VARIANTS, calls_of, random_layer
from moequant.selftest.pool import Died

COMPUTE = NaiveBatched.experts._run_batches


@pytest.fixture
def few(monkeypatch):
    """Only the formats that are named."""

    def choose(*formats):
        monkeypatch.setattr(run, "RUNNABLE", formats)

    return choose


def naive(**change):
    return selftest("cpu", backend="naive_batched", **change)


def test_it_runs_every_scheme_of_every_format(few):
    few("nvfp4", "w4a8", "fp8_tensor")
    document = naive()
    assert document["ok"]
    assert {(row["format"], row["activations"]) for row in document["rows"]} == {
        ("nvfp4", "none"),
        ("nvfp4", "fp8_token"),
        ("nvfp4", "fp8_tensor"),
        ("w4a8", "fp8_token"),
        ("w4a8", "fp8_tensor"),
        ("w4a8", "none"),
        ("fp8_tensor", "fp8_token"),
        ("fp8_tensor", "fp8_tensor"),
        ("fp8_tensor", "fp8_static"),
        ("fp8_tensor", "none"),
    }
    for row in document["rows"]:
        assert row["calls"] == len(list(calls_of(EVEN.sizes[0], many=True))) + 1
        assert row["error"] <= 1e-6 < row["limit"]
        assert not row["failures"]
        assert not row["skipped"]


def test_scales_of_eight_bits_are_tested_far_apart(few):
    few("mxfp4")
    document = naive()
    assert document["ok"]
    for row in document["rows"]:
        assert row["calls"] == len(list(calls_of(EVEN.sizes[0], many=True))) + 2
        assert row["error"] <= 1e-6 < row["limit"]
    layer = random_layer("mxfp4", FAR, FAR.sizes[0], static=False)
    backend = backends()["sm90_mxfp4_fp8"]
    assert backend.layout_of(backend.pack(layer)) == backend.layouts[1]


def test_processes_find_what_one_does(few):
    few("w4a8", "fp8_tensor")
    alone, several = naive(), naive(processes=2)
    assert several["ok"]
    assert several["rows"] == alone["rows"]


@pytest.mark.parametrize(
    ("in_time", "said"),
    [
        (True, "its process ended without a result; see what "),
        (
            False,
            "its process had no result after 120 s and was ended; if kernels were being compiled, "
            "run it again, as they are kept; see what ",
        ),
    ],
)
def test_a_process_that_ends_fails_its_row(few, monkeypatch, in_time, said):
    few("w4a8")
    died = Died(in_time=in_time)
    monkeypatch.setattr(run, "run_apart", lambda *_, **__: [(1, died), (0, "a row")])
    monkeypatch.setattr(run, "_run_alone", None)
    cases, _ = run._cases_of(backends()["naive_batched"], torch.device("cpu"))
    (position, row), other = run._run_all(cases, 2)
    assert other == (0, "a row")
    assert (position, row.backend, row.calls) == (1, "naive_batched", 0)
    assert row.failures == [f"{said}moequant selftest --backend naive_batched prints"]


def test_it_says_with_which_packages_it_ran(few):
    few("bf16")
    document = naive()
    assert document["torch"] == torch.__version__
    for name, distribution in {
        "triton": "triton",
        # Which has CuTe DSL, by whatever name that was installed.
        "cutlass_dsl": "nvidia-cutlass-dsl-libs-base",
        "deep_gemm": "sgl-deep-gemm",
    }.items():
        there = list(distributions(name=distribution))
        assert document[name] == (there[0].version if there else None)


def test_it_says_why_a_backend_runs_nothing(few):
    few("fp8_block")
    document = selftest("cpu")
    assert [row["backend"] for row in document["rows"]] == ["naive_batched"] * 4
    reasons = dict.fromkeys(REGISTRY.keys() - {"naive_batched"}, "needs a CUDA device")
    reasons["torch_reference"] = "on a CPU it is what the others are compared with"
    few("fp8_block", "fp8_channel", "nvfp4", "mxfp4", "w4a8")
    assert {name: run._cases_of(REGISTRY[name], torch.device("cpu"))[1] for name in reasons} == {
        **reasons,
        "torch_reference": "",
    }
    assert document["not_run"]["torch_reference"] == reasons["torch_reference"]
    assert document["not_run"].keys() == reasons.keys()


def test_it_says_why_a_backend_does_not_run_what_it_is_for(few):
    """Not that it does not run other formats."""
    few("mxfp4", "w4a8")
    for name in ("cutlass_fp4", "deepgemm_fp4_batched", "sm90_w4a8", "sm90_mxfp4_fp8"):
        document = selftest("cpu", backend=name)
        assert document["not_run"] == {name: "needs a CUDA device"}
        assert document["never_run"] == ([name] if "fp4" in name and "sm90" not in name else [])


def test_every_backend_for_a_gpu_is_asked_with_what_it_is_for():
    """Else a self-test there would say nothing of it."""
    asked = {(format, scheme.name) for format, scheme in run._schemes()}
    choices = {
        (format, scheme_of(format, option, static=static))
        for format, option, static in product(RUNNABLE, ACTIVATIONS, (False, True))
    }
    served = {
        (format, scheme)
        for backend in REGISTRY.values()
        for target in TARGETS
        for format, scheme in choices
        if format in backend.serves(target, scheme)
    }
    assert ("mxfp4", "mxfp8") in served
    assert served <= asked


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda y: y * 1.1, "from the CPU reference by 0.1 in norm"),
        (lambda y: y * (1 + 1e-3 * torch.rand_like(y)), "two equal calls differ"),
        (lambda y: torch.full_like(y, torch.nan), "are not finite"),
        (lambda y: y.reshape(3, 5, 7, 1), "RuntimeError: shape"),
    ],
)
def test_it_finds_what_is_wrong(few, monkeypatch, broken, reason):
    few("bf16")
    monkeypatch.setattr(
        NaiveBatched.experts, "_run_batches", lambda self, tokens: broken(COMPUTE(self, tokens))
    )
    document = naive()
    assert not document["ok"]
    for row in document["rows"]:
        assert any(reason in failure for failure in row["failures"])


BLOCK_SCALED = [
    ("nvfp4", "nvfp4"),
    ("nvfp4", "nvfp4_static"),
    ("mxfp4", "mxfp4"),
    ("mxfp4", "mxfp8"),
    ("mxfp8", "mxfp8"),
]


@pytest.fixture
def planted(monkeypatch, few):
    """planted(change): a self-test of the reference, whose every matrix product is changed.

    `change(y, which)` gets the product of gate, up or down, float32 [R, N], and its number in 0 to
    2. Only activations in groups of 16 or 32 columns run.
    """
    linear, number = torch_reference._linear, count()

    def document(change):
        class Experts(torch_reference.ReferenceExperts):
            def run_sorted(self, *arguments):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(
                        torch_reference,
                        "_linear",
                        lambda *of: change(linear(*of), next(number) % 3),
                    )
                    return super().run_sorted(*arguments)

        class Planted(torch_reference.TorchReference):
            name, experts = "planted", Experts

        few("nvfp4", "mxfp4", "mxfp8")
        every = [(f, s) for f, s in run._schemes() if (f, s.name) in BLOCK_SCALED]
        monkeypatch.setattr(run, "_schemes", lambda: every)
        monkeypatch.setitem(REGISTRY, "planted", Planted())
        backends.cache_clear()
        return selftest("cpu", backend="planted")

    yield document
    monkeypatch.undo()
    backends.cache_clear()


def test_gate_and_up_in_bfloat16_are_within_the_limits_of_block_scaled_activations(planted):
    document = planted(lambda y, which: y if which == 2 else y.bfloat16().float())
    assert [(row["format"], row["activations"]) for row in document["rows"]] == BLOCK_SCALED
    assert document["ok"], [row for row in document["rows"] if row["failures"]]
    # Half of each limit is the error derived; that it is met says that the limits are no wider.
    assert all(row["error"] > row["limit"] / 4 for row in document["rows"])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda y, which: y * 1.1 if which == 2 else y, marks=pytest.mark.full),
        lambda y, which: y * 1.1 if which == 1 else y,
        lambda y, which: y.roll(1, 1) if which == 1 else y,
        lambda y, which: y + 0.1 * y.std() if which == 2 else y,
    ],
    ids=["down off by a tenth", "up off by a tenth", "up of the next column", "down shifted"],
)
def test_it_finds_what_is_wrong_with_block_scaled_activations(planted, change):
    for row in planted(change)["rows"]:
        assert any("33 tokens: off from the CPU reference" in f for f in row["failures"]), row


def test_one_token_has_its_own_limit_in_fp4():
    for name, limits in {
        "none": (2**-7, 2**-7),
        "mxfp8": (2**-4.5, 2**-4.5),
        "nvfp4": (2**-2.5, 2**-4),
        "nvfp4_static": (2**-2.5, 2**-4),
        "mxfp4": (2**-2.5, 2**-4),
    }.items():
        scheme = run._Scheme(name=name, option=name)
        assert (scheme.limit(1), scheme.limit(33)) == limits


def test_a_row_has_the_error_that_came_nearest_to_its_limit():
    row = run._Row(backend="one", format="mxfp4", activations="mxfp4", limit=0.06)
    wanted = torch.ones(100).bfloat16()
    for error, limit in ((2**-6, 0.06), (2**-5, 0.2), (0, 0.06)):
        off = (wanted * (1 + error)).bfloat16()
        run._compare(row, "a call", wanted, off, off, limit=limit)
    assert (row.error, row.limit) == (2**-6, 0.06)
    assert not row.failures


def test_a_call_of_zeros_must_be_zeros():
    row = run._Row(backend="one", format="bf16", activations="none", limit=0.01)
    zeros, others = torch.zeros(2, 3), torch.full((2, 3), 1e-3)
    run._compare(row, "no token", zeros, others, others, limit=0.01)
    assert row.failures


def test_calls_are_compared_as_bits():
    def failures(found, again):
        row = run._Row(backend="one", format="bf16", activations="none", limit=0.01)
        outputs = (torch.tensor([x]).bfloat16() for x in (0.0, found, again))
        run._compare(row, "one", *outputs, limit=0.01)
        return row.failures

    assert failures(0.0, 0.0) == []
    assert failures(0.0, -0.0) == ["one: two equal calls differ in 1 values"]
    assert failures(torch.nan, torch.nan) == ["one: 1 values are not finite"]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_calls_are_what_their_names_say(variant):
    sizes = variant.sizes[0]
    calls = {call.name: call for call in calls_of(sizes, many=True)}
    assert [len(calls[name].hidden) for name in ("33 tokens", "no token", "1 token")] == [33, 0, 1]
    skewed = calls["150 tokens, skewed, with an expert map"]
    assert (skewed.topk_ids[:, 0] == 0).all()
    assert (skewed.topk_ids == -1).any()
    assert set(skewed.expert_map[skewed.topk_ids[skewed.topk_ids >= 0].long()].tolist()) <= {
        *range(sizes.experts)
    }
    for call in calls.values():
        assert torch.allclose(call.topk_weights.sum(1), torch.ones(len(call.hidden)))


def test_a_layer_of_odd_sizes_is_the_first_that_a_format_has():
    scheme = run._Scheme(name="none", option="none")
    for format, hidden in {"bf16": 717, "nvfp4": 720, "mxfp4": 736, "w4a8": 640}.items():
        sizes, _ = run._choose_sizes(NaiveBatched(), format, scheme, ODD, torch.device("cpu"))
        assert sizes.hidden == hidden


@pytest.mark.parametrize(("place", "ends"), [("cuda", True), ("cpu", False)])
def test_a_process_whose_gpu_an_earlier_case_broke_ends(monkeypatch, place, ends):
    def fail(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    codes = []
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(os, "_exit", codes.append)
    run._end_without_device(torch.device(place))
    assert codes == [1] * ends


def test_a_backend_or_device_that_is_none_is_refused():
    with pytest.raises(UnsupportedError, match="unknown backend 'fast'; use one of: sm90"):
        selftest("cpu", backend="fast")
    with pytest.raises(UnsupportedError, match="cannot be used"):
        selftest("cuda:99")


@pytest.fixture(scope="module")
def on_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return selftest("cuda")


@pytest.mark.gpu
def test_every_backend_of_the_gpu_passes(on_gpu):
    assert on_gpu["ok"], [row for row in on_gpu["rows"] if row["failures"]]


@pytest.mark.gpu
@pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="other tests share the GPU and the cores, and the time would be theirs, too; use -n 0",
)
def test_the_self_test_of_the_gpu_takes_less_than_two_minutes(on_gpu):
    assert on_gpu["seconds"] < 120


def test_a_device_without_numbers_is_refused():
    with pytest.raises(UnsupportedError, match=r"^device meta holds no numbers.* such as cuda or"):
        selftest("meta")
