"""How words of eight codes are made for panels, whatever bits a family wants where.

A word is what a thread reads of 16 columns: two bytes of codes of row f, and two of row f + 8. It
is linear in their bits: the XOR of a word for each bit that is set. On a CPU that is compiled for
all words of an expert; elsewhere tables of 256 words replace arithmetic on every code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.native_code import UnavailableError, jit
from moequant.native_code.vectors import I32, I64, PTR, Function, Type

if TYPE_CHECKING:
    from collections.abc import Callable

    from moequant.native_code.vectors import Value

_HALVES = (0, 1)  # rows f and f + 8
_BOTH = (0, 1)  # bytes of a quad
_QUADS = range(4)
_STEPS = range(4)  # of 16 columns, in 64


@dataclass(frozen=True, kw_only=True)
class PanelWords:
    """The words of a family.

    Attributes:
        bits: from int32 bytes, the half (0 for row f, 1 for f + 8) and which of the two bytes, to
            the int32 words that these bytes alone would make. A word is the XOR of four such.
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
        P, blocks, panel_bytes = packed.shape
        if codes.is_cpu and (native := _native(self)):
            assert codes.is_contiguous()
            assert packed.is_contiguous()
            native(codes.data_ptr(), packed.data_ptr(), P, blocks, panel_bytes)
            return
        # [.., K / 128, 64s, 16s, bytes of a quad]
        parts = codes.view(*codes.shape[:-1], blocks, 2, 4, 8)
        words = None
        for half in _HALVES:
            for which in _BOTH:
                table = _tabulate(self.bits, half, which, codes.device)
                first, last = self.byte_of(0, which), self.byte_of(3, which)
                of_quads = parts[:, :, :, :, half, ..., first : last + 1 : self.quad_stride]
                found = look_up(table, of_quads)
                words = found if words is None else words.bitwise_xor_(found)
        assert words is not None
        # From [P, block, warp, a, b, K / 128, 64s, 16s, quad].
        words = words.permute(0, 5, 1, 6, 2, 3, 4, 8, 7)
        code_bytes = 4 * words[0, 0].numel()
        packed[..., :code_bytes].view(torch.int32).view(words.shape).copy_(words)

    def byte_of(self, quad: int, which: int) -> int:
        """Where one of the two bytes of a quad lies among the eight of 16 columns."""
        return self.quad_stride * quad + which * (4 if self.quad_stride == 1 else 1)


@cache
def _native(words: PanelWords) -> jit.Compiled | None:
    """`packer`, compiled; None where this machine does not run such code."""
    try:
        jit.processor()
        return jit.compile_function(packer(words))
    except UnavailableError:
        return None


def packer(words: PanelWords) -> Function:
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
        for which in _BOTH:
            at = [8 * step + words.byte_of(quad, which) for quad in _QUADS for step in _STEPS]
            byte = halves[half].pick(at).to("i32")
            for distance, mask in _moved(words.bits, half, which).items():
                bits = byte & mask
                found.append(bits << distance if distance >= 0 else bits >> -distance)
    whole = found[0]
    for one in found[1:]:
        whole = whole ^ one
    return whole


def _moved(bits: Callable[[Tensor, int, int], Tensor], half: int, which: int) -> dict[int, int]:
    """By how far they move to the left, those of the eight bits of a byte that do."""
    found: dict[int, int] = {}
    for bit in range(8):
        word = int(bits(torch.tensor([1 << bit], dtype=torch.int32), half, which))
        for place in range(32):
            if word >> place & 1:
                found[place - bit] = found.get(place - bit, 0) | 1 << bit
    return found


@cache
def _tabulate(
    bits: Callable[[Tensor, int, int], Tensor], half: int, which: int, device: torch.device
) -> Tensor:
    return bits(every_byte(device), half, which)


def every_byte(device: torch.device) -> Tensor:
    """0 to 255 as int32."""
    return torch.arange(256, dtype=torch.int32, device=device)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]`, for an index of bytes, which torch would take for a mask."""
    return table.index_select(0, index.int().flatten()).view(index.shape)
