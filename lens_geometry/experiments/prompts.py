"""Prompts as token ids, in batches of one length, and continuations as text again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Int
from torch import Tensor

from lens_geometry.data import Text, Tokens
from lens_geometry.errors import DataError
from lens_geometry.runner import RunSettings, prepare

DEFAULT_PROMPTS = (  # Austen, Melville, Carroll, Lincoln: in the public domain everywhere
    "It is a truth universally acknowledged, that a single man in possession of a good fortune,",
    "Call me Ishmael. Some years ago, having little or no money in my purse, I thought I would",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of",
    "Four score and seven years ago our fathers brought forth on this continent a new",
)

Batches = list[tuple[list[int], Int[Tensor, "prompt pos"]]]
"""The prompts' numbers and their token ids, batch by batch."""


def prompt_tokens(model: Any, prompts: Any, settings: RunSettings, new: int) -> Tokens:
    """Each prompt as one sequence, padded on the right; see `continuations` for what `prompts` may be.

    Raises ModelError and DataError for what cannot be used: a prompt of fewer than two tokens, or one too long.
    """
    if isinstance(prompts, Text):
        prompts = list(prompts.documents)
    if isinstance(prompts, str):
        prompts = [prompts]
    context = getattr(model.cfg, "n_ctx", None) if hasattr(model, "cfg") else None
    room = min(settings.sequence_length, context - new) if context else settings.sequence_length
    if room < 2:
        raise DataError(
            f"{new} new tokens leave no room for a prompt in a context of {context}", cure="lower max_new_tokens"
        )
    if prompts is None or (isinstance(prompts, Sequence) and all(isinstance(prompt, str) for prompt in prompts)):
        texts = DEFAULT_PROMPTS if prompts is None else tuple(prompts)
        name = f"{len(texts)} {'bundled ' if prompts is None else ''}prompts"
        if not texts:
            raise DataError("there are no prompts", cure="give at least one")
        tokenizer = getattr(model, "tokenizer", None)
        for text in texts:
            if tokenizer is None:
                break  # which `prepare` refuses
            length = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) + settings.prepend_bos
            if not 2 <= length <= room:
                raise DataError(
                    f"a prompt has {length} tokens, and here it must have 2 to {room}",
                    where=repr(text[:40]),
                    cure="change the prompt, or max_new_tokens or sequence_length where they leave too little room; "
                    "long text is cut with tokenize(model, text, sequence_length=..., max_sequences=...)",
                )
        prompts = Text(name, texts)
    tokens = prepare(model, prompts, replace(settings, sequence_length=room))
    if context and int(tokens.mask.sum(1).max()) + new > context:
        raise DataError(
            f"prompts and {new} new tokens are longer than the model's context of {context}",
            cure="shorten the prompts or lower max_new_tokens",
        )
    return tokens


def prompt_batches(model: Any, tokens: Tokens, batch_size: int) -> Batches:
    """Prompts of one length together, those of other lengths apart: nothing is padded."""
    device = next(model.parameters()).device
    lengths = tokens.mask.sum(1).tolist()
    found: Batches = []
    for length in dict.fromkeys(lengths):
        rows = [row for row, other in enumerate(lengths) if other == length]
        for start in range(0, len(rows), batch_size):
            chosen = rows[start : start + batch_size]
            found.append((chosen, tokens.ids[chosen, :length].to(device)))
    return found


def split_text(model: Any, ids: Int[Tensor, " pos"], prompt_length: int) -> tuple[str, str]:
    """Prompt and continuation as text; ids separated by blanks where the model has no tokenizer."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        words = [str(token) for token in ids.tolist()]
        return " ".join(words[:prompt_length]), "".join(f" {word}" for word in words[prompt_length:])
    before, whole = (
        str(tokenizer.decode(part, clean_up_tokenization_spaces=False)) for part in (ids[:prompt_length], ids)
    )
    if whole.startswith(before):
        return before, whole[len(before) :]
    return before, str(tokenizer.decode(ids[prompt_length:], clean_up_tokenization_spaces=False))
