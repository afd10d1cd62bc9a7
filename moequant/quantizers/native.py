"""Quantize with functions compiled for this processor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch

from moequant.errors import UnsupportedError
from moequant.formats import QuantizedWeight, dtype_text
from moequant.formats.base import SOURCE_DTYPES, check_values
from moequant.quantizers import jit
from moequant.quantizers.base import Quantizer, UnavailableError
from moequant.quantizers.elements import Source
from moequant.quantizers.kernels import KERNELS, amax, scratch_count
from moequant.quantizers.probes import check_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moequant.formats import Format
    from moequant.quantizers.base import Allocator

_Key = tuple[str, tuple[tuple[str, str], ...], torch.dtype]


class NativeQuantizer(Quantizer):
    """The kernels of `moequant.quantizers.kernels`, compiled when `prepare` asks for them.

    Raises:
        UnavailableError: LLVM cannot be loaded, or not for this processor.
    """

    name = "native"
    summary = "vector code compiled for this processor"

    def __init__(self) -> None:
        self._processor = jit.processor()
        self._kernels: dict[_Key, _Kernels] = {}

    def prepare(self, format: Format, options: Mapping[str, str], dtype: torch.dtype) -> None:
        """As Quantizer; kernels are compared with the reference before they are used."""
        key = _key(format, options, dtype)
        if key in self._kernels:
            return
        if format.name not in KERNELS:
            raise UnavailableError(f"it has no kernel for {format.name}")
        source = Source(dtype_text(dtype))
        made = _Kernels(
            source=source,
            amax=jit.compile_kernel(amax(source).text()),
            quantize=jit.compile_kernel(KERNELS[format.name](source, options).text()),
        )
        check_bytes(format, options, dtype, partial(_run, [made]), self._processor)
        self._kernels[key] = made

    def quantize_fused(
        self,
        format: Format,
        weights: Sequence[Tensor],
        options: Mapping[str, str],
        *,
        names: Sequence[str],
        empty: Allocator = torch.empty,
    ) -> list[QuantizedWeight]:
        """As Quantizer."""
        for w, name in zip(weights, names, strict=True):
            _check_kind(w, format, name)
            self.prepare(format, options, w.dtype)
        kernels = [self._kernels[_key(format, options, w.dtype)] for w in weights]
        weights = [w.detach().contiguous() for w in weights]
        return _run(kernels, format, weights, options, names, empty)


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """Compiled for one format, its options and a source dtype."""

    source: Source
    amax: jit.Kernel
    quantize: jit.Kernel

    def find_largest(self, w: Tensor, name: str) -> float:
        """The largest magnitude of `w`."""
        bits = self.amax(w.data_ptr(), *w.shape, 0.0, 0, 0, 0)
        self._check_finite(bits, w, name)
        return self.source.number(bits)

    def run(
        self,
        format: Format,
        w: Tensor,
        name: str,
        global_scale: Tensor | None,
        empty: Allocator,
    ) -> QuantizedWeight:
        specs = format.specs(w.shape, name)
        qdata, scale = (empty(specs[k].shape, dtype=specs[k].dtype) for k in ("qdata", "scale"))
        scratch = torch.empty(scratch_count(scale.shape[1]), dtype=torch.float32)
        bits = self.quantize(
            w.data_ptr(),
            *w.shape,
            0.0 if global_scale is None else global_scale.item(),
            qdata.data_ptr(),
            scale.data_ptr(),
            scratch.data_ptr(),
        )
        self._check_finite(bits, w, name)
        return QuantizedWeight(
            format=format.name, qdata=qdata, scale=scale, global_scale=global_scale, shape=w.shape
        )

    def _check_finite(self, bits: int, w: Tensor, name: str) -> None:
        if bits >= self.source.infinity:
            check_values(w, name)
            raise AssertionError(f"{name}: magnitude {bits:#x}, but every weight is finite")


def _run(
    kernels: Sequence[_Kernels],
    format: Format,
    weights: Sequence[Tensor],
    options: Mapping[str, str],
    names: Sequence[str],
    empty: Allocator,
) -> list[QuantizedWeight]:
    """Quantize a fused set, each weight with the kernels of its dtype."""
    global_scale = None
    work = list(zip(kernels, weights, names, strict=True))
    if format.has_global_scale:
        largest = max(own.find_largest(w, name) for own, w, name in work)
        # A copy: what one caller does to it is nothing to the next.
        global_scale = _global_scale(format, tuple(options.items()), largest).clone()
    return [own.run(format, w, name, global_scale, empty) for own, w, name in work]


@lru_cache(maxsize=1 << 12)
def _global_scale(format: Format, options: tuple[tuple[str, str], ...], largest: float) -> Tensor:
    """Of weights with this largest magnitude, a float32.

    Kept, because a dozen torch operations on one number take a tenth of what the quantizer does,
    and the largest weights of a model's experts are few numbers of eight bits.
    """
    w = torch.tensor([[largest]], dtype=torch.float32, device="cpu")
    return format.global_scale([w], dict(options))


def _check_kind(w: Tensor, format: Format, name: str) -> None:
    if w.ndim != 2 or w.device.type != "cpu":
        raise UnsupportedError(
            f"{name}: {list(w.shape)} on {w.device}, but a weight [N, K] on the CPU is wanted"
        )
    format.check_shape(w.shape, name)
    if w.dtype not in SOURCE_DTYPES:
        check_values(w, name)


def _key(format: Format, options: Mapping[str, str], dtype: torch.dtype) -> _Key:
    return format.name, tuple(sorted(options.items())), dtype
