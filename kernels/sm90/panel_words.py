"""How words of eight codes are made for panels, whatever bits a family wants where.

A word is what a thread reads of 16 columns: two bytes of codes of row f, and two of row f + 8. It
is linear in their bits: the XOR of a word for each bit that is set. On a CPU that is compiled for
all words of an expert; elsewhere, and on a CPU that runs no such code, which is then said, tables
of 256 words replace arithmetic on every code.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.errors import SlowPathWarning
from moequant.native_code import UnavailableError, jit
from moequant.native_code.vectors import I32, I64, PTR, Function, Type

if TYPE_CHECKING:
    from collections.abc import Callable

    from moequant.native_code.vectors import Value

PANEL_ROWS = 128
PANEL_COLUMNS = 128
CODE_BYTES = PANEL_ROWS * PANEL_COLUMNS // 2
"""Of a panel, in front of its scales."""

_HALVES = (0, 1)  # rows f and f + 8
_WHICH = (0, 1)  # of the two bytes of a quad
_QUADS = range(4)
_STEPS = range(4)  # of 16 columns, in 64


@dataclass(frozen=True, kw_only=True)
class PanelWords:
    """The words of a family.

    Attributes:
        bits: of (bytes as int32, half, which), the int32 words that these bytes alone would make;
            half is 0 for row f and 1 for f + 8, which is 0 or 1. A word is the XOR of four such.
        quad_stride: of the eight bytes that 16 columns of a row have, how far those of two quads
            lie apart: 1, and the second byte of a quad lies 4 behind the first; or 2, and 1 behind.
    """

    bits: Callable[[Tensor, int, int], Tensor]
    quad_stride: int

    def pack(self, codes: Tensor, packed: Tensor) -> None:
        """Write codes in the order of panels.

        Args:
            codes: uint8 [P, block, warp, a, half, b, blocks * 64] contiguous, two codes a byte.
            packed: uint8 [P, blocks, panel bytes] contiguous, whose first CODE_BYTES are written.
        """
        if codes.is_cpu and (native := self._native()):
            assert codes.is_contiguous()
            assert packed.is_contiguous()
            native(codes.data_ptr(), packed.data_ptr(), *packed.shape)
        else:
            self.pack_by_tables(codes, packed)

    def pack_by_tables(self, codes: Tensor, packed: Tensor) -> None:
        """As `pack`, in torch operations on any device."""
        # [.., K / 128, 64s, 16s, bytes of a quad]
        parts = codes.view(*codes.shape[:-1], packed.shape[1], 2, 4, 8)
        words = None
        for half in _HALVES:
            for which in _WHICH:
                table = _tabulate(self.bits, half, which, codes.device)
                first, last = self.byte_of(0, which), self.byte_of(3, which)
                of_quads = parts[:, :, :, :, half, ..., first : last + 1 : self.quad_stride]
                found = look_up(table, of_quads)
                words = found if words is None else words.bitwise_xor_(found)
        assert words is not None
        # From [P, block, warp, a, b, K / 128, 64s, 16s, quad].
        words = words.permute(0, 5, 1, 6, 2, 3, 4, 8, 7)
        packed[..., :CODE_BYTES].view(torch.int32).view(words.shape).copy_(words)

    def _native(self) -> jit.Compiled | None:
        with _COMPILING:  # not by each of the threads that begin at once
            return _compiled(self)

    def byte_of(self, quad: int, which: int) -> int:
        """Where one of the two bytes of a quad lies among the eight of 16 columns."""
        return self.quad_stride * quad + which * (4 if self.quad_stride == 1 else 1)


_COMPILING = threading.Lock()


@cache
def _compiled(words: PanelWords) -> jit.Compiled | None:
    """`_packer`, compiled and compared with the tables; None where this machine does not run it."""
    try:
        jit.processor()
        function = jit.compile_function(_packer(words))
        _check(words, function)
    except UnavailableError as error:
        warnings.warn(
            f"codes are packed by torch, which takes up to ten times as long: {error}",
            SlowPathWarning,
            stacklevel=1,
        )
        return None
    return function


def _check(words: PanelWords, function: jit.Compiled) -> None:
    """Compare the words of random codes with those of tables.

    Raises:
        UnavailableError: they differ.
    """
    g = torch.Generator("cpu").manual_seed(0)
    P, blocks = 3, 5  # 30720 words, so that each of their four bytes takes every value
    size = (P, 2, 4, 4, 2, 2, blocks * 64)
    codes = torch.randint(0, 256, size, dtype=torch.uint8, generator=g, device="cpu")
    found, wanted = (codes.new_empty(P, blocks, CODE_BYTES) for _ in range(2))
    function(codes.data_ptr(), found.data_ptr(), *found.shape)
    words.pack_by_tables(codes, wanted)
    if not torch.equal(found, wanted):
        raise UnavailableError("LLVM's code for this processor packs other words than torch")


def _packer(words: PanelWords) -> Function:
    """`PanelWords.pack` as a function of both addresses, and the three sizes of `packed`."""
    sizes = {"panels": I64, "blocks": I64, "panel_bytes": I64}
    f = Function("pack_codes", {"codes": PTR, "packed": PTR, **sizes}, I32)
    blocks = f.parameter("blocks")
    zero, row_bytes = f.constant(I64, 0), blocks * 64
    with f.loop(zero, f.parameter("panels"), 1) as panel, f.loop(zero, f.constant(I64, 64), 1) as i:
        # The i-th pair of rows f and f + 8 of the panel: [block, warp, a, b].
        row = (panel * 64 + (i & ~1)) * 2 + (i & 1)
        place = (i >> 5) * 4096 + (i & 31) * 64
        with f.loop(zero, blocks * 2, 1) as part:  # of 64 columns
            halves = [
                f.load(Type("i8", 32), f.parameter("codes"), r * row_bytes + part * 32)
                for r in (row, row + 2)
            ]
            at = (panel * blocks + (part >> 1)) * f.parameter("panel_bytes")
            at = at + place + (part & 1) * 2048
            f.store(_words_of(words, halves).bitcast("i8"), f.parameter("packed"), at)
    f.give(f.constant(I32, 0))
    return f


def _words_of(words: PanelWords, halves: list[Value]) -> Value:
    """16 words [quad, 16s] as i32, of 64 columns of rows f and f + 8."""
    found = []
    for half in _HALVES:
        for which in _WHICH:
            at = [8 * step + words.byte_of(quad, which) for quad in _QUADS for step in _STEPS]
            byte = halves[half].pick(at).to("i32")
            table = _tabulate(words.bits, half, which, torch.device("cpu"))
            for distance, mask in _moved(table).items():
                bits = byte & mask
                found.append(bits << distance if distance >= 0 else bits >> -distance)
    whole = found[0]
    for one in found[1:]:
        whole = whole ^ one
    return whole


def _moved(table: Tensor) -> dict[int, int]:
    """By how far they move to the left, those of the eight bits of a byte that do."""
    found: dict[int, int] = {}
    for bit in range(8):
        word = int(table[1 << bit])
        for place in range(32):
            if word >> place & 1:
                found[place - bit] = found.get(place - bit, 0) | 1 << bit
    return found


@cache
def _tabulate(
    bits: Callable[[Tensor, int, int], Tensor], half: int, which: int, device: torch.device
) -> Tensor:
    # Copied, which waits: what a stream computes, others would have to wait for.
    return bits(every_byte(), half, which).to(device)


def every_byte() -> Tensor:
    """0 to 255 as int32, on the CPU."""
    return torch.arange(256, dtype=torch.int32, device="cpu")


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]`, for an index of bytes, which torch would take for a mask."""
    return table.index_select(0, index.int().flatten()).view(index.shape)
