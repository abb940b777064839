"""Greedy decoding under hooks, with a KV cache or without, and the check that the cache is right.

Every new token is one pass of the model. The pass of step s ends at the newest token and chooses the next one: step 0
is the pass over the prompt. Nothing stops at an end-of-text token, so all continuations are equally long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from lens_geometry.anatomy import attached, inspect
from lens_geometry.edits import Batch, Hooks, applied
from lens_geometry.errors import LensGeometryError, ModelError
from lens_geometry.experiments.prompts import Batches
from lens_geometry.metrics import token_losses
from lens_geometry.sites import HOOKS


class Run(NamedTuple):
    """The continuations of a few prompts of one length.

    `rows` are the prompts' numbers, `ids` prompt and continuation [prompt, pos]; `finals` is the last layer's output
    at the newest token of each pass, and `lengths` how many tokens each pass was over.
    """

    rows: list[int]
    prompt_length: int
    ids: Int[Tensor, "prompt pos"]
    finals: Float[Tensor, "step prompt d_model"]
    lengths: list[int]

    @property
    def new(self) -> Int[Tensor, "prompt step"]:
        return self.ids[:, self.prompt_length :]


class Scores(NamedTuple):
    """The unedited model on prompts and continuations in one pass: log-probabilities (nats) of the new tokens."""

    logprobs: Float[Tensor, "prompt step"]
    finals: Float[Tensor, "step prompt d_model"]


@dataclass
class Unedited:
    """The unedited continuations, whether a KV cache was used for them, and why not where it was asked for."""

    runs: list[Run]
    scores: list[Scores]
    cached: bool
    warnings: list[str]


def decode(
    model: Any,
    batches: Batches,
    new: int,
    *,
    cached: bool,
    hooks: Hooks | None = None,
    batch: Batch | None = None,
    progress: tqdm[Any] | None = None,
) -> list[Run]:
    """Greedy continuations of every prompt by `new` tokens under hooks, which are attached once.

    `batch` is told of each batch of prompts. An edit that changes nothing is left to the caller to find.
    Raises ModelError when the model runs other passes than one per new token.
    """
    batch, seen, found = batch or Batch(), list[Tensor](), list[Run]()

    def keep(tensor: Tensor, hook: Any) -> None:
        seen.append(tensor[:, -1].detach().cpu())
        lengths.append(tensor.shape[1])

    with applied(model, [*(hooks or []), (_last_hook(model), keep)], require_change=False):
        for rows, ids in batches:
            batch.ids, batch.prompt_length = rows, ids.shape[1]
            lengths: list[int] = []
            seen.clear()
            out = (_with_cache if cached else _whole)(model, ids, new)
            if len(seen) != new or out.shape != (len(ids), ids.shape[1] + new):
                raise ModelError(
                    f"{new} new tokens took {len(seen)} passes and gave {out.shape[1] - ids.shape[1]} tokens",
                    where="generate",
                    cure="generate without a cache (use_past_kv_cache=False)",
                )
            found.append(Run(rows, ids.shape[1], out, torch.stack(seen), lengths))
            if progress is not None:
                progress.update(len(rows))
    return found


def score(model: Any, runs: Sequence[Run]) -> list[Scores]:
    """How probable the unedited model finds each new token, given all before it: one pass for each run."""
    finals: list[Tensor] = []
    found = []
    with attached(model, [(_last_hook(model), lambda tensor, hook: finals.append(tensor.detach().cpu()))]):
        for run in runs:
            logits = model(run.ids, return_type="logits")
            logprobs = -token_losses(logits, run.ids)[:, run.prompt_length - 1 :].cpu()
            newest = finals.pop()[:, run.prompt_length - 1 : -1]
            found.append(Scores(logprobs, rearrange(newest, "prompt step d -> step prompt d")))
    return found


def unedited(
    model: Any,
    batches: Batches,
    new: int,
    *,
    cache: bool,
    edited: Sequence[str] = (),
    watched: Callable[[], Hooks] = list,
    progress: tqdm[Any] | None = None,
) -> Unedited:
    """The unedited continuations, and whether a KV cache can be trusted with them.

    A cached run must give the last layer what one pass over the whole sequence gives it, token for token; where it
    does not, cannot be had, or hides what one of the `edited` sites needs, whole sequences are run instead and the
    reason is among `warnings`. `watched` makes hooks that look, anew for each attempt.
    """
    reason = _late_pattern(model, edited) if cache else ""
    if cache and not reason:
        try:
            runs = decode(model, batches, new, cached=True, hooks=watched(), progress=progress)
            scores = score(model, runs)
            reason = _cache_fault(model, runs, scores)
            if not reason:
                return Unedited(runs, scores, True, [])
        except LensGeometryError:
            raise
        except Exception as error:  # whatever this model's generate cannot do, a plain loop may
            reason = f"its cached generation fails ({type(error).__name__}: {error})"
        if progress is not None:
            progress.reset()
    runs = decode(model, batches, new, cached=False, hooks=watched(), progress=progress)
    warning = f"no KV cache was used, whole sequences were run: {reason}"
    return Unedited(runs, score(model, runs), False, [warning] if cache else [])


def _with_cache(model: Any, ids: Tensor, new: int) -> Tensor:
    out: Tensor = model.generate(
        ids, max_new_tokens=new, do_sample=False, stop_at_eos=False, use_past_kv_cache=True, prepend_bos=False,
        return_type="tokens", verbose=False,
    )  # fmt: skip
    return out


def _whole(model: Any, ids: Tensor, new: int) -> Tensor:
    for _ in range(new):
        chosen = model(ids, return_type="logits")[:, -1].argmax(-1)
        ids = torch.cat([ids, rearrange(chosen, "prompt -> prompt 1").to(ids.device)], 1)
    return ids


def _last_hook(model: Any) -> str:
    return HOOKS["resid_post"].format(inspect(model).n_layers - 1)


def _late_pattern(model: Any, edited: Sequence[str]) -> str:
    """Why `value_excl_self` cannot be edited under a cache of this model, if it cannot."""
    late = any(facts.score_scale is not None for facts in inspect(model).layers)
    if late and "value_excl_self" in edited:
        return "this model shows its attention pattern too late for value_excl_self to be edited under one"
    return ""


def _cache_fault(model: Any, runs: Sequence[Run], scores: Sequence[Scores]) -> str:
    """What is wrong with a cached run, judged by one pass over the same tokens; empty when nothing is."""
    if any(length > 1 for run in runs for length in run.lengths[1:]):
        return "this model keeps none"
    tolerance, worst = 10 * inspect(model).tolerance, 0.0
    for run, whole in zip(runs, scores, strict=True):
        size = whole.finals.norm(dim=-1)
        gap = (run.finals - whole.finals).norm(dim=-1) / size.masked_fill(size == 0, 1.0)
        worst = max(worst, float(gap.nan_to_num(0.0).max()))
    if worst > tolerance:
        return f"with one the last layer is off by {worst:.2g} of its size (tolerance {tolerance:g})"
    return ""


def batch_rows(runs: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """`(prompt, run, row of the run)` for every prompt, in the prompts' order."""
    places = [(prompt, at, row) for at, run in enumerate(runs) for row, prompt in enumerate(run.rows)]
    yield from sorted(places)
