"""Bars and histograms as SVG, in the colors of the page's style sheet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.reporting.markup import Markup, element
from moequant.reporting.words import number, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_ROLES = (
    "routed_experts", "shared_experts", "attention", "dense_mlp", "embedding", "lm_head", "router",
)  # fmt: skip
_WIDTH, _LABEL, _BAR, _STEP = 760, 120, 26, 38
_PLOT = 150


def role_color(role: str) -> str:
    """The class of the style sheet with the color of a role."""
    return f"c{_ROLES.index(role) + 1}" if role in _ROLES else "c0"


def stacked_bars(title: str, bars: Mapping[str, Mapping[str, int]], largest: int) -> Markup:
    """Horizontal bars of parts by role, with a name each; a width of `largest` fills the line."""
    parts: list[Markup] = []
    for index, (name, sizes) in enumerate(bars.items()):
        y = index * _STEP + 4
        parts.append(element("text", _cut(name, 18), x=_LABEL - 8, y=y + 18, text_anchor="end"))
        x = float(_LABEL)
        for role, size_bytes in sizes.items():
            width = size_bytes / max(largest, 1) * (_WIDTH - _LABEL)
            parts.append(
                element(
                    "rect", element("title", role), x=f"{x:.1f}", y=y,
                    width=f"{max(width - 1, 0.3):.1f}", height=_BAR, class_=role_color(role),
                )
            )  # fmt: skip
            x += width
    return _picture(title, parts, _WIDTH, len(bars) * _STEP)


def value_bars(
    title: str,
    bars: Sequence[tuple[str, float, float | None]],
    floor: float | None,
    *,
    picture: str | None = None,
) -> Markup:
    """Horizontal bars with a name, value and standard error each; `floor` is a dashed line.

    `picture` is the name under which `pictures_of` finds it.
    """
    label, width = 220, _WIDTH - 220 - 130
    largest = max([value + (error or 0) for _, value, error in bars] + [floor or 0, 1e-300])
    parts = []
    for index, (name, value, error) in enumerate(bars):
        y = index * 30 + 4
        end = label + value / largest * width
        parts += [
            element("text", _cut(name, 32), x=label - 8, y=y + 15, text_anchor="end"),
            element("rect", x=label, y=y, width=f"{end - label:.1f}", height=20, class_="c1"),
        ]
        if error is not None:
            low, high = (
                label + max(v, 0) / largest * width for v in (value - error, value + error)
            )
            parts.append(element("path", d=f"M{low:.1f} {y + 10}H{high:.1f}", class_="whisker"))
            end = max(end, high)
        parts.append(element("text", number(value), x=f"{end + 6:.1f}", y=y + 15))
    height = len(bars) * 30
    if floor is not None:
        x = label + floor / largest * width
        parts += [
            element("path", d=f"M{x:.1f} 0V{height}", class_="floor"),
            element("text", f"noise floor {number(floor)}", x=f"{x:.1f}", y=height + 14),
        ]
        height += 20
    return _picture(title, parts, _WIDTH, height, picture=picture)


def histogram(
    title: str, bars: Sequence[tuple[str, int]], *, axis: str, width: int = 325
) -> Markup:
    """Vertical bars of counts, as shares of their sum, with the labels of some of them below."""
    total = sum(count for _, count in bars)
    if not total:
        return Markup("")
    largest, left = max(count for _, count in bars), 54
    step = (width - left - 8) / len(bars)
    every = max(1, round(34 / step))
    parts: list[Markup] = [
        element("path", d=f"M{left} {_PLOT}H{width}", class_="axis"),
        element("text", percent(largest / total), x=left - 6, y=18, text_anchor="end"),
        element("text", "0", x=left - 6, y=_PLOT, text_anchor="end"),
        element("text", axis, x=(left + width) / 2, y=_PLOT + 34, text_anchor="middle"),
    ]
    for index, (label, count) in enumerate(bars):
        height = count / largest * (_PLOT - 10)
        x = left + 2 + index * step
        if count:
            parts.append(
                element(
                    "rect", element("title", f"{label}: {count}"), x=f"{x:.1f}",
                    y=f"{_PLOT - max(height, 1.5):.1f}", width=f"{max(step - 1.5, 1):.1f}",
                    height=f"{max(height, 1.5):.1f}", class_="c1",
                )
            )  # fmt: skip
        if index % every == 0:
            parts.append(
                element("text", label, x=f"{x + step / 2:.1f}", y=_PLOT + 16, text_anchor="middle")
            )
    return _picture(title, parts, width, _PLOT + 40)


def legend(roles: Sequence[str]) -> Markup:
    """The colors of roles, by name."""
    return element("p", _entries(roles), class_="key")


def _entries(roles: Sequence[str]) -> Iterator[Markup]:
    for role in roles:
        yield element("span", element("i", class_=f"swatch {role_color(role)}"), role)


def _picture(
    title: str, parts: Sequence[Markup], width: int, height: int, *, picture: str | None = None
) -> Markup:
    return element(
        "svg", element("title", title), parts, role="img", data_picture=picture,
        viewBox=f"0 0 {width} {height}", width=width, height=height,
    )  # fmt: skip


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"...{name[3 - most :]}"
