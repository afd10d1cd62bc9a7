"""Deterministic algorithms are asked for where they are not the usual ones, and only as long."""

from __future__ import annotations

import os
import warnings

import torch

from moequant.streaming.deterministic import deterministic


def asked_for():
    return torch.are_deterministic_algorithms_enabled()


def test_a_cpu_needs_nothing():
    with deterministic(torch.device("cpu")):
        assert not asked_for()


def test_a_gpu_is_asked_and_the_setting_is_put_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic(torch.device("cuda")):
        assert asked_for()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        # As torch warns: an error in these tests if it passed.
        warnings.warn("cumsum_cuda does not have a deterministic implementation", stacklevel=1)
    assert not asked_for()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
