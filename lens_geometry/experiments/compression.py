"""How far is a compressed model from the dense one, layer by layer: and is it turned, or made longer and shorter?

The error of an update is split against the dense update itself. In `local` mode each block of the compressed model is
run on the dense model's stream, so that a layer answers for itself alone; in `propagated` mode on what the compressed
blocks before it made. Both models go through the text side by side, one block's activations in memory at a time.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_geometry import models
from lens_geometry.anatomy import inspect
from lens_geometry.block_runs import BlockRun, Blocks, block_by_block
from lens_geometry.errors import DataError, SiteError
from lens_geometry.experiments.compression_sums import Sums
from lens_geometry.experiments.counterparts import (
    calibration_of,
    common_tokens,
    loaded,
    require_counterparts,
    require_finite,
    weight_errors,
)
from lens_geometry.experiments.profile import available_sites
from lens_geometry.metrics import scored_losses
from lens_geometry.results import Result
from lens_geometry.runner import RunSettings, at_least, bar, batches, model_warnings, provenance
from lens_geometry.sites import Grouping, token_mask

Mode = Literal["local", "propagated"]
COMPARED = ("attn", "mlp", "block", "value")
COLUMNS = (
    "mode", "site", "layer", "head", "metric", "mean", "ci_low", "ci_high", "std", "ratio_of_norms",
    "n_tokens", "n_infinite", "n_undefined",
)  # fmt: skip


@dataclass(frozen=True)
class CompressionSettings(RunSettings):
    """Settings of `compression_report`.

    Attributes:
        sites: which updates are compared (see `sites.SITES`); those that a model does not have are left out and named
            in the warnings.
        modes: "local" runs each compressed block on the dense model's stream, "propagated" on its own model's.
        grouping: value-space vectors by head ("each"), "kv_group" or "merged".
        measured: "all" tokens, or only the "last" of every sequence; the loss is always that of all.
        exclude_positions: token positions that are not measured.
        layer_losses: also the loss of the dense model with one layer compressed, for each layer (half a forward pass
            more per layer).
        replicates: of the bootstrap over sequences.
    """

    sites: tuple[str, ...] = COMPARED
    modes: tuple[Mode, ...] = ("local", "propagated")
    grouping: Grouping = "each"
    measured: Literal["all", "last"] = "all"
    exclude_positions: tuple[int, ...] = (0,)
    layer_losses: bool = False
    replicates: int = 400

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, replicates=2)
        unknown = [mode for mode in self.modes if mode not in ("local", "propagated")]
        if isinstance(self.modes, str) or unknown or not self.modes:
            raise DataError(f"modes is {self.modes!r}", cure='give "local", "propagated" or both, in a tuple')
        if self.measured not in ("all", "last"):
            raise DataError(f"measured is {self.measured!r}", cure='give "all" or "last"')


def compression_report(
    base: Any, compressed: Any, data: Any, settings: CompressionSettings | None = None, **changes: Any
) -> Result:
    """Split the error of every update of a compressed model against the dense model's update.

        e = u' - u        e_par = (<e, u> / |u|^2) u        e_perp = e - e_par

    Args:
        base: the dense model: a TransformerLens model, or a name or path that `load_model` takes.
        compressed: the other one, of the same architecture and dtype; likewise.
        data: a Text, a string, a list of strings, or token ids [sequence, pos]; see `data.tokenize`. It must not be
            what the compressed model was calibrated on.
        settings: see `CompressionSettings`; `changes` override single fields.

    Returns:
        A Result with one row per mode, site, layer, head and metric: mean over tokens, std, a 95 % interval by
        bootstrap over sequences, and `ratio_of_norms`, the same of root-sum-squares over all tokens.

        - mode "local" and "propagated": `update_errors.ERRORS`; mode "dense": `update_errors.DENSE`, of the base.
        - without a layer: each metric's mean over layers, and how |e|/|u| goes with either part over layers
          (`compression_sums.ALIGNMENT`: Pearson's and Spearman's correlation).
        - mode "propagated" without a site: the losses of both models and their difference in nats, the divergence
          KL(base || compressed) in nats per token, and the share of tokens with the same first guess.
        - mode "local" without a site, with `layer_losses`: change of loss and divergence of the dense model with that
          layer alone compressed.
        - mode "weights": |W' - W| / |W| over a layer's matrices, and over all of them.

    Raises:
        ModelError for models that cannot be compared; DataError for data that cannot be used, tokenizers that differ,
        or text that the compressed model was calibrated on; SiteError when the models have none of the sites;
        GeometryError, naming model, site and layer, for activations that are not finite.
        Source: geometry of the error as in "Disentangling Representation Evolution in Transformers through Directional
        Decomposition".
    """
    settings, started = replace(settings or CompressionSettings(), **changes), time.monotonic()
    base, compressed = loaded(base), loaded(compressed)
    require_finite(base, "base")
    require_finite(compressed, "compressed model")
    sites, left_out = available_sites(base, settings.sites)
    sites, also_left_out = available_sites(compressed, sites)
    require_counterparts(base, compressed, sites)
    tokens = common_tokens(base, compressed, data, settings)
    overlap = calibration_of(compressed, tokens)
    measured = measured_tokens(tokens.counted, settings)
    sums = Sums(base, sites, measured, grouping=settings.grouping, replicates=settings.replicates, seed=settings.seed)
    n_layers = inspect(base).n_layers
    with (
        block_by_block(base, sites) as dense,
        block_by_block(compressed, sites) as other,
        bar(-(-len(tokens.ids) // settings.batch_size) * n_layers, "compare", settings.progress) as progress,
    ):
        for rows, ids, mask in batches(base, tokens, settings.batch_size):
            scored = None if tokens.scored is None else tokens.scored[rows.start : rows.stop]
            sums.start_batch(rows, scored_losses(mask.cpu(), scored))
            _run_batch(dense, other, ids, settings, sums, progress.update)
    weights = weight_errors(base, compressed)
    table = pd.DataFrame([*sums.rows(), *_weight_rows(weights, n_layers)], columns=COLUMNS)
    table[["layer", "head"]] = table[["layer", "head"]].astype("Int64")
    meta = provenance(
        base,
        tokens,
        settings,
        started=started,
        token_mask=f"real tokens, positions {list(settings.exclude_positions)} left out"
        + ("; only the last of each sequence" if settings.measured == "last" else ""),
        counts={
            "tokens_measured": int(measured.sum()),
            "infinite": int(table["n_infinite"].sum()),
            "undefined": int(table["n_undefined"].sum()),
        },
    )
    meta["compressed"] = models.describe(compressed)
    meta["compression"] = meta["compressed"].get("compression")
    meta["calibration"] = overlap
    meta["warnings"] += [*model_warnings(compressed), *left_out, *also_left_out, *_caveats(meta, weights)]
    return Result("compression", table, meta)


def _caveats(meta: dict[str, Any], weights: Any) -> list[str]:
    base, compressed = meta["model"], meta["compressed"]
    found = []
    if base["class"] != compressed["class"]:
        found.append(
            f"the base is a {base['class']} and the compressed model a {compressed['class']}: errors of the size of "
            "rounding are theirs, not the compression's"
        )
    elif base["fingerprint"] == compressed["fingerprint"]:
        found.append("both models have the same weights: there is nothing to compare")
        warnings.warn(found[-1], stacklevel=3)
    if meta["calibration"]["shared"]:
        found.append(f"{meta['calibration']['shared']} windows of this text are in the calibration text")
    if not meta["calibration"]["known"]:
        found.append("whether the compressed model was calibrated on this text is not known")
    if weights is None:
        found.append("the two models' parameters cannot be paired: the weight error is not known")
    return found


def measured_tokens(
    counted: Bool[Tensor, "sequence pos"], settings: CompressionSettings
) -> Bool[Tensor, "sequence pos"]:
    """Which tokens are measured. Raises SiteError when none is left."""
    measured = token_mask(counted, exclude=settings.exclude_positions)
    if settings.measured == "last":
        places = torch.arange(measured.shape[1])
        last = torch.where(measured, places, -1).amax(1, keepdim=True)
        measured = measured & (places == last)
    if not measured.any():
        raise SiteError("no token is left to measure", cure="use longer sequences or exclude fewer positions")
    return measured


def _run_batch(
    dense: Blocks,
    other: Blocks,
    ids: Int[Tensor, "batch pos"],
    settings: CompressionSettings,
    sums: Sums,
    update: Callable[[], Any],
) -> None:
    """One batch through all blocks of both models, side by side."""
    their_ids = ids.to(next(other.model.parameters()).device)
    stream: Tensor | None = None
    their_stream: Tensor | None = None
    reference = dense.logits(ids, 0) if settings.layer_losses else None
    for layer in range(dense.n_layers):
        ours = dense.run(ids, layer, stream)
        sums.add_dense(layer, ours)
        if "local" in settings.modes or settings.layer_losses:
            local = other.run(their_ids, layer, ours.before)
            if "local" in settings.modes:
                sums.add_errors("local", layer, ours, local)
            if reference is not None:
                mixed = dense.logits(ids, layer, ours.before, instead=local.after)
                sums.add_outputs(layer, ids, zip(reference, mixed, strict=True))
        theirs = other.run(their_ids, layer, their_stream)
        if "propagated" in settings.modes:
            sums.add_errors("propagated", layer, ours, theirs)
        stream, their_stream = ours.after, theirs.after
        update()
    sums.add_outputs(None, ids, zip(_rows_of(dense, ids, ours), _rows_of(other, their_ids, theirs), strict=True))


def _rows_of(blocks: Blocks, ids: Int[Tensor, "batch pos"], last: BlockRun) -> Iterator[Float[Tensor, "pos vocab"]]:
    """The logits of one sequence after the other: they are by far the largest activations."""
    for row in range(len(ids)):
        one = slice(row, row + 1)
        yield blocks.logits(ids[one], blocks.n_layers - 1, last.before[one])[0]


def _weight_rows(weights: dict[int, tuple[float, float]] | None, n_layers: int) -> Iterator[dict[str, Any]]:
    sums = weights or dict.fromkeys(range(n_layers), (np.nan, np.nan))
    whole = tuple(np.sum([*sums.values()], 0))
    for layer, (error, size) in [*sorted(sums.items()), (None, whole)]:
        at = {"mode": "weights", "site": "", "layer": layer, "head": None, "metric": "weight_error"}
        with np.errstate(invalid="ignore", divide="ignore"):
            value = float(np.sqrt(np.float64(error) / np.float64(size)))
        nothing = dict.fromkeys(("ci_low", "ci_high", "std", "ratio_of_norms"), np.nan)
        yield {**at, "mean": value, **nothing, "n_tokens": 0, "n_infinite": 0, "n_undefined": 0}
