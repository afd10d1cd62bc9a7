"""A value of every expert of every layer as a picture: a row a layer, a column an expert.

The cells are one small PNG, so that a page with tens of thousands of experts stays small. Colors
are those of the map cividis, which people with and without color vision deficiency see alike
(Nunez, Anderton, Renslow, PLoS ONE 13(7), 2018); cells above the scale and marked ones also differ
by a frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from moequant.reporting.markup import Markup, element
from moequant.reporting.png import png_uri

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from moequant.reporting.png import Color

_CIVIDIS = (
    (0, 34, 78), (18, 53, 112), (59, 73, 108), (87, 93, 109), (112, 113, 115),
    (138, 134, 120), (165, 156, 116), (195, 179, 105), (225, 204, 85), (254, 232, 56),
)  # fmt: skip
_ABOVE = (213, 43, 107)
_STEPS = 250
_LEFT, _BOTTOM, _TOP = 44, 36, 4
_MOST_FRAMES = 500


def _gradient() -> Iterator[Color]:
    """Colors between those of the map, at equal distances."""
    for step in range(_STEPS):
        at, part = divmod(step * (len(_CIVIDIS) - 1) / (_STEPS - 1), 1)
        ends = _CIVIDIS[int(at)], _CIVIDIS[min(int(at) + 1, len(_CIVIDIS) - 1)]
        red, green, blue = (round(a + (b - a) * part) for a, b in zip(*ends, strict=True))
        yield red, green, blue


_PALETTE = ((255, 255, 255), *_gradient(), _ABOVE)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Which values the colors stand for.

    Attributes:
        low: the value of the first color.
        high: the value of the last one; what is above has a color of its own.
        show: a value as text.
    """

    low: float
    high: float
    show: Callable[[float], str]

    @classmethod
    def of(cls, values: Iterable[float | None], show: Callable[[float], str]) -> Scale:
        """From the smallest value to the largest that is at most twice the median.

        Values that differ by less than a tenth have similar colors.
        """
        known = [value for value in values if value is not None]
        most = 2 * median(known or [0.0])
        high = max((value for value in known if value <= most), default=0.0)
        return cls(low=min([*known, 0.9 * high]), high=high, show=show)

    def index(self, value: float | None) -> int:
        """The color of a value, in the palette."""
        if value is None:
            return 0
        if value > self.high:
            return _STEPS + 1
        span = self.high - self.low
        return 1 + (round((value - self.low) / span * (_STEPS - 1)) if span else 0)


def heat_map(
    title: str,
    rows: Mapping[int, Sequence[float | None]],
    scale: Scale,
    *,
    marked: Collection[tuple[int, int]] = (),
    picture: str | None = None,
) -> Markup:
    """A picture with axes, as an element `svg`.

    Args:
        title: what it shows, also for who cannot see it.
        rows: by layer, the value of each expert; None where there is none.
        scale: the colors.
        marked: pairs of layer and expert that get a frame, such as faulty ones.
        picture: name under which `pictures_of` finds it.
    """
    layers = sorted(rows)
    columns = max((len(values) for values in rows.values()), default=0)
    if not columns:
        return Markup("")
    cell = max(3, min(26, 900 // columns)), max(5, min(18, 400 // len(layers)))
    width, height = columns * cell[0], len(layers) * cell[1]
    pixels = [
        bytes(map(scale.index, (*rows[layer], *[None] * (columns - len(rows[layer])))))
        for layer in layers
    ]
    image = element(
        "image", href=png_uri(pixels, _PALETTE), x=_LEFT, y=_TOP, width=width, height=height,
        preserveAspectRatio="none", class_="cells",
    )  # fmt: skip
    frame = element("rect", x=_LEFT, y=_TOP, width=width, height=height, class_="frame")
    places = [(layers.index(layer), expert) for layer, expert in marked if layer in rows]
    frames = (
        element(
            "rect", x=_LEFT + expert * cell[0] - 1, y=_TOP + row * cell[1] - 1,
            width=cell[0] + 2, height=cell[1] + 2, class_="mark",
        )
        for row, expert in places[:_MOST_FRAMES]
    )  # fmt: skip
    return element(
        "svg",
        element("title", title),
        image,
        frame,
        frames,
        _layer_axis(layers, cell[1]),
        _expert_axis(columns, cell[0], _TOP + height),
        role="img",
        data_picture=picture,
        viewBox=f"0 0 {_LEFT + width + 12} {_TOP + height + _BOTTOM}",
        width=_LEFT + width + 12,
        height=_TOP + height + _BOTTOM,
    )


def color_key(
    scale: Scale, values: Collection[float | None], *, marked: str | None = None
) -> Markup:
    """What the colors stand for: a strip from low to high, and what else is among `values`.

    `marked` says what a frame means, if there are any.
    """
    strip = png_uri([bytes(range(1, _STEPS + 1))], _PALETTE)
    parts = [
        element("span", scale.show(scale.low)),
        element(
            "svg",
            element(
                "image", href=strip, width=160, height=12, preserveAspectRatio="none",
                class_="cells",
            ),
            width=160, height=12, aria_hidden="true",
        ),
        element("span", scale.show(scale.high)),
    ]  # fmt: skip
    if any(value is not None and value > scale.high for value in values):
        above = element("i", class_="swatch above")
        parts.append(element("span", above, f"above {scale.show(scale.high)}"))
    if None in values:
        parts.append(element("span", element("i", class_="swatch missing"), "not measured"))
    if marked:
        parts.append(element("span", element("i", class_="swatch marked"), marked))
    return element("p", parts, class_="key")


def _layer_axis(layers: Sequence[int], height: int) -> Iterator[Markup]:
    every = -(-14 // height)
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100) if step >= every)
    for row, layer in enumerate(layers):
        if row % every == 0:
            y = _TOP + row * height + height / 2 + 4
            yield element("text", str(layer), x=_LEFT - 6, y=y, text_anchor="end")
    middle = _TOP + len(layers) * height / 2
    yield element(
        "text", "layer", x=10, y=middle, text_anchor="middle", transform=f"rotate(-90 10 {middle})"
    )


def _expert_axis(columns: int, width: int, bottom: float) -> Iterator[Markup]:
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 4096) if step * width >= 24)
    for column in range(0, columns, every):
        x = _LEFT + column * width + width / 2
        yield element("text", str(column), x=x, y=bottom + 14, text_anchor="middle")
    middle = _LEFT + columns * width / 2
    yield element("text", "expert", x=middle, y=bottom + 30, text_anchor="middle")
