"""How far can one number be moved before a bound is crossed? The search alone: it knows no model and no loss.

Numbers are tried outwards from a start that is inside by definition: first a coarse grid, until a point is outside,
then bisection between the last point inside and the first outside. That a curve is monotone is not assumed: what
ends a side is the *nearest* point found outside, whatever lies further out. A bump narrower than the grid's step can
still be stepped over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

Target = TypeVar("Target", bound=Hashable)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Line:
    """The numbers that are searched.

    Attributes:
        low, high: the limits; `low <= start <= high`.
        step: of the coarse grid, which begins at `start` and ends at the limits themselves.
        tolerance: bisection stops when the points inside and outside are no further apart.
        beyond: how many points of the coarse grid past the first one outside are tried too, to see a re-entry.
        start: the number that is inside by definition; it is never tried.
        digits: decimals to which tried numbers are rounded; 0 makes them whole.
    """

    low: float
    high: float
    step: float
    tolerance: float
    beyond: int = 2
    start: float = 1.0
    digits: int = 9

    def grid(self, side: int) -> list[float]:
        """The coarse grid of one side (-1 down, 1 up), outwards, the limit last."""
        limit = self.low if side < 0 else self.high
        steps = math.ceil(round(abs(limit - self.start) / self.step, 6))
        return [round(self.start + side * k * self.step, self.digits) for k in range(1, steps)] + [limit] * (steps > 0)


class Edge(NamedTuple):
    """Where one side ends.

    `inside` is the outermost number such that every tried number from the start to it is inside (the start itself
    when there is none), `outside` the nearest tried number outside, None when there is none; `reentrant` says that
    a tried number further out is inside again.
    """

    inside: float
    outside: float | None
    reentrant: bool

    @property
    def open(self) -> bool:
        """Whether the limit was reached without leaving."""
        return self.outside is None


def edge(inside: Mapping[float, bool], line: Line, side: int) -> Edge:
    """The edge of one side (-1 down, 1 up), from all numbers tried so far and whether each is inside."""
    outwards = sorted((x for x in inside if (x - line.start) * side > 0), key=lambda x: abs(x - line.start))
    last = line.start
    for place, x in enumerate(outwards):
        if not inside[x]:
            return Edge(last, x, any(inside[further] for further in outwards[place + 1 :]))
        last = x
    return Edge(last, None, False)


def wanted(inside: Mapping[float, bool], line: Line) -> list[float]:
    """The numbers to try next, from all that were tried so far; none when both edges are found."""
    numbers: list[float] = []
    for side in (-1, 1):
        found, grid = edge(inside, line, side), line.grid(side)
        # the grid's first point that is, or may be, outside: it is looked at, and `beyond` more
        first = next((k for k, x in enumerate(grid) if x not in inside or not inside[x]), len(grid))
        numbers += [x for x in grid[: first + 1 + line.beyond] if x not in inside]
        if found.outside is not None and abs(found.outside - found.inside) > line.tolerance * (1 + 1e-9):
            numbers.append(round((found.inside + found.outside) / 2, line.digits))
    return numbers


def search(
    targets: Iterable[Target],
    evaluate: Callable[[dict[Target, list[float]]], Mapping[Target, Mapping[float, Answer]]],
    criteria: Sequence[Callable[[Answer], bool]],
    line: Line,
) -> dict[Target, dict[float, Answer]]:
    """Try numbers until, for every target and criterion, both edges are found; all that was tried, with its answer.

    `evaluate` is asked once a round, for all targets together. Each criterion says of an answer whether it is inside;
    every one's edges are bisected, over the numbers that any of them had tried.

    >>> tried = search(["x"], lambda ask: {"x": {x: abs(x - 1) for x in ask["x"]}}, [lambda far: far < 0.6],
    ...                Line(low=0, high=3, step=0.25, tolerance=0.125))
    >>> inside = {x: far < 0.6 for x, far in tried["x"].items()}
    >>> edge(inside, Line(0, 3, 0.25, 0.125), -1).inside, edge(inside, Line(0, 3, 0.25, 0.125), 1).outside
    (0.5, 1.625)
    """
    tried: dict[Target, dict[float, Answer]] = {target: {} for target in targets}
    while True:
        ask = {target: points for target, known in tried.items() if (points := _asked(known, criteria, line))}
        if not ask:
            return tried
        answers = evaluate(ask)
        for target, points in ask.items():
            tried[target].update({x: answers[target][x] for x in points})


def _asked(known: Mapping[float, Answer], criteria: Sequence[Callable[[Answer], bool]], line: Line) -> list[float]:
    by_criterion = [wanted({x: inside(answer) for x, answer in known.items()}, line) for inside in criteria]
    return sorted({x for points in by_criterion for x in points})
