"""Runs the perturbations of a dissociation over text and pairs, and puts what they gave into arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lens_geometry.data import Tokens
from lens_geometry.edits import Displacements, Unit
from lens_geometry.experiments.calibration import median_norms, principal_directions
from lens_geometry.experiments.damages import KINDS, Doses
from lens_geometry.experiments.dissociation_plan import DissociationSettings
from lens_geometry.experiments.dissociation_rows import rows
from lens_geometry.experiments.equal_loss import displacement_at
from lens_geometry.experiments.variants import VARIANTS, variant_hooks
from lens_geometry.metrics import SequenceLosses, pair_margins
from lens_geometry.runner import Condition, identity_of_run, run_conditions
from lens_geometry.stats import Floats

NO_PAIRS = "no pairs"
WITHIN = 0.1  # of the loss that was aimed at: what misses it by more has not reached it


@dataclass(frozen=True)
class Cell:
    """One way of perturbing one set of layers."""

    variant: str
    layers: str
    components: int

    def key(self, kind: str, displacement: float, seed: int) -> str:
        how = VARIANTS[self.variant].key(kind, self.components)
        return f"{how}; layers {self.layers}; {displacement!r}; seed {seed}"


class Study:
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

    def run(self, wanted: dict[Cell, dict[str, tuple[float, ...]]], only: str | None = None) -> None:
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

    def _condition(self, cell: Cell, kind: str, displacement: float, seed: int) -> Condition:
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

    def at_equal_loss(self, cell: Cell, kind: str) -> tuple[float, ...]:
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

    def _damage(self, cell: Cell, kind: str, displacement: float) -> float:
        """Change of loss on the text, over all seeds; NaN where a condition was impossible or not finite."""
        losses = self.losses["text"]
        found = [losses[cell.key(kind, displacement, seed)] for seed in self.seeds]
        if any(one.nonfinite.any() for one in found):
            return float("nan")
        base = losses["base"]
        return float(np.mean([one.sums.sum() for one in found]) - base.sums.sum()) / float(base.counts.sum())

    def tables(
        self,
        cells: Sequence[Cell],
        wanted: dict[Cell, dict[str, tuple[float, ...]]],
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

    def _doses(self, cell: Cell, wanted: dict[str, tuple[float, ...]], labels: tuple[float, ...], pairs: str) -> Doses:
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
