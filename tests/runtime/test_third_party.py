"""Backends of other packages, found by their entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch

from moequant.errors import UnsupportedError
from moequant.runtime import FusedExperts, backends
from moequant.runtime.backends import ExpertsBackend, third_party


class Zeros(ExpertsBackend):
    name = "zeros"
    default_on = ()

    def supports(self, workload):
        return None

    def run(self, activations, weights, permutation):
        return torch.zeros(permutation.token.shape[0], weights.hidden)


class Misnamed(Zeros):
    name = "ones"


def not_a_backend():
    return 3


@pytest.fixture
def install(monkeypatch):
    """Installs objects of this file as entry points, by name."""

    def installed(**objects):
        points = [
            EntryPoint(name, f"{__name__}:{value}", third_party.GROUP)
            for name, value in objects.items()
        ]
        monkeypatch.setattr(third_party, "entry_points", lambda group: points)
        monkeypatch.setattr(EntryPoint, "load", lambda point: globals()[point.attr])
        backends.backends.cache_clear()

    yield installed
    backends.backends.cache_clear()


def test_an_installed_backend_runs_when_named(layers, install):
    install(zeros="Zeros")
    layer = layers.make()
    assert not FusedExperts(layer.weights, backend="zeros")(*layer.call).any()
    assert FusedExperts(layer.weights)(*layer.call).any()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("gone", "Missing", "cannot be loaded from .*: KeyError"),
        ("three", "not_a_backend", "is no moequant.runtime.backends.Backend"),
        ("twos", "Misnamed", "calls itself 'ones'; both names must be one"),
        ("torch_reference", "Zeros", "its name is a backend's of moequant"),
    ],
)
def test_one_that_cannot_be_used_is_listed_with_its_reason(layers, install, name, value, reason):
    install(**{name: value})
    layer = layers.make()
    with pytest.raises(UnsupportedError, match=rf"{name}.*{reason}"):
        FusedExperts(layer.weights, backend="nothing")
    assert FusedExperts(layer.weights, backend="torch_reference")(*layer.call).any()
