"""Humming's experts: the package humming-kernels, Apache-2.0, which vLLM has as a backend.

A call is

    sort          our kernel, in place of vLLM's permutation
    quantize      each token, copied to the rows of its experts
    gate and up   Humming's grouped GEMM, rows in the order of their experts
    activation    and quantization, in one launch that the package has and vLLM does not use
    down          the GEMM again
    reduce        our kernel, in place of vLLM's

The GEMMs are called as vLLM's HummingGroupedExperts calls them, its choice on Hopper, with the tile
shapes that Humming's own rules choose. Names and arguments were read in the sources of version
0.1.19. MXFP4 with activations in FP8 was run on an H200, the other pairs were not.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from moequant.act_fn import SILU
from moequant.errors import UnsupportedError
from moequant.formats import CONVERTIBLE, get_format
from moequant.kernels.calls import MAX_PAIRS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.formats import QuantizedWeight
    from moequant.runtime import ExpertWeights

PACKAGE, VERSION = "humming-kernels", "0.1.19"

_WEIGHTS: dict[tuple[str, torch.dtype], dict[str, Any]] = {
    ("int4", torch.bfloat16): {"dtype": "int4", "group_size": 128},
    ("e2m1", torch.float8_e8m0fnu): {
        "dtype": "float4e2m1",
        "scale_dtype": "float8e8m0",
        "group_size": 32,
    },
    ("e2m1", torch.float8_e4m3fn): {
        "dtype": "float4e2m1",
        "scale_dtype": "float8e4m3",
        "group_size": 16,
        "scale_2_type": "tensor",
    },
}
"""By the element of codes and the dtype of scales."""
_INPUTS = {"fp8_token": {"dtype": "float8e4m3"}, "none": {"dtype": "bfloat16"}}
_RUNS = {
    ("int4", torch.bfloat16): ["fp8_token"],
    ("e2m1", torch.float8_e8m0fnu): ["fp8_token", "none"],
    ("e2m1", torch.float8_e4m3fn): ["none"],
}
"""Schemes of activations, likewise."""
_COMPUTE = json.dumps({"gemm_type": "grouped_contiguous"})
_OFFSET = 0x88
"""Flips the sign of two's complement nibbles: Humming's integers are codes + 8."""
_TILE_ROWS = 64
"""Of a work list that our sort makes and nothing here reads."""


def humming(weights: ExpertWeights, scheme: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The experts in Humming's layout, called as experts(hidden, topk_weights, ids).

    Args:
        weights: the experts, on a CUDA device.
        scheme: of `moequant.runtime.activations`.

    Raises:
        UnsupportedError: weights, activations or a function that it is not timed with, or it is not
            installed.
    """
    if scheme not in _RUNS.get(_stored_as(weights.format), ()):
        pairs = ", ".join(
            f"{name} with {one}" for name in CONVERTIBLE for one in _RUNS.get(_stored_as(name), ())
        )
        raise UnsupportedError(
            f"humming is timed with weights and activations of {pairs}, not with {weights.format} "
            f"and {scheme}"
        )
    activation = _activation(weights.act_fn)
    _check_installed()
    from humming.forward import may_process_input  # type: ignore[import-not-found]

    from moequant.kernels.routing import Grouping, SortedRouting, sort_routing
    from moequant.kernels.weighted_reduce import weighted_reduce

    try:
        gate_up = _layer(_of(weights, "gate", "up"), _biases(weights, "gate", "up"), scheme)
        down = _layer(_of(weights, "down"), _biases(weights, "down"), scheme)
    # AssertionError and ValueError too: it checks its arguments so.
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UnsupportedError(f"humming does not pack these weights: {error!r}") from error
    E, device = weights.experts, weights.device
    grouping = Grouping(experts=E, tile_rows=_TILE_ROWS)

    @cache
    def room(pairs: int) -> tuple[SortedRouting, Tensor]:
        # Where the rows of each expert begin, and the last end, as Humming reads them.
        layout = torch.zeros(E + 1, dtype=torch.int32, device=device)
        empty = partial(torch.empty, device=device)
        routing = SortedRouting.allocate(pairs, grouping, empty=empty)
        return replace(routing, row_end=layout[1:]), layout

    def run(hidden: Tensor, topk_weights: Tensor, ids: Tensor) -> Tensor:
        if ids.numel() > MAX_PAIRS:
            raise UnsupportedError(
                f"humming is timed with at most {MAX_PAIRS} token-expert pairs, not {ids.numel()}"
            )
        routing, layout = room(ids.numel())
        sort_routing(ids, routing, grouping)
        x, _, scale = may_process_input(
            gate_up.humming_config,
            hidden,
            layout="scatter",
            scatter_idx=routing.row_of_pair.view(ids.shape),
        )
        rows = gate_up(x, input_scale=scale, expert_layout=layout, compute_config=_COMPUTE)
        x, _, scale = may_process_input(
            down.humming_config,
            rows,
            activation_type="binary_split",
            activation_impl=activation,
        )
        rows = down(x, input_scale=scale, expert_layout=layout, compute_config=_COMPUTE)
        out = torch.empty_like(hidden)
        weighted_reduce(rows, routing.row_of_pair, topk_weights, out)
        return out

    return run


def _check_installed() -> None:
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        raise UnsupportedError(
            f"humming is not installed; pip install {PACKAGE}=={VERSION}"
        ) from None
    if found != VERSION:
        raise UnsupportedError(
            f"{PACKAGE} {found} is installed, but it is called as {VERSION}; "
            f"pip install {PACKAGE}=={VERSION}"
        )


def _activation(act_fn: ActFn) -> str:
    """The function of a = gate and b = up, as an expression in CUDA C++."""
    if act_fn == SILU:
        return "a / (1.0f + expf(-a)) * b"
    if act_fn.name != "swigluoai" or not act_fn.gated or act_fn.limit is None:
        raise UnsupportedError(f"humming is timed with gated silu and swigluoai, not {act_fn}")
    limit, alpha, beta = (f"({float(x)!r}f)" for x in (act_fn.limit, act_fn.alpha, act_fn.beta))
    gate, up = f"fminf(a, {limit})", f"fminf(fmaxf(b, -{limit}), {limit})"
    return f"{gate} / (1.0f + expf(-{alpha} * {gate})) * ({up} + {beta})"


def _of(weights: ExpertWeights, *names: str) -> list[QuantizedWeight]:
    parts = weights.projections()
    return [parts[name] for name in names]


def _biases(weights: ExpertWeights, *names: str) -> Tensor | None:
    """The biases of a layer, bfloat16 [E, N]; zeros for a projection that has none beside others'.

    None where no projection of it has one.
    """
    biases = weights.biases()
    if not any(f"{name}_bias" in biases for name in names):
        return None
    rows = [q.shape[1] for q in _of(weights, *names)]
    return torch.cat(
        [
            biases.get(f"{name}_bias", torch.zeros(weights.experts, N, device=weights.device))
            for name, N in zip(names, rows, strict=True)
        ],
        1,
    ).bfloat16()


def _layer(parts: Sequence[QuantizedWeight], bias: Tensor | None, scheme: str) -> Any:
    """A HummingLayer of `parts`, one below the other."""
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    first = parts[0]
    E, _, K = first.shape
    tensors = _tensors(parts)
    if bias is not None:
        tensors["bias"] = bias
    with torch.device(first.qdata.device):
        layer = HummingLayer(
            shape_n=sum(part.shape[1] for part in parts),
            shape_k=K,
            weight_config=dict(_WEIGHTS[_stored_as(first.format)]),
            input_config=dict(_INPUTS[scheme]),
            # As vLLM pads.
            pad_n_to_multiple=256,
            pad_k_to_multiple=128,
            num_experts=E,
            has_bias=bias is not None,
            torch_dtype=torch.bfloat16,
        )
    missing = set(dict(layer.named_parameters())) ^ set(tensors)
    if missing:
        raise ValueError(f"its parameters are others: {sorted(missing)}")
    layer.load_from_tensors(tensors)
    layer.transform()
    return layer


def _stored_as(format: str) -> tuple[str, torch.dtype]:
    fmt = get_format(format)
    return fmt.element.name, fmt.scale_dtype


def _tensors(parts: Sequence[QuantizedWeight]) -> dict[str, Tensor]:
    """Codes int32 [E, N, K / 8], scale [E, N, groups] and, of nvfp4, global scales [E]."""
    codes = torch.cat([part.qdata for part in parts], 1)
    if get_format(parts[0].format).element.name == "int4":
        codes ^= _OFFSET
    tensors = {
        "weight": codes.view(torch.int32),
        "weight_scale": torch.cat([part.scale.view(torch.uint8) for part in parts], 1).view(
            parts[0].scale.dtype
        ),
    }
    scales = [part.global_scale for part in parts if part.global_scale is not None]
    if scales:
        if any(not torch.equal(scale, scales[0]) for scale in scales):
            raise ValueError("gate and up have other global scales")
        tensors["weight_scale_2"] = scales[0].float()
    return tensors
