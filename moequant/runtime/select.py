"""Choose a backend, or say why none will do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.errors import UnsupportedError
from moequant.runtime.backends import REGISTRY

if TYPE_CHECKING:
    from moequant.runtime.backends import Backend, Problem


def select(problem: Problem, backend: str | None = None) -> Backend:
    """The backend called `backend`, or else the best that runs `problem` on its device unasked.

    Raises:
        UnsupportedError: there is none; lists every backend with its reason.
    """
    if backend is None:
        for candidate in REGISTRY.values():
            if _reason(candidate, problem) is None:
                return candidate
    elif backend in REGISTRY and REGISTRY[backend].supports(problem) is None:
        return REGISTRY[backend]
    raise UnsupportedError(_refusal(problem, backend))


def _reason(backend: Backend, problem: Problem) -> str | None:
    """Why `backend` is not chosen for `problem` unasked; None where it may be."""
    reason = backend.supports(problem)
    if reason is None and problem.device.type not in backend.default_on:
        return f'runs on {problem.device.type} only when named, backend="{backend.name}"'
    return reason


def _refusal(problem: Problem, backend: str | None) -> str:
    if backend is None:
        subject = "no backend runs"
    elif backend in REGISTRY:
        subject = f"backend {backend!r} does not run"
    else:
        subject = f"there is no backend {backend!r} to run"
    reasons = [f"{b.name}: {_reason(b, problem) or 'runs it'}" for b in REGISTRY.values()]
    return (
        f"{subject} {problem.format} with activations {problem.activations}, "
        f"E {problem.experts}, H {problem.hidden}, I {problem.intermediate} "
        f"on {problem.device}. {'; '.join(reasons)}"
    )
