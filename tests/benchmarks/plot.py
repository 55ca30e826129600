"""The plot: for each scenario with clients, throughput and p99 by the number of clients, as SVG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from html import escape

from tests.benchmarks.results import Outcome

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 34
PANELS = (("per_second", "answers/s"), ("p99_ms", "p99, ms"))
# Told apart without colours too: each line has a sign of its own.
COLOURS = ("#0b6e4f", "#b3541e", "#3b5b92", "#7a3e7e", "#5c5c5c")
SIGNS = ("●", "■", "◆", "✕", "▲")

Point = tuple[float, float, float, float]
"""Clients, then median, least and most of the runs."""


def svg(outcomes: Sequence[Outcome]) -> str:
    """One picture of all scenarios that have series; both axes are logarithmic."""
    shown = [one for one in outcomes if any(case.series for case in one.scenario.cases)]
    width, height = WIDTH * len(PANELS), max(1, len(shown)) * HEIGHT
    frame = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame} font-family="sans-serif" font-size="11">',
        "<title>Throughput and p99 latency by clients</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    names = dict.fromkeys(case.series for one in shown for case in one.scenario.cases)
    styles = {name: number % len(COLOURS) for number, name in enumerate(filter(None, names))}
    for row, outcome in enumerate(shown):
        for column, (metric, label) in enumerate(PANELS):
            lines = _series(outcome, metric)
            title = f"{outcome.scenario.name}: {label}"
            parts.append(f'<g transform="translate({column * WIDTH},{row * HEIGHT})">')
            parts += _panel(title, lines, styles)
            parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _series(outcome: Outcome, metric: str) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = {}
    for case in outcome.scenario.cases:
        values = [value for value in outcome.values(case.name, metric) if value > 0]
        if case.series and values:
            point = (case.clients, statistics.median(values), min(values), max(values))
            lines.setdefault(case.series, []).append(point)
    return {name: sorted(points) for name, points in lines.items()}


def _panel(title: str, lines: dict[str, list[Point]], styles: dict[str, int]) -> list[str]:
    parts = [f'<text x="{LEFT}" y="18" font-weight="bold">{escape(title)}</text>']
    points = [point for line in lines.values() for point in line]
    if not points:
        return [*parts, f'<text x="{LEFT}" y="60">nothing measured</text>']
    clients = sorted({point[0] for point in points})
    low = math.floor(math.log10(min(point[2] for point in points)))
    high = max(low + 1, math.ceil(math.log10(max(point[3] for point in points))))

    def x(value: float) -> float:
        span = math.log2(clients[-1] / clients[0]) or 1.0
        return LEFT + 8 + (WIDTH - LEFT - RIGHT - 16) * math.log2(value / clients[0]) / span

    def y(value: float) -> float:
        share = (math.log10(value) - low) / (high - low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(
            f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    parts += [
        f'<text x="{x(count):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{count:g}</text>'
        for count in clients
    ]
    parts.append(f'<text x="6" y="{HEIGHT - BOTTOM + 15}">clients</text>')
    for number, (name, line) in enumerate(lines.items()):
        style = styles[name]
        parts += _line(line, x, y, COLOURS[style], SIGNS[style])
        parts.append(
            f'<text x="{LEFT + 10 + 115 * (number % 3)}" y="{TOP + 10 + 13 * (number // 3)}" '
            f'fill="{COLOURS[style]}">{SIGNS[style]} {escape(name)}</text>'
        )
    return parts


def _line(
    points: list[Point],
    x: Callable[[float], float],
    y: Callable[[float], float],
    colour: str,
    sign: str,
) -> list[str]:
    """The medians joined, and at each a bar from the least run to the most."""
    places = [f"{x(point[0]):.1f} {y(point[1]):.1f}" for point in points]
    parts = [f'<path d="M{"L".join(places)}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    for count, middle, least, most in points:
        parts.append(
            f'<path d="M{x(count):.1f} {y(least):.1f}V{y(most):.1f}" stroke="{colour}"/>'
            f'<text x="{x(count):.1f}" y="{y(middle) + 4:.1f}" text-anchor="middle" '
            f'fill="{colour}">{sign}</text>'
        )
    return parts
