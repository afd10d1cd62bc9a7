"""Merge what was found of weights of the same kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable


class _Mergeable(Protocol):
    @property
    def kind(self) -> Hashable:
        """What must be equal for two of them to be added."""

    def __add__(self, other: Self) -> Self: ...


_Error = TypeVar("_Error", bound=_Mergeable)


def merged_errors(errors: Iterable[_Error]) -> list[_Error]:
    """Errors merged by kind, in order of first appearance."""
    kinds: dict[Hashable, _Error] = {}
    for error in errors:
        before = kinds.get(error.kind)
        kinds[error.kind] = error if before is None else before + error
    return list(kinds.values())
