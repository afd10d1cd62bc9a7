"""Which layout the default backend of a target reads, for each format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.errors import UnsupportedError
from moequant.formats import get_format
from moequant.runtime.backends import REGISTRY, TARGETS
from moequant.runtime.prepared import expected

if TYPE_CHECKING:
    from moequant.act_fn import ActFn
    from moequant.models import MoeConfig
    from moequant.runtime.backends import Backend, Layout


def layout_for(moe: MoeConfig, format: str, target: str, *, act_fn: ActFn) -> Layout:
    """The layout of the first backend that serves `target` and packs experts of these sizes.

    Raises:
        UnsupportedError: no such format, no such target, or no backend there takes the format in
            these sizes; says why.
    """
    reasons = []
    for backend in backends_for(format, target):
        try:
            expected(backend.layout, moe, format, act_fn=act_fn, biased=False)
        except UnsupportedError as error:
            reasons.append(f"{backend.name}: {error}")
            continue
        return backend.layout
    able = [t for t in TARGETS if backends_for(format, t)]
    raise UnsupportedError(
        f"no backend on {target} reads prepared experts in {format}"
        f"{''.join(f'; {reason}' for reason in reasons)}; it can be prepared for "
        f"{' and '.join(able) or 'no target'}"
    )


def backends_for(format: str, target: str) -> list[Backend]:
    """The backends that serve `target` in `format`, best first.

    Raises:
        UnsupportedError: no such format, or no such target.
    """
    get_format(format)
    if target not in TARGETS:
        raise UnsupportedError(f"unknown target {target!r}; use one of: {', '.join(TARGETS)}")
    return [b for b in REGISTRY.values() if format in b.serves(target)]
