"""CUDA C++ sources with the files they include, as NVRTC wants them: one text."""

from __future__ import annotations

import re
from pathlib import Path

_KERNELS = Path(__file__).parent.parent
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def read_source(path: Path) -> str:
    """The text of `path`, with every `#include "FOLDER/FILE"` of a folder beside it replaced."""
    return _INCLUDE.sub(lambda match: read_source(_KERNELS / match[1]), path.read_text())


def tile_classes(sizes: list[int]) -> str:
    """What a source knows of the classes of tiles, by their rows; a tile has the smallest it fits.

    CLASSES, `class_of(rows)`, `rows_of(class)`, and `EACH_CLASS(F)`, which is F(class, rows) for
    each.
    """
    last = len(sizes) - 1
    index = "".join(f"rows <= {n} ? {i} : " for i, n in enumerate(sizes[:-1]))
    rows = "".join(f"c == {i} ? {n} : " for i, n in enumerate(sizes[:-1]))
    each = " ".join(f"F({i}, {n})" for i, n in enumerate(sizes))
    return (
        f"constexpr int CLASSES = {len(sizes)};\n"
        f"__device__ __forceinline__ int class_of(int rows) {{ return {index}{last}; }}\n"
        f"__device__ __forceinline__ int rows_of(int c) {{ return {rows}{sizes[-1]}; }}\n"
        f"#define EACH_CLASS(F) {each}\n"
    )


def wgmma(n: int, *, a_in_registers: bool = False, bf16: bool = False) -> str:
    """A function `wgmma(d, a, b, accumulate)` for m64, `n` columns and k32 of E4M3.

    Args:
        n: a multiple of 8, at most 256.
        a_in_registers: `a` is four registers; else it is a descriptor, as `b` is.
        bf16: k16 of bfloat16 instead; with `a_in_registers`.
    """
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if a_in_registers:
        parameter, b = "const u32* a", count + 4
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    else:
        parameter, a, b, inputs = "u64 a", f"%{count}", count + 1, '"l"(a)'
    shape, tail = f"m64n{n}k32.f32.e4m3.e4m3", "1, 1"
    if bf16:
        shape, tail = f"m64n{n}k16.f32.bf16.bf16", "1, 1, 0"
    return (
        "__device__ __forceinline__ "
        f"void wgmma(float (&d)[{count}], {parameter}, u64 b, int on) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b + 1}, 0;\\n"\n'
        f'    "wgmma.mma_async.sync.aligned.{shape} {{{registers}}}, "\n'
        f'    "{a}, %{b}, p, {tail};\\n}}" : {operands} : {inputs}, "l"(b), "r"(on));\n'
        "}\n"
    )
