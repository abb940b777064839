"""What an edit does to a model's output."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from lens_geometry.errors import DataError


class SequenceLosses(NamedTuple):
    """Next-token losses of some sequences, in nats, as sums so that any mean can be made of them.

    `sums` over the scored tokens with a finite loss, `counts` of the scored tokens, `nonfinite` how many of
    those had no finite loss.
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.int64]
    nonfinite: NDArray[np.int64]


def token_losses(
    logits: Float[Tensor, "batch pos vocab"], ids: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch pos-1"]:
    """The loss of predicting each next token, in nats; float32 whatever the logits' dtype."""
    from transformer_lens.utilities import lm_cross_entropy_loss  # takes seconds to import

    losses = lm_cross_entropy_loss(logits.to(torch.promote_types(logits.dtype, torch.float32)), ids, per_token=True)
    assert isinstance(losses, Tensor)
    return losses


def scored_losses(
    mask: Bool[Tensor, "batch pos"], scored: Bool[Tensor, "batch pos"] | None = None
) -> Bool[Tensor, "batch pos-1"]:
    """Which of `token_losses` count: those of real tokens after real ones, among them the ones in `scored`."""
    pairs = mask[:, 1:] & mask[:, :-1]
    return pairs if scored is None else pairs & scored[:, 1:].to(pairs.device)


@torch.no_grad()
def sequence_losses(
    model: Any,
    ids: Int[Tensor, "batch pos"],
    mask: Bool[Tensor, "batch pos"],
    scored: Bool[Tensor, "batch pos"] | None = None,
) -> SequenceLosses:
    """One forward pass; a token is scored when it and the one that predicts it are real, and `scored` has it."""
    return summed_losses(token_losses(model(ids, return_type="logits"), ids), mask, scored)


def summed_losses(
    losses: Float[Tensor, "batch pos-1"],
    mask: Bool[Tensor, "batch pos"],
    scored: Bool[Tensor, "batch pos"] | None = None,
) -> SequenceLosses:
    """The sums of `token_losses` over what is scored; see `sequence_losses`."""
    scored = scored_losses(mask, scored).to(losses.device)
    finite = torch.isfinite(losses)
    sums = torch.where(scored & finite, losses, losses.new_zeros(())).cpu().double().sum(1)
    return SequenceLosses(sums.numpy(), scored.sum(1).cpu().numpy(), (scored & ~finite).sum(1).cpu().numpy())


Scoring = Literal["sentence", "word", "normalised"]
SCORINGS: tuple[Scoring, ...] = ("sentence", "word", "normalised")


def pair_margins(losses: SequenceLosses, scoring: Scoring) -> NDArray[np.float64]:
    """log p(good) - log p(bad) of minimal pairs, in nats, [pair]; the rows are good_0, bad_0, good_1, bad_1, ...

    "normalised" divides each sentence's log-probability by the number of its scored tokens; "sentence" and "word" are
    sums over what was scored. NaN where a sentence has a loss that is not finite, or none at all.
    """
    if scoring not in SCORINGS:
        raise DataError(f"there is no scoring {scoring!r}", cure=f"choose one of {', '.join(SCORINGS)}")
    if len(losses.sums) % 2:
        raise DataError(f"{len(losses.sums)} rows are no pairs", cure="pass the losses of tokenize_pairs' rows")
    whole = (losses.nonfinite == 0) & (losses.counts > 0)
    divisors = np.maximum(losses.counts, 1) if scoring == "normalised" else 1
    scores = np.where(whole, -losses.sums / divisors, np.nan)
    margins: NDArray[np.float64] = scores[::2] - scores[1::2]
    return margins


def pair_accuracy(margins: NDArray[np.float64]) -> float:
    """The share of pairs with a margin above 0, among those that have one; a tie is no success. NaN without any."""
    finite = margins[np.isfinite(margins)]
    return float((finite > 0).mean()) if len(finite) else float("nan")
