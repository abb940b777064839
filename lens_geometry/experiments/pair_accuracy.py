"""Does the model prefer the grammatical sentence of a minimal pair? By whole sentence, critical word, and per token."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from lens_geometry import models
from lens_geometry.anatomy import at_rest
from lens_geometry.data import Tokens
from lens_geometry.errors import DataError
from lens_geometry.metrics import (
    SCORINGS,
    Scoring,
    SequenceLosses,
    pair_accuracy,
    pair_margins,
    summed_losses,
    token_losses,
)
from lens_geometry.pair import Pair, Pairs
from lens_geometry.pair_tokens import kept_pairs, tokenize_pairs
from lens_geometry.pairs import load_pairs
from lens_geometry.results import Result, jsonable
from lens_geometry.runner import RunSettings, at_least, bar, batches, model_warnings, provenance
from lens_geometry.stats import bootstrap_means

FEATURES = ("template", "number", "attractor", "match", "number and attractor", "noun", "verb", "gender", "item")
MARGINS = {  # what the margin is, by scoring
    "sentence": "log p(good) - log p(bad) of the whole sentences, nats",
    "word": "log p(good) - log p(bad) of the critical word given what comes before it, nats",
    "normalised": "the same of the whole sentences, each divided by its number of scored tokens, nats per token",
}


@dataclass(frozen=True)
class PairSettings:
    """Settings of `minimal_pairs`.

    Attributes:
        max_pairs: so many pairs are drawn of each set that is given by name; None takes all.
        scorings: "sentence" (log-probability of the whole sentence), "word" (of the critical word), "normalised" (of
            the sentence, per token).
        batch_size: sentences per forward pass; changes speed and memory, not results.
        prepend_bos: put the tokenizer's BOS before every sentence, so that its first token is scored too.
        on_unscorable: "refuse" pairs that cannot be scored with an error, or "drop" them, counted.
        seed: of the draw and of the bootstrap.
        progress: show progress bars.
    """

    max_pairs: int | None = 200
    scorings: tuple[Scoring, ...] = SCORINGS
    batch_size: int = 32
    prepend_bos: bool = False
    on_unscorable: Literal["refuse", "drop"] = "refuse"
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        at_least(self, batch_size=1, seed=0)
        if self.max_pairs is not None:
            at_least(self, max_pairs=1)
        if not self.scorings or not set(self.scorings) <= set(SCORINGS) or isinstance(self.scorings, str):
            cure = f"choose from {', '.join(SCORINGS)}"
            raise DataError(f"scorings are {self.scorings!r}", cure=cure)


def minimal_pairs(
    model: Any,
    pairs: Pairs | str | os.PathLike[str] | Sequence[Pairs | str | os.PathLike[str]],
    settings: PairSettings | None = None,
    **changes: Any,
) -> Result:
    """How often, and by how much, a model prefers the grammatical sentence of each pair.

    Args:
        model: any TransformerLens model with a tokenizer.
        pairs: Pairs or a name for `load_pairs`, or several of them.
        settings: see `PairSettings`; `changes` override single fields.

    Returns:
        A Result with one row per set, scoring and group of pairs: all of them (`feature` "all"), and those of each
        `value` of a `feature` that a set tells apart, such as the number of its subjects. Its `accuracy` (share of
        pairs with a margin above 0; a tie is no success) and mean `margin` (log p(good) - log p(bad)) have 95 %
        intervals by bootstrap over pairs. `status` is "ok", or "nonfinite" where margins are not finite and are left
        out.

    Raises:
        DataError for pairs and settings that cannot be used; ModelError without a model.
    """
    settings, started = replace(settings or PairSettings(), **changes), time.monotonic()
    models.require_model(model)
    found = _sets(pairs, settings)
    for warning in model_warnings(model):
        warnings.warn(warning, stacklevel=2)
    rows: list[dict[str, Any]] = []
    tokens: dict[str, dict[str, Tokens]] = {}
    for one in found:
        tokens[one.name], losses = _losses(model, one, settings)
        for scoring in dict.fromkeys(settings.scorings):
            scored = tokens[one.name][_scored_as(scoring)]
            margins = pair_margins(losses[_scored_as(scoring)], scoring)
            rows += _rows(one.name, kept_pairs(one, scored), margins, scoring, settings.seed)
    table = pd.DataFrame(rows)
    return Result("minimal_pairs", table, _meta(model, tokens, table, settings, started))


def pair_columns(margins: NDArray[np.float64], *, seed: int) -> dict[str, Any]:
    """Accuracy and mean margin of some pairs with 95 % intervals by bootstrap over pairs, and counts.

    Margins that are not finite are counted and left out; then there is no interval.
    """
    finite = np.isfinite(margins)
    correct = np.where(finite, margins > 0, np.nan)
    found = bootstrap_means(np.stack([correct, margins]), seed=seed, resamples=2000)
    if not finite.all():
        found["ci_low"], found["ci_high"] = np.full((2, 2), np.nan)
    columns: dict[str, Any] = {"n_pairs": len(margins)}
    for place, name in enumerate(("accuracy", "margin")):
        columns |= {name: float(found["mean"][place])}
        columns |= {f"{name}_{end}": float(found[f"ci_{end}"][place]) for end in ("low", "high")}
    return {
        **columns,
        "accuracy": pair_accuracy(margins),
        "n_ties": int((margins == 0).sum()),
        "n_nonfinite": int((~finite).sum()),
        "status": "ok" if finite.all() else "nonfinite",
    }


def _sets(pairs: Any, settings: PairSettings) -> list[Pairs]:
    several = [pairs] if isinstance(pairs, Pairs | str | os.PathLike) else list(pairs)
    found = [
        one if isinstance(one, Pairs) else load_pairs(one, max_pairs=settings.max_pairs, seed=settings.seed)
        for one in several
    ]
    names = [one.name for one in found]
    if not names or len(set(names)) < len(names):
        problem = f"two sets have the name {max(names, key=names.count)!r}" if names else "there are no sets of pairs"
        raise DataError(problem, cure="give at least one set, and each only once")
    return found


def _scored_as(scoring: str) -> Scoring:
    """What has to be run for a scoring: "normalised" is made of the same losses as "sentence"."""
    return "word" if scoring == "word" else "sentence"


@torch.no_grad()
def _losses(model: Any, pairs: Pairs, settings: PairSettings) -> tuple[dict[str, Tokens], dict[str, SequenceLosses]]:
    """Tokens and losses of one set, for whole sentences and for critical words, as far as they are asked for.

    One pass does for both. Where pairs are dropped, fewer may have a critical word than can be scored as sentences.
    """
    options: dict[str, Any] = {"prepend_bos": settings.prepend_bos, "on_unscorable": settings.on_unscorable}
    tokens: dict[str, Tokens] = {
        scored: tokenize_pairs(model, pairs, scoring=scored, **options)
        for scored in dict.fromkeys(map(_scored_as, settings.scorings))
    }
    most = max(tokens.values(), key=lambda one: len(one.ids))
    scored = {kind: _scored_in(most, one) for kind, one in tokens.items()}
    found: dict[str, list[SequenceLosses]] = {kind: [] for kind in tokens}
    total = -(-len(most.ids) // settings.batch_size)
    with at_rest(model), bar(total, pairs.name, settings.progress) as progress:
        for rows, ids, mask in batches(model, most, settings.batch_size):
            losses = token_losses(model(ids, return_type="logits"), ids)
            for kind, chosen in scored.items():
                found[kind].append(summed_losses(losses, mask, chosen[rows.start : rows.stop]))
            progress.update()
    return tokens, {
        kind: SequenceLosses(
            *(np.concatenate(parts)[_same_rows(most, one)] for parts in zip(*found[kind], strict=True))
        )
        for kind, one in tokens.items()
    }


def _same_rows(most: Tokens, tokens: Tokens) -> NDArray[np.bool_]:
    """Which rows of `most` are those of `tokens`, which may lack some of its pairs."""
    assert most.noise_ids is not None
    assert tokens.noise_ids is not None
    return np.isin(most.noise_ids, tokens.noise_ids)


def _scored_in(most: Tokens, tokens: Tokens) -> Tensor:
    """What `tokens` scores, at its rows of `most`."""
    found = torch.zeros_like(most.mask)
    found[torch.from_numpy(_same_rows(most, tokens)), : tokens.mask.shape[1]] = tokens.counted
    return found


def _rows(
    name: str, pairs: list[Pair], margins: NDArray[np.float64], scoring: str, seed: int
) -> Iterator[dict[str, Any]]:
    """A row of all pairs, and one for each value of each feature that has several."""
    phenomenon = ", ".join(dict.fromkeys(filter(None, (pair.phenomenon for pair in pairs))))
    groups: list[tuple[str, str, Any]] = [("all", "all", slice(None))]
    for feature in FEATURES:
        values = np.array([_value(pair, feature) for pair in pairs])
        present = [value for value in dict.fromkeys(values.tolist()) if value]
        if len(present) > 1:
            groups += [(feature, value, values == value) for value in present]
    for feature, value, chosen in groups:
        labels = {"set": name, "phenomenon": phenomenon, "feature": feature, "value": value, "scoring": scoring}
        yield {**labels, **pair_columns(margins[chosen], seed=seed)}


def _value(pair: Pair, feature: str) -> str:
    if feature == "template":
        return pair.template
    if feature == "number and attractor" and "attractor" in pair.features:
        return f"{pair.features['number']} and {pair.features['attractor']}"
    return pair.features.get(feature, "")


def _meta(
    model: Any, tokens: dict[str, dict[str, Tokens]], table: pd.DataFrame, settings: PairSettings, started: float
) -> dict[str, Any]:
    each = {name: next(iter(kinds.values())) for name, kinds in tokens.items()}
    first = next(iter(each.values()))
    run = RunSettings(batch_size=settings.batch_size, prepend_bos=settings.prepend_bos, seed=settings.seed)
    counts = {"rows": len(table), "nonfinite_rows": int((table["status"] == "nonfinite").sum())}
    meta = provenance(model, replace(first, scored=None), run, started=started, counts=counts)
    meta["settings"] = {key: jsonable(value) for key, value in asdict(settings).items() if key != "progress"}
    meta["data"] = {
        "text": ", ".join(each),
        "n_pairs": sum(one.meta["n_pairs"] for one in each.values()),
        "n_sequences": sum(len(one.ids) for one in each.values()),
        "n_tokens": sum(one.meta["n_tokens"] for one in each.values()),
    }
    meta["sets"] = {name: {kind: one.meta for kind, one in kinds.items()} for name, kinds in tokens.items()}
    meta["margins"] = {scoring: MARGINS[scoring] for scoring in settings.scorings}
    words = "; ".join(f"{name}: {one.meta['scored']}" for name, one in next(iter(tokens.values())).items())
    meta["token_mask"] = words
    return meta
