"""A plot of an evaluation, as SVG: the mean KL divergence of each test, by section."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.svg import legend, picture, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moequant.evaluation.run import EvaluationResult, ModelResult

_COLORS = ("#1f6feb", "#2da44e", "#d9a441", "#8250df", "#cf222e", "#116329", "#9aa5b1", "#bf3989")
_FLOOR = "#57606a"
_BAR, _GAP, _HEIGHT = 22, 26, 240
"""Widths of a bar and of the gap between sections, and height of the axis, in pixels."""
_LEFT, _TOP, _BOTTOM = 70, 56, 46
_STEPS = 4
"""Lines of the axis above 0."""


def plot_evaluation(result: EvaluationResult) -> str:
    """An SVG picture: a bar for each test over all windows, then by section, with standard errors.

    The dashed line is the noise floor, where it was measured.
    """
    tests = result.tests
    colors = {test.name: _COLORS[n % len(_COLORS)] for n, test in enumerate(tests)}
    columns = [("all", [_of_all(test) for test in tests])]
    for place, section in enumerate(tests[0].figures.sections if tests else ()):
        found = [test.figures.sections[place] for test in tests]
        bars = [(one.kl_mean, one.kl_mean_se or 0.0) for one in found]
        columns.append((f"section {section.section}", bars))
    floor = None if result.noise_floor is None else result.noise_floor.figures.kl_mean
    values = [mean + error for _, bars in columns for mean, error in bars]
    largest = max([*values, floor or 0.0]) or 1.0
    group = len(tests) * _BAR + _GAP
    step = max(map(len, colors), default=0) * 6.5 + 40
    width = max(_LEFT + len(columns) * max(group, 80) + _GAP, _LEFT + step * len(colors))
    parts = [*legend(colors, _LEFT, step=step), *_axis(largest, width)]
    for place, (name, bars) in enumerate(columns):
        left = _LEFT + _GAP / 2 + place * max(group, 80)
        for index, (bar, color) in enumerate(zip(bars, colors.values(), strict=True)):
            parts += _bar(left + index * _BAR, *bar, largest, color)
        parts.append(text(left + len(bars) * _BAR / 2, _base() + 18, name, anchor="middle"))
    if floor is not None:
        parts += _floor(floor, largest, width)
    return picture(width, _base() + _BOTTOM, parts)


def _of_all(test: ModelResult) -> tuple[float, float]:
    return test.figures.kl_mean, test.figures.kl_mean_se or 0.0


def _base() -> int:
    return _TOP + _HEIGHT


def _y(value: float, largest: float) -> float:
    return _base() - value / largest * _HEIGHT


def _axis(largest: float, width: float) -> Iterator[str]:
    yield text(_LEFT, _TOP - 18, "KL(reference || test), mean in nats, with its standard error")
    for step in range(_STEPS + 1):
        value = step / _STEPS * largest
        y = _y(value, largest)
        yield f'<line x1="{_LEFT}" x2="{width - 8}" y1="{y}" y2="{y}" stroke="#d0d7de"/>'
        yield text(_LEFT - 8, y + 4, f"{value:.2g}", anchor="end")


def _bar(x: float, mean: float, error: float, largest: float, color: str) -> Iterator[str]:
    y, middle = _y(mean, largest), x + (_BAR - 4) / 2
    yield (
        f'<rect x="{x}" y="{y:.1f}" width="{_BAR - 4}" height="{_base() - y:.1f}" fill="{color}"/>'
    )
    low, high = _y(max(mean - error, 0.0), largest), _y(mean + error, largest)
    yield f'<line x1="{middle}" x2="{middle}" y1="{low:.1f}" y2="{high:.1f}" stroke="black"/>'


def _floor(floor: float, largest: float, width: float) -> Iterator[str]:
    y = _y(floor, largest)
    yield (
        f'<line x1="{_LEFT}" x2="{width - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_FLOOR}" '
        'stroke-dasharray="5 4"/>'
    )
    yield text(width - 10, y - 4, f"noise floor {floor:.2g}", anchor="end")
