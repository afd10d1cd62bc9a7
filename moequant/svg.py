"""Pieces of SVG pictures that several plots share."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


def picture(width: float, height: float, parts: Iterable[str]) -> str:
    """An SVG document of `width` by `height` pixels on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def legend(colors: Mapping[str, str], left: float, *, step: float = 130) -> Iterator[str]:
    """A square of each color with its name, side by side from `left`, in the top 26 pixels."""
    for index, (name, color) in enumerate(colors.items()):
        x = left + index * step
        yield f'<rect x="{x}" y="8" width="12" height="12" fill="{color}"/>'
        yield text(x + 17, 18, name)


def text(x: float, y: float, content: str, *, anchor: str = "start") -> str:
    """Text at a point; `anchor` is start, middle or end."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(content)}</text>'
