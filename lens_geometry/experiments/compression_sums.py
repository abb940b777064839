"""What is kept of two models' activations while they are compared, and the table that is made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from scipy.stats import rankdata
from torch import Tensor

from lens_geometry.anatomy import inspect, n_vectors
from lens_geometry.block_runs import BlockRun
from lens_geometry.errors import GeometryError
from lens_geometry.experiments.token_sums import add_tokens
from lens_geometry.sites import SITES, Grouping, group_heads
from lens_geometry.stats import Floats, RunningSummary, percentile_interval, poisson_weights
from lens_geometry.update_errors import (
    DENSE,
    ERRORS,
    DenseLengths,
    ErrorLengths,
    dense_lengths,
    dense_metrics,
    dense_squares,
    error_lengths,
    error_metrics,
    error_squares,
    pooled_dense,
    pooled_errors,
)

OUTPUT = ("loss_base", "loss_compressed", "loss_change", "kl", "agreement")
ALIGNMENT = ("pearson_perpendicular", "spearman_perpendicular", "pearson_parallel", "spearman_parallel")
Place = tuple[str, str, int]  # mode, site, layer


class Sums:
    """Running sums of every mode, site and layer, in memory that does not grow with the text."""

    def __init__(
        self,
        base: Any,
        sites: tuple[str, ...],
        measured: Bool[Tensor, "sequence pos"],
        *,
        grouping: Grouping,
        replicates: int,
        seed: int,
    ) -> None:
        self.sites, self.measured, self.anatomy = sites, measured, inspect(base)
        self.grouping: Grouping = grouping
        self.replicates, self.seed = replicates, seed
        self.errors: dict[Place, tuple[RunningSummary, ErrorLengths]] = {}
        self.dense: dict[Place, tuple[RunningSummary, DenseLengths]] = {}
        self.outputs: dict[int | None, RunningSummary] = {}

    def start_batch(self, rows: range, scored: Bool[Tensor, "batch pos-1"]) -> None:
        self.real = self.measured[rows.start : rows.stop, :, None]
        self.scored = scored[..., None]
        self.weights = poisson_weights(rows, self.replicates, self.seed)

    def add_dense(self, layer: int, ours: BlockRun) -> None:
        for site in self.sites:
            update, reference = self._vectors(site, layer, ours)
            found = DenseLengths(*(x.cpu() for x in dense_lengths(update, reference)))
            self._check("base", site, layer, found.update, found.reference)
            self._add(self.dense, ("dense", site, layer), dense_metrics(found), dense_squares(found))

    def add_errors(self, mode: str, layer: int, ours: BlockRun, theirs: BlockRun) -> None:
        for site in self.sites:
            update, reference = self._vectors(site, layer, ours)
            compressed, _ = self._vectors(site, layer, theirs)
            found = error_lengths(update, compressed.to(update.device), reference)
            found = ErrorLengths(*(x.cpu() for x in found))
            self._check("compressed model", site, layer, found.compressed)
            self._add(self.errors, (mode, site, layer), error_metrics(found), error_squares(found))

    def add_outputs(
        self, layer: int | None, ids: Int[Tensor, "batch pos"], logits: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Losses and divergence of one batch, from both models' logits [pos, vocab], sequence by sequence."""
        values = torch.stack([_outputs(row, *pair) for row, pair in zip(ids, logits, strict=True)], 1)
        summary = self.outputs.setdefault(layer, RunningSummary(1, len(OUTPUT), self.replicates))
        add_tokens(summary, values[..., None], self.scored, self.weights)

    def _vectors(self, site: str, layer: int, run: BlockRun) -> tuple[Tensor, Tensor]:
        """A site's update and reference, [batch, pos, group, d]."""
        update, reference = run.vectors[site]
        if SITES[site].has_heads:
            n_kv = self.anatomy.layers[layer].n_kv_heads
            return group_heads(update, self.grouping, n_kv), group_heads(reference, self.grouping, n_kv)
        if SITES[site].axis:
            return update, reference
        return rearrange(update, "batch pos d -> batch pos 1 d"), rearrange(reference, "batch pos d -> batch pos 1 d")

    def _check(self, whose: str, site: str, layer: int, *norms: Float[Tensor, "batch pos group"]) -> None:
        """Raise GeometryError where the norm of a measured vector is not finite."""
        if not all(x[self.real[..., 0]].isfinite().all() for x in norms):
            raise GeometryError(
                f"activations of the {whose} at site {site!r} in layer {layer} are not finite",
                where=self.anatomy.where(SITES[site], layer),
                cure="check its weights and the dtype (float16 overflows where bfloat16 and float32 do not)",
            )

    def _add(self, sums: dict[Any, Any], place: Place, metrics: dict[str, Tensor], squares: Any) -> None:
        """Add a batch's tokens to the sums of a place."""
        _, site, layer = place
        groups = n_vectors(SITES[site], self.anatomy.layers[layer], self.grouping)
        totals = type(squares)(*(torch.where(self.real, x, 0.0).sum((0, 1)) for x in squares))
        if place in sums:
            summary, before = sums[place]
            totals = type(squares)(*map(torch.add, before, totals))
        else:
            summary = RunningSummary(groups, len(metrics), self.replicates)
        add_tokens(summary, torch.stack(list(metrics.values())), self.real, self.weights)
        sums[place] = summary, totals

    def rows(self) -> Iterator[dict[str, Any]]:
        yield from _place_rows(ERRORS, pooled_errors, self.errors)
        yield from _place_rows(DENSE, pooled_dense, self.dense)
        for layer, summary in self.outputs.items():
            at = {"mode": "propagated" if layer is None else "local", "site": "", "layer": layer, "head": None}
            shown = OUTPUT if layer is None else ("loss_change", "kl")
            yield from (row for row in _rows(at, OUTPUT, summary, summary.statistics(), {}) if row["metric"] in shown)


def _place_rows(
    names: tuple[str, ...], pooled: Callable[[Any], dict[str, Tensor]], sums: Mapping[Place, tuple[RunningSummary, Any]]
) -> Iterator[dict[str, Any]]:
    """Every place's rows, heads pooled (or the whole residual update) and each by itself; then those over layers."""
    for (mode, site, layer), (summary, totals) in sums.items():
        statistics = summary.statistics()
        for head in [None, *range(summary.count.shape[0])] if SITES[site].axis else [None]:
            group = slice(None) if head is None else slice(head, head + 1)
            ratios = pooled(type(totals)(*(x[group].sum() for x in totals)))
            at = {"mode": mode, "site": site, "layer": layer, "head": head}
            yield from _rows(at, names, summary, statistics, ratios)
    for mode, site in dict.fromkeys(place[:2] for place in sums):
        of_layers = [summary for place, (summary, _) in sums.items() if place[:2] == (mode, site)]
        yield from _over_layers(mode, site, names, of_layers)


def _outputs(
    ids: Int[Tensor, pos], ours: Float[Tensor, "pos vocab"], theirs: Float[Tensor, "pos vocab"]
) -> Float[Tensor, "output pos-1"]:
    """The numbers of `OUTPUT` for every next token of one sequence, on the CPU."""
    working, following = torch.promote_types(ours.dtype, torch.float32), ids[1:, None]
    one = ours[:-1].to(working).log_softmax(-1)
    other = theirs[:-1].to(ours.device, working).log_softmax(-1)
    losses = -one.gather(-1, following).squeeze(-1), -other.gather(-1, following).squeeze(-1)
    kl = torch.nn.functional.kl_div(other, one, reduction="none", log_target=True).sum(-1)
    same = (one.argmax(-1) == other.argmax(-1)).to(working)
    return torch.stack([*losses, losses[1] - losses[0], kl, torch.where(kl.isnan(), torch.nan, same)]).cpu()


def _rows(
    at: dict[str, Any],
    names: tuple[str, ...],
    summary: RunningSummary,
    statistics: dict[str, Floats],
    ratios: dict[str, Tensor],
) -> Iterator[dict[str, Any]]:
    """The rows of one place: all of its groups pooled, or the head that `at` names."""
    head = at["head"]
    row, group = (0, slice(None)) if head is None else (head + 1, slice(head, head + 1))
    for number, name in enumerate(names):
        yield {
            **at,
            "metric": name,
            **{key: float(values[row, number]) for key, values in statistics.items()},
            "ratio_of_norms": float(ratios.get(name, torch.nan)),
            "n_tokens": int(summary.count[group, number].sum()),
            "n_infinite": int(summary.infinite[group, number].sum()),
            "n_undefined": int(summary.undefined[group, number].sum()),
        }


def _over_layers(
    mode: str, site: str, names: tuple[str, ...], of_layers: list[RunningSummary]
) -> Iterator[dict[str, Any]]:
    """Each metric's mean over layers and, of errors, how the whole goes with its parts over layers."""
    means, replicates = zip(*(summary.means() for summary in of_layers), strict=True)
    point = np.stack(means)[:, 0]  # [layer, metric]
    drawn = np.stack(replicates)[:, :, 0]  # [layer, replicate, metric]
    values = dict(zip(names, zip(np.moveaxis(point, -1, 0), np.moveaxis(drawn, -1, 0), strict=True), strict=True))
    counts = {
        name: [int(sum(getattr(s, part)[:, i].sum() for s in of_layers)) for part in ("count", "infinite", "undefined")]
        for i, name in enumerate(names)
    }
    for name, (of_metric, of_replicates) in values.items():
        yield _pooled_row(mode, site, name, finite_mean(of_metric), finite_mean(of_replicates), counts[name])
    if "error" in values:
        for part in ("perpendicular", "parallel"):
            for how in ("pearson", "spearman"):
                whole, other = values["error"], values[f"{part}_error"]
                one, many = (
                    correlation(*(np.atleast_2d(x.T) for x in pair), ranks=how == "spearman")
                    for pair in ((whole[0], other[0]), (whole[1], other[1]))
                )
                yield _pooled_row(mode, site, f"{how}_{part}", one[0], many, counts["error"])


def _pooled_row(mode: str, site: str, metric: str, value: Any, replicates: Floats, counts: list[int]) -> dict[str, Any]:
    low, high = percentile_interval(replicates)
    return {
        "mode": mode, "site": site, "layer": None, "head": None, "metric": metric, "mean": float(value),
        "ci_low": float(low), "ci_high": float(high), "std": np.nan, "ratio_of_norms": np.nan,
        **dict(zip(("n_tokens", "n_infinite", "n_undefined"), counts, strict=True)),
    }  # fmt: skip


def finite_mean(values: Floats) -> Floats:
    """The mean over the first axis of what is finite there; NaN where nothing is."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(finite, values, 0.0).sum(0) / finite.sum(0))


def correlation(one: Floats, other: Floats, *, ranks: bool = False) -> Floats:
    """Pearson's correlation along the last axis (Spearman's with `ranks`); NaN where one of them does not vary.

    A place that is not finite in some row is left out of all of them, a row without anything finite is NaN; with fewer
    than three places there is no correlation.
    """
    finite = np.isfinite(one) & np.isfinite(other)
    rows = finite.any(-1)
    kept, found = finite[rows].all(0), np.full(len(one), np.nan)
    if kept.sum() < 3 or not rows.any():
        return found
    x, y = (v[rows][:, kept] for v in (one, other))
    varies = (np.ptp(x, axis=-1) > 0) & (np.ptp(y, axis=-1) > 0)
    x, y = (rankdata(v, axis=-1) if ranks else v for v in (x, y))
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        product = (x * y).sum(-1) / np.sqrt(np.square(x).sum(-1) * np.square(y).sum(-1))
    found[rows] = np.where(varies, product, np.nan)
    return found
