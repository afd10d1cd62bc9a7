"""Choose a backend, or give the reasons why none can run a workload."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from moequant.errors import UnsupportedError, unknown_name
from moequant.runtime.activations import ActivationsChoice
from moequant.runtime.backends import REGISTRY, backends
from moequant.units import NEVER_RUN

if TYPE_CHECKING:
    from moequant.runtime.backends import Backend, Layout, Workload


def select(
    workload: Workload, backend: str | None = None, *, layout: Layout | None = None
) -> Backend:
    """The backend called `backend`, or else the best that runs `workload` on its device by default.

    Args:
        workload: what is to be run.
        backend: name of a backend.
        layout: the one that the backend must read; by default any.

    Raises:
        UnsupportedError: there is none. Says why the named backend does not run it, and which do;
            without a name, lists every backend with its reason; of an unknown one, says which
            there are, and the nearest.
    """
    if backend is None:
        for candidate in backends().values():
            if _why_not_default(candidate, workload, layout) is None:
                return candidate
    else:
        named = _named(backend)
        if named is not None and _why_not(named, workload, layout) is None:
            return named
    raise UnsupportedError(_refusal(workload, backend, layout))


def why_not(backend: Backend, workload: Workload) -> str | None:
    """Why `backend` does not run `workload`; None if it does.

    A backend of another package that fails to answer does not run it; the reason says how.
    """
    try:
        return backend.supports(workload)
    except Exception as error:
        if backend.name in REGISTRY:
            raise
        return f"cannot say whether it runs this: {error!r}"


def _named(backend: object) -> Backend | None:
    """The backend of that name; None if there is none, or it is no name."""
    return backends().get(backend) if isinstance(backend, str) else None


def _why_not(backend: Backend, workload: Workload, layout: Layout | None) -> str | None:
    """Why `backend` does not run `workload` from weights in `layout`; None if it does."""
    reason = why_not(backend, workload)
    if reason is None and layout is not None and layout not in backend.layouts:
        read = " or ".join(map(str, backend.layouts))
        return f"reads weights as {read}, but these are {layout}"
    return reason


def _why_not_default(backend: Backend, workload: Workload, layout: Layout | None) -> str | None:
    """Why `backend` is not chosen for `workload` by default; None where it may be."""
    reason = _why_not(backend, workload, layout)
    if reason is None and workload.device.type not in backend.default_on:
        return f'runs on {workload.device.type} only when named, backend="{backend.name}"'
    return reason


def _refusal(workload: Workload, backend: str | None, layout: Layout | None) -> str:
    named = _named(backend)
    if backend is not None and named is None:
        return unknown_name("backend", backend, backends())
    function = f"{workload.act_fn}{' and biases' if workload.bias else ''}"
    asked = (
        f"{workload.format} with activations {workload.activations}, E {workload.experts}, "
        f"H {workload.hidden}, I {workload.intermediate}, {function} on {workload.device}"
    )
    if named is not None:
        lines = [_refusal_of(named, workload, layout, asked)]
    else:
        reasons = {b: _why_not_default(b, workload, layout) for b in backends().values()}
        lines = [f"no backend runs {asked}:"]
        lines += [f"  {b.marked_name}: {reason}" for b, reason in reasons.items()]
    advised = _advised_activations(named, workload, layout)
    if advised is not None:
        quantized = " without quantized activations" if advised == "none" else ""
        lines.append(
            f'activations="{advised}" runs the same weights{quantized}; where a command has it, '
            f"--activations {advised}"
        )
    return "\n".join(lines)


def _advised_activations(
    named: Backend | None, workload: Workload, layout: Layout | None
) -> str | None:
    """What callers can ask for instead so that a backend runs the weights, "none" before others.

    Args:
        named: the backend; None for those that are chosen by default.
        workload: what was asked for.
        layout: see `select`.
    """

    def is_run(asked: Workload) -> bool:
        if named is not None:
            return _why_not(named, asked, layout) is None
        return any(_why_not_default(b, asked, layout) is None for b in backends().values())

    for scheme in get_args(ActivationsChoice):
        if scheme in ("format", workload.activations):
            continue
        if is_run(replace(workload, activations=scheme)):
            return str(scheme)
    return None


def _refusal_of(backend: Backend, workload: Workload, layout: Layout | None, asked: str) -> str:
    """Why the backend that was named does not run what was asked, and which would."""
    running = [b.marked_name for b in backends().values() if _why_not(b, workload, layout) is None]
    instead = f"{', '.join(running)} would run it" if running else "no other backend runs it here"
    reason = _why_not(backend, workload, layout)
    mark = f" ({NEVER_RUN})" if backend.never_run else ""
    return f"backend {backend.name!r}{mark} does not run {asked}: {reason}; {instead}"
