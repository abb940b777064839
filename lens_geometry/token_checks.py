"""Token ids and their masks, checked before anything is run on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lens_geometry.errors import DataError


def check_ids(model: Any, ids: Tensor) -> None:
    """Raise DataError unless `ids` are [sequence, pos] integers that this model takes."""
    place = f"ids of shape {tuple(ids.shape)}, {ids.dtype}"
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise DataError("token ids must be integers", where=place, cure="pass an integer tensor, such as ids.long()")
    if ids.ndim != 2:
        raise DataError(
            "token ids must have the shape [sequence, pos]",
            where=place,
            cure="pass ids[None] for one sequence",
        )
    if ids.shape[0] < 1 or ids.shape[1] < 2:
        raise DataError("there must be a sequence, and two tokens in it", where=place, cure="pass longer sequences")
    context, d_vocab = getattr(model.cfg, "n_ctx", None), model.cfg.d_vocab
    if context and ids.shape[1] > context:
        raise DataError(f"the model's context is {context} tokens", where=place, cure=f"pass ids[:, :{context}]")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= d_vocab:
        problem = f"token id {low if low < 0 else high} is outside the vocabulary of {d_vocab}"
        raise DataError(problem, where=place, cure="use the tokenizer that belongs to this model")


def check_mask(ids: Tensor, mask: Tensor) -> None:
    """Raise DataError unless the mask is that of right padding, with two real tokens in every sequence."""
    place = f"mask of shape {tuple(mask.shape)}, {mask.dtype}"
    if mask.dtype != torch.bool or mask.shape != ids.shape:
        cure = f"pass a bool mask of shape {tuple(ids.shape)}, True for real tokens"
        raise DataError("the mask does not belong to the ids", where=place, cure=cure)
    if (mask[:, 1:] & ~mask[:, :-1]).any() or (mask.sum(1) < 2).any():
        raise DataError(
            "padding must stand on the right, after at least two real tokens in every sequence",
            where=place,
            cure="move padding to the right, and leave out sequences of one token",
        )


def check_scored(ids: Tensor, mask: Tensor, scored: Tensor | None) -> None:
    """Raise DataError unless `scored` has the shape of the ids and leaves a loss to count in every sequence."""
    if scored is None:
        return
    place = f"scored of shape {tuple(scored.shape)}, {scored.dtype}"
    if scored.dtype != torch.bool or scored.shape != ids.shape:
        cure = f"pass a bool mask of shape {tuple(ids.shape)}, True for tokens whose losses count, or None"
        raise DataError("what is scored does not belong to the ids", where=place, cure=cure)
    empty = (~(mask & scored)[:, 1:].any(1)).nonzero().flatten().tolist()
    if empty:
        raise DataError(
            f"sequence {empty[0]} has no token to score that is real and has another before it",
            where=place,
            cure="leave such sequences out, or score more tokens",
        )


def check_noise_ids(ids: Tensor, noise_ids: tuple[int, ...] | None) -> None:
    """Raise DataError unless `noise_ids` has a whole number for every sequence, or is None."""
    if noise_ids is None:
        return
    if len(noise_ids) != len(ids) or not all(isinstance(number, int) and number >= 0 for number in noise_ids):
        problem = f"{len(noise_ids)} noise ids do not belong to {len(ids)} sequences"
        raise DataError(problem, where="noise_ids", cure="give one whole number of 0 or more per sequence, or None")
