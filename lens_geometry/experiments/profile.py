"""How much of every update is parallel to what it is added to? The directional profile of a model.

One pass over the text, whatever its length, in fixed memory: activations are measured in their own layer and
let go; what stays are sums, bootstrap replicates and a sample of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from lens_geometry.anatomy import at_rest, inspect, n_vectors
from lens_geometry.edits import applied, observe
from lens_geometry.errors import GeometryError, SiteError
from lens_geometry.experiments.token_sums import add_tokens
from lens_geometry.geometry import METRICS, Lengths, lengths, metrics_of
from lens_geometry.results import Result
from lens_geometry.runner import RunSettings, at_least, bar, batches, prepare, provenance
from lens_geometry.sites import SITES, Grouping, Site, group_heads, token_mask
from lens_geometry.stats import QUANTILES, RunningSummary, TokenSample, poisson_weights, quantiles

PROFILED = ("attn", "mlp", "block", "value", "value_excl_self")
DECOMPOSED = tuple(name for name in SITES if name != "resid")


@dataclass(frozen=True)
class ProfileSettings(RunSettings):
    """Settings of `profile`.

    Attributes:
        sites: which updates, of all but `resid` (see `sites.SITES`); sites that this model does not have are left
            out and named in the warnings.
        grouping: value-space vectors by head ("each"), "kv_group" or "merged".
        exclude_positions: token positions that are not measured; 0 is degenerate in value space.
        quantile_sample: quantiles are over at most this many tokens, drawn uniformly (exact up to it).
        replicates: of the bootstrap over sequences.
    """

    sites: tuple[str, ...] = PROFILED
    grouping: Grouping = "each"
    exclude_positions: tuple[int, ...] = (0,)
    quantile_sample: int = 4096
    replicates: int = 400

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, quantile_sample=1, replicates=2)


def profile(model: Any, data: Any, settings: ProfileSettings | None = None, **changes: Any) -> Result:
    """Measure the directional decomposition of every update, at every site, layer and head.

    Args:
        model: any TransformerLens model (HookedTransformer, TransformerBridge).
        data: a Text, a string, a list of strings, or token ids [sequence, pos]; see `data.tokenize`.
        settings: see `ProfileSettings`; `changes` override single fields, `profile(model, text, sites=("mlp",))`.

    Returns:
        A Result with one row per site, layer, head and metric (`geometry.METRICS`): mean over tokens, std,
        quantiles, a 95 % interval of the mean by bootstrap over sequences, and `ratio_of_norms`, the same
        metric of root-sum-squares over all tokens. `head` is missing for residual sites, and for the rows that
        pool all heads; for the sites inside the MLP it is the number of the slice. Infinite and undefined
        tokens are left out of the mean and counted.

    Raises:
        ModelError, DataError for what cannot be used; SiteError when the model has none of the sites;
        GeometryError, naming hook and layer, for activations that are not finite.
    """
    settings, started = replace(settings or ProfileSettings(), **changes), time.monotonic()
    tokens = prepare(model, data, settings)
    sites, left_out = available_sites(model, settings.sites)
    scored = token_mask(tokens.counted, exclude=settings.exclude_positions)
    if not scored.any():
        raise SiteError("no token is left to measure", cure="use longer sequences or exclude fewer positions")
    accumulator = _Accumulator(model, sites, settings, int(scored.sum()))
    with (
        at_rest(model),
        bar(len(tokens.ids), "profile", settings.progress) as progress,
        applied(model, observe(model, sites, accumulator.visit)),
    ):
        for rows, ids, _ in batches(model, tokens, settings.batch_size):
            accumulator.start_batch(rows, scored[rows.start : rows.stop])
            model(ids, stop_at_layer=accumulator.anatomy.n_layers)  # every block, without the unembedding
            progress.update(len(rows))
    table = pd.DataFrame(accumulator.rows())
    table["head"] = table["head"].astype("Int64")
    meta = provenance(
        model,
        tokens,
        settings,
        started=started,
        token_mask=f"real tokens, positions {list(settings.exclude_positions)} left out",
        counts={
            "tokens_measured": int(scored.sum()),
            "infinite": int(table["n_infinite"].sum()),
            "undefined": int(table["n_undefined"].sum()),
        },
    )
    meta["warnings"] += left_out
    return Result("profile", table, meta)


def available_sites(model: Any, sites: tuple[str, ...], *, editing: bool = False) -> tuple[tuple[str, ...], list[str]]:
    """The sites that this model has in every layer, and a sentence for each that it has not.

    Raises SiteError for an unknown site, for `resid` (its own reference), and when none is left.
    """
    if isinstance(sites, str):
        raise SiteError(f"sites is the text {sites!r}", cure=f"give a tuple of sites: ({sites!r},)")
    anatomy = inspect(model)
    kept, refused = [], []
    for name in dict.fromkeys(sites):
        if name not in SITES or name == "resid":
            raise SiteError(f"{name!r} is no site to decompose", cure=f"choose among {', '.join(DECOMPOSED)}")
        reasons = [anatomy.refusal(SITES[name], layer, editing=editing) for layer in range(anatomy.n_layers)]
        first = next(filter(None, reasons), "")
        if first:
            refused.append(f"site {name} was left out: {first}")
        else:
            kept.append(name)
    if not kept:
        raise SiteError("this model has none of the sites", where="; ".join(refused), cure="see `lens-geometry sites`")
    return tuple(kept), refused


class _Accumulator:
    """Running sums of every site and layer; `visit` is called by the hooks as soon as a site's vectors exist.

    All of it is laid out beforehand: what is allocated between the activations would keep their memory in pieces.
    """

    def __init__(self, model: Any, sites: tuple[str, ...], settings: ProfileSettings, n_tokens: int) -> None:
        self.settings, self.anatomy, self.sites = settings, inspect(model), sites
        self.sample = TokenSample(min(settings.quantile_sample, n_tokens), settings.seed)
        places = [(site, layer) for site in sites for layer in range(self.anatomy.n_layers)]
        groups = {place: self._groups(*place) for place in places}
        self.summaries = {at: RunningSummary(groups[at], len(METRICS), settings.replicates) for at in places}
        self.pools = {at: np.zeros((5, groups[at])) for at in places}
        self.sampled = {at: np.full((5, self.sample.size, groups[at]), np.nan, np.float32) for at in places}

    def start_batch(self, rows: range, mask: Tensor) -> None:
        self.mask = mask
        self.weights = poisson_weights(rows, self.settings.replicates, self.settings.seed)
        places, self.slots = self.sample.add(rows, mask.numpy())
        self.places = torch.from_numpy(places)

    def visit(self, site: Site, layer: int, update: Tensor, reference: Tensor) -> None:
        if site.has_heads:
            n_kv = self.anatomy.layers[layer].n_kv_heads
            update, reference = (group_heads(x, self.settings.grouping, n_kv) for x in (update, reference))
        elif not site.axis:
            update, reference = (rearrange(x, "batch pos d -> batch pos 1 d") for x in (update, reference))
        found = torch.stack(lengths(update, reference)).cpu()  # [length, batch, pos, group]
        real = self.mask[..., None]
        if not torch.isfinite(found[1:3][:, self.mask]).all():
            raise GeometryError(
                f"activations of site {site.name!r} in layer {layer} are not finite",
                where=self.anatomy.where(site, layer),
                cure="check the weights and the dtype (float16 overflows where bfloat16 and float32 do not)",
            )
        self._sum(site.name, layer, Lengths(*found), real)
        sampled = self.sampled[site.name, layer]
        sampled[:, self.slots] = rearrange(found, "length batch pos group -> length (batch pos) group")[:, self.places]

    def _sum(self, site: str, layer: int, found: Lengths, real: Tensor) -> None:
        add_tokens(self.summaries[site, layer], torch.stack(list(metrics_of(found).values())), real, self.weights)
        squares = torch.stack(
            [
                found.update.double() ** 2,
                found.reference.double() ** 2,
                found.parallel.double() ** 2,
                found.perpendicular.double() ** 2,
                found.parallel.double().copysign(found.alpha.double()) * found.reference.double(),  # <u, r>
            ]
        )
        pool = torch.where(real, squares, 0.0).sum((1, 2)).numpy()
        self.pools[site, layer] += pool

    def rows(self) -> Iterator[dict[str, Any]]:
        for site, layer in self.summaries:
            yield from self._rows_of(site, layer)

    def _groups(self, site: str, layer: int) -> int:
        return n_vectors(SITES[site], self.anatomy.layers[layer], self.settings.grouping)

    def _rows_of(self, site: str, layer: int) -> Iterator[dict[str, Any]]:
        """All heads pooled (or the whole residual update), then each head by itself."""
        at = (site, layer)
        summary, found = self.summaries[at], self.summaries[at].statistics()
        filled = len(self.sample.priorities)
        sample = torch.from_numpy(self.sampled[at][:, :filled].astype(np.float64))
        values = torch.stack(list(metrics_of(Lengths(*sample)).values())).numpy()  # [metric, token, group]
        pooled = quantiles(rearrange(values, "metric token group -> metric 1 (token group)"))
        single = quantiles(rearrange(values, "metric token group -> metric group token"))
        ordered = np.concatenate([pooled, single], 1)
        for row, head in enumerate([None, *range(values.shape[2])] if SITES[site].axis else [None]):
            groups = slice(None) if head is None else slice(head, head + 1)
            norms = pooled_metrics(self.pools[at][:, groups].sum(1))
            for number, metric in enumerate(METRICS):
                yield {
                    "site": site,
                    "layer": layer,
                    "head": head,
                    "metric": metric,
                    **{name: float(of_rows[row, number]) for name, of_rows in found.items()},
                    **{f"q{round(100 * q):02d}": float(ordered[number, row, i]) for i, q in enumerate(QUANTILES)},
                    "ratio_of_norms": norms[metric],
                    "n_tokens": int(summary.count[groups, number].sum()),
                    "n_infinite": int(summary.infinite[groups, number].sum()),
                    "n_undefined": int(summary.undefined[groups, number].sum()),
                }


def pooled_metrics(sums: NDArray[np.float64]) -> dict[str, float]:
    """The metrics of root-sum-squares, from sums over tokens of |u|^2, |r|^2, |u_par|^2, |u_perp|^2 and <u, r>.

    `alpha` is sum<u, r> / sum|r|^2, `cosine` sum<u, r> / (root-sum-square of u times that of r).
    """
    u, r, parallel, perpendicular, dot = sums
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "alpha": float(dot / r),
            "parallel_ratio": float(np.sqrt(parallel / perpendicular)),
            "parallel_fraction": float(np.sqrt(parallel / u)),
            "perpendicular_fraction": float(np.sqrt(perpendicular / u)),
            "parallel_energy": float(parallel / u),
            "perpendicular_energy": float(perpendicular / u),
            "cosine": float(dot / np.sqrt(u * r)),
            "update_over_reference": float(np.sqrt(u / r)),
        }
