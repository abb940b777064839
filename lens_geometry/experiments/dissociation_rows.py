"""What direction and what size cost at each displacement, and how they compare: arrays of losses to a tidy table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lens_geometry.paired_tests import bonferroni, holm, paired_test
from lens_geometry.stats import Floats, percentile_interval, two_way_means

KINDS = ("angular", "magnitude")
QUANTITIES = ("loss", "margin", "accuracy")
STATUSES = ("ok", "no_effect", "nonfinite", "impossible")  # the worst last
COUNTS = ("n_clipped", "n_flipped", "n_places")
TESTS = ("p_seeds", "p_items")  # which are corrected for how many there are
NAN = math.nan
EMPTY: dict[str, Any] = {
    "quantity": "", "kind": "", "regime": "", "displacement": NAN, "seed": pd.NA,
    "value": NAN, "low": NAN, "high": NAN, "level": NAN, "base": NAN,
    "p_seeds": NAN, "p_seeds_bonferroni": NAN, "p_seeds_holm": NAN, "cohens_d_seeds": NAN,
    "p_items": NAN, "p_items_wilcoxon": NAN, "p_items_bonferroni": NAN, "p_items_holm": NAN, "cohens_d_items": NAN,
    "n_seeds": 0, "n_items": 0, "n_left_out": 0, "displacement_mean": NAN, "displacement_max_error": NAN,
    "n_clipped": pd.NA, "n_flipped": pd.NA, "n_places": pd.NA, "status": "ok",
}  # fmt: skip


@dataclass(frozen=True)
class Doses:
    """What was run for one variant of the perturbation and one set of layers.

    Attributes:
        displacements, seeds: of every kind.
        sums: kind to [displacement, seed, sequence], the summed losses of each text sequence under the perturbation in
            nats; NaN where that was not run or is not finite.
        base_sums, counts: [sequence], the unperturbed summed losses, and how many losses were summed.
        margins: kind to [displacement, seed, pair], log p(good) - log p(bad) in nats, NaN likewise; empty without pairs.
        base_margins: [pair], unperturbed.
        measured: kind to [displacement][seed], what the perturbation really did: `displacement_mean`,
            `displacement_max_error` (relative), `n_clipped`, `n_flipped`, `n_places`, and `status`: "ok",
            "nonfinite", "no_effect" or "impossible".
    """

    displacements: tuple[float, ...]
    seeds: tuple[int, ...]
    sums: Mapping[str, Floats]
    base_sums: Floats
    counts: Floats
    margins: Mapping[str, Floats]
    base_margins: Floats
    measured: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]


class _Group(NamedTuple):
    """One displacement, or a regime of them: which rows of the arrays."""

    regime: str
    displacement: float
    places: list[int]


class _Quantity:
    """Damage of one quantity: the mean of `changes` over the mean of `weights`. Points up: what is lost."""

    def __init__(self, doses: Doses, name: str) -> None:
        self.name, self.population = name, int(name != "loss")
        levels, base = (doses.sums, doses.base_sums) if name == "loss" else (doses.margins, doses.base_margins)
        levels, base = {kind: np.asarray(levels[kind], float) for kind in KINDS}, np.asarray(base, float)
        if name == "accuracy":
            levels, base = {kind: _correct(levels[kind]) for kind in KINDS}, _correct(base)
        sign = 1.0 if name == "loss" else -1.0
        self.levels, self.base_items = levels, base
        self.changes = {kind: sign * (levels[kind] - base) for kind in KINDS}
        self.weights = np.asarray(doses.counts, float) if name == "loss" else np.ones(len(base))
        self.base = float(base.sum() / self.weights.sum())
        self.status = {kind: self._status(doses, kind) for kind in KINDS}
        fine = [np.array(self.status[kind]) == "ok" for kind in KINDS]
        self.comparable = np.logical_and(*fine).all(1)  # [displacement]
        self.by_seed = {kind: self.changes[kind].sum(-1) / self.weights.sum() for kind in KINDS}
        self.draws: dict[str, Floats] = {}  # [resample, displacement], filled for all quantities together

    def _status(self, doses: Doses, kind: str) -> list[list[str]]:
        """[displacement][seed]: as measured, and "nonfinite" where this quantity is not finite."""
        finite = np.isfinite(self.changes[kind]).all(-1)
        return [
            [
                str(found["status"]) if found["status"] != "ok" else "ok" if good else "nonfinite"
                for found, good in zip(of_dose, fine, strict=True)
            ]
            for of_dose, fine in zip(doses.measured[kind], finite, strict=True)
        ]

    def damage(self, kind: str) -> Floats:
        """[displacement], over all seeds."""
        return self.by_seed[kind].mean(-1)

    def by_item(self, kind: str, places: list[int]) -> Floats:
        """Damage of each sequence (per token) or pair, over seeds and displacements."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.changes[kind][places].mean((0, 1)) / self.weights

    def kept(self, places: list[int]) -> list[int]:
        return [place for place in places if self.comparable[place]]


def rows(doses: Doses, *, seed: int = 0, low_regime: float | None = None) -> list[dict[str, Any]]:
    """Every damage, alone and compared, as rows of one long table; `as_table` makes it one.

    Damage points up: change of loss (nats per token, all tokens alike), drop of the margin (nats), drop of the
    accuracy (share of pairs with a margin above 0). The kinds of rows:

    - `angular`, `magnitude`: the damage, for each seed and over all (`seed` NA), with `level` and `base`, the loss,
      margin or accuracy itself, perturbed and not, and with what the perturbation really did.
    - `difference`: angular minus magnitude, with paired tests over seeds, and over items (sequences or pairs, averaged
      over seeds, each counting once). Corrections are for all tests of single displacements in these rows.
    - `ratio`: angular over magnitude. Infinite where only the angular one hurts, undefined where neither does: such a
      resample counts at both ends of the interval.
    - `contrast`: (a - m) / (|a| + |m|), from -1 (only magnitude hurts) to 1 (only angular hurts), 0 where nothing
      changed.
    - `crossover`: (contrast of loss - contrast of this quantity) / 2.

    Intervals are 95 % percentiles over seeds and items drawn anew, all rows from the same draws (one seed's rows: over
    items alone). A `regime` pools displacements: those up to `low_regime` (by default the median), those above, and
    all; damages are averaged over its displacements before they are compared, contrasts are averaged themselves.

    A displacement at which any condition is not "ok" is compared no further: its rows say why, and regimes leave it
    out (`n_left_out`). Damage by itself is then over what is finite, without an interval.
    """
    found = [_Quantity(doses, name) for name in QUANTITIES if name == "loss" or doses.margins]
    _draw(found, seed)
    groups = list(_groups(doses.displacements, low_regime))
    table: list[dict[str, Any]] = []
    for quantity in found:
        for kind in KINDS:
            table += _damages(doses, quantity, kind, groups, seed)
        table += [row for group in groups for row in _comparisons(doses, quantity, group)]
        if quantity.name != "loss":
            table += [_crossover(doses, found[0], quantity, group) for group in groups]
    _correct_tests([row for row in table if row["kind"] == "difference" and not row["regime"]])
    return table


def as_table(found: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a table, with whole numbers that may be missing."""
    return pd.DataFrame(found).astype(dict.fromkeys(("seed", *COUNTS), "Int64"))


def contrast(angular: Floats, magnitude: Floats) -> Floats:
    """(a - m) / (|a| + |m|); 0 where both are 0."""
    size = np.abs(angular) + np.abs(magnitude)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(size == 0, 0.0, (angular - magnitude) / size)


def ratio(angular: Floats, magnitude: Floats, undefined: float = NAN) -> Floats:
    """a / m; infinite where only a is above 0, `undefined` where neither is, negative where a alone is below 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.where(magnitude > 0, angular / magnitude, np.where(angular > 0, np.inf, undefined))
    return np.where(np.isnan(angular) | np.isnan(magnitude), np.nan, found)


def _correct(margins: Floats) -> Floats:
    return np.where(np.isnan(margins), np.nan, margins > 0)


def _draw(found: list[_Quantity], seed: int) -> None:
    """Resampled damages of every quantity and kind, the seeds drawn alike for all, sequences and pairs each alike."""
    arrays, populations = [], []
    for quantity in found:
        arrays += [quantity.changes[kind] for kind in KINDS] + [quantity.weights[None]]
        populations += [quantity.population] * (len(KINDS) + 1)
    drawn = iter(two_way_means(arrays, populations, seed=seed))
    for quantity in found:
        changes = {kind: next(drawn) for kind in KINDS}
        weights = next(drawn)
        quantity.draws = {kind: changes[kind] / weights[:, None] for kind in KINDS}


def _groups(displacements: Sequence[float], low_regime: float | None) -> Iterator[_Group]:
    places = range(len(displacements))
    for place in places:
        yield _Group("", float(displacements[place]), [place])
    bound = float(np.median(displacements)) if low_regime is None else low_regime
    low = [place for place in places if displacements[place] <= bound]
    for regime, chosen in (("low", low), ("high", [p for p in places if p not in low]), ("all", list(places))):
        if chosen:
            yield _Group(regime, NAN, chosen)


def _damages(doses: Doses, quantity: _Quantity, kind: str, groups: list[_Group], seed: int) -> Iterator[dict[str, Any]]:
    """Rows of one kind of perturbation: every displacement over all seeds and for each, then the regimes."""
    low, high = percentile_interval(quantity.draws[kind])
    alone = []
    for number in range(len(doses.seeds)):
        change, weights = two_way_means([quantity.changes[kind][:, number : number + 1], quantity.weights[None]],
                                        seed=seed)  # fmt: skip
        alone.append(percentile_interval(change / weights[:, None]))
    about = {"quantity": quantity.name, "kind": kind, "base": quantity.base}
    for place, displacement in enumerate(doses.displacements):
        base = {**EMPTY, **about, "displacement": float(displacement)}
        measured, status = doses.measured[kind][place], quantity.status[kind][place]
        everywhere = slice(None)
        yield {**base, **_finite(quantity, kind, place, everywhere), **_measured(measured), "status": _worst(status),
               "low": float(low[place]), "high": float(high[place])}  # fmt: skip
        for number, name in enumerate(doses.seeds):
            ends = {"low": float(alone[number][0][place]), "high": float(alone[number][1][place])}
            one = slice(number, number + 1)
            yield {**base, **_finite(quantity, kind, place, one), **_measured(measured[one]), "seed": name,
                   "status": status[number], **ends}  # fmt: skip
    for group in groups:
        if group.regime:
            kept = quantity.kept(group.places)
            values = quantity.damage(kind)[kept]
            yield {**EMPTY, **about, **_place(doses, quantity, group, kept),
                   **_estimate(values, quantity.draws[kind][:, kept], lambda x: x.mean(-1)),
                   "level": quantity.base + (values.mean() if quantity.name == "loss" else -values.mean())
                   if kept else NAN}  # fmt: skip


def _finite(quantity: _Quantity, kind: str, place: int, seeds: slice) -> dict[str, Any]:
    """Damage and level over the finite sequences or pairs alone, and how many there are."""
    changes, levels = quantity.changes[kind][place, seeds], quantity.levels[kind][place, seeds]
    finite = np.isfinite(changes)
    weight = float((finite * quantity.weights).sum())
    sums = [float(np.where(finite, x, 0.0).sum()) for x in (changes, levels)]
    value, level = (total / weight if weight else NAN for total in sums)
    n_seeds, n_items = int(finite.any(1).sum()), int(finite.any(0).sum())
    return {"value": value, "level": level, "n_seeds": n_seeds, "n_items": n_items}


def _measured(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the perturbation did, over seeds: the mean displacement by places, the largest error, sums of counts."""
    counts = {name: sum(int(one[name]) for one in found) for name in COUNTS}
    means = [(float(one["displacement_mean"]), int(one["n_places"])) for one in found]
    means = [(mean, places) for mean, places in means if places and math.isfinite(mean)]
    errors = [float(one["displacement_max_error"]) for one in found]
    total = sum(places for _, places in means)
    return {
        "displacement_mean": sum(mean * places for mean, places in means) / total if total else NAN,
        "displacement_max_error": max((error for error in errors if math.isfinite(error)), default=NAN),
        **counts,
    }


def _worst(status: Sequence[str]) -> str:
    return max(status, key=lambda name: STATUSES.index(name) if name in STATUSES else len(STATUSES))


def _estimate(values: Floats, draws: Floats, statistic: Any, *ends: Any) -> dict[str, Any]:
    """A statistic over the last axis with its interval; `ends` are the statistics of its two ends where they differ."""
    if not values.shape[-1]:
        return {}
    at_low, at_high = ends or (statistic, statistic)
    low, high = percentile_interval(at_low(draws))[0], percentile_interval(at_high(draws))[1]
    return {"value": float(statistic(values)), "low": float(low), "high": float(high)}


def _place(doses: Doses, quantity: _Quantity, group: _Group, kept: list[int]) -> dict[str, Any]:
    """Which displacements a row is of, over how much, and whether there was something to compare."""
    found = {
        "regime": group.regime, "displacement": group.displacement, "n_seeds": len(doses.seeds),
        "n_items": len(quantity.weights), "n_left_out": len(group.places) - len(kept),
    }  # fmt: skip
    return found if kept else {**found, "status": _why_not(quantity, group)}


def _why_not(*about: Any) -> str:
    """Why a group could not be compared, such as "angular impossible"."""
    *quantities, group = about
    if group.regime:
        return "incomparable"
    worst = {
        kind: _worst([_worst(quantity.status[kind][group.places[0]]) for quantity in quantities]) for kind in KINDS
    }
    return ", ".join(f"{kind} {status}" for kind, status in worst.items() if status != "ok")


def _comparisons(doses: Doses, quantity: _Quantity, group: _Group) -> Iterator[dict[str, Any]]:
    """Difference with its tests, ratio and contrast of one displacement or regime."""
    kept = quantity.kept(group.places)
    base = {**EMPTY, "quantity": quantity.name, **_place(doses, quantity, group, kept)}
    values = np.stack([quantity.damage(kind)[kept] for kind in KINDS])  # [kind, displacement]
    draws = np.stack([quantity.draws[kind][:, kept] for kind in KINDS])  # [kind, resample, displacement]

    def difference(x: Floats) -> Floats:
        return (x[0] - x[1]).mean(-1)

    def ratio_of_means(undefined: float = NAN) -> Any:
        return lambda x: ratio(x[0].mean(-1), x[1].mean(-1), undefined)

    tests = _tests(quantity, kept) if kept else {}
    yield {**base, "kind": "difference", **_estimate(values, draws, difference), **tests}
    ends = ratio_of_means(-math.inf), ratio_of_means(math.inf)
    yield {**base, "kind": "ratio", **_estimate(values, draws, ratio_of_means(), *ends)}
    yield {**base, "kind": "contrast", **_estimate(values, draws, _mean_contrast)}


def _mean_contrast(x: Floats) -> Floats:
    return contrast(x[0], x[1]).mean(-1)


def _tests(quantity: _Quantity, kept: list[int]) -> dict[str, Any]:
    seeds = paired_test(*(quantity.by_seed[kind][kept].mean(0) for kind in KINDS))
    items = paired_test(*(quantity.by_item(kind, kept) for kind in KINDS))
    return {
        "p_seeds": seeds.p, "cohens_d_seeds": seeds.cohens_d,
        "p_items": items.p, "p_items_wilcoxon": items.p_wilcoxon, "cohens_d_items": items.cohens_d,
    }  # fmt: skip


def _crossover(doses: Doses, loss: _Quantity, quantity: _Quantity, group: _Group) -> dict[str, Any]:
    """(contrast of loss - contrast of the quantity) / 2, over the displacements at which both can be compared."""
    kept = [place for place in quantity.kept(group.places) if loss.comparable[place]]
    base = {**EMPTY, "quantity": quantity.name, "kind": "crossover", **_place(doses, quantity, group, kept)}
    if not kept:
        return {**base, "status": _why_not(loss, quantity, group)}
    values = np.stack([part.damage(kind)[kept] for part in (loss, quantity) for kind in KINDS])
    draws = np.stack([part.draws[kind][:, kept] for part in (loss, quantity) for kind in KINDS])
    return {**base, **_estimate(values, draws, lambda x: (_mean_contrast(x[:2]) - _mean_contrast(x[2:])) / 2)}


def _correct_tests(differences: list[dict[str, Any]]) -> None:
    """Write the corrected p values into the rows of single displacements, one family for each way of testing."""
    for test in TESTS:
        p = [row[test] for row in differences]
        for name, correct in (("bonferroni", bonferroni), ("holm", holm)):
            for row, corrected in zip(differences, correct(p), strict=True):
                row[f"{test}_{name}"] = float(corrected)
