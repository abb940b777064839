"""What direction and what size cost at each displacement, and how they compare: arrays of losses to a tidy table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lens_geometry.experiments.damages import KINDS, QUANTITIES, Damage, Doses, contrast, draw, ratio, worst
from lens_geometry.paired_tests import bonferroni, holm, paired_test
from lens_geometry.stats import Floats, percentile_interval

__all__ = ["Doses", "as_table", "rows"]

COUNTS = ("n_clipped", "n_flipped", "n_places")
TESTS = ("p_seeds", "p_items")  # corrected for how many of each there are
NAN = math.nan
EMPTY: dict[str, Any] = {
    "quantity": "", "kind": "", "regime": "", "displacement": NAN, "seed": pd.NA,
    "value": NAN, "low": NAN, "high": NAN, "level": NAN, "base": NAN,
    "p_seeds": NAN, "p_seeds_bonferroni": NAN, "p_seeds_holm": NAN, "cohens_d_seeds": NAN,
    "p_items": NAN, "p_items_wilcoxon": NAN, "p_items_bonferroni": NAN, "p_items_holm": NAN, "cohens_d_items": NAN,
    "n_seeds": 0, "n_items": 0, "n_left_out": 0, "displacement_mean": NAN, "displacement_max_error": NAN,
    "n_clipped": pd.NA, "n_flipped": pd.NA, "n_places": pd.NA, "status": "ok",
}  # fmt: skip


class _Group(NamedTuple):
    """One displacement, or a regime of them: which places of the arrays."""

    regime: str
    displacement: float
    places: list[int]


def rows(
    doses: Doses, *, seed: int = 0, low_regime: float | None = None, resamples: int = 2000
) -> list[dict[str, Any]]:
    """Every damage, alone and compared, as rows of one long table; `as_table` makes it one.

    Damage points up: rise of the loss (nats per token, all tokens alike), drop of the margin (nats), drop of the
    accuracy (share of pairs with a margin above 0). The kinds of rows:

    - `angular`, `magnitude`: the damage, for each seed and over all (`seed` NA), with `level` and `base`, the loss,
      margin or accuracy itself, perturbed and not, and with what the perturbation really did.
    - `difference`: angular minus magnitude, with paired tests over seeds, and over items (sequences or pairs, averaged
      over seeds, each counting once). Corrections are for all tests of single displacements in these rows.
    - `ratio`: angular over magnitude. Infinite where only the angular one hurts, undefined where neither does: such a
      resample counts at both ends of the interval.
    - `contrast`: (a - m) / (|a| + |m|), from -1 (only magnitude hurts) to 1 (only angular hurts), 0 where nothing
      changed.
    - `crossover`: (contrast of the loss - contrast of this quantity) / 2.

    Intervals are 95 % percentiles over seeds and items drawn anew (`stats.two_way_means`), all rows from the same draws
    (one seed's rows: over items alone). A `regime` pools displacements: those up to `low_regime` (by default the
    median), those above, and all; damages are averaged over its displacements before they are compared, contrasts are
    averaged themselves.

    A displacement at which any condition is not "ok" is compared no further: its rows say why, and regimes leave it
    out (`n_left_out`). Damage by itself is then over what is finite, with an interval only where everything is.
    """
    damages = [Damage(doses, name) for name in QUANTITIES if name == "loss" or doses.margins]
    draw(damages, seed=seed, resamples=resamples)
    groups = list(_groups(doses.displacements, low_regime))
    table: list[dict[str, Any]] = []
    for damage in damages:
        for kind in KINDS:
            table += _by_displacement(doses, damage, kind)
            table += [_pooled(damage, kind, group) for group in groups if group.regime]
        table += [row for group in groups for row in _comparisons(damage, group)]
        if damage.quantity != "loss":
            table += [_crossover(damages[0], damage, group) for group in groups]
    _correct_tests([row for row in table if row["kind"] == "difference" and not row["regime"]])
    return table


def as_table(found: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a table, with whole numbers that may be missing."""
    return pd.DataFrame(found).astype(dict.fromkeys(("seed", *COUNTS), "Int64"))


def _groups(displacements: Sequence[float], low_regime: float | None) -> Iterator[_Group]:
    places = list(range(len(displacements)))
    for place in places:
        yield _Group("", float(displacements[place]), [place])
    bound = float(np.median(displacements)) if low_regime is None else low_regime
    low = [place for place in places if displacements[place] <= bound]
    high = [place for place in places if place not in low]
    for regime, chosen in (("low", low), ("high", high), ("all", places)):
        if chosen:
            yield _Group(regime, NAN, chosen)


def _by_displacement(doses: Doses, damage: Damage, kind: str) -> Iterator[dict[str, Any]]:
    """One kind of perturbation at every displacement: over all seeds, then each seed by itself."""
    ends, ends_by_seed = (percentile_interval(draws[kind]) for draws in (damage.draws, damage.draws_by_seed))
    for place, displacement in enumerate(doses.displacements):
        statuses, measured = damage.status[kind][place], doses.measured[kind][place]
        about = {"quantity": damage.quantity, "kind": kind, "displacement": float(displacement), "base": damage.base}
        for number in (None, *range(len(doses.seeds))):
            seeds = slice(None) if number is None else slice(number, number + 1)
            low, high = (end[place] for end in ends) if number is None else (end[place, number] for end in ends_by_seed)
            yield {
                **EMPTY,
                **about,
                "seed": pd.NA if number is None else doses.seeds[number],
                **damage.finite(kind, place, seeds),
                "low": float(low),
                "high": float(high),
                **_measured(measured[seeds]),
                "status": worst(statuses[seeds]),
            }


def _measured(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the perturbation did, over seeds: the mean displacement of all places, the largest error, sums of counts."""
    counts = {name: np.array([one[name] for one in found], dtype=float) for name in COUNTS}
    means, errors = (
        np.array([one[f"displacement_{name}"] for one in found], dtype=float) for name in ("mean", "max_error")
    )
    places = np.where(np.isfinite(means), np.nan_to_num(counts["n_places"]), 0.0)
    total, errors = places.sum(), errors[np.isfinite(errors)]
    return {
        "displacement_mean": float((np.nan_to_num(means) * places).sum() / total) if total else NAN,
        "displacement_max_error": float(errors.max()) if errors.size else NAN,
        **{name: int(np.nansum(count)) for name, count in counts.items()},
    }


def _pooled(damage: Damage, kind: str, group: _Group) -> dict[str, Any]:
    """Mean damage of one kind over a regime."""
    row, kept = _row(kind, group, damage)
    row |= _estimate(damage.values(kind)[kept], damage.draws[kind][:, kept], lambda x: x.mean(-1))
    sign = 1 if damage.quantity == "loss" else -1
    return {**row, "base": damage.base, "level": damage.base + sign * row["value"]}


def _row(kind: str, group: _Group, *damages: Damage) -> tuple[dict[str, Any], list[int]]:
    """A row of the last damage, still without numbers, and the displacements at which all damages can be compared."""
    kept = [place for place in group.places if all(damage.comparable[place] for damage in damages)]
    row = {
        **EMPTY, "quantity": damages[-1].quantity, "kind": kind, "regime": group.regime,
        "displacement": group.displacement, "n_left_out": len(group.places) - len(kept),
        "n_seeds": damages[-1].by_seed[KINDS[0]].shape[-1], "n_items": len(damages[-1].weights),
        "status": "ok" if kept else _why_not(group, damages),
    }  # fmt: skip
    return row, kept


def _why_not(group: _Group, damages: Sequence[Damage]) -> str:
    """Why there is nothing to compare, such as "angular impossible"."""
    if group.regime:
        return "incomparable"
    place = group.places[0]
    found = {kind: worst([one for damage in damages for one in damage.status[kind][place]]) for kind in KINDS}
    return ", ".join(f"{kind} {status}" for kind, status in found.items() if status != "ok")


Statistic = Callable[[Floats], Floats]


def _estimate(values: Floats, draws: Floats, statistic: Statistic, *ends: Statistic) -> dict[str, float]:
    """A statistic over the last axis with its interval; `ends` where a resample counts differently at its two ends."""
    if not values.shape[-1]:
        return {}
    at_low, at_high = ends or (statistic, statistic)
    low, high = percentile_interval(at_low(draws))[0], percentile_interval(at_high(draws))[1]
    return {"value": float(statistic(values)), "low": float(low), "high": float(high)}


def _comparisons(damage: Damage, group: _Group) -> Iterator[dict[str, Any]]:
    """Difference with its tests, ratio and contrast of one displacement or regime."""
    row, kept = _row("difference", group, damage)
    values, draws = _both_kinds([damage], kept)
    yield {**row, **_estimate(values, draws, lambda x: (x[0] - x[1]).mean(-1)), **_tests(damage, kept)}
    ratios = (_ratio_of_means(undefined) for undefined in (NAN, -math.inf, math.inf))
    yield {**row, "kind": "ratio", **_estimate(values, draws, *ratios)}
    yield {**row, "kind": "contrast", **_estimate(values, draws, _mean_contrast)}


def _crossover(loss: Damage, damage: Damage, group: _Group) -> dict[str, Any]:
    """Half the contrast of the loss minus that of another quantity, where both can be compared."""
    row, kept = _row("crossover", group, loss, damage)
    values, draws = _both_kinds([loss, damage], kept)
    return {**row, **_estimate(values, draws, lambda x: (_mean_contrast(x[:2]) - _mean_contrast(x[2:])) / 2)}


def _both_kinds(damages: Sequence[Damage], kept: list[int]) -> tuple[Floats, Floats]:
    """Values [damage and kind, displacement] and draws [damage and kind, resample, displacement]."""
    values = np.stack([damage.values(kind)[kept] for damage in damages for kind in KINDS])
    return values, np.stack([damage.draws[kind][:, kept] for damage in damages for kind in KINDS])


def _mean_contrast(both: Floats) -> Floats:
    return contrast(both[0], both[1]).mean(-1)


def _ratio_of_means(undefined: float) -> Statistic:
    return lambda both: ratio(both[0].mean(-1), both[1].mean(-1), undefined)


def _tests(damage: Damage, kept: list[int]) -> dict[str, float]:
    """Paired tests of the angular against the magnitude damage, averaged over displacements."""
    if not kept:
        return {}
    seeds = paired_test(*(damage.by_seed[kind][kept].mean(0) for kind in KINDS))
    items = paired_test(*(damage.by_item(kind, kept) for kind in KINDS))
    return {
        "p_seeds": seeds.p, "cohens_d_seeds": seeds.cohens_d,
        "p_items": items.p, "p_items_wilcoxon": items.p_wilcoxon, "cohens_d_items": items.cohens_d,
    }  # fmt: skip


def _correct_tests(differences: list[dict[str, Any]]) -> None:
    """Write corrected p values into the rows of single displacements, one family for each way of testing."""
    for test in TESTS:
        p = [row[test] for row in differences]
        for name, correct in (("bonferroni", bonferroni), ("holm", holm)):
            for row, corrected in zip(differences, correct(p), strict=True):
                row[f"{test}_{name}"] = float(corrected)
