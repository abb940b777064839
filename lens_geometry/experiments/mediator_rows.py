"""What was measured of the mediators of a push, as rows: means by layer, growth, and the share of damage explained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lens_geometry.edits.mediating import BRANCH, GROWTH, MEDIATORS, STREAM
from lens_geometry.mediation import FEWEST_POINTS, explained, explained_beyond, explained_in_rank, growth_exponent
from lens_geometry.metrics import SequenceLosses
from lens_geometry.stats import Floats, percentile_interval, two_way_means

STATUSES = ("ok", "no_effect", "nonfinite", "impossible")  # the worst last
SHARES = ("explained", "explained_in_rank", "explained_beyond")
KNOWN = "relative_displacement"  # what `explained_beyond` is beyond
RESAMPLES = 1000


@dataclass(frozen=True)
class Measured:
    """One pass over all sequences: mediators summed over tokens and their numbers, [sequence, mediator, level].

    `clipped` and `flipped` count places that were moved less than asked, or turned right round.
    """

    sums: Floats
    counts: Floats
    losses: SequenceLosses
    clipped: int = 0
    flipped: int = 0


@dataclass(frozen=True)
class Pushed:
    """All seeds of one perturbation: what is the same for its rows, and what each seed gave (None: impossible)."""

    about: dict[str, Any]
    layers: tuple[int, ...]
    seeds: tuple[int, ...]
    found: tuple[Measured | None, ...]


def rows(pushed: Pushed, clean: Measured, *, seed: int) -> list[dict[str, Any]]:
    """The rows of one perturbation, pooled over seeds (`seed` missing) and of each seed alone.

    Means are over all measured tokens; intervals are 95 % percentiles over sequences drawn anew, and over seeds drawn
    anew where several are pooled.
    """
    runs = [(number, run) for number, run in zip(pushed.seeds, pushed.found, strict=True) if run is not None]
    statuses = {number: _status(run, clean) for number, run in zip(pushed.seeds, pushed.found, strict=True)}
    pooled = max(statuses.values(), key=STATUSES.index)
    scopes = [(None, [run for _, run in runs], pooled), *((number, [run], statuses[number]) for number, run in runs)]
    table = [
        row for number, some, status in scopes if some for row in _scope(pushed, clean, some, number, status, seed)
    ]
    lost = [number for number in pushed.seeds if statuses[number] == "impossible"]
    if not runs:
        table.append(_row(pushed, None, "loss", "mean", pooled, 0, len(clean.sums)))
    table += [_row(pushed, number, "loss", "mean", "impossible", 0, len(clean.sums)) for number in lost]
    return [*table, *_shares(pushed, clean, runs, pooled, seed)]


def as_table(found: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The rows as a table, whole numbers as such."""
    return pd.DataFrame(found).astype(dict.fromkeys(("layer", "pushes", "seed", "n_clipped", "n_flipped"), "Int64"))


def _scope(
    pushed: Pushed, clean: Measured, runs: list[Measured], number: int | None, status: str, seed: int
) -> Iterator[dict[str, Any]]:
    """Means by layer, the growth's exponents and the loss, of one seed or of several pooled."""
    n_sequences = len(clean.sums)
    moved = {"n_clipped": sum(run.clipped for run in runs), "n_flipped": sum(run.flipped for run in runs)}

    def row(mediator: str, measure: str, **columns: Any) -> dict[str, Any]:
        return _row(pushed, number, mediator, measure, status, len(runs), n_sequences, **moved, **columns)

    values, drawn = _means([(run.sums, run.counts) for run in runs], seed)
    before, before_drawn = _means([(clean.sums, clean.counts)], seed)
    levels = values.shape[-1]
    for place, mediator in enumerate(MEDIATORS):
        if not np.isfinite(values[place]).any():
            continue
        value, sample = values[place], drawn[:, place]
        reference, reference_sample = before[place], before_drawn[:, place]
        if mediator in GROWTH:
            with np.errstate(invalid="ignore"):  # few seeds are drawn with weights that may be negative
                value, sample = np.sqrt(value), np.sqrt(sample)
            steps = [level for level in range(levels) if np.isfinite(value[level])]
            low, high = _interval(growth_exponent(sample[:, steps]), n_sequences)
            found = float(growth_exponent(value[steps]))
            yield row(mediator, "growth_exponent", value=found, low=low, high=high)
        if mediator in (*STREAM, *BRANCH, *GROWTH):  # the clean pass compared with itself
            reference = np.full(levels, {"norm_ratio": 1.0}.get(mediator, math.nan if mediator in GROWTH else 0.0))
            reference_sample = np.broadcast_to(reference, sample.shape)
        for level in np.flatnonzero(np.isfinite(value)):
            yield row(
                mediator,
                "mean",
                layer=int(level),
                pushes=sum(layer <= level for layer in pushed.layers),
                **_compared(n_sequences, value[level], sample[:, level], reference[level], reference_sample[:, level]),
            )
    losses, loss_draws = _means([_loss_sums(run) for run in runs], seed)
    base, base_draws = _means([_loss_sums(clean)], seed)
    finite = n_sequences if status != "nonfinite" else 0  # a loss over the rest has no interval
    yield row("loss", "mean", **_compared(finite, losses, loss_draws, base, base_draws))


def _means(runs: Sequence[tuple[Floats, Floats]], seed: int) -> tuple[Floats, Floats]:
    """`(mean, means of the resamples)` of sums over counts [sequence, ...], all seeds together."""
    sums, counts = (np.moveaxis(np.stack(arrays), (0, 1), (-2, -1)) for arrays in zip(*runs, strict=True))
    drawn_sums, drawn_counts = two_way_means([sums, counts], seed=seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums.sum((-2, -1)) / counts.sum((-2, -1)), drawn_sums / drawn_counts


def _interval(drawn: Floats, sequences: int) -> tuple[float, float]:
    """Percentiles of resampled statistics; none where there is one sequence only."""
    if sequences < 2:
        return math.nan, math.nan
    low, high = percentile_interval(drawn)
    return float(low), float(high)


def _compared(sequences: int, value: Any, drawn: Any, reference: Any, reference_drawn: Any) -> dict[str, float]:
    low, high = _interval(drawn, sequences)
    change_low, change_high = _interval(drawn - reference_drawn, sequences)
    found = {"value": value, "low": low, "high": high, "clean": reference}
    return {**found, "change": value - reference, "change_low": change_low, "change_high": change_high}


def _shares(
    pushed: Pushed, clean: Measured, runs: list[tuple[int, Measured]], status: str, seed: int
) -> Iterator[dict[str, Any]]:
    """How much of the variance of the loss change, over sequences and seeds, each mediator's change explains.

    A mediator counts with its mean over tokens and over the levels from the first push on. Where a loss is not finite
    the point is left out.
    """
    n_sequences, first = len(clean.sums), min(pushed.layers)
    shape = (len(runs), n_sequences)
    damage = np.array([_damage(run, clean) for _, run in runs]).reshape(shape)
    changes = {
        mediator: np.array([_change(run, clean, place, first) for _, run in runs]).reshape(shape)
        for place, mediator in enumerate(MEDIATORS)
        if mediator not in GROWTH
    }
    even = np.full(n_sequences, 1 / n_sequences)
    times_drawn = np.random.default_rng(seed).multinomial(n_sequences, even, RESAMPLES).astype(float)
    for mediator, change in changes.items():
        if not np.isfinite(change).any():
            continue
        for measure in SHARES:
            if measure == "explained_beyond" and mediator == KNOWN:
                continue
            kept = np.isfinite(damage + change + changes[KNOWN])
            points = int(kept.sum())
            columns: dict[str, Any] = {"n_points": points}
            if points >= FEWEST_POINTS:
                arrays = [np.where(kept, x, 0.0).ravel() for x in (change, damage, changes[KNOWN])]
                whole, drawn = (  # all seeds of a sequence go together; a point that is left out never counts
                    (kept * times[..., None, :]).reshape(*times.shape[:-1], -1)
                    for times in (np.ones(n_sequences), times_drawn)
                )
                low, high = _interval(_share(measure, arrays, drawn), n_sequences)
                columns |= {"value": float(_share(measure, arrays, whole)), "low": low, "high": high}
            told = "few_points" if points < FEWEST_POINTS else status
            yield _row(pushed, None, mediator, measure, told, len(runs), n_sequences, **columns)


def _share(measure: str, arrays: list[Floats], weights: Floats) -> Floats:
    change, damage, known = arrays
    if measure == "explained_beyond":
        return explained_beyond(change, damage, known, weights)
    return (explained if measure == "explained" else explained_in_rank)(change, damage, weights)


def _change(run: Measured, clean: Measured, place: int, first: int) -> Floats:
    """One mediator's change against the clean pass, of each sequence: mean over tokens, then levels from `first` on."""
    with np.errstate(invalid="ignore", divide="ignore"):
        after, before = (x.sums[:, place, first:] / x.counts[:, place, first:] for x in (run, clean))
    if MEDIATORS[place] in (*STREAM, *BRANCH):
        before = np.zeros_like(after)
    there = np.isfinite(after - before).any(0)  # attention has no last level; what a layer lacks, all sequences lack
    change: Floats = (after - before)[:, there].mean(1) if there.any() else np.full(len(after), math.nan)
    return change


def _damage(run: Measured, clean: Measured) -> Floats:
    """The change of each sequence's mean loss; NaN where a loss is not finite."""
    sums, counts = _loss_sums(run)
    base, base_counts = _loss_sums(clean)
    lost = run.losses.nonfinite > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(lost, math.nan, sums / counts - base / base_counts)


def _loss_sums(run: Measured) -> tuple[Floats, Floats]:
    """Summed finite losses and their number, [sequence]."""
    return run.losses.sums, (run.losses.counts - run.losses.nonfinite).astype(float)


def _status(run: Measured | None, clean: Measured) -> str:
    if run is None:
        return "impossible"
    if run.losses.nonfinite.any():
        return "nonfinite"
    return "no_effect" if np.array_equal(run.losses.sums, clean.losses.sums) else "ok"


def _row(
    pushed: Pushed, number: int | None, mediator: str, measure: str, status: str, seeds: int, sequences: int,
    **columns: Any,
) -> dict[str, Any]:  # fmt: skip
    numbers = ("value", "low", "high", "clean", "change", "change_low", "change_high")
    return {
        **pushed.about,
        "mediator": mediator,
        "measure": measure,
        "layer": columns.get("layer", pd.NA),
        "pushes": columns.get("pushes", pd.NA),
        "seed": pd.NA if number is None else number,
        **{name: float(columns.get(name, math.nan)) for name in numbers},
        "n_clipped": columns.get("n_clipped", pd.NA),
        "n_flipped": columns.get("n_flipped", pd.NA),
        "n_seeds": seeds,
        "n_sequences": sequences,
        "n_points": columns.get("n_points", seeds * sequences),
        "status": status,
    }
