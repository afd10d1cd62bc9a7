from __future__ import annotations

import pytest

from moequant.runtime.backends.naive_batched import NaiveBatched
from moequant.selftest import run as selftest

ARGUMENTS = ("selftest", "--device", "cpu", "--backend", "naive_batched")


@pytest.fixture(autouse=True)
def one_format(monkeypatch):
    monkeypatch.setattr(selftest, "RUNNABLE", ("bf16",))


@pytest.fixture
def broken(monkeypatch):
    compute = NaiveBatched.experts._run_batches
    monkeypatch.setattr(
        NaiveBatched.experts, "_run_batches", lambda self, tokens: 2 * compute(self, tokens)
    )


def test_it_prints_a_row_for_each_format_and_scheme(run):
    result = run(*ARGUMENTS)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("CPU; moequant ")
    assert [line.split()[0:4] for line in lines[3:6]] == [
        ["naive_batched", "bf16", "none", "7"],
        ["naive_batched", "bf16", "fp8_token", "7"],
        ["naive_batched", "bf16", "fp8_tensor", "7"],
    ]
    assert lines[3].endswith("passed")
    assert lines[-1].startswith("21 calls, ")


def test_it_ends_with_5_and_the_reasons_where_a_backend_is_wrong(run, broken):
    result = run(*ARGUMENTS)
    assert result.exit_code == 5
    assert result.stdout.count("FAILED") == 3
    assert "Error: 18 failures; open an issue with this output\n" in result.stderr
    assert (
        "naive_batched, bf16 x none: multiples of 256, 1 token: off from the CPU reference by 1 in "
        "norm, where its roundings explain 0.0078\n" in result.stderr
    )


def test_as_json_a_failure_has_the_document_too(run, broken):
    result = run(*ARGUMENTS, "--json")
    assert result.exit_code == 5
    assert not result.document["ok"]
    assert result.document["error"]["type"] == "NumericsError"
    assert len(result.document["rows"]) == 3


def test_where_nothing_runs_it_fails_and_says_so(run):
    result = run("selftest", "--device", "cpu", "--backend", "triton")
    assert result.exit_code == 4
    assert "not run: triton: needs a CUDA device" in result.stdout
    assert "limit" not in result.stdout
    assert "nothing was checked, because triton cannot run on cpu; name another" in result.stderr


def test_a_backend_that_no_gpu_has_run_is_marked_where_it_is_not_run(run):
    result = run("selftest", "--device", "cpu", "--backend", "cutlass_fp4")
    assert result.exit_code == 4
    said = (
        "not run: cutlass_fp4 (compiled, never run): runs only nvfp4 and mxfp4\n"  # bf16 is asked
    )
    assert said in result.stdout
    assert "because cutlass_fp4 (compiled, never run) cannot run on cpu" in result.stderr
    result = run("selftest", "--device", "cpu", "--backend", "cutlass_fp4", "--json")
    assert result.document["error"]["type"] == "UnsupportedError"
    assert result.document["never_run"] == ["cutlass_fp4"]


def test_the_reference_is_not_compared_with_itself(run):
    result = run("selftest", "--device", "cpu", "--backend", "torch_reference")
    assert result.exit_code == 4
    assert "torch_reference: on a CPU it is what the others are compared with" in result.stderr


def test_an_error_of_any_type_in_a_backend_is_its_failure(run, monkeypatch):
    def load(*_):
        raise KeyError("w13")

    monkeypatch.setattr(NaiveBatched, "load", load)
    result = run(*ARGUMENTS)
    assert result.exit_code == 5
    assert "naive_batched, bf16 x none: multiples of 256: KeyError: 'w13'\n" in result.stderr
