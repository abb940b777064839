"""How do updates change while a model writes? Their decomposition at each newly processed token, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from lens_geometry.anatomy import at_rest
from lens_geometry.edits import observe
from lens_geometry.errors import GeometryError
from lens_geometry.experiments.decoding import Unedited, unedited
from lens_geometry.experiments.generation import GenerationSettings, result_of
from lens_geometry.experiments.profile import available_sites
from lens_geometry.experiments.prompts import prompt_batches, prompt_tokens
from lens_geometry.geometry import METRICS, lengths, metrics_of
from lens_geometry.results import Result
from lens_geometry.runner import bar
from lens_geometry.sites import HOOKS, Site
from lens_geometry.stats import bootstrap_means


def generation_profile(
    model: Any, prompts: Any = None, settings: GenerationSettings | None = None, **changes: Any
) -> Result:
    """Directional decomposition of every update while the unedited model writes, step by step.

    The pass of step s is over the newest token (step 0: the last one of the prompt), whose updates are measured; it
    chooses the next token. `prompts` and `settings` are those of `continuations`.

    Returns:
        A Result with one row per site, layer, step and metric (`geometry.METRICS`): mean and std over prompts and a
        95 % interval of the mean by bootstrap over prompts. A prompt's number at a value site is the mean over its
        heads, and in rows whose `layer` is missing the mean over layers. Infinite and undefined numbers are left
        out of means and counted.

    Raises:
        ModelError, DataError, SiteError for what cannot be used; GeometryError for activations that are not finite.
    """
    settings, started = replace(settings or GenerationSettings(), **changes), time.monotonic()
    tokens = prompt_tokens(model, prompts, settings, settings.max_new_tokens)
    sites, remarks = available_sites(model, settings.profile_sites)
    batches, new = prompt_batches(model, tokens, settings.batch_size), settings.max_new_tokens
    seen = _Seen()
    with at_rest(model), bar(len(tokens.ids), "generation profile", settings.progress) as progress:
        base = unedited(
            model,
            batches,
            new,
            cache=settings.use_past_kv_cache,
            watched=lambda: observe(model, sites, seen.started_again()),
            progress=progress,
        )
    table = pd.DataFrame(_profile_rows(seen, sites, base, settings))
    table["layer"] = table["layer"].astype("Int64")
    counts = {"infinite": int(table["n_infinite"].sum()), "undefined": int(table["n_undefined"].sum())}
    return result_of(
        "generation_profile", model, tokens, settings, table, started, remarks + base.warnings, base, counts
    )


class _Seen:
    """The metrics of the newest token, pass by pass, for every site and layer: [kind, metric, prompt].

    Kinds: mean over heads of what is finite, how many were infinite, how many undefined.
    """

    def __init__(self) -> None:
        self.passes: dict[tuple[str, int], list[NDArray[np.float64]]] = {}

    def started_again(self) -> Any:
        self.passes.clear()
        return self.visit

    def visit(self, site: Site, layer: int, update: Tensor, reference: Tensor) -> None:
        found = lengths(update[:, -1], reference[:, -1])
        if not (torch.isfinite(found.update).all() and torch.isfinite(found.reference).all()):
            raise GeometryError(
                f"activations of site {site.name!r} in layer {layer} are not finite",
                where=HOOKS[site.target].format(layer),
                cure="check the weights and the dtype (float16 overflows where bfloat16 and float32 do not)",
            )
        values = torch.stack([metric.double().cpu() for metric in metrics_of(found).values()])
        values = values if site.has_heads else values[..., None]  # [metric, prompt, head]
        finite = torch.isfinite(values)
        mean = torch.where(finite, values, 0.0).sum(-1) / finite.sum(-1)  # 0 / 0: undefined
        kinds = torch.stack([mean, values.isinf().sum(-1).double(), values.isnan().sum(-1).double()])
        self.passes.setdefault((site.name, layer), []).append(kinds.numpy())

    def by_prompt(self, site: str, layer: int, base: Unedited) -> NDArray[np.float64]:
        """[kind, metric, step, prompt], the prompts in the order of the runs."""
        passes = iter(self.passes[site, layer])
        blocks = [np.stack([next(passes) for _ in run.lengths], 2) for run in base.runs]
        return np.concatenate(blocks, -1)


def _profile_rows(
    seen: _Seen, sites: Sequence[str], base: Unedited, settings: GenerationSettings
) -> Iterator[dict[str, Any]]:
    for site in sites:
        layers = [layer for name, layer in seen.passes if name == site]
        found = {layer: seen.by_prompt(site, layer, base) for layer in layers}
        stacked = np.stack(list(found.values()))  # [layer, kind, metric, step, prompt]
        finite = np.isfinite(stacked[:, 0])
        with np.errstate(invalid="ignore"):
            pooled = np.where(finite, stacked[:, 0], 0.0).sum(0) / finite.sum(0)
        whole = np.stack([pooled, *stacked[:, 1:].sum(0)])
        for layer, values in [(None, whole), *found.items()]:
            numbers = bootstrap_means(values[0], seed=settings.seed, resamples=settings.replicates)
            left_out = values[1:].sum(-1).astype(np.int64)
            for step in range(values.shape[2]):
                for number, metric in enumerate(METRICS):
                    yield {
                        "site": site,
                        "layer": layer,
                        "step": step,
                        "metric": metric,
                        **{name: float(array[number, step]) for name, array in numbers.items()},
                        "n": int(np.isfinite(values[0, number, step]).sum()),
                        "n_infinite": int(left_out[0, number, step]),
                        "n_undefined": int(left_out[1, number, step]),
                    }
