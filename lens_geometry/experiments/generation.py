"""What does an edit do to the text that a model writes? Edited greedy continuations beside the unedited one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from lens_geometry.anatomy import at_rest, inspect
from lens_geometry.edits import WHEN, Batch, scale
from lens_geometry.edits import When as WhenEdited
from lens_geometry.errors import DataError
from lens_geometry.experiments.decoding import Run, Scores, Unedited, batch_rows, decode, score, unedited
from lens_geometry.experiments.profile import PROFILED, available_sites
from lens_geometry.experiments.prompts import prompt_batches, prompt_tokens, split_text
from lens_geometry.results import Result
from lens_geometry.runner import RunSettings, at_least, bar, check_effect, provenance
from lens_geometry.sites import HOOKS, SITES, choose_layers


@dataclass(frozen=True)
class GenerationSettings(RunSettings):
    """Settings of `continuations` and `generation_profile`.

    Attributes:
        sequence_length: the longest prompt, in tokens; a longer one is refused.
        max_sequences: how many prompts, evenly spread over those given; None takes all.
        max_new_tokens: new tokens per prompt and condition; an end-of-text token stops nothing.
        use_past_kv_cache: decode with the model's KV cache where it is right, which is checked; same tokens, less time.
        sites: which updates are edited in `continuations`.
        parallel: retained scales of the parallel part, the perpendicular part kept.
        when: which tokens are edited: "always" all, "prompt" only those of the prompt, "new" only the others.
        layers: the layers edited at once: "all", "4", "1-", "4-11", "0,3,6".
        profile_sites: which updates are measured in `generation_profile`.
        replicates: of the bootstrap over prompts in `generation_profile`.
    """

    sequence_length: int = 256
    max_sequences: int | None = None
    max_new_tokens: int = 40
    use_past_kv_cache: bool = True
    sites: tuple[str, ...] = ("value_excl_self", "attn")
    parallel: tuple[float, ...] = (0.0, 0.5)
    when: tuple[WhenEdited, ...] = ("always", "new")
    layers: str = "all"
    profile_sites: tuple[str, ...] = PROFILED
    replicates: int = 400

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, max_new_tokens=2, replicates=2)
        if set(self.when) - set(WHEN):
            raise DataError(f"when is {self.when!r}", cure=f"choose among {', '.join(WHEN)}")
        if not (self.sites and self.parallel and self.when):
            raise DataError("there is nothing to edit", cure="give at least one site, one scale and one `when`")


@dataclass(frozen=True)
class _Edit:
    """One condition of `continuations`; the site "none" is the unedited model."""

    site: str = "none"
    parallel: float = 1.0
    when: WhenEdited = "always"


def continuations(
    model: Any, prompts: Any = None, settings: GenerationSettings | None = None, **changes: Any
) -> Result:
    """Greedy continuations of every prompt, unedited and under each edit.

    Args:
        model: any TransformerLens model.
        prompts: a string, a list of strings, token ids [prompt, pos], or Tokens; None for a few bundled ones. Each is
            one prompt, tokenised without special tokens. Prompts of one length are run together, others apart.
        settings: see `GenerationSettings`; `changes` override single fields.

    Returns:
        A Result with one row per prompt and condition (site "none": unedited): the continuation as text and token ids,
        how many of its first tokens agree with the unedited one (`n_agree`) and the step of the first that does not,
        its mean log-probability per token under the *unedited* model (`logprob`, nats) with the change against the
        unedited continuation's, and `repetition`, the share of its 3-grams that it had before. `agreed_characters`
        is where its text parts from the unedited text. A row has status "nonfinite" when the edited model computed
        something not finite, "no_effect" when the edit changed no bit of the last layer.

    Raises:
        ModelError, DataError, SiteError for what cannot be used; HookError when an edit does not reach the output.
    """
    settings, started = replace(settings or GenerationSettings(), **changes), time.monotonic()
    tokens = prompt_tokens(model, prompts, settings, settings.max_new_tokens)
    sites, remarks = available_sites(model, settings.sites, editing=True)
    layers = choose_layers(settings.layers, inspect(model).n_layers)
    edits = [_Edit(s, float(p), w) for s in sites for p in settings.parallel for w in settings.when]
    for target in {SITES[site].target for site in sites}:
        check_effect(model, HOOKS[target].format(layers[0]))
    batches, new = prompt_batches(model, tokens, settings.batch_size), settings.max_new_tokens
    total = (1 + len(edits)) * len(tokens.ids)
    rows: list[dict[str, Any]] = []
    with at_rest(model), bar(total, "continuations", settings.progress) as progress:
        base = unedited(model, batches, new, cache=settings.use_past_kv_cache, edited=sites, progress=progress)
        rows += _rows(model, _Edit(), base.runs, base.scores, base)
        for edit in edits:
            batch = Batch()
            hooks = scale(model, edit.site, parallel=edit.parallel, layers=layers, when=edit.when, batch=batch)
            runs = decode(model, batches, new, cached=base.cached, hooks=hooks, batch=batch, progress=progress)
            rows += _rows(model, edit, runs, score(model, runs), base)
    table = pd.DataFrame(rows).sort_values("prompt", kind="stable", ignore_index=True)
    table.insert(table.columns.get_loc("site") + 1, "layers", settings.layers)
    table = table.astype({"first_difference": "Int64", "eos_step": "Int64"})
    counts = {
        "conditions": 1 + len(edits),
        "nonfinite_rows": int((table["status"] == "nonfinite").sum()),
        "no_effect_rows": int((table["status"] == "no_effect").sum()),
    }
    return result_of("continuations", model, tokens, settings, table, started, remarks + base.warnings, base, counts)


def result_of(
    name: str,
    model: Any,
    tokens: Any,
    settings: GenerationSettings,
    table: pd.DataFrame,
    started: float,
    remarks: list[str],
    base: Unedited,
    counts: dict[str, int],
) -> Result:
    """A Result of this settings' kind, its remarks warned of and kept."""
    for remark in remarks:
        warnings.warn(remark, stacklevel=3)
    meta = provenance(
        model,
        tokens,
        settings,
        started=started,
        token_mask=f"{settings.max_new_tokens} new tokens for each prompt",
        decoding="greedy; an end-of-text token stops nothing",
        kv_cache=base.cached,
        counts={"prompts": len(tokens.ids), **counts},
    )
    meta["warnings"] += remarks
    return Result(name, table, meta)


def _rows(
    model: Any, edit: _Edit, runs: Sequence[Run], scores: Sequence[Scores], base: Unedited
) -> Iterator[dict[str, Any]]:
    """A row per prompt for one condition, beside the unedited runs of the same prompts."""
    eos = getattr(getattr(model, "tokenizer", None), "eos_token_id", None)
    for prompt, at, row in batch_rows(runs):
        run, plain = runs[at], base.runs[at]
        before, text = split_text(model, run.ids[row], run.prompt_length)
        _, plain_text = split_text(model, plain.ids[row], run.prompt_length)
        found, other = run.new[row].tolist(), plain.new[row].tolist()
        agree = _agreeing(found, other)
        _, agreed = split_text(model, run.ids[row, : run.prompt_length + agree], run.prompt_length)
        parted = len(text) if agree == len(found) else min(len(agreed), _agreeing(text, plain_text))
        logprob, plain_logprob = (float(one[at].logprobs[row].mean()) for one in (scores, base.scores))
        finals = run.finals[:, row]
        finite = bool(torch.isfinite(finals).all()) and bool(np.isfinite(logprob))
        idle = edit.parallel != 1.0 and torch.equal(finals, plain.finals[:, row])
        yield {
            "prompt": prompt,
            "prompt_text": before,
            "site": edit.site,
            "parallel": edit.parallel,
            "when": edit.when,
            "text": text,
            "agreed_characters": parted,
            "token_ids": " ".join(map(str, found)),
            "n_new": len(found),
            "n_agree": agree,
            "first_difference": agree if agree < len(found) else None,
            "logprob": logprob,
            "logprob_change": logprob - plain_logprob,
            "repetition": repetition(found),
            "eos_step": found.index(eos) if eos in found else None,
            "status": "nonfinite" if not finite else "no_effect" if idle else "ok",
        }


def _agreeing(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many of the first items of two sequences are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def repetition(ids: Sequence[int], n: int = 3) -> float:
    """The share of n-grams that were there before; NaN where there is none.

    >>> repetition([1, 2, 3, 1, 2, 3]), repetition([1, 2, 3, 4])
    (0.25, 0.0)
    """
    grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else float("nan")
