"""Minimal pairs as token ids: two rows for each pair, and the tokens of the critical word."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from lens_geometry.data import EVERY_TOKEN, Tokens, special_ids, tokens_meta
from lens_geometry.errors import DataError
from lens_geometry.metrics import SCORINGS, Scoring
from lens_geometry.pair import Pair, Pairs, Span
from lens_geometry.pairs import load_pairs
from lens_geometry.token_checks import check_ids

CRITICAL_WORD = "only the critical word of each sentence is scored"


class _Sentence(NamedTuple):
    """The ids of one sentence, and the places of its critical word; None where the tokenizer tells no offsets."""

    ids: list[int]
    critical: list[int] | None


def tokenize_pairs(
    model: Any,
    pairs: Pairs | str | os.PathLike[str],
    *,
    scoring: Scoring = "sentence",
    prepend_bos: bool = False,
    on_unscorable: Literal["refuse", "drop"] = "refuse",
) -> Tokens:
    """Token ids of the rows good_0, bad_0, good_1, bad_1, ..., padded on the right.

    Without BOS the first token of a sentence has nothing before it that predicts it, and is not scored. So a pair that
    differs there already cannot be compared.

    Args:
        model: any TransformerLens model with a tokenizer.
        pairs: Pairs, or a name for `load_pairs`.
        scoring: "sentence" and "normalised" score every token. "word" scores the critical word alone: every token that
            shares a character with it. (A word of several tokens is the sum over them; one that the other word
            begins with, as with "walk" and "walks" in letters, is not marked as ended by that.)
        prepend_bos: give every sentence the tokenizer's BOS, so that its first token is scored too.
        on_unscorable: what to do with pairs that cannot be scored: "refuse" raises, "drop" leaves them out, counted.

    Returns:
        Tokens. `noise_ids` are the pairs' numbers, the same for both sentences. `meta` counts the pairs, those that
        were dropped, critical words of several tokens, and pairs whose critical words have different numbers of tokens
        (None where the tokenizer tells no offsets).

    Raises:
        DataError: no tokenizer, or one without offsets for "word"; pairs that cannot be scored; a sentence longer than
            the model's context.
    """
    for value, choices, what in ((scoring, SCORINGS, "scoring"), (on_unscorable, ("refuse", "drop"), "on_unscorable")):
        if value not in choices:
            raise DataError(f"there is no {what} {value!r}", cure=f"choose one of {', '.join(choices)}")
    if not isinstance(pairs, Pairs):
        pairs = load_pairs(pairs)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        cure = "load the model with its tokenizer"
        raise DataError("the model has no tokenizer, which pairs need", where=pairs.name, cure=cure)
    if scoring == "word" and not getattr(tokenizer, "is_fast", False):
        cure = "use a fast tokenizer, or scoring='sentence'"
        raise DataError("the tokenizer does not say where its tokens are", where=pairs.name, cure=cure)
    bos, pad = special_ids(model, prepend_bos)
    goods = _sentences(tokenizer, [(pair.good, pair.good_span) for pair in pairs.items])
    bads = _sentences(tokenizer, [(pair.bad, pair.bad_span) for pair in pairs.items])
    problems = [_problem(*both, scoring, prepend_bos) for both in zip(goods, bads, strict=True)]
    kept = [number for number, problem in enumerate(problems) if not problem]
    if not kept or (len(kept) < len(problems) and on_unscorable == "refuse"):
        raise _unscorable(pairs, problems, prepend_bos)
    rows = [one for number in kept for one in (goods[number], bads[number])]
    ids, mask, critical = _padded(rows, bos if prepend_bos else None, pad)
    _check_context(model, pairs, mask, kept)
    check_ids(model, ids)
    scored = critical if scoring == "word" else None
    about = {
        "text": pairs.name,
        "source": pairs.source,
        "licence": pairs.licence,
        "text_sha256": pairs.sha256,
        "scoring": scoring,
        "scored": CRITICAL_WORD if scoring == "word" else EVERY_TOKEN,
        "n_pairs": len(kept),
        "pairs_dropped": len(problems) - len(kept),
        **_critical_counts(rows),
        "pad_token_id": pad,
    }
    meta = tokens_meta(
        ids, mask, about, available=2 * len(pairs.items), bos=bos if prepend_bos else None, scored=scored
    )
    meta["sampling"] = "all" if len(kept) == len(problems) else "pairs that cannot be scored are left out"
    return Tokens(ids, mask, meta, scored, tuple(number for number in kept for _ in range(2)))


def kept_pairs(pairs: Pairs, tokens: Tokens) -> list[Pair]:
    """The pairs that `tokens` holds, in the order of its rows."""
    assert tokens.noise_ids is not None
    return [pairs.items[number] for number in tokens.noise_ids[::2]]


def _sentences(tokenizer: Any, sentences: Sequence[tuple[str, Span]]) -> list[_Sentence]:
    offsets = bool(getattr(tokenizer, "is_fast", False))
    found = tokenizer(
        [sentence for sentence, _ in sentences],
        add_special_tokens=False,
        truncation=False,
        padding=False,
        verbose=False,
        return_offsets_mapping=offsets,
    )
    places = found["offset_mapping"] if offsets else [None] * len(sentences)
    return [
        _Sentence(list(ids), None if tokens is None else _overlapping(tokens, span))
        for ids, tokens, (_, span) in zip(found["input_ids"], places, sentences, strict=True)
    ]


def _overlapping(tokens: Sequence[Span], span: Span) -> list[int]:
    """The places of the tokens that share a character with the span."""
    return [place for place, (start, stop) in enumerate(tokens) if max(start, span[0]) < min(stop, span[1])]


def _problem(good: _Sentence, bad: _Sentence, scoring: str, prepend_bos: bool) -> str:
    """Why a pair cannot be scored; empty where it can."""
    if good.ids == bad.ids:
        return "are the same tokens"
    if not prepend_bos and good.ids[:1] != bad.ids[:1]:
        return "differ in their first token, which nothing predicts"
    if not prepend_bos and min(len(good.ids), len(bad.ids)) < 2:
        return "have a sentence of one token, which nothing predicts"
    if scoring == "word":
        places = [good.critical or [], bad.critical or []]
        if not all(places):
            return "have no critical word in one sentence"
        if not prepend_bos and any(0 in some for some in places):
            return "have their critical word in the first token, which nothing predicts"
    return ""


def _unscorable(pairs: Pairs, problems: list[str], prepend_bos: bool) -> DataError:
    counts = {problem: problems.count(problem) for problem in problems if problem}
    words = "; ".join(f"{count} {problem}" for problem, count in counts.items())
    first = next(number for number, problem in enumerate(problems) if problem)
    where = f"{pairs.name}, first in pair {first}: {pairs.items[first].good!r}"
    cures = [] if prepend_bos or not any("predicts" in problem for problem in counts) else ["pass prepend_bos=True"]
    cures += ["score whole sentences (scoring='sentence')"] if any("critical" in problem for problem in counts) else []
    if len(counts) and sum(counts.values()) < len(problems):
        cures.append("leave them out with on_unscorable='drop'")
    cure = ", or ".join(cures) or "correct the pairs"
    return DataError(f"of {len(problems)} pairs {words}", where=where, cure=cure)


def _padded(rows: list[_Sentence], bos: int | None, pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask of real tokens, and mask of critical ones."""
    shift = int(bos is not None)
    width = max(len(row.ids) for row in rows) + shift
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask, critical = (torch.zeros(len(rows), width, dtype=torch.bool) for _ in range(2))
    for number, row in enumerate(rows):
        whole = row.ids if bos is None else [bos, *row.ids]
        ids[number, : len(whole)] = torch.tensor(whole, dtype=torch.int64)
        mask[number, : len(whole)] = True
        critical[number, [place + shift for place in row.critical or []]] = True
    return ids, mask, critical


def _check_context(model: Any, pairs: Pairs, mask: torch.Tensor, kept: list[int]) -> None:
    context, lengths = getattr(model.cfg, "n_ctx", None), mask.sum(1)
    if context and int(lengths.max()) > context:
        row = int(lengths.argmax())
        raise DataError(
            f"a sentence has {int(lengths.max())} tokens, and the model's context is {context}",
            where=f"{pairs.name}, pair {kept[row // 2]}",
            cure="leave such pairs out",
        )


def _critical_counts(rows: list[_Sentence]) -> dict[str, int | None]:
    lengths = [None if row.critical is None else len(row.critical) for row in rows]
    names = ("critical_words_of_several_tokens", "pairs_of_unequal_critical_words")
    if any(length is None for length in lengths):
        return dict.fromkeys(names)
    several = sum(length > 1 for length in lengths if length is not None)
    unequal = sum(one != two for one, two in zip(lengths[::2], lengths[1::2], strict=True))
    return dict(zip(names, (several, unequal), strict=True))
