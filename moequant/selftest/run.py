"""The self-test: which backends and schemes run on a device, and whether they compute the experts.

`torch_reference` on the CPU gets the same weights and calls. `moequant verify` compares it with an
independent evaluation, and `moequant.verification.serving` derives how far a backend may be off.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from moequant._version import __version__
from moequant.cores import available_cores
from moequant.device import usable_device
from moequant.errors import UnsupportedError, unknown_name
from moequant.formats import RUNNABLE, get_format
from moequant.progress import SilentProgress
from moequant.runtime import FusedExperts
from moequant.runtime.activations import FP8_TENSOR, GROUPS, NVFP4_STATIC
from moequant.runtime.backends import TARGETS, Workload, backends
from moequant.runtime.packing import scheme_of
from moequant.runtime.select import why_not
from moequant.selftest.layers import VARIANTS, Variant, calls_of, random_layer, variants_of
from moequant.selftest.pool import Died, run_apart
from moequant.verification.serving import most_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from moequant.progress import Progress
    from moequant.runtime import ExpertWeights
    from moequant.runtime.backends import Backend
    from moequant.selftest.layers import Call, LayerSizes

REFERENCE = "torch_reference"
_COMPARED_WITH = "on a CPU it is what the others are compared with"
_CPU = torch.device("cpu")
_PROCESSES = 8
"""On a GPU, unless there are fewer cores: almost all of a first run is compilation."""
_CASE_LIMIT_S = 120
"""Of a case in a process of its own: thirty times the mean on an H200 with 16 cores, compilation
included, as there are machines with fewer. Past it, a kernel is taken to hang."""


@dataclass(frozen=True, kw_only=True)
class _Scheme:
    """What activations are quantized to.

    Attributes:
        name: one of `moequant.runtime.activations.SCHEMES`.
        option: what `FusedExperts` calls it.
        static: whether static scales come with the weights.
    """

    name: str
    option: Any
    static: bool = False

    def limit(self, tokens: int) -> float:
        """The limit on ||y - reference|| / ||reference|| of a call."""
        return most_error(self.name, tokens=tokens)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """What makes a row: a backend by its name, with a format and a scheme, on a device."""

    backend: str
    format: str
    scheme: _Scheme
    place: torch.device

    def row(self) -> _Row:
        """The row, before anything ran."""
        return _Row(
            backend=self.backend,
            format=self.format,
            activations=self.scheme.name,
            limit=self.scheme.limit(tokens=2),
        )


@dataclass(kw_only=True)
class _Row:
    """What was found of a backend with a format and a scheme.

    Attributes:
        backend: its name.
        format: of the weights.
        activations: name of the scheme.
        limit: see `_Scheme.limit`; that of the call whose error is `error`.
        calls: how many calls ran.
        error: ||y - reference|| / ||reference|| of the call that came nearest to its limit.
        failures: what is wrong; empty if nothing is.
        skipped: reasons why a kind of layer was not run, by its name.
    """

    backend: str
    format: str
    activations: str
    limit: float
    calls: int = 0
    error: float = 0.0
    failures: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def selftest(
    device: torch.device | str = "cuda",
    *,
    backend: str | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run the backends that serve a device, with every format and scheme, on small layers.

    Each call runs twice, into an output of NaN and with scratch memory whose bytes are 255, and
    must give the same bits.

    Args:
        device: where to run.
        backend: name of the one to run; by default all.
        processes: how many run them side by side; 1 for this one. By default as many as there are
            cores, up to 8, on a GPU; else 1. One that ends with a case fails that case alone, and
            one that is still at a case after two minutes is ended. A script that starts several
            calls this under `if __name__ == "__main__"`.
        progress: told of every backend, format and scheme.

    Returns:
        A JSON document: versions of `moequant`, `python`, `torch`, `cuda`, `triton`, `cutlass_dsl`
        and `deep_gemm` (null where there is none), `device` and its `gpu` and `compute_capability`
        (null on a CPU), `ok`, `seconds`, `rows` of what ran, with the attributes of a row,
        `not_run`: reasons of backends that run nothing there, by name, and `never_run`: names of
        those that no GPU had run before.

    Raises:
        UnsupportedError: no such device or backend here, the reference itself, or the device is
            "meta".
    """
    place = usable_device(device)
    if place.type == "meta":
        raise UnsupportedError(
            "device meta holds no numbers, so there is nothing to compare; name another, such as "
            "cuda or cpu"
        )
    chosen = _backends(backend, place)
    report = progress or SilentProgress()
    started = time.monotonic()
    cases: list[_Case] = []
    not_run: dict[str, str] = {}
    for one in chosen:
        runs, reason = _cases_of(one, place)
        cases += runs
        if not runs:
            not_run[one.name] = reason
    if backend is None and place.type == "cpu":
        not_run[REFERENCE] = _COMPARED_WITH
    if processes is None:
        processes = min(_PROCESSES, available_cores()) if place.type == "cuda" else 1
    report.start("self-test", len(cases), unit="cases")
    found: dict[int, _Row] = {}
    for position, row in _run_all(cases, processes):
        found[position] = row
        report.advance(1, f"{row.backend}, {row.format} x {row.activations}")
    rows = [found[position] for position in sorted(found)]
    report.finish()
    return {
        **_versions(place),
        "ok": bool(rows) and not any(row.failures for row in rows),
        "seconds": round(time.monotonic() - started, 1),
        "rows": [dict(vars(row)) for row in rows],
        "not_run": not_run,
        "never_run": [one.name for one in chosen if one.never_run],
    }


def _backends(name: str | None, place: torch.device) -> list[Backend]:
    known = backends()
    if name is not None and name not in known:
        raise UnsupportedError(unknown_name("backend", name, known))
    if name == REFERENCE and place.type == "cpu":
        raise UnsupportedError(
            f"{REFERENCE}: {_COMPARED_WITH}; name another backend, or another device"
        )
    chosen = [known[name]] if name is not None else list(known.values())
    # On the CPU it would be compared with itself.
    return [one for one in chosen if one.name != REFERENCE or place.type != "cpu"]


def _cases_of(backend: Backend, place: torch.device) -> tuple[list[_Case], str]:
    """What a backend runs; and if that is nothing, why: best by what the device lacks."""
    runs: list[_Case] = []
    reasons: dict[str, None] = {}
    reasons_of_served: dict[str, None] = {}
    reasons_of_device: dict[str, None] = {}
    elsewhere = torch.device("cpu" if place.type != "cpu" else "cuda")
    for format, scheme in _schemes():
        reason = _why_not_any(backend, format, scheme, place)
        if reason is None:
            runs.append(_Case(backend=backend.name, format=format, scheme=scheme, place=place))
        else:
            reasons[reason] = None
            if _is_served(format, scheme.name, [backend]):
                reasons_of_served[reason] = None
            # What is about the layer, it says of any device.
            if reason != _why_not_any(backend, format, scheme, elsewhere):
                reasons_of_device[reason] = None
    return runs, "; ".join(reasons_of_device or reasons_of_served or reasons)


def _is_served(format: str, scheme: str, by: Iterable[Backend]) -> bool:
    """Whether a backend is for weights in `format` with such activations, on some GPU."""
    return any(format in one.serves(target, scheme) for one in by for target in TARGETS)


def _schemes() -> list[tuple[str, _Scheme]]:
    """Every format with every scheme of activations that kernels multiply it by.

    Those with groups of 16 or 32 columns only by weights in the same format, or where a backend is
    for the two.
    """
    found: dict[tuple[str, str], _Scheme] = {}
    for format, static in product(RUNNABLE, (False, True)):
        static_scheme = get_format(format).static_activations
        if static and static_scheme is None:
            continue
        groups = [g for g in GROUPS if g == format or _is_served(format, g, backends().values())]
        for option in (
            "format",
            "none",
            "fp8_token",
            FP8_TENSOR,
            *(g for g in groups if g != NVFP4_STATIC),
        ):
            name = scheme_of(format, option, static=static)
            scheme = _Scheme(name=name, option=option, static=name == static_scheme)
            found.setdefault((format, name), scheme)
    return [(format, scheme) for (format, _), scheme in found.items()]


def _why_not_any(backend: Backend, format: str, scheme: _Scheme, place: torch.device) -> str | None:
    """Why none of the layers runs; None if one does."""
    reasons = [_choose_sizes(backend, format, scheme, v, place)[1] for v in VARIANTS]
    return reasons[0] if all(reasons) else None


def _choose_sizes(
    backend: Backend, format: str, scheme: _Scheme, variant: Variant, place: torch.device
) -> tuple[LayerSizes | None, str]:
    """The first of a variant's sizes that runs; or None, and the reason why the last does not."""
    reason = ""
    for sizes in variant.sizes:
        try:
            for shape in ((sizes.intermediate, sizes.hidden), (sizes.hidden, sizes.intermediate)):
                get_format(format).check_shape(shape)
        except UnsupportedError as error:
            reason = str(error)
            continue
        workload = Workload(
            format=format,
            activations=scheme.name,
            experts=sizes.experts,
            hidden=sizes.hidden,
            intermediate=sizes.intermediate,
            device=place,
            act_fn=variant.act_fn,
            bias=variant.biased,
        )
        why = why_not(backend, workload)
        if why is None:
            return sizes, ""
        reason = why
    return None, reason


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Experts on the CPU, calls, and what the reference gives for them."""

    weights: ExpertWeights
    calls: list[tuple[Call, torch.Tensor]]


class _Layers:
    """The layers of a self-test; several backends run each."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], _Layer] = {}

    def get(self, format: str, scheme: _Scheme, variant: Variant, sizes: LayerSizes) -> _Layer:
        """The layer of these, with more calls if it is the first variant."""
        key = (format, scheme, variant.name, sizes)
        if key not in self._made:
            weights = random_layer(format, variant, sizes, static=scheme.static)
            experts = FusedExperts(weights, backend=REFERENCE, activations=scheme.option)
            calls = []
            for call in calls_of(sizes, many=variant is VARIANTS[0]):
                arguments, named = call.arguments(_CPU)
                calls.append((call, experts(*arguments, **named)))
            self._made[key] = _Layer(weights=weights, calls=calls)
        return self._made[key]


def _run_all(cases: Sequence[_Case], processes: int) -> Iterator[tuple[int, _Row]]:
    """The row of each case with its position, as they come."""
    if processes == 1:
        layers = _Layers()
        yield from enumerate(_run(case, layers) for case in cases)
        return
    for position, result in run_apart(_run_alone, cases, processes, limit_s=_CASE_LIMIT_S):
        if isinstance(result, Died):
            row = cases[position].row()
            what = (
                "ended without a result"
                if result.in_time
                else f"had no result after {_CASE_LIMIT_S} s and was ended; if kernels were being "
                "compiled, run it again, as they are kept"
            )
            row.failures.append(
                f"its process {what}; see what moequant selftest --backend {row.backend} prints"
            )
            yield position, row
        else:
            yield position, result


@cache
def _layers_of_process() -> _Layers:
    return _Layers()


def _run_alone(case: _Case) -> _Row:
    _end_without_device(case.place)
    return _run(case, _layers_of_process())


def _end_without_device(place: torch.device) -> None:
    """End this process if an earlier case made the GPU unusable for it, as an illegal access does.

    `run_apart` then runs the case in another process.
    """
    if place.type == "cuda":
        try:
            torch.cuda.synchronize(place)
        except Exception:  # torch has several classes for it
            os._exit(1)


def _run(case: _Case, layers: _Layers) -> _Row:
    backend, row = backends()[case.backend], case.row()
    format, scheme, place = case.format, case.scheme, case.place
    for variant in variants_of(format):
        sizes, reason = _choose_sizes(backend, format, scheme, variant, place)
        if sizes is None:
            row.skipped[variant.name] = reason
            continue
        layer = layers.get(format, scheme, variant, sizes)
        try:
            there = {n: t.to(place) for n, t in layer.weights.tensors().items()}
            experts = FusedExperts(
                layer.weights.replace(there), backend=backend.name, activations=scheme.option
            )
        except Exception as error:  # a backend of another package may raise any
            row.failures.append(f"{variant.name}: {type(error).__name__}: {error}")
            continue
        for call, wanted in layer.calls:
            what = f"{variant.name}, {call.name}"
            try:
                found, again = _call_twice(experts, call, place)
            except Exception as error:  # a backend of another package may raise any
                row.failures.append(f"{what}: {type(error).__name__}: {error}")
                continue
            row.calls += 1
            _compare(row, what, wanted, found, again, limit=scheme.limit(len(call.hidden)))
    return row


def _call_twice(
    experts: FusedExperts, call: Call, place: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [M, H] bfloat16, on the CPU, of two equal calls on poisoned memory."""
    arguments, named = call.arguments(place)
    size_bytes = experts.workspace_bytes(*call.topk_ids.shape)
    outputs = []
    for _ in range(2):
        out = torch.full_like(arguments[0], torch.nan)
        workspace = torch.full((size_bytes,), 255, dtype=torch.uint8, device=place)
        outputs.append(experts(*arguments, **named, out=out, workspace=workspace).cpu())
    return outputs[0], outputs[1]


def _compare(
    row: _Row,
    what: str,
    wanted: torch.Tensor,
    found: torch.Tensor,
    again: torch.Tensor,
    *,
    limit: float,
) -> None:
    """Add what is wrong with an output to a row."""
    # As bits: a NaN differs from itself, and 0 does not from -0.
    differ = int((found.view(torch.int16) != again.view(torch.int16)).sum())
    if differ:
        row.failures.append(f"{what}: two equal calls differ in {differ} values")
    if not found.isfinite().all():
        row.failures.append(f"{what}: {int((~found.isfinite()).sum())} values are not finite")
        return
    size = float(wanted.double().norm())
    error = float((found.double() - wanted.double()).norm())
    if size and error / size / limit >= row.error / row.limit:
        row.error, row.limit = error / size, limit
    if error > limit * size:
        row.failures.append(
            f"{what}: off from the CPU reference by {error / size if size else error:.2g} in norm, "
            f"where its roundings explain {limit:.2g}"
        )


def _versions(place: torch.device) -> dict[str, Any]:
    """What a report is about."""
    from importlib.metadata import PackageNotFoundError, version

    from moequant.kernels.cutlass.compiled import COMPILER

    def version_of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    is_gpu = place.type == "cuda"
    return {
        "moequant": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version_of("triton"),
        "cutlass_dsl": version_of(COMPILER),
        "deep_gemm": version_of("sgl-deep-gemm"),
        "device": str(place),
        "gpu": torch.cuda.get_device_name(place) if is_gpu else None,
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(place)))
        if is_gpu
        else None,
    }
