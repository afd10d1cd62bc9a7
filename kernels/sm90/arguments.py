"""Arguments that the grouped GEMMs for SM90 share, as C structures."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.act_fn import ActFn

ROUTED_SLOTS = 32
"""Up to so many token-expert pairs, the first GEMM of a call finds its tiles by itself."""

ACT_FNS = ("silu", "gelu", "gelu_tanh", "swigluoai", "relu2", "swiglustep", "situ")
"""The activation functions in the order of the macro ACT, see activation.cuh."""


class ActArguments(ctypes.Structure):
    """The numbers of an activation function."""

    _fields_ = tuple((name, ctypes.c_float) for name in ("alpha", "limit", "beta", "linear_beta"))

    @classmethod
    def of(cls, act_fn: ActFn) -> ActArguments:
        """Those of `act_fn`; 0 for those it does not have."""
        return cls(act_fn.alpha, act_fn.limit or 0.0, act_fn.beta, act_fn.linear_beta or 0.0)


class RoutingArguments(ctypes.Structure):
    """The routing of a call, for a kernel that finds its tiles by itself; see routing.cuh."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("expert_map", ctypes.c_void_p),
        ("slots", ctypes.c_int),
        ("experts", ctypes.c_int),
        ("map_size", ctypes.c_int),
        ("wide_ids", ctypes.c_int),
        ("wide_map", ctypes.c_int),
    )

    def route(self, topk_ids: Tensor, expert_map: Tensor | None) -> None:
        """Point to the ids and the map of the next call, contiguous int32 or int64."""
        self.ids = topk_ids.data_ptr()
        self.slots = topk_ids.numel()
        self.wide_ids = int(topk_ids.dtype == torch.int64)
        self.map_size = -1
        if expert_map is not None:
            self.expert_map = expert_map.data_ptr()
            self.map_size = expert_map.shape[0]
            self.wide_map = int(expert_map.dtype == torch.int64)


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """The address of a tensor; null for None."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())
