"""Is it the direction or the size that matters? The same displacement, as a turn and as a change of length.

Both are made at the same layers by the same distance, and judged by two kinds of damage: loss on text, and the
preference for the grammatical sentence of minimal pairs. In a double dissociation a turn hurts one more, and a change
of length the other.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from lens_geometry import models
from lens_geometry.anatomy import inspect, require
from lens_geometry.data import Tokens
from lens_geometry.dissociation_verdict import verdict
from lens_geometry.experiments.damages import KINDS
from lens_geometry.experiments.dissociation_plan import DissociationSettings, layer_texts, pair_sets
from lens_geometry.experiments.dissociation_rows import as_table
from lens_geometry.experiments.dissociation_runs import Cell, Study
from lens_geometry.experiments.variants import check_variants
from lens_geometry.pair import Pairs
from lens_geometry.pair_tokens import tokenize_pairs
from lens_geometry.results import Result, jsonable
from lens_geometry.runner import check_effects, prepare, provenance
from lens_geometry.sites import choose_layers

PairSource = Pairs | str | os.PathLike[str]


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
    sets = pair_sets(pairs, settings)
    by_set = {
        one.name: tokenize_pairs(model, one, scoring=settings.scoring, prepend_bos=settings.prepend_bos) for one in sets
    }
    layer_sets = {name: choose_layers(name, inspect(model).n_layers) for name in layer_texts(model, settings)}
    for layers in layer_sets.values():
        require(model, settings.site, layers, editing=True)
    check_effects(model, (settings.site,), {layers[0] for layers in layer_sets.values()})
    study = Study(model, settings, text, by_set, layer_sets, None if out is None else Path(out))
    cells = [
        Cell(variant, layers, settings.components)
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
