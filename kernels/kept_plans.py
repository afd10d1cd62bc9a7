"""What runs calls of one size in one workspace, made once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import ref

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import Tensor

Plan = TypeVar("Plan")

_MOST = 64


class KeptPlans(Generic[Plan]):
    """Plans, each kept for as long as calls of its size have the same workspace.

    Several threads may ask at once, each with a workspace of its own. Plans hold addresses, so a
    copy has none.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, int], tuple[ref[Tensor], Plan]] = {}

    def get(self, size: Hashable, workspace: Tensor, make: Callable[[], Plan]) -> Plan:
        """The plan of `size` in `workspace`.

        Args:
            size: of the call, with all else that its plan depends on.
            workspace: where the plan's buffers are.
            make: makes it, if there is none or the workspace is at another address.
        """
        key = (size, workspace.data_ptr())
        kept = self._kept
        found = kept.get(key)
        if found is not None:
            return found[1]
        plan = make()
        capturing = workspace.is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing:  # else the workspace is the graph's own
            # A copy, and pop: another thread may be at the same.
            for old, (other, _) in list(kept.items()):
                if other() is None or len(kept) >= _MOST:
                    kept.pop(old, None)
            kept[key] = ref(workspace), plan
        return plan

    def __reduce__(self) -> tuple[type[KeptPlans[Plan]], tuple[()]]:
        return KeptPlans, ()
