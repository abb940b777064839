"""Is it the direction or the size that matters? The same displacement, as a turn and as a change of length.

Both are made at the same layers by the same distance, and judged by two kinds of damage: loss on text, and the
preference for the grammatical sentence of minimal pairs. In a double dissociation a turn hurts one more, and a change
of length the other.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from torch import Tensor

from lens_geometry import models
from lens_geometry.anatomy import inspect, require
from lens_geometry.data import Tokens
from lens_geometry.dissociation_verdict import verdict
from lens_geometry.edits import Displacements, Unit
from lens_geometry.errors import DataError
from lens_geometry.experiments.calibration import median_norms, principal_directions
from lens_geometry.experiments.damages import KINDS, Doses
from lens_geometry.experiments.dissociation_rows import as_table, rows
from lens_geometry.experiments.equal_loss import displacement_at
from lens_geometry.experiments.variants import VARIANTS, check_variants, variant_hooks
from lens_geometry.metrics import Scoring, SequenceLosses, pair_margins
from lens_geometry.pair import Pairs
from lens_geometry.pair_tokens import tokenize_pairs
from lens_geometry.pairs import load_pairs
from lens_geometry.results import Result, jsonable
from lens_geometry.runner import (
    Condition,
    RunSettings,
    at_least,
    check_effects,
    identity_of_run,
    prepare,
    provenance,
    run_conditions,
)
from lens_geometry.sites import choose_layers
from lens_geometry.stats import Floats

PairSource = Pairs | str | os.PathLike[str]
NO_PAIRS = "no pairs"
WITHIN = 0.1  # of the loss that was aimed at: what misses it by more has not reached it


@dataclass(frozen=True)
class DissociationSettings(RunSettings):
    """Settings of `dissociation`.

    Attributes:
        displacements: how far every token is moved at every perturbed layer.
        unit: of the displacements: "relative" to each token's own norm, "median" (to the median norm of the layer's
            tokens in the unedited model), or "absolute".
        layers: layer sets, each perturbed in all of its layers at once: "middle" (the middle third), "10-17", "all";
            "windows:8" stands for windows of 8 layers over the depth, each half a window further.
        seeds: how many draws of noise, numbered from `seed` on; each is run on all text and pairs.
        variants: ways of making the perturbation: "default" (fresh directions, signs redrawn in every layer), "as_run"
            (as published code: shared directions, redrawn signs, one scale for all tokens), "shared_noise",
            "fixed_signs", "shared_and_fixed" (each token's sign, or direction, the same in all layers),
            "mean_displacement", "growing", "shrinking", "with_position_0", "paper" (position 0 moved too), "principal"
            (turned along principal directions), "semantic" (towards an earlier token); see `VARIANTS`.
        site: which vectors are moved; "resid" is the stream that enters a block.
        scoring: of pairs: "sentence", "word" (the critical one) or "normalised" (per token).
        max_pairs: so many pairs are drawn of each set that is given by name; None takes all.
        equal_loss: also compare at displacements that cost this much loss (nats per token), found from each kind's
            dose-response: what is left of a difference on pairs there is no matter of dose.
        low_regime: displacements up to this one are the low regime; None takes their median.
        components: principal directions of the "principal" variant.
    """

    sequence_length: int = 128
    displacements: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    unit: Literal["relative", "median", "absolute"] = "relative"
    layers: tuple[str, ...] = ("middle",)
    seeds: int = 5
    variants: tuple[str, ...] = ("default", "as_run")
    site: str = "resid"
    scoring: Scoring = "sentence"
    max_pairs: int | None = 200
    equal_loss: tuple[float, ...] = ()
    low_regime: float | None = None
    components: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, seeds=1, components=1)
        check_variants(self.variants)
        for name, least in (("displacements", 1), ("equal_loss", 0)):
            found = getattr(self, name)
            if not isinstance(found, tuple | list) or len(found) < least or not all(map(_is_size, found)):
                raise DataError(f"{name} is {found!r}", cure=f"give a tuple of numbers above 0, such as {name}=(0.1,)")
            if len(set(found)) < len(found):
                raise DataError(f"{name} {found!r} has one twice", cure="name each once")
        if self.low_regime is not None and not _is_size(self.low_regime):
            raise DataError(f"low_regime is {self.low_regime!r}", cure="give a displacement, or None for their median")
        if isinstance(self.layers, str) or not self.layers:
            raise DataError(f"layers is {self.layers!r}", cure="give a tuple of layer sets, such as ('10-17',)")
        if self.unit not in ("relative", "median", "absolute"):
            raise DataError(f"unit is {self.unit!r}", cure="choose one of relative, median, absolute")


def _is_size(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < np.inf


@dataclass(frozen=True)
class _Cell:
    """One way of perturbing one set of layers."""

    variant: str
    layers: str
    components: int

    def key(self, kind: str, displacement: float, seed: int) -> str:
        how = VARIANTS[self.variant].key(kind, self.components)
        return f"{how}; layers {self.layers}; {displacement!r}; seed {seed}"


def dissociation(
    model: Any,
    data: Any,
    pairs: PairSource | Sequence[PairSource] | None = "agreement-simple",
    settings: DissociationSettings | None = None,
    *,
    out: Path | str | None = None,
    **changes: Any,
) -> Result:
    """Move hidden states by equal distances, by turning and by rescaling them, and compare what breaks.

    Args:
        model: any TransformerLens model (with a tokenizer, if there are pairs).
        data: a Text, a string, a list of strings, or token ids [sequence, pos].
        pairs: minimal pairs (see `load_pairs`), or several sets of them, each compared with the loss by itself; None
            for the loss alone. Both sentences of a pair have the same noise up to where they differ.
        settings: see `DissociationSettings`; `changes` override single fields.
        out: a directory for the journals: each finished condition is written there, and the same call started again
            goes on where it was.

    Returns:
        A Result with one long table: damage (change of loss, drop of the margin between good and bad sentence, drop of
        accuracy) for every displacement, kind and seed with 95 % intervals, and the comparisons of
        `dissociation_rows.rows`, each for a `variant`, a set of `layers` and a set of `pairs`. `matched` says what
        is equal: "displacement", or "loss" for `equal_loss` (`displacement` is then the loss that was aimed at). What a
        perturbation really did stands in `displacement_mean` (in the model's units) and `displacement_max_error`.
        `meta["verdicts"]` has the verdict for each: "dissociation", "one-sided", "none", "reversed", or "undecided".

    Raises:
        ModelError, DataError, SiteError, GeometryError for what cannot be used; HookError when a perturbation does not
        reach the output; ResultError when a journal is of something else. A displacement that some token cannot be
        moved by is no error: that condition has status "impossible"; so has a loss that a dose-response does not reach
        "not_reached".
    """
    settings, started = replace(settings or DissociationSettings(), **changes), time.monotonic()
    text = prepare(model, data, settings)
    sets = _pair_sets(pairs, settings)
    by_set = {
        one.name: tokenize_pairs(model, one, scoring=settings.scoring, prepend_bos=settings.prepend_bos) for one in sets
    }
    layer_sets = {name: choose_layers(name, inspect(model).n_layers) for name in _layer_texts(model, settings)}
    for layers in layer_sets.values():
        require(model, settings.site, layers, editing=True)
    check_effects(model, (settings.site,), {layers[0] for layers in layer_sets.values()})
    study = _Study(model, settings, text, by_set, layer_sets, None if out is None else Path(out))
    cells = [
        _Cell(variant, layers, settings.components)
        for variant in check_variants(settings.variants)
        for layers in layer_sets
    ]
    doses = dict.fromkeys(KINDS, settings.displacements)
    table = study.tables(cells, dict.fromkeys(cells, doses), settings.displacements, "displacement")
    if settings.equal_loss:
        found = {cell: {kind: study.at_equal_loss(cell, kind) for kind in KINDS} for cell in cells}
        table += study.tables(cells, found, settings.equal_loss, "loss")
    whole = as_table([row for _, row in table])
    whole = pd.concat([pd.DataFrame([about for about, _ in table]), whole], axis=1)
    about = models.describe(model)
    whole.insert(0, "model", str(about["name"]))
    whole.insert(1, "normalization", str(getattr(model.cfg, "normalization_type", None)))
    return Result("dissociation", whole, _meta(model, text, by_set, whole, settings, started))


def side_by_side(results: Sequence[Result]) -> Result:
    """Dissociations of several models in one Result, told apart by `model` (numbered where names are alike)."""
    names: list[str] = []
    for result in results:
        name = str(result.table["model"].iloc[0])
        same = sum(before.split(" #")[0] == name for before in names)
        names.append(f"{name} #{same + 1}" if same else name)
    tables = [result.table.assign(model=name) for result, name in zip(results, names, strict=True)]
    table = pd.concat(tables, ignore_index=True)
    first = results[0].meta
    about = [{key: result.meta[key] for key in ("model", "data", "counts", "seconds")} for result in results]
    remarks = [warning for result in results for warning in result.meta["warnings"]]
    return Result("dissociation", table, {**first, "models": about, "warnings": remarks, "verdicts": _verdicts(table)})


class _Study:
    """Runs conditions over the text and over each set of pairs, and puts what they gave into arrays."""

    def __init__(
        self,
        model: Any,
        settings: DissociationSettings,
        text: Tokens,
        pairs: dict[str, Tokens],
        layer_sets: dict[str, tuple[int, ...]],
        out: Path | None,
    ) -> None:
        self.model, self.settings, self.out = model, settings, out
        self.tokens = {"text": text, **{f"pairs {name}": tokens for name, tokens in pairs.items()}}
        self.pairs, self.layer_sets = pairs, layer_sets
        self.seeds = tuple(range(settings.seed, settings.seed + settings.seeds))
        self.losses: dict[str, dict[str, SequenceLosses]] = {}
        self.measured: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in self.tokens}
        layers = sorted({layer for found in layer_sets.values() for layer in found})
        self.medians = self.directions = None
        if settings.unit == "median":
            self.medians = median_norms(model, text, site=settings.site, layers=layers, settings=settings)
        if "principal" in settings.variants:
            self.directions = principal_directions(
                model, text, settings.components, site=settings.site, layers=layers, settings=settings
            )

    def run(self, wanted: dict[_Cell, dict[str, tuple[float, ...]]], only: str | None = None) -> None:
        """Every displacement of every kind, with each seed, on the text and all pairs; what is done is not redone."""
        for name, tokens in self.tokens.items():
            if only not in (None, name):
                continue
            conditions = [
                self._condition(cell, kind, displacement, seed)
                for cell, doses in wanted.items()
                for kind in KINDS
                for displacement in doses[kind]
                for seed in self.seeds
                if np.isfinite(displacement)
            ]
            settings = self.settings
            if name != "text":  # as many tokens in a batch as of the text
                size = settings.batch_size * self.tokens["text"].ids.shape[1] // tokens.ids.shape[1]
                settings = replace(settings, batch_size=max(2, size))
            journal = None if self.out is None else self.out / f"{_file_name(name)}.journal.jsonl"
            known = self.losses.get(name, {})
            todo = [condition for condition in conditions if condition.key not in known]
            if todo:
                found = run_conditions(
                    self.model,
                    tokens,
                    list({condition.key: condition for condition in todo}.values()),
                    settings,
                    journal=journal,
                    about=None if journal is None else self._identity(name, tokens),
                    measured=self.measured[name],
                    what=name,
                )
                self.losses[name] = {**known, **found}

    def _condition(self, cell: _Cell, kind: str, displacement: float, seed: int) -> Condition:
        record = Displacements()
        layers = self.layer_sets[cell.layers]
        unit: Unit = "relative" if self.settings.unit == "relative" else "absolute"
        size: float | Tensor = displacement if self.medians is None else displacement * self.medians
        hooks = variant_hooks(
            self.model,
            cell.variant,
            kind,  # type: ignore[arg-type]
            size,
            layers=layers,
            unit=unit,
            seed=seed,
            site=self.settings.site,
            directions=self.directions,
            record=record,
        )
        key = cell.key(kind, displacement, seed)
        return Condition(key, hooks, first_layer=layers[0], measured=record.summary)

    def _identity(self, name: str, tokens: Tokens) -> dict[str, Any]:
        """What the numbers of a journal depend on: not on which displacements, seeds and variants are run."""
        free = {"displacements", "seeds", "seed", "variants", "layers", "equal_loss", "low_regime", "max_pairs"}
        free |= {"components", *(("scoring",) if name == "text" else ())}
        about = identity_of_run(self.model, tokens, self.settings, free=free)
        if name != "text" and (self.medians is not None or self.directions is not None):
            about["measured_on_tokens_sha256"] = self.tokens["text"].meta["tokens_sha256"]  # medians, directions
        return about

    def at_equal_loss(self, cell: _Cell, kind: str) -> tuple[float, ...]:
        """The displacements at which a kind costs as much loss as asked; NaN where its dose-response does not reach."""
        found: list[float] = []
        for target in self.settings.equal_loss:
            doses = list(self.settings.displacements)
            guess = float("nan")
            for _ in range(3):  # each time on the curve that the guess before has made finer
                guess = displacement_at(target, doses, [self._damage(cell, kind, dose) for dose in doses])
                if not np.isfinite(guess) or guess in doses:
                    break
                self.run({cell: {one: (guess,) if one == kind else () for one in KINDS}}, only="text")
                doses = sorted([*doses, guess])
                if abs(self._damage(cell, kind, guess) / target - 1) < WITHIN / 2:
                    break
            reached = np.isfinite(guess) and abs(self._damage(cell, kind, guess) / target - 1) < WITHIN
            found.append(guess if reached else float("nan"))
        return tuple(found)

    def _damage(self, cell: _Cell, kind: str, displacement: float) -> float:
        """Change of loss on the text, over all seeds; NaN where a condition was impossible or not finite."""
        losses = self.losses["text"]
        found = [losses[cell.key(kind, displacement, seed)] for seed in self.seeds]
        if any(one.nonfinite.any() for one in found):
            return float("nan")
        base = losses["base"]
        return float(np.mean([one.sums.sum() for one in found]) - base.sums.sum()) / float(base.counts.sum())

    def tables(
        self,
        cells: Sequence[_Cell],
        wanted: dict[_Cell, dict[str, tuple[float, ...]]],
        labels: tuple[float, ...],
        matched: str,
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Rows of every cell and set of pairs, each with what it is of."""
        self.run(wanted)
        found = []
        for cell in cells:
            for name in self.pairs or (NO_PAIRS,):
                about = {"variant": cell.variant, "layers": cell.layers, "pairs": name, "matched": matched}
                about["unit"] = "nats" if matched == "loss" else self.settings.unit
                doses = self._doses(cell, wanted[cell], labels, name)
                low = self.settings.low_regime if matched == "displacement" else None
                for row in rows(doses, seed=self.settings.seed, low_regime=low):
                    found.append((about, row))
        return found

    def _doses(self, cell: _Cell, wanted: dict[str, tuple[float, ...]], labels: tuple[float, ...], pairs: str) -> Doses:
        text, scoring = self.losses["text"], self.settings.scoring
        of_pairs = self.losses.get(f"pairs {pairs}")
        keys = {kind: [[cell.key(kind, dose, seed) for seed in self.seeds] for dose in wanted[kind]] for kind in KINDS}

        def stacked(kind: str, losses: dict[str, SequenceLosses], values: Any, width: int) -> Floats:
            missing = np.full(width, np.nan)
            return np.array([[values(losses[key]) if key in losses else missing for key in row] for row in keys[kind]])

        base, margins, base_margins = text["base"], dict[str, Floats](), np.empty(0)
        sums = {kind: stacked(kind, text, _whole_sums, len(base.sums)) for kind in KINDS}
        if of_pairs is not None:
            base_margins = pair_margins(of_pairs["base"], scoring)
            for kind in KINDS:
                margins[kind] = stacked(kind, of_pairs, lambda x: pair_margins(x, scoring), len(base_margins))
        seen = {kind: [[self._seen(key, pairs) for key in row] for row in keys[kind]] for kind in KINDS}
        counts = base.counts.astype(np.float64)
        return Doses(labels, self.seeds, sums, base.sums, counts, margins, base_margins, seen)

    def _seen(self, key: str, pairs: str) -> dict[str, Any]:
        """What a perturbation did on the text and the pairs together, and how it ended."""
        parts, status = [], "ok"
        for name in ("text", f"pairs {pairs}"):
            if name not in self.losses:
                continue
            losses, found = self.losses[name], self.measured[name].get(key, {})
            if key not in losses or "impossible" in found:
                status = "not_reached" if key not in losses else "impossible"
                continue
            parts.append(found)
            if losses[key].nonfinite.any():
                status = "nonfinite"
            elif np.array_equal(losses[key].sums, losses["base"].sums) and status == "ok":
                status = "no_effect"
        places = [part["n_places"] for part in parts]
        mean = np.average([part["displacement_mean"] for part in parts], weights=places) if sum(places) else np.nan
        return {
            "displacement_mean": float(mean),
            "displacement_max_error": max((part["displacement_max_error"] for part in parts), default=float("nan")),
            **{name: sum(part[name] for part in parts) for name in ("n_clipped", "n_flipped", "n_places")},
            "status": status,
        }


def _whole_sums(losses: SequenceLosses) -> Floats:
    """Summed losses of each sequence, NaN where one of them is not finite."""
    return np.where(losses.nonfinite > 0, np.nan, losses.sums)


def _file_name(name: str) -> str:
    """A name as a file's: where it has to be changed or shortened, a hash keeps it apart from others."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)[:60]
    return plain if plain == name.replace(" ", "_", 1) else f"{plain}-{sha256(name.encode()).hexdigest()[:8]}"


def _pair_sets(pairs: Any, settings: DissociationSettings) -> list[Pairs]:
    """The sets of pairs, drawn where they are given by name. Raises DataError for two of one name."""
    if pairs is None:
        return []
    given = [pairs] if isinstance(pairs, Pairs | str | os.PathLike) else list(pairs)
    found = [
        one if isinstance(one, Pairs) else load_pairs(one, max_pairs=settings.max_pairs, seed=settings.seed)
        for one in given
    ]
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise DataError(f"pairs {names} have a name twice", cure="give each set once")
    return found


def _layer_texts(model: Any, settings: DissociationSettings) -> Iterator[str]:
    """The layer sets as texts, windows written out."""
    for text in settings.layers:
        if not isinstance(text, str):
            raise DataError(f"{text!r} names no layer set", cure='write it as text: "middle", "10-17", "windows:8"')
        if not text.startswith("windows:"):
            yield text
            continue
        n_layers, width = inspect(model).n_layers, text.removeprefix("windows:")
        if not width.isdecimal() or not 0 < int(width) <= n_layers:
            raise DataError(f"{text!r} are no windows of layers", cure=f"write windows:1 to windows:{n_layers}")
        size = int(width)
        last = n_layers - size
        for first in sorted({*range(0, last, max(1, size // 2)), last}):
            yield f"{first}-{first + size - 1}" if size > 1 else str(first)


def _meta(
    model: Any,
    text: Tokens,
    pairs: dict[str, Tokens],
    table: pd.DataFrame,
    settings: DissociationSettings,
    started: float,
) -> dict[str, Any]:
    runs = table[table["kind"].isin(KINDS) & table["seed"].notna() & (table["quantity"] == "loss")]
    status = runs.drop_duplicates(["variant", "layers", "matched", "kind", "displacement", "seed"])["status"]
    meta = provenance(
        model,
        text,
        settings,
        started=started,
        token_mask="next-token losses of real tokens; position 0 is left alone but for with_position_0 and paper",
        pairs={name: jsonable(tokens.meta) for name, tokens in pairs.items()},
        counts={
            "conditions": len(status),
            **{f"{name}_conditions": int(n) for name, n in status.value_counts().items()},
        },
        verdicts=_verdicts(table),
    )
    lost = {name: int((status == name).sum()) for name in ("impossible", "not_reached", "nonfinite", "no_effect")}
    remarks = [f"{n} of {len(status)} conditions are {name.replace('_', ' ')}" for name, n in lost.items() if n]
    for remark in remarks:
        warnings.warn(remark, stacklevel=3)
    meta["warnings"] += remarks
    return meta


def _verdicts(table: pd.DataFrame) -> list[dict[str, Any]]:
    found = verdict(table)
    return [{str(key): jsonable(value) for key, value in row.items()} for row in found.to_dict("records")]
