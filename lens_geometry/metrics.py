"""What an edit does to a model's output, and to where its attention goes."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from lens_geometry.errors import DataError, GeometryError


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


def attention_entropy(pattern: Float[Tensor, "batch head query key"]) -> Float[Tensor, "batch head query"]:
    """How widely each head spreads a token's attention, in nats: -sum over keys of A log A, with 0 log 0 = 0.

    0 when one key has all of it, log n when n keys share it evenly. Float32 (float64 for a float64 pattern); -inf for a
    row with a weight below zero, which no softmax makes.

    >>> attention_entropy(torch.tensor([[[[0.5, 0.5], [1.0, 0.0]]]])).tolist()
    [[[0.6931471824645996, 0.0]]]
    """
    weights = pattern.to(torch.promote_types(pattern.dtype, torch.float32))
    return torch.special.entr(weights).sum(-1)


def query_key_alignment(
    q: Float[Tensor, "batch pos head d"],
    k: Float[Tensor, "batch pos kv d"],
    pattern: Float[Tensor, "batch head query key"],
    products: Float[Tensor, "batch head query key"] | None = None,
) -> Float[Tensor, "batch head query"]:
    """How far each query points where the keys that it attends to point: the attention-weighted mean of cos(q, k).

        alignment of query i = sum over keys j of A_ij <q_i, k_j> / (|q_i| |k_j|)

    Between -1 and 1, in each query head; under grouped-query attention heads 0..g-1 share KV head 0 and so on. q and k
    are those that the scores are made of: after the rotation of rotary models. Where only the unrotated ones are
    known, `products` are their dot products *after* it; lengths do not change by a rotation, so that this is enough.
    A zero query or key has no direction; its cosine counts as 0. Keys without attention do not count, whatever
    their products (masked ones are -inf). Float32 (float64 for float64 q).

    Raises GeometryError when the shapes do not fit each other.
    """
    n_heads, n_kv = q.shape[2], k.shape[2]
    expected = (q.shape[0], n_heads, q.shape[1], k.shape[1])
    given = [tuple(x.shape) for x in (pattern, products) if x is not None]
    if n_heads % n_kv or k.shape[3] != q.shape[3] or any(shape != expected for shape in given):
        raise GeometryError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and a pattern {given[0]} do not fit each other",
            cure="pass q [batch, pos, head, d], k [batch, pos, kv, d], kv dividing the heads, and that pattern",
        )
    working = torch.promote_types(q.dtype, torch.float32)
    queries = rearrange(q.to(working), "batch query (kv group) d -> batch kv group query d", kv=n_kv)
    keys = rearrange(k.to(working), "batch key kv d -> batch kv key d")
    weights = rearrange(pattern.to(working), "batch (kv group) query key -> batch kv group query key", kv=n_kv)
    if products is None:
        sums = torch.einsum("bkgqt,bktd->bkgqd", weights, _unit(keys))
        found = torch.linalg.vecdot(_unit(queries), sums)
    else:
        product = rearrange(products.to(working), "batch (kv group) query key -> batch kv group query key", kv=n_kv)
        sizes = queries.norm(dim=-1).unsqueeze(-1) * keys.norm(dim=-1)[:, :, None, None, :]
        counted = (weights != 0) & (sizes > 0)
        found = (weights * torch.where(counted, product / sizes, 0.0)).sum(-1)
    return rearrange(found, "batch kv group query -> batch (kv group) query")


def _unit(vectors: Tensor) -> Tensor:
    length = vectors.norm(dim=-1, keepdim=True)
    return vectors / length.masked_fill(length == 0, 1.0)
