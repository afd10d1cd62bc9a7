"""A layer from its portable weights to its kernel-ready file, an expert at a time."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from concurrent.futures import wait
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from moequant.errors import DoesNotFitError, UnsupportedError, unknown_name
from moequant.formats import STATIC_SCHEMES, get_format, stack
from moequant.runtime.activations import NVFP4, NVFP4_STATIC
from moequant.runtime.backends import REGISTRY, TARGETS
from moequant.runtime.layer_reader import computed_act_fn
from moequant.runtime.packing import ACTIVATIONS, scheme_of
from moequant.runtime.prepared import expected
from moequant.runtime.prepared_manifest import (
    PreparedLayer,
    add_originals,
    add_tensors,
    layer_file,
)
from moequant.runtime.weights import ExpertWeights
from moequant.storage.buffers import tensor_bytes
from moequant.storage.headers import dtype_name
from moequant.storage.reader import FixedFile
from moequant.storage.writer import ShardWriter, lay_out

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Generator,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )
    from concurrent.futures import Executor, Future
    from pathlib import Path

    from torch import Tensor

    from moequant.formats import QuantizedWeight
    from moequant.progress import Progress
    from moequant.runtime.backends import Backend, Layout
    from moequant.weights.converted import ConvertedCheckpoint

T = TypeVar("T")

_AHEAD = 8
"""Experts that may be packed and written before their portable weights are digested."""


def layouts_of_layer(
    converted: ConvertedCheckpoint, layer: int, target: str, activations: str
) -> tuple[Sequence[Layout], str]:
    """The layouts that a layer may be prepared in, and the scheme of activations that it is for.

    Its weights decide: it is the first layout that holds them.

    Args:
        converted: a checkpoint, opened with `quantized_activations`.
        layer: one whose experts were converted.
        target: one of TARGETS.
        activations: what is asked for, as of `load_experts`.

    Raises:
        UnsupportedError: the layer cannot be prepared so; names checkpoint and layer, and says what
            can be done instead.
    """
    try:
        return _layouts_of_layer(converted, layer, target, activations)
    except UnsupportedError as error:
        advice = _advice(converted, layer, target)
        raise UnsupportedError(
            f"{converted.checkpoint.path}: layer {layer}: {error}{advice}"
        ) from error


def _layouts_of_layer(
    converted: ConvertedCheckpoint, layer: int, target: str, activations: str
) -> tuple[Sequence[Layout], str]:
    """As `layouts_of_layer`, with errors that do not name the layer."""
    format, moe = converted.format_of_experts(layer), converted.moe
    assert format is not None, "the layer was converted"
    scheme = scheme_for(converted, layer, activations)
    layouts = layouts_for(format, target, scheme)
    # Packed without data, which says whether the layout holds these sizes.
    act_fn = moe.act_fn_of(layer)
    expected(layouts[0], moe, format, act_fn=act_fn, biased=False, static=False)
    return layouts, scheme


def _advice(converted: ConvertedCheckpoint, layer: int, target: str) -> str:
    """What the layer can be prepared with on the target, the best first; empty if with nothing."""
    able = {}
    for choice in ACTIVATIONS:
        with suppress(UnsupportedError):
            _, able[choice] = _layouts_of_layer(converted, layer, target, choice)
    own = able.pop("format", "none")
    if own != "none":
        # Of formats with FP8 activations, whose kernels read another layout than without.
        best = (
            '; leave out --activations (activations="format"), which prepares it for activations '
            f"in {own}"
        )
        able = {choice: scheme for choice, scheme in able.items() if scheme != own}
    elif able.pop("none", None) is not None:
        best = '; give --activations none (activations="none"), which prepares the weights alone'
    else:
        best = ""
    also = "also " if best else ""
    return best + (f"; it can {also}be prepared with one of: {', '.join(able)}" if able else "")


def layouts_for(format: str, target: str, activations: str) -> tuple[Layout, ...]:
    """The layouts of the first backend that serves `target` in `format` with `activations`.

    Args:
        format: of the weights.
        target: one of TARGETS.
        activations: a scheme.

    Raises:
        UnsupportedError: no such format, no such target, or no backend there runs the format with
            such activations.
    """
    serving = backends_for(format, target, activations)
    if serving:
        return serving[0].layouts
    others = [other for other in TARGETS if other != target]
    able = [other for other in others if backends_for(format, other, activations)]
    elsewhere = f"; one on {' and '.join(able)} does" if able else f", and none on {others[0]} does"
    raise UnsupportedError(
        f"no backend on {target} runs {format} with activations in {activations}{elsewhere}"
    )


def check_target(target: str) -> None:
    """Refuse a target that nothing is prepared for.

    Raises:
        UnsupportedError: it is none of TARGETS.
    """
    if target not in TARGETS:
        raise UnsupportedError(unknown_name("target", target, TARGETS))


def backends_for(format: str, target: str, activations: str | None = None) -> list[Backend]:
    """The backends that serve `target` in `format`, best first.

    Args:
        format: of the weights.
        target: one of TARGETS.
        activations: a scheme; by default that of the format.

    Raises:
        UnsupportedError: no such format, or no such target.
    """
    of_format = get_format(format).activations
    check_target(target)
    return [b for b in REGISTRY.values() if format in b.serves(target, activations or of_format)]


def scheme_for(converted: ConvertedCheckpoint, layer: int, activations: str) -> str:
    """The scheme that `load_experts` would quantize a layer's activations by.

    Args:
        converted: a checkpoint, opened with `quantized_activations`.
        layer: one whose experts were converted.
        activations: what is asked for, as of `load_experts`.

    Raises:
        UnsupportedError: `activations` is none of those, or the layer's experts differ in it.
    """
    format = converted.format_of_experts(layer)
    assert format is not None, "the layer was converted"
    if activations not in ("format", NVFP4):
        return scheme_of(format, activations, static=False)
    stated = converted.activations_of_experts(layer)
    if activations == "format" and stated is not None:
        return stated
    return scheme_of(format, activations, static=stated == NVFP4_STATIC)


def packed_experts(
    converted: ConvertedCheckpoint,
    layer: int,
    layout: Layout,
    digest: hashlib._Hash,
    *,
    static: bool,
) -> Iterator[dict[str, Tensor]]:
    """The tensors of each expert of a layer, [1, ...], as `layout` packs them.

    The portable biases, scales and weights they are made from are added to `digest`.

    Args:
        converted: the portable weights.
        layer: which.
        layout: how they are packed.
        digest: see above.
        static: whether static scales of activations are among the tensors.

    Raises:
        CheckpointError: a weight or a scale cannot be read.
        DoesNotFitError: the layout does not hold the values of a weight.
        UnsupportedError: it does not hold such weights.
    """
    experts = _Experts(converted, layer, layout, static=static)
    experts.add_shared(digest)
    for expert in range(experts.count):
        weights, tensors = experts.pack(expert)
        add_originals(digest, weights)
        yield tensors


class _Experts:
    """The experts of a layer, to be packed by several threads; see `packed_experts`."""

    def __init__(
        self, converted: ConvertedCheckpoint, layer: int, layout: Layout, *, static: bool
    ) -> None:
        self._converted, self._layer, self._layout = converted, layer, layout
        self.count = converted.moe.experts
        self._act_fn = computed_act_fn(converted, layer)
        self._biases = converted.read_biases(layer) or {}
        self._scales = converted.read_input_scales(layer, range(self.count)) if static else {}

    def add_shared(self, digest: hashlib._Hash) -> None:
        """Add what tensors of all experts hold, before the weights are added."""
        add_tensors(digest, self._biases)
        add_tensors(digest, self._scales)

    def pack(self, expert: int) -> tuple[Collection[QuantizedWeight], dict[str, Tensor]]:
        """The portable weights of an expert, and its tensors."""
        projections = self._converted.moe.projections
        weights = {p: self._converted.read_expert(self._layer, expert, p) for p in projections}
        one = {p: stack([q]) for p, q in weights.items()}
        of_experts = {**{f"{p}_bias": bias for p, bias in self._biases.items()}, **self._scales}
        rows = {name: tensor[expert : expert + 1] for name, tensor in of_experts.items()}
        return weights.values(), self._layout.pack(ExpertWeights.of(one, self._act_fn, **rows))


def _ahead(
    pool: Executor, work: Callable[[int], T], items: Iterable[int]
) -> Generator[T, None, None]:
    """What `work` makes of each item, in order; a few are made ahead, so that few are held."""
    pending: deque[Future[T]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > _AHEAD:
                yield _first(pending)
        while pending:
            yield _first(pending)
    finally:
        for future in pending:
            future.cancel()
        wait(pending)  # what they write to may be closed next


def _first(pending: deque[Future[T]]) -> T:
    """The result of the first, which stays among them, to be waited for, until it is there."""
    result = pending[0].result()
    pending.popleft()
    return result


def write_layer(
    converted: ConvertedCheckpoint,
    layer: int,
    layouts: Sequence[Layout],
    *,
    activations: str,
    folder: Path,
    progress: Progress,
    pool: Executor,
) -> PreparedLayer:
    """Write the tensors of all experts of a layer; returns what the manifest says of them.

    Args:
        converted: the portable weights.
        layer: which.
        layouts: how the backend of `activations` reads them; the first that holds all experts is
            taken.
        activations: the scheme that they are prepared for; if it has static scales, these are
            written too.
        folder: where the file goes.
        progress: receives the progress.
        pool: threads that read, pack and write, each an expert.

    Errors as `packed_experts`.
    """
    *others, last = layouts
    write = partial(
        _write_as,
        converted,
        layer,
        activations=activations,
        folder=folder,
        progress=progress,
        pool=pool,
    )
    for layout in others:
        with suppress(DoesNotFitError):
            return write(layout)
    return write(last)


def _write_as(
    converted: ConvertedCheckpoint,
    layer: int,
    layout: Layout,
    *,
    activations: str,
    folder: Path,
    progress: Progress,
    pool: Executor,
) -> PreparedLayer:
    """As `write_layer`, in one layout; leaves no file if that does not hold an expert."""
    path = folder / layer_file(layer)
    where = converted.moe.whereabouts(layer)
    digest = hashlib.sha256()
    packed_bytes = 0
    experts = _Experts(converted, layer, layout, static=activations in STATIC_SCHEMES)
    file = _LayerFile(path, layer, experts.count)

    def write(expert: int) -> tuple[Collection[QuantizedWeight], int]:
        weights, tensors = experts.pack(expert)
        return weights, file.write(expert, tensors)

    try:
        experts.add_shared(digest)
        with closing(_ahead(pool, write, range(experts.count))) as written:
            for weights, of_expert in written:
                add_originals(digest, weights)
                packed_bytes += of_expert
                progress.advance(of_expert, where)
        size, sha256 = file.finish()
    except BaseException as error:
        file.abort()
        if isinstance(error, DoesNotFitError):
            progress.advance(-packed_bytes, where)
        raise
    format = converted.format_of_experts(layer)
    assert format is not None, "the layer was converted"
    return PreparedLayer(
        file=path.name,
        bytes=size,
        mtime_ns=FixedFile.at(path).mtime_ns,
        sha256=sha256,
        format=format,
        activations=activations,
        layout=layout.name,
        layout_version=layout.version,
        originals_sha256=digest.hexdigest(),
    )


class _LayerFile:
    """The file of a layer, which several threads write.

    Args:
        path: where it is.
        layer: whose tensors they are.
        experts: how many.
    """

    def __init__(self, path: Path, layer: int, experts: int) -> None:
        self._path, self._layer, self._experts = path, layer, experts
        self._writer: ShardWriter | None = None
        self._opening = threading.Lock()

    def write(self, expert: int, tensors: Mapping[str, Tensor]) -> int:
        """Write the tensors of an expert, [1, ...], from any thread; returns their bytes."""
        named = {f"layers.{self._layer}.{name}": tensor for name, tensor in tensors.items()}
        with self._opening:
            if self._writer is None:
                self._writer = self._open(named)
        for name, tensor in named.items():
            contents = tensor_bytes(tensor.contiguous())
            self._writer.write_bytes(name, expert * tensor.nbytes, contents)
        size_bytes = sum(tensor.nbytes for tensor in named.values())
        # One thread digests at a time: twice what it wrote lets it catch up, and ends soon.
        self._writer.digest(2 * size_bytes)
        return size_bytes

    def finish(self) -> tuple[int, str]:
        """As `ShardWriter.finish`."""
        assert self._writer is not None, "a layer has experts"
        return self._writer.finish()

    def abort(self) -> None:
        """Leave no file."""
        if self._writer is not None:
            self._writer.abort()

    def _open(self, tensors: Mapping[str, Tensor]) -> ShardWriter:
        """A file for as many experts, each with such tensors."""
        header, slots = lay_out(
            [
                (name, dtype_name(t.dtype), (self._experts, *t.shape[1:]))
                for name, t in tensors.items()
            ]
        )
        return ShardWriter(self._path, header, slots)
