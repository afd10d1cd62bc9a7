"""Compile kernels ahead of calls.

Kernels compile on first use, which takes some seconds each, and are cached on disk: ours under
MOEQUANT_CACHE_DIR, Triton's under TRITON_CACHE_DIR. A server should compile them before its first
request.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, product
from typing import TYPE_CHECKING, Literal, get_args

import torch

from moequant.arguments import check_count
from moequant.errors import UnsupportedError
from moequant.progress import SilentProgress
from moequant.runtime.call import MAX_TOKENS
from moequant.runtime.load import load_experts, open_reader
from moequant.runtime.routing import ID_DTYPES, WEIGHT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable
    from pathlib import Path

    from moequant.progress import Progress
    from moequant.runtime.activations import ActivationsChoice
    from moequant.runtime.experts import FusedExperts
    from moequant.weights.converted import ConvertedCheckpoint


Mode = Literal["full", "relax", "skip"]
MODES: tuple[str, ...] = get_args(Mode)


def tokens_of(mode: str, max_tokens: int) -> list[int]:
    """The M, of those up to `max_tokens`, that a warm-up has kernels for.

    Args:
        mode: "full" for all; "relax" for powers of two and `max_tokens`, so that what lies between
            may compile when it comes; "skip" for none, so that everything does. The words are those
            of vLLM's VLLM_DEEP_GEMM_WARMUP.
        max_tokens: the largest M.

    Raises:
        UnsupportedError: no mode is called that, or `max_tokens` is less than 1.
    """
    if mode not in MODES:
        raise UnsupportedError(f"mode is {mode!r}, but must be one of: {', '.join(MODES)}")
    max_tokens = check_count("max_tokens", max_tokens, 1)
    if mode == "skip":
        return []
    if mode == "full":
        # More tokens run in parts of no more than these.
        return list(range(1, min(max_tokens, MAX_TOKENS) + 1))
    powers = [1 << i for i in range(max_tokens.bit_length())]
    return powers if powers[-1] == max_tokens else [*powers, max_tokens]


def warm_up(
    experts: FusedExperts,
    tokens: Iterable[int],
    topk: int,
    *,
    progress: Progress | None = None,
) -> list[int]:
    """Compile every kernel that calls of `tokens` tokens in bfloat16 run, and no other.

    With ids in int32 and int64, router weights in float32, bfloat16 and float16, and with or
    without an expert_map, as long as the module's own or, without one, as there are experts.

    Args:
        experts: on the device they will run on; layers of the same sizes share kernels.
        tokens: each M that may come; M of equal kernels are run once.
        topk: T.
        progress: receives the progress, one step per set of kernels.

    Returns:
        The M that were run, one for each set of kernels; none where the backend compiles nothing.

    Raises:
        UnsupportedError: no backend runs the experts, or one that does not say which kernels a call
            runs, such as one of batches.
    """
    report = progress or SilentProgress()
    packed = experts.packed()
    if packed.compiles and packed.kernels_for(1, topk) is None:
        raise UnsupportedError(
            f"backend {packed.backend.name!r} cannot be warmed up: it does not say which kernels a "
            "call runs, as those of batches depend on how many tokens each expert gets, so they "
            "compile in the first calls; name another backend, such as 'triton'"
        )
    chosen = distinct_calls(experts, tokens, topk)
    report.start("compiling", len(chosen), unit="kernel sets")
    experts.compile_ahead(chosen, topk)
    for M in chosen:
        _call(experts, M, topk)
        report.advance(1, f"{M} tokens")
    report.finish()
    return chosen


def distinct_calls(experts: FusedExperts, tokens: Iterable[int], topk: int) -> list[int]:
    """The least M of `tokens` for each set of kernels.

    An empty list where the backend compiles nothing, or does not say what it compiles: see
    `PackedExperts.kernels_for`.

    Args:
        experts: on the device they will run on.
        tokens: numbers of tokens.
        topk: T.

    Raises:
        UnsupportedError: no backend runs the experts.
    """
    least = {experts.kernels_for(M, topk): M for M in sorted(set(tokens), reverse=True)}
    least.pop(None, None)
    return sorted(least.values())


def _call(experts: FusedExperts, tokens: int, topk: int) -> None:
    """Call with ids and maps of every dtype, with a map and without, and every dtype of weights.

    Kernels that read ids are compiled for each pair of dtypes of ids and map, the one that reads
    router weights for each of their dtypes, so six calls cover all.
    """
    workload = experts.packed().workload
    device, E = workload.device, workload.experts
    known = E if experts.expert_map is None else experts.expert_map.shape[0]
    hidden = torch.zeros(tokens, workload.hidden, device=device, dtype=torch.bfloat16)
    weights = torch.full((tokens, topk), 1 / topk, device=device)
    ids = (torch.arange(tokens * topk, device=device) % known).reshape(tokens, topk)
    local = torch.arange(known, device=device) % E
    maps = (None, local.int(), local)
    for (id_dtype, expert_map), weight_dtype in zip(
        product(ID_DTYPES, maps), cycle(WEIGHT_DTYPES), strict=False
    ):
        experts(hidden, weights.to(weight_dtype), ids.to(id_dtype), expert_map=expert_map)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """One kind of layer: format, scheme of activations, function, backend, and the M run."""

    format: str
    activations: str
    act_fn: str
    backend: str
    tokens: list[int]


def warm_up_checkpoint(
    converted: str | Path,
    *,
    max_tokens: int,
    mode: Mode = "full",
    device: torch.device | str = "cuda",
    backend: str | None = None,
    activations: ActivationsChoice = "format",
    architecture: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Warmed]:
    """Compile what calls of 1 to `max_tokens` tokens of a converted checkpoint's layers run.

    Args:
        converted: as `load_experts` takes it; one layer of each kind is loaded: of each format,
            activation function and scheme of activations.
        max_tokens: the largest M.
        mode: which M, see `tokens_of`; "skip" reads the checkpoint's config and loads no layer.
        device: where the experts will run.
        backend: name of a backend; by default the best there.
        activations: as `load_experts` takes it.
        architecture: as `load_experts` takes it.
        progress: receives the progress, one step per set of kernels.

    Returns:
        What was run for each kind; nothing with "skip".

    Raises:
        CheckpointError: not a converted checkpoint, or a damaged one.
        UnsupportedError: no layer was converted, no such device here, no backend that runs the
            experts there, or one that cannot be warmed up, see `warm_up`.
    """
    tokens = tokens_of(mode, max_tokens)
    checkpoint = open_reader(converted, torch.device("cpu"), architecture).converted
    return [
        _warm_up_layer(
            load_experts(
                converted,
                layer,
                device,
                backend=backend,
                activations=activations,
                architecture=architecture,
            ),
            tokens,
            checkpoint.moe.top_k,
            progress,
        )
        for layer in _one_of_each_kind(checkpoint)
        if tokens
    ]


def _one_of_each_kind(checkpoint: ConvertedCheckpoint) -> list[int]:
    """The first layer of each format, activation function and scheme; all have the same sizes."""
    layers: dict[Hashable, int] = {}
    for layer in checkpoint.expert_layers():
        if (format := checkpoint.format_of_experts(layer)) is None:  # kept
            continue
        scheme = checkpoint.activations_of_experts(layer)
        layers.setdefault((format, checkpoint.moe.act_fn_of(layer), scheme), layer)
    if not layers:
        raise checkpoint.no_converted_experts("there is nothing to compile")
    return list(layers.values())


def _warm_up_layer(
    experts: FusedExperts, tokens: list[int], topk: int, progress: Progress | None
) -> Warmed:
    workload = experts.packed().workload
    return Warmed(
        format=workload.format,
        activations=workload.activations,
        act_fn=workload.act_fn.name,
        backend=experts.chosen_backend(),
        tokens=warm_up(experts, tokens, topk, progress=progress),
    )
