"""Which layers can do with fewer bits, and which without being there at all? Chosen by several rules, paid in loss.

Mixed precision: every layer's local error at every width is read off one text, widths are given out under one budget
of size so that the sum of errors is least, and the model that this makes is tried on other text. Layer dropping: orders
of layers by what their update does to the stream, against orders by loss. Whichever rule wins is what the table says.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from lens_geometry.anatomy import inspect
from lens_geometry.compress.rounding import check_grid
from lens_geometry.compressed import DENSE_BITS
from lens_geometry.data import Tokens
from lens_geometry.errors import DataError
from lens_geometry.experiments.bit_choice import bit_rows
from lens_geometry.experiments.changes import check_positive
from lens_geometry.experiments.compression_study import calibration_text
from lens_geometry.experiments.counterparts import loaded
from lens_geometry.experiments.layer_drop import drop_rows
from lens_geometry.results import Result, alone
from lens_geometry.runner import RunSettings, at_least, prepare, provenance

PARTS = ("bits", "drop")
WHOLE = ("layer", "bits", "n_blanked", "n_sequences")


@dataclass(frozen=True)
class LayerChoiceSettings(RunSettings):
    """Settings of `layer_choice`.

    Attributes:
        parts: "bits" (mixed precision), "drop" (which layers to blank), or both.
        bits: the widths that a layer may have; 16 leaves it as it is.
        group_size: weights along the inputs that share a scale; None for a whole row.
        symmetric: round without zero points.
        mean_bits: the budget: mean bits per weight of the layers' matrices, their groups' scales not counted.
        budget_bytes: the budget in bytes instead: of the layers' matrices, scales counted.
        site: whose local error is a layer's sensitivity.
        random_allocations: how many allocations stand beside with the same widths given to other layers.
        max_blanked: how many layers are blanked at most; a third of them when left out.
        random_orders: how many random orders of the layers stand beside the others.
        exclude_positions: token positions whose errors are not measured.
        calibration_sequences: sequences of the calibration text, where there is one.
        replicates: of the bootstrap over sequences of the errors.
    """

    parts: tuple[str, ...] = PARTS
    bits: tuple[int, ...] = (8, 4, 3, 2)
    group_size: int | None = 64
    symmetric: bool = False
    mean_bits: float = 4.0
    budget_bytes: int | None = None
    site: str = "block"
    random_allocations: int = 3
    max_blanked: int | None = None
    random_orders: int = 3
    exclude_positions: tuple[int, ...] = (0,)
    calibration_sequences: int = 16
    replicates: int = 400

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, random_allocations=0, random_orders=0, replicates=2, calibration_sequences=2)
        check_positive(self, "mean_bits")
        for name in ("budget_bytes", "max_blanked"):
            if getattr(self, name) is not None:
                at_least(self, **{name: 1})
        if isinstance(self.parts, str) or not self.parts or not {*self.parts} <= {*PARTS}:
            raise DataError(f"parts is {self.parts!r}", cure='give "bits", "drop" or both, in a tuple')
        if isinstance(self.bits, int) or len({*self.bits}) < 2:
            raise DataError(f"bits are {self.bits!r}", cure="give two or more different widths, such as (8, 4, 3, 2)")
        for width in self.bits:
            check_grid(8 if width == DENSE_BITS else width, self.group_size)


def layer_choice(
    base: Any,
    data: Any,
    settings: LayerChoiceSettings | None = None,
    *,
    calibration: Any = None,
    out: Path | str | None = None,
    **changes: Any,
) -> Result:
    """Give layers widths under a budget, and blank layers, by several rules; and measure what each choice costs.

    What the rules go by is read on the calibration text, or on every other sequence of the data where there is none;
    what the choices cost, on the rest: a choice looks better on the text that it was made on.

    Args:
        base: a TransformerLens model, or a name that `load_model` takes.
        data: the text on which choices are paid for; see `data.tokenize`.
        settings: see `LayerChoiceSettings`; `changes` override single fields.
        calibration: another text, on which the choices are made.
        out: a directory for what was measured: the same call started again goes on where it was.

    Returns:
        A Result with rows of two parts. `part` "bits": `kind` "sensitivity", a layer's `value` of a `measure` at a
        width; "allocation", the `bits` that a choice gives a layer; "comparison", a choice's `mean_bits`, `size_bytes`
        and `loss_change` on the held-out text, and the `difference` of its loss from that of the choice in `against`
        (positive: the other is better), paired; "contrast", the same for pairs of choices. The choices: "perpendicular"
        and "error" (least sum over layers of the squares of |e_perp|/|u| and |e|/|u|), "perpendicular_of_stream" and
        "error_of_stream" (of |e_perp|/|x| and |e|/|x|), "loss" (least sum of the losses of single layers), "uniform",
        and "random 1", ...: the widths of the first of these that has several, given to other layers.
        `part` "drop": "score", a layer's `value` by the measure that orders it; "curve", a choice's loss after
        `n_blanked` layers (`layer` the last of them). The choices: "cosine" (1 - cos(x, x + u)), "perpendicular"
        (|u_perp|/|x|), "update" (|u|/|x|), smallest first; "loss" (of the layer alone), "greedy_loss" (of the layer
        beside those that are gone), "random 1", ....

    Raises:
        ModelError, DataError (also for a budget that cannot be met, and too few sequences), SiteError,
        CompressionError for what cannot be used; ResultError when `out` is of something else.
    """
    settings, started = replace(settings or LayerChoiceSettings(), **changes), time.monotonic()
    base = loaded(base)
    tokens = prepare(base, data, settings)
    calibrating = calibration_text(base, calibration, tokens, settings)
    searched, held_out = _texts(tokens, calibrating)
    directory = None if out is None else Path(out)
    rows: list[dict[str, Any]] = []
    remarks: list[str] = []
    with alone(directory, "choosing layers") if directory is not None else contextlib.nullcontext():
        for part, make in (("bits", bit_rows), ("drop", drop_rows)):
            if part in settings.parts:
                found, notes = make(base, searched, held_out, settings, directory)
                rows += [{"part": part, **row} for row in found]
                remarks += notes
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    table = choice_table(rows)
    meta = provenance(
        base,
        tokens,
        settings,
        started=started,
        token_mask=f"next-token losses of real tokens; errors without positions {list(settings.exclude_positions)}",
        counts={
            "conditions": int(table["kind"].isin(("comparison", "curve")).sum()),
            "nonfinite_conditions": int((table["status"] == "nonfinite").sum()),
        },
        calibration=None if calibrating is None else calibrating.meta,
        chosen_on="every other sequence of the data" if calibrating is None else "the calibration text",
        n_layers=inspect(base).n_layers,
    )
    meta["warnings"] += remarks
    return Result("layer_choice", table, meta)


def choice_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The rows of both parts as one table, its columns in order."""
    columns = [
        *("part", "kind", "choice", "measure", "layer", "bits", "value", "value_low", "value_high"),
        *("mean_bits", "size_bytes", "n_blanked", "loss_change", "loss_change_low", "loss_change_high"),
        *("against", "difference", "difference_low", "difference_high", "n_sequences", "status"),
    ]
    table = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(WHOLE, "Int64"))
    return table.astype({name: float for name in columns if name.startswith(("value", "loss", "diff", "mean", "size"))})


def _texts(tokens: Tokens, calibrating: Tokens | None) -> tuple[Tokens, Tokens]:
    """The sequences that choices are made on, and those that they are paid for on."""
    searched, held_out = (calibrating, tokens) if calibrating is not None else (_half(tokens, 0), _half(tokens, 1))
    for part, name in ((searched, "choose on"), (held_out, "measure on")):
        if len(part.ids) < 2:
            raise DataError(
                f"there are {len(part.ids)} sequences to {name}, and an interval takes two",
                cure="give more text, or shorter or more sequences (max_sequences of 4 or more)",
            )
    return searched, held_out


def _half(tokens: Tokens, place: int) -> Tokens:
    """Every other sequence, with a hash of its own: a run on one half is none on the other."""
    part = tokens.take(slice(place, None, 2))
    return replace(part, meta={**part.meta, "tokens_sha256": f"{part.meta['tokens_sha256']} half {place}"})
