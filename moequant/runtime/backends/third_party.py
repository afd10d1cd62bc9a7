"""Backends of other packages: entry points of the group "moequant.backends".

    [project.entry-points."moequant.backends"]
    my_kernels = "my_package.backend:MyBackend"

The name of the entry point is the name of the backend; the object is a subclass of
`moequant.runtime.backends.Backend` that takes no arguments. These backends come after ours, in the
order of their names. Their experts count as compiling kernels unless their class says `compiles =
False`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from moequant.runtime.backends.base import Backend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from moequant.runtime.workload import Workload

GROUP = "moequant.backends"


class Unavailable(Backend):
    """In place of a backend that could not be loaded; says why."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name  # type: ignore[misc]
        self.reason = reason

    def supports(self, workload: Workload) -> str | None:
        """Never does."""
        return self.reason


def load_third_party(taken: frozenset[str]) -> dict[str, Backend]:
    """The backends that installed packages offer; `taken` are names that are ours."""
    loaded: dict[str, Backend] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        backend = _load(point, taken | loaded.keys())
        loaded[backend.name] = backend
    return loaded


def _load(point: EntryPoint, taken: frozenset[str]) -> Backend:
    if point.name in taken:
        return Unavailable(f"{point.name} ({point.value})", "another backend has this name")
    # Another package's code: whatever it raises is that backend's reason, not ours to end with.
    try:
        backend = point.load()()
    except Exception as error:
        return Unavailable(point.name, f"cannot be loaded from {point.value}: {error!r}")
    if not isinstance(backend, Backend):
        return Unavailable(point.name, f"{point.value} makes no Backend")
    name, default_on = (getattr(backend, field, None) for field in ("name", "default_on"))
    if name != point.name:
        return Unavailable(
            point.name, f"{point.value} calls itself {name!r}; both names must be one"
        )
    if not hasattr(backend, "experts") and type(backend).load is Backend.load:
        return Unavailable(point.name, f"{point.value} has no experts, which says what runs them")
    if not isinstance(default_on, tuple):
        return Unavailable(
            point.name, f"{point.value} has default_on {default_on!r}; it must be a tuple"
        )
    return backend
