"""Mixed precision: a width for every layer under a budget of size, by the errors or the losses of single layers.

Errors of different layers hardly point the same way, so that their energies add up, and near a minimum the loss grows
with energy: what is made least is the sum over layers of *squared* relative errors. Losses of single layers are added
as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lens_geometry.allocation import Choices, allocate, check_budget, even, shuffled, total
from lens_geometry.compress import Variant, round_to_nearest
from lens_geometry.compress.matrices import matrices
from lens_geometry.compress.plain import fresh_copy
from lens_geometry.compressed import DENSE_BITS
from lens_geometry.data import Tokens
from lens_geometry.errors import DataError
from lens_geometry.experiments.changes import NO_CHANGE, Change, change
from lens_geometry.experiments.compression_study import StudySettings, compression_study
from lens_geometry.journal import Journal
from lens_geometry.metrics import SequenceLosses, sequence_losses
from lens_geometry.runner import RunSettings, bar, batches, identity_of_run

MEASURES = {  # the choice, the measure that it is by, and its power
    "perpendicular": ("perpendicular_error", 2.0),
    "error": ("error", 2.0),
    "perpendicular_of_stream": ("perpendicular_error_over_reference", 2.0),
    "error_of_stream": ("error_over_reference", 2.0),
    "loss": ("loss_change", 1.0),
}
CONTRASTS = (
    ("perpendicular", "error"),
    ("perpendicular_of_stream", "error_of_stream"),
    ("perpendicular_of_stream", "perpendicular"),
    ("perpendicular", "loss"),
    ("error", "loss"),
)
Array = NDArray[Any]


def bit_rows(
    base: Any, searched: Tokens, held_out: Tokens, settings: Any, out: Path | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of mixed precision, and what about them a reader must know. Settings: `LayerChoiceSettings`."""
    widths = sorted({*settings.bits})
    plain, stored = layer_sizes(base, widths, settings)
    weights = int(plain[:, 0].sum()) // widths[0]
    sizes = plain if settings.budget_bytes is None else stored
    budget = (
        math.floor(settings.mean_bits * weights + 1e-6)
        if settings.budget_bytes is None
        else 8 * int(settings.budget_bytes)
    )
    remarks = []
    if not check_budget(sizes, budget):
        raise DataError(
            f"the budget leaves nothing to choose: {widths[-1]} bits in every layer take "
            f"{int(sizes[:, -1].sum()) / weights:.3g} bits per weight, and {budget / weights:.3g} are allowed",
            cure="give a smaller budget (mean_bits or budget_bytes), or a larger width (bits)",
        )
    sensitivity = sensitivities(base, searched, widths, settings, out)
    rows = [*_sensitivity_rows(sensitivity)]
    choices = {
        name: allocate(costs(sensitivity, measure, power, widths, len(sizes)), sizes, budget)
        for name, (measure, power) in MEASURES.items()
    }
    choices["uniform"] = even(sizes, budget)
    if len({*choices["uniform"]}) > 1:
        remarks.append(
            "no one width uses the budget up: uniform mixes two neighbouring ones, spread evenly over the layers"
        )
    mixed = next((chosen for chosen in choices.values() if len({*chosen}) > 1), choices["perpendicular"])
    for number in range(1, settings.random_allocations + 1):
        drawn = shuffled(mixed, sizes, budget, np.random.default_rng((settings.seed, number)))
        if drawn is not None:
            choices[f"random {number}"] = drawn
    if settings.random_allocations and "random 1" not in choices:
        remarks.append("no choice has another order within the budget, so that there are no random ones")
    losses = _losses(base, held_out, choices, widths, settings, out)
    for name, chosen in choices.items():
        for layer, choice in enumerate(chosen):
            rows.append({"kind": "allocation", "choice": name, "layer": layer, "bits": widths[choice]})
    changes = {name: change(losses[name], losses["base"], settings.seed) for name in choices}
    lost = [name for name, found in changes.items() if found.status == "nonfinite"]
    if lost:
        remarks.append(f"losses are not finite with the widths of {', '.join(lost)}")
    for name, chosen in choices.items():
        size = {
            "mean_bits": total(plain, chosen) / weights,
            "size_bytes": math.ceil(total(stored, chosen) / 8),
            "n_sequences": len(held_out.ids),
        }
        row = {"kind": "comparison", "choice": name, **size, **change_columns(changes[name])}
        rows.append(row | difference_columns(losses, name, "uniform", settings.seed))
    for one, other in CONTRASTS:
        row = {"kind": "contrast", "choice": one, "n_sequences": len(held_out.ids)}
        rows.append(row | difference_columns(losses, one, other, settings.seed))
    return rows, remarks


def layer_sizes(base: Any, widths: list[int], settings: Any) -> tuple[Array, Array]:
    """Bits of each layer's matrices, [layer, width]: of the weights alone, and with the scales of the groups."""
    found = matrices(fresh_copy(base))
    layers = 1 + max(matrix.layer for matrix in found)
    plain, stored = (np.zeros((layers, len(widths)), dtype=np.int64) for _ in range(2))
    for matrix in found:
        outputs, inputs = matrix.read().shape
        scales = outputs * math.ceil(inputs / (settings.group_size or inputs))
        scales *= DENSE_BITS * (1 if settings.symmetric else 2)
        for place, width in enumerate(widths):
            plain[matrix.layer, place] += outputs * inputs * width
            stored[matrix.layer, place] += outputs * inputs * width + (scales if width < DENSE_BITS else 0)
    return plain, stored


def sensitivities(base: Any, tokens: Tokens, widths: list[int], settings: Any, out: Path | None) -> pd.DataFrame:
    """Each layer's local errors, and the change of loss with it alone compressed, at each width: rows of a study."""
    shared = {name: getattr(settings, name) for name in ("batch_size", "seed", "progress", "replicates")}
    study = StudySettings(
        **shared,
        sites=(settings.site,),
        modes=("local",),
        layer_losses=True,
        exclude_positions=settings.exclude_positions,
    )
    options = {"group_size": settings.group_size, "symmetric": settings.symmetric}
    variants = {width: Variant("rtn", {"bits": width, **options}) for width in widths if width < DENSE_BITS}
    made = compression_study(
        base, list(variants.values()), tokens, study, out=None if out is None else out / "sensitivities"
    ).table
    failed = made[made["status"] == "failed"]
    if len(failed):
        row = failed.iloc[0]
        raise DataError(
            f"{row['variant']} could not be measured: {row['reason']}", cure="choose other widths or groups"
        )
    labels = {variant.label: width for width, variant in variants.items()}
    rows = made[made["layer"].notna() & (made["mode"] == "local")]
    return rows.assign(bits=rows["variant"].map(labels))


def costs(sensitivity: pd.DataFrame, measure: str, power: float, widths: list[int], n_layers: int) -> Array:
    """What each width costs in each layer, [layer, width]: the power of a measure; 0 for a layer left as it is."""
    found = np.zeros((n_layers, len(widths)))
    name = "loss_change" if measure == "loss_change" else "value"
    rows = sensitivity if measure == "loss_change" else sensitivity[sensitivity["predictor"] == measure]
    for row in rows.drop_duplicates(["layer", "bits"]).to_dict("records"):
        found[int(row["layer"]), widths.index(int(row["bits"]))] = float(row[name]) ** power
    return found


def losses_of(model: Any, tokens: Tokens, settings: RunSettings) -> SequenceLosses:
    """Losses of every sequence under a model."""
    parts = []
    for rows, ids, mask in batches(model, tokens, settings.batch_size):
        scored = None if tokens.scored is None else tokens.scored[rows.start : rows.stop]
        parts.append(sequence_losses(model, ids, mask, scored))
    return SequenceLosses(*map(np.concatenate, zip(*parts, strict=True)))


def _losses(
    base: Any,
    tokens: Tokens,
    choices: Mapping[str, Choices],
    widths: list[int],
    settings: Any,
    out: Path | None,
) -> dict[str, SequenceLosses]:
    """Losses of the dense model ("base") and of each choice's, those that are written down already left out."""
    free = {*vars(settings)} - {"group_size", "symmetric"}
    about = identity_of_run(base, tokens, settings, free=free)
    done = Journal(None if out is None else out / "allocations.jsonl", about)
    before, now = done.losses.get("base"), losses_of(base, tokens, settings)
    if before is None:
        done.add("base", now)
    else:
        done.check_same(before, now)
    keys = {name: " ".join(str(widths[choice]) for choice in chosen) for name, chosen in choices.items()}
    with bar(len({*keys.values()}), "allocations", settings.progress) as progress:
        for name, key in keys.items():
            if key not in done.losses:
                mixed = {layer: widths[choice] for layer, choice in enumerate(choices[name])}
                options = {"group_size": settings.group_size, "symmetric": settings.symmetric}
                done.add(key, losses_of(round_to_nearest(base, bits=mixed, **options), tokens, settings))
            progress.update()
    return {"base": done.losses["base"], **{name: done.losses[key] for name, key in keys.items()}}


def change_columns(found: Change) -> dict[str, Any]:
    """A change of loss as the table has it."""
    return {
        "loss_change": found.value,
        "loss_change_low": found.low,
        "loss_change_high": found.high,
        "status": found.status,
    }


def difference_columns(losses: Mapping[str, SequenceLosses], one: str, other: str, seed: int) -> dict[str, Any]:
    """How much higher the loss of one choice is than that of another, paired."""
    same = np.array_equal(losses[one].sums, losses[other].sums)
    found = NO_CHANGE if same else change(losses[one], losses[other], seed)
    return {
        "against": other,
        "difference": found.value,
        "difference_low": found.low,
        "difference_high": found.high,
    }


def _sensitivity_rows(sensitivity: pd.DataFrame) -> Iterator[dict[str, Any]]:
    wanted = {measure for measure, _ in MEASURES.values()}
    for row in sensitivity.to_dict("records"):
        place = {"kind": "sensitivity", "layer": int(row["layer"]), "bits": int(row["bits"]), "status": row["status"]}
        if row["predictor"] in wanted:
            ends = {name: row[name] for name in ("value", "value_low", "value_high")}
            yield {**place, "measure": row["predictor"], **ends}
        if row["predictor"] == "error":
            ends = {f"value{end}": row[f"loss_change{end}"] for end in ("", "_low", "_high")}
            yield {**place, "measure": "loss_change", **ends}
