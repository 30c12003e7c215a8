"""Small plots as SVG: dots, steps and bars on axes from zero with round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 46
BASE, END = HEIGHT - BOTTOM, WIDTH - RIGHT
#: about how many marks an axis has
MARKS = 5


@dataclass(frozen=True)
class Series:
    """Points (x, y), each with what is shown when it is pointed at. style: a class of the page."""

    style: str
    points: Sequence[tuple[float, float]]
    hints: Sequence[str] = ()


def figure(title: str, x_label: str, y_label: str, drawing: str) -> str:
    """A drawing with its title and the names of its axes."""
    middle = (LEFT + END) / 2
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
        f'<text class="axis" transform="translate(12 {(TOP + BASE) / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>'
        f"{drawing}</svg></figure>"
    )


def dots(series: Sequence[Series]) -> str:
    """A dot a point."""
    scale = _Scale.of(series)
    made = [scale.frame()]
    for one in series:
        hints = one.hints or [""] * len(one.points)
        for (x, y), hint in zip(one.points, hints, strict=True):
            made.append(
                f'<circle class="{one.style}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="4">'
                f"<title>{escape(hint)}</title></circle>"
            )
    return "".join(made)


def steps(series: Sequence[Series]) -> str:
    """A line that holds each point's height until the next point; points ascend in x."""
    scale = _Scale.of(series)
    made = [scale.frame()]
    for one in series:
        if one.points:
            path = f"M{scale.x(one.points[0][0]):.1f} {BASE}"
            path += "".join(f"H{scale.x(x):.1f}V{scale.y(y):.1f}" for x, y in one.points)
            made.append(f'<path class="{one.style}" d="{path}H{END}"/>')
    return "".join(made)


def bars(values: Sequence[float], first: int, style: str) -> str:
    """Bars numbered from `first`."""
    scale = _Scale(float(len(values) or 1), _round_up(max(values, default=0)))
    wide = (END - LEFT) / (len(values) or 1)
    made = [scale.frame(marks_below=False)]
    every = math.ceil(len(values) / 16)
    for index, value in enumerate(values):
        x, y = LEFT + wide * index, scale.y(value)
        made.append(
            f'<rect class="{style}" x="{x + wide * 0.12:.1f}" y="{y:.1f}" '
            f'width="{wide * 0.76:.1f}" height="{BASE - y:.1f}">'
            f"<title>{first + index}: {value:.3g}</title></rect>"
        )
        if index % every == 0:
            made.append(_text(x + wide / 2, BASE + 16, str(first + index), "middle"))
    return "".join(made)


@dataclass(frozen=True)
class _Scale:
    """From zero to these values over the whole drawing."""

    right: float
    top: float

    @classmethod
    def of(cls, series: Sequence[Series]) -> _Scale:
        points = [point for one in series for point in one.points]
        right, top = (max((p[axis] for p in points), default=0.0) for axis in (0, 1))
        return cls(_round_up(right), _round_up(top))

    def x(self, value: float) -> float:
        return LEFT + (END - LEFT) * value / self.right

    def y(self, value: float) -> float:
        return BASE - (BASE - TOP) * value / self.top

    def frame(self, *, marks_below: bool = True) -> str:
        """Lines across at round heights, and the numbers of both axes."""
        made = [
            f'<path class="grid" d="M{LEFT} {self.y(v):.1f}H{END}"/>'
            + _text(LEFT - 6, self.y(v) + 4, f"{v:g}", "end")
            for v in _marks(self.top)
        ]
        if marks_below:
            made += [_text(self.x(v), BASE + 16, f"{v:g}", "middle") for v in _marks(self.right)]
        return "".join([*made, f'<path class="base" d="M{LEFT} {BASE}H{END}"/>'])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _step(largest: float) -> float:
    """A round distance between marks: 1, 2, 2.5 or 5 times a power of ten."""
    raw = largest / MARKS
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= raw * (1 - 1e-9))


def _round_up(largest: float) -> float:
    """The mark at or above the largest value; 1 for nothing."""
    if largest <= 0:
        return 1.0
    step = _step(largest)
    return step * math.ceil(largest / step - 1e-9)


def _marks(largest: float) -> list[float]:
    step = _step(largest)
    return [round(step * n, 12) for n in range(round(largest / step) + 1)]
