"""One batch of tokens per expert, and back: prepare and finalize around batched experts.

Expert e has C places. The first counts[e] hold its token-expert pairs, in token order. On CUDA
nothing here synchronizes with the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from moequant.arguments import check_argument, check_count, check_tensor
from moequant.device import usable_device
from moequant.errors import UnsupportedError
from moequant.runtime.activations import (
    FP8_SCHEMES,
    GROUPS,
    QUANTIZED_DTYPE,
    Activations,
    quantize_activations,
    scale_columns,
)
from moequant.runtime.inputs import HIDDEN_DTYPES
from moequant.runtime.routing import NOWHERE, Routing, permute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.runtime.workload import Workload

OVERFLOW = -2
"""Place of a token-expert pair whose expert has no place left."""


@dataclass(frozen=True, kw_only=True)
class BatchedTokens:
    """Activations of the tokens of each expert, quantized by a scheme.

    Attributes:
        scheme: "none", or one of `moequant.runtime.activations.FP8_SCHEMES`.
        qdata: [E, C, H] float8_e4m3fn, or the activations themselves for "none".
        scale: [E, C, groups] float32, or None for "none".
        counts: [E] int32, at most C; what lies beyond in `qdata` and `scale` can be anything.
    """

    scheme: str
    qdata: Tensor
    scale: Tensor | None
    counts: Tensor


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the token-expert pairs of M tokens are in batches of C rows for each expert.

    Attributes:
        of_pairs: [M, T] int64, e * C + i; NOWHERE for a pair without an expert here, OVERFLOW for
            one without a place left.
        experts: E.
        capacity: C.
    """

    of_pairs: Tensor
    experts: int
    capacity: int


def batch_scheme(activations: str) -> str:
    """The scheme of the tokens in batches for experts that take `activations`.

    Those whose scales are bytes have an order of their own in every GEMM, so the experts quantize
    to them: such batches hold tokens that are not quantized.
    """
    return "none" if activations in GROUPS else activations


def check_batches(
    tokens: BatchedTokens, workload: Workload, names: Mapping[str, str] | None = None
) -> BatchedTokens:
    """Check tokens against the experts that shall run them; on CUDA, limit counts to C.

    Args:
        tokens: what is checked.
        workload: of the experts.
        names: what messages call fields of `tokens`; by default their names.

    Raises:
        UnsupportedError: another E, H, scheme or device than the experts have; dtypes or shapes
            that contradict each other; on a CPU, a count beyond C or below 0.
    """
    if not isinstance(tokens, BatchedTokens):
        raise UnsupportedError(
            f"the tokens are {type(tokens).__name__}, but must be BatchedTokens; prepare_batched "
            "makes them"
        )
    scheme = batch_scheme(workload.activations)
    if tokens.scheme != scheme:
        raise UnsupportedError(
            f"the tokens are in {tokens.scheme}, but experts with activations "
            f'{workload.activations} take batches in {scheme}; prepare_batched(scheme="{scheme}") '
            "makes them"
        )
    called = {field: field for field in ("qdata", "scale", "counts")} | dict(names or {})
    if check_tensor(called["qdata"], tokens.qdata).dim() != 3:
        shape = list(tokens.qdata.shape)
        raise UnsupportedError(f"{called['qdata']} is {shape}, but must be [E, C, H]")
    E, H, C = workload.experts, workload.hidden, tokens.qdata.shape[1]
    groups = scale_columns(tokens.scheme, H)
    needed: dict[str, tuple[tuple[torch.dtype, ...], list[int]]] = {
        "qdata": (HIDDEN_DTYPES if groups is None else (QUANTIZED_DTYPE,), [E, C, H]),
        "counts": ((torch.int32,), [E]),
    }
    if groups is not None:
        needed["scale"] = (torch.float32,), [E, C, groups]
    elif tokens.scale is not None:
        raise UnsupportedError(
            f"{called['scale']} is given, but the scheme none has no scales; leave it out"
        )
    for field, (dtypes, shape) in needed.items():
        tensor: Tensor | None = getattr(tokens, field)
        if tensor is None:
            raise UnsupportedError(f"{called[field]} is None, but {tokens.scheme} needs {shape}")
        _check_field(called[field], tensor, dtypes, shape, workload.device)
    if tokens.counts.device.type == "cpu":
        _check_capacity(called["counts"], tokens.counts, C)
        return tokens
    # Reading them would synchronize with the device.
    return replace(tokens, counts=tokens.counts.clamp(0, C))


def _check_field(
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: list[int],
    device: torch.device,
) -> None:
    check_tensor(name, tensor)
    if list(tensor.shape) != shape or tensor.dtype not in dtypes:
        raise UnsupportedError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, but these experts need "
            f"{' or '.join(map(str, dtypes))} {shape}"
        )
    if tensor.device != device:
        raise UnsupportedError(f"{name} is on {tensor.device}, but the experts are on {device}")


def expert_range(
    global_experts: int, rank: int, ranks: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """The expert_map of rank `rank` of `ranks`, which have equal, consecutive shares of experts.

    Returns:
        [global_experts] int32: index on this rank, or -1.

    Raises:
        UnsupportedError: the ranks cannot share the experts equally, there is no such rank or
            device, or one of the numbers is no whole number.
    """
    global_experts = check_count("global_experts", global_experts)
    ranks, rank = check_count("ranks", ranks, 1), check_count("rank", rank)
    if global_experts % ranks or rank >= ranks:
        raise UnsupportedError(
            f"rank {rank} of {ranks} and {global_experts} experts: the rank must be from 0 to "
            "ranks - 1, and ranks must divide the experts"
        )
    here = global_experts // ranks
    place = usable_device(device)
    local = torch.arange(global_experts, dtype=torch.int32, device=place) - rank * here
    return torch.where((local >= 0) & (local < here), local, NOWHERE)


def largest_batch(routing: Routing, experts: int) -> int:
    """The capacity that `routing` needs: the most tokens of an expert. Synchronizes."""
    if routing.expert.numel() == 0 or experts == 0:
        return 0
    return int(torch.bincount(routing.expert.flatten() + 1, minlength=experts + 1)[1:].max())


def prepare_batched(
    hidden: Tensor,
    routing: Routing,
    *,
    experts: int,
    capacity: int,
    scheme: str,
    static_scale: Tensor | None = None,
) -> tuple[BatchedTokens, Places]:
    """Quantize each token once, and copy it to the batches of its experts.

    Args:
        hidden: [M, H] bfloat16, float16 or float32.
        routing: the experts here of the M tokens.
        experts: E.
        capacity: C; `largest_batch`, or M, which is enough where no token has an expert twice.
        scheme: how to quantize, "none" or one of FP8_SCHEMES: `batch_scheme` of the experts'.
        static_scale: for "fp8_static", the scale, [1] float32, positive and finite: checked on a
            CPU.

    Returns:
        The tokens, and where they are. On CUDA, a token with a pair that has no place left is made
        NaN by `finalize_batched`, because an error would need a synchronization.

    Raises:
        UnsupportedError: elsewhere, an expert with more than `capacity` tokens, which is named; no
            scheme is called that, one that has no batches, or "fp8_static" without a scale; an
            argument of another kind, dtype or shape.
    """
    check_argument("hidden", hidden, HIDDEN_DTYPES, "[M, H]")
    _check_static_scale(static_scale)
    x = quantize_activations(hidden, scheme, static_scale=static_scale)
    return lay_out(x, routing, experts=experts, capacity=capacity)


def lay_out(
    x: Activations, routing: Routing, *, experts: int, capacity: int
) -> tuple[BatchedTokens, Places]:
    """The same for M tokens that are already quantized, or stay unquantized.

    Raises:
        UnsupportedError: as `prepare_batched`, or a scheme whose scales are bytes.
    """
    if x.scheme in GROUPS:
        raise UnsupportedError(
            f"there are no batches of tokens in {x.scheme}; quantize them by one of: "
            f"{', '.join(FP8_SCHEMES)}; in batches by none, the experts do"
        )
    experts, capacity = check_count("experts", experts), check_count("capacity", capacity)
    _check_routing(routing)
    _check_routing_of(routing, x.qdata, experts)
    permutation = permute(routing, experts)
    begin, end = permutation.offsets[:-1], permutation.offsets[1:]
    here = routing.expert != NOWHERE
    expert = routing.expert.clamp(min=0)
    order = permutation.row - begin[expert] if experts else permutation.row
    if x.qdata.device.type == "cpu":
        _check_capacity("counts", end - begin, capacity)
    places = torch.where(order < capacity, expert * capacity + order, OVERFLOW)
    places = torch.where(here, places, NOWHERE)

    # Token-expert pairs without a place go to an extra last row, which is never read.
    rows = experts * capacity
    target = torch.where(places >= 0, places, rows).flatten()
    token = torch.arange(x.qdata.shape[0], device=x.qdata.device)
    token = token.repeat_interleave(routing.expert.shape[1], output_size=target.shape[0])

    def laid_out(part: Tensor) -> Tensor:
        batch = part.new_empty(rows + 1, part.shape[1])
        batch[target] = part[token]
        return batch[:rows].reshape(experts, capacity, part.shape[1])

    if x.scale is None:
        qdata = laid_out(x.qdata)
    else:  # codes as bytes: index operations do not know float8
        qdata = laid_out(x.qdata.view(torch.uint8)).view(x.qdata.dtype)
    tokens = BatchedTokens(
        scheme=x.scheme,
        qdata=qdata,
        scale=None if x.scale is None else laid_out(x.scale),
        counts=(end - begin).clamp(max=capacity).int(),
    )
    return tokens, Places(of_pairs=places, experts=experts, capacity=capacity)


def finalize_batched(rows: Tensor, routing: Routing, places: Places) -> Tensor:
    """Weight the experts' results and add them up for each token, in float32, in routing order.

    Args:
        rows: [E, C, H] float32 or bfloat16; rows at unused places are ignored.
        routing: the weights.
        places: as `prepare_batched` gives them.

    Returns:
        [M, H] float32; NaN for a token with a pair that had no place.

    Raises:
        UnsupportedError: the places are of batches of other experts, another capacity or another
            routing; an argument of another kind, dtype, number of dimensions or device.
    """
    if not isinstance(places, Places):
        raise UnsupportedError(
            f"places is {type(places).__name__}, but must be Places; prepare_batched makes them"
        )
    _check_routing(routing)
    device = places.of_pairs.device
    check_argument("rows", rows, (torch.float32, torch.bfloat16), "[E, C, H]")
    if rows.device != device or routing.expert.device != device:
        raise UnsupportedError(
            f"rows is on {rows.device}, the routing on {routing.expert.device} and the places on "
            f"{device}; move them to one device"
        )
    if rows.shape[:2] != (places.experts, places.capacity):
        raise UnsupportedError(
            f"rows is {list(rows.shape)}, [E, C, H], but the places are of batches of E = "
            f"{places.experts} and C = {places.capacity}; prepare the batches with "
            f"experts={rows.shape[0]} and capacity={rows.shape[1]}"
        )
    if routing.expert.shape != places.of_pairs.shape:
        raise UnsupportedError(
            f"the places are of {list(places.of_pairs.shape)} token-expert pairs, but the routing "
            f"of {list(routing.expert.shape)}; give that which the batches were prepared with"
        )
    M, T = places.of_pairs.shape
    flat = rows.reshape(-1, rows.shape[2])
    result = torch.zeros(M, rows.shape[2], dtype=torch.float32, device=rows.device)
    if not flat.shape[0]:
        lost = (places.of_pairs == OVERFLOW).any(1, keepdim=True)
        return result.masked_fill(lost, torch.nan)
    for t in range(T):
        place = places.of_pairs[:, t, None]
        y = flat[place.flatten().clamp(min=0)].float()
        y = torch.where(place == OVERFLOW, torch.nan, torch.where(place == NOWHERE, 0.0, y))
        result += routing.weight[:, t, None] * y
    return result


def _check_static_scale(scale: Tensor | None) -> None:
    if scale is None:
        return
    check_argument("static_scale", scale, (torch.float32,), "[1]")
    if scale.shape[0] != 1:
        raise UnsupportedError(f"static_scale is {list(scale.shape)}, but must be [1]")
    if scale.device.type == "cpu" and not 0 < scale.item() < torch.inf:
        raise UnsupportedError(
            f"static_scale is {scale.item():g}, but must be positive and finite; calibrate again"
        )


def _check_routing(routing: Routing) -> None:
    if not isinstance(routing, Routing):
        raise UnsupportedError(
            f"routing is {type(routing).__name__}, but must be what "
            "moequant.runtime.routing.route returns"
        )


def _check_routing_of(routing: Routing, tokens: Tensor, experts: int) -> None:
    if routing.expert.device != tokens.device:
        raise UnsupportedError(
            f"the routing is on {routing.expert.device}, but the tokens are on {tokens.device}; "
            "move it there"
        )
    if routing.expert.shape[0] != tokens.shape[0]:
        raise UnsupportedError(
            f"the routing is of {routing.expert.shape[0]} tokens, but {tokens.shape[0]} were "
            "given; route the same tokens"
        )
    if routing.expert.device.type == "cpu" and (routing.expert >= experts).any():
        raise UnsupportedError(
            f"the routing has expert {int(routing.expert.max())}, but experts is {experts}; give "
            "the number that route was given"
        )


def _check_capacity(name: str, counts: Tensor, capacity: int) -> None:
    if (counts < 0).any():
        raise UnsupportedError(f"{name} has {int(counts.min())}, but must be at least 0")
    over = counts > capacity
    if over.any():
        expert = int(over.nonzero()[0])
        raise UnsupportedError(
            f"expert {expert} has {int(counts[expert])} tokens, but the capacity is {capacity}; "
            "raise it: the number of tokens is enough unless a token has an expert twice"
        )
