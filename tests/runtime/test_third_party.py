"""Backends of other packages, found by their entry points."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
import torch
from click.testing import CliRunner

from moequant.cli import cli
from moequant.errors import UnsupportedError
from moequant.runtime import FusedExperts, backends
from moequant.runtime.backends import Backend, StandardExperts, third_party
from moequant.runtime.packing import workload_of
from moequant.runtime.select import select


class ZeroExperts(StandardExperts):
    def run_sorted(self, activations, permutation):
        return torch.zeros(permutation.token.shape[0], self.workload.hidden)


class Zeros(Backend):
    name = "zeros"
    default_on = ()
    experts = ZeroExperts

    def supports(self, workload):
        return None


class Misnamed(Zeros):
    name = "ones"


def not_a_backend():
    return 3


class Nameless(Backend):
    supports = load = None


class WithoutExperts(Backend):
    name = "without_experts"
    default_on = ()

    def supports(self, workload):
        return None


class SaysNothing(Backend):
    name = "mute"
    default_on = ()


class ByDefaultNowhere(Zeros):
    name = "nowhere"
    default_on = None


class Undecided(Zeros):
    name = "undecided"
    default_on = ("cpu",)

    def supports(self, workload):
        raise RuntimeError("driver is gone")


def nothing_runs(weights):
    """A workload that every backend refuses, so that the error has the reason of each."""
    return replace(workload_of(weights, "none"), activations="no_such_scheme")


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
        ("three", "not_a_backend", "makes no Backend"),
        (
            "without_experts",
            "WithoutExperts",
            "WithoutExperts has no experts, which says what runs them",
        ),
        ("mute", "SaysNothing", "cannot be loaded from .*: TypeError"),
        ("twos", "Misnamed", "calls itself 'ones'; both names must be one"),
        ("name", "Nameless", "calls itself None; both names must be one"),
        ("nowhere", "ByDefaultNowhere", "has default_on None; it must be a tuple"),
        ("torch_reference", "Zeros", "another backend has this name"),
        ("undecided", "Undecided", r"cannot say whether it runs this: RuntimeError\('driver is"),
    ],
)
def test_a_backend_that_cannot_be_used_is_listed_with_its_reason(
    layers, install, name, value, reason
):
    install(**{name: value})
    layer = layers.make()
    with pytest.raises(UnsupportedError, match=rf"{name}.*{reason}"):
        select(nothing_runs(layer.weights))
    assert FusedExperts(layer.weights, backend="torch_reference")(*layer.call).any()


def test_of_two_backends_with_the_same_name_the_first_is_used(layers, install, monkeypatch):
    points = [EntryPoint("zeros", f"{__name__}:{c}", third_party.GROUP) for c in ("Zeros", "Other")]
    install()
    monkeypatch.setattr(third_party, "entry_points", lambda group: points)
    assert isinstance(backends.backends()["zeros"], Zeros)
    with pytest.raises(
        UnsupportedError, match=r"zeros \(.*:Other\): another backend has this name"
    ):
        select(nothing_runs(layers.make().weights))


def test_moequant_formats_lists_a_backend_that_fails(install):
    install(undecided="Undecided")
    shown = CliRunner().invoke(cli, ["formats", "--backends"])
    assert shown.exit_code == 0
    assert "no: cannot say whether it runs this: RuntimeError('driver is gone')" in shown.stdout
