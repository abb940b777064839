"""What carries a push to the output? Attention, streams and branches of a perturbed run beside those of the clean one.

Two questions of the double dissociation are asked here. Do the pushes of several layers add up, or do they cancel like
a random walk, and is that the pushes' doing or the layers'? And how much of the damage, over sequences and seeds, goes
with the change of each mediator? That is correlation; what a pathway causes is seen by repairing it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from lens_geometry.anatomy import inspect
from lens_geometry.edits import KINDS, Kind, Unit
from lens_geometry.edits.mediating import MediatorReader
from lens_geometry.errors import DataError, SiteError
from lens_geometry.experiments.mediator_rows import SHARES, Pushed, as_table, rows
from lens_geometry.experiments.mediator_runs import measured_of, run
from lens_geometry.experiments.variants import VARIANTS, check_variants, variant_hooks
from lens_geometry.journal import Journal
from lens_geometry.results import Result
from lens_geometry.runner import (
    RunSettings,
    at_least,
    check_effects,
    identity_of_run,
    prepare,
    provenance,
)
from lens_geometry.sites import choose_layers, indices, token_mask

IN_KEYS = ("variants", "kinds", "displacements", "seeds", "seed")  # of the journal: a run may be gone on with more


@dataclass(frozen=True)
class MediatorSettings(RunSettings):
    """Settings of `mediators`.

    Attributes:
        layers: which layers are perturbed, all at once: "middle" (the middle third), "all", "4", "1-", "4-11", "0,3,6".
        kinds: "angular", "magnitude" or both.
        displacements: how far each token is moved in each of these layers.
        unit: of the displacements, "relative" to each token's norm or "absolute".
        variants: ways of making the perturbation, see `variants.VARIANTS`: "default" (fresh noise in every layer),
            "as_run" (as published code did: noise shared by layers and sequences), "shared_noise" and "fixed_signs"
            (each switch that makes pushes add up, by itself), and others; not "principal".
        seeds: how many seeds of the noise, from `seed` on.
        exclude_positions: token positions left out of all means; 0 is a massive activation in many models.
    """

    sequence_length: int = 128
    layers: str = "middle"
    kinds: tuple[Kind, ...] = KINDS
    displacements: tuple[float, ...] = (0.1,)
    unit: Unit = "relative"
    variants: tuple[str, ...] = ("default", "as_run")
    seeds: int = 5
    exclude_positions: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, seeds=1)
        indices(self.exclude_positions, "position", "give whole numbers, such as exclude_positions=(0,)")
        if "principal" in check_variants(self.variants):
            raise DataError("principal directions are not made here", cure="use another variant, or `dissociation`")
        if not isinstance(self.kinds, tuple | list) or not self.kinds or set(self.kinds) - set(KINDS):
            raise DataError(f"kinds is {self.kinds!r}", cure=f"give a tuple of one or more of {', '.join(KINDS)}")
        distances = self.displacements
        usable = isinstance(distances, tuple | list) and all(isinstance(d, float | int) and d > 0 for d in distances)
        if not usable or not distances:
            raise DataError(f"displacements is {distances!r}", cure="give a tuple of numbers above 0, such as (0.1,)")


@dataclass(frozen=True)
class _Cell:
    """One perturbation with one seed."""

    variant: str
    kind: Kind
    displacement: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.variant} {self.kind} {self.displacement!r} seed {self.seed}"


def mediators(
    model: Any, data: Any, settings: MediatorSettings | None = None, *, out: Path | str | None = None, **changes: Any
) -> Result:
    """Perturb layers of the stream, and measure in every layer what may carry that to the loss.

    See `MediatorReader` for the mediators: the attention's entropy, its alignment of queries with keys and its weight
    on position 0; the stream's displacement, angle and norm, and the displacement of what attention and MLP add, all
    against the clean run at the same token.

    Args:
        model: any TransformerLens model. Nothing but the stream is edited, so that models whose attention pattern
            cannot be edited are measured too; what a model does not show is left out and named.
        data: a Text, a string, a list of strings, or token ids [sequence, pos].
        settings: see `MediatorSettings`; `changes` override single fields.
        out: a directory for the journal: the same call started again goes on where it was.

    Returns:
        A Result with one long table. `seed` is missing where all seeds are pooled. By `measure`:

        - "mean": a mediator over tokens, by `layer`: the stream as that layer reads it (after its push), and in one
          last layer, numbered n_layers, the stream that leaves the model. `value`, the `clean` run's, their `change`;
          `growth` and `growth_of_pushes` are root mean squares, in units of one push, after `pushes` of them.
        - "growth_exponent": p of size ~ n^p after n pushes: 1 where they add up, 0.5 for a random walk. `growth` is of
          the stream, `growth_of_pushes` of the sum of the pushes alone: where the first is higher, layers amplify.
        - "explained", "explained_in_rank", "explained_beyond": the share of the variance of the loss change, over
          sequences and seeds (`n_points`), that goes with the mediator's change: R^2 of a straight line, squared
          Spearman correlation, and R^2 gained beside the stream's relative displacement. The change is the mean over
          tokens and over layers from the first push on. Chance alone gives about 1 / (n_points - 1). With fewer than
          10 points there is none, and the status is "few_points".

        Intervals are 95 % by bootstrap over sequences, and over seeds where they are pooled (not for shares).
        `n_clipped` and `n_flipped` count places that were moved less than asked or turned right round, `status` is
        "ok", "nonfinite", "no_effect" or "impossible" (a token cannot be moved so far).

    Raises:
        ModelError, DataError, SiteError for what cannot be used; HookError when a push does not reach
        the output; ResultError when the journal is of something else.
    """
    settings, started = replace(settings or MediatorSettings(), **changes), time.monotonic()
    tokens = prepare(model, data, settings)
    layers = choose_layers(settings.layers, inspect(model).n_layers)
    excluded = indices(settings.exclude_positions, "position", "give whole numbers")
    scored = token_mask(tokens.counted, exclude=excluded)
    if not scored.any():
        raise SiteError("no token is left to measure", cure="use longer sequences or exclude fewer positions")
    check_effects(model, ("resid",), layers[:1])
    reader = MediatorReader(model)
    cells = list(_cells(settings))
    journal = Journal(
        None if out is None else Path(out) / "journal.jsonl",
        {} if out is None else {"experiment": "mediators", **identity_of_run(model, tokens, settings, free=IN_KEYS)},
    )
    pushes = {
        cell.key: variant_hooks(
            model,
            cell.variant,
            cell.kind,
            cell.displacement,
            layers=layers,
            unit=settings.unit,
            seed=cell.seed,
            record=reader.record,
        )
        for cell in cells
    }
    run(model, tokens, pushes, scored, reader, journal, settings)
    left_out = reader.left_out()
    table = _table(journal, cells, layers, len(tokens.ids), settings)
    if len(layers) < 2:
        left_out.append("one layer is perturbed, so that nothing can be said of how displacements grow")
    few = table["status"] == "few_points"
    if few.any():
        left_out.append(
            f"{table.loc[few, 'n_points'].max()} points (sequences x seeds) are too few for explained shares"
        )
    for warning in left_out:
        warnings.warn(warning, stacklevel=2)
    everywhere = [name for name in settings.variants if VARIANTS[name].position_0]
    moved = f"position 0 is perturbed in {', '.join(everywhere) or 'no variant'}"
    meta = provenance(
        model,
        tokens,
        settings,
        started=started,
        token_mask="losses of real tokens; mediators of real tokens (attention by query), positions "
        f"{excluded} left out; {moved}",
        counts=_counts(table),
        perturbed_layers=list(layers),
    )
    meta["warnings"] += left_out
    return Result("mediators", table, meta)


def _cells(settings: MediatorSettings) -> Iterator[_Cell]:
    for variant in dict.fromkeys(settings.variants):
        for kind in dict.fromkeys(settings.kinds):
            for displacement in dict.fromkeys(map(float, settings.displacements)):
                for number in range(settings.seeds):
                    yield _Cell(variant, kind, displacement, settings.seed + number)


def _table(
    journal: Journal, cells: list[_Cell], layers: tuple[int, ...], n_sequences: int, settings: MediatorSettings
) -> pd.DataFrame:
    clean = measured_of(journal, "base", n_sequences)
    groups: dict[tuple[Any, ...], list[_Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.variant, cell.kind, cell.displacement), []).append(cell)
    found = []
    for (variant, kind, displacement), some in groups.items():
        about = {"variant": variant, "kind": kind, "displacement": displacement, "unit": settings.unit}
        runs = tuple(
            None if f"{cell.key} impossible" in journal.losses else measured_of(journal, cell.key, n_sequences)
            for cell in some
        )
        found += rows(Pushed(about, layers, tuple(cell.seed for cell in some), runs), clean, seed=settings.seed)
    return as_table(found)


def _counts(table: pd.DataFrame) -> dict[str, int]:
    """How many perturbed runs there were, and how many of them were not as they should be."""
    runs = table[(table["mediator"] == "loss") & table["seed"].notna()]
    shares = table[table["measure"].isin(SHARES)]
    lost = {
        f"{status}_conditions": int((runs["status"] == status).sum())
        for status in ("nonfinite", "no_effect", "impossible")
    }
    return {"conditions": len(runs), **lost, "shares_of_few_points": int((shares["status"] == "few_points").sum())}
