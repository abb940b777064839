"""Greedy texts: what a request asks for, and where its text ends. Batches of sequences of one length."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lens_geometry.errors import DataError

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # one thing, by precedence
WITHOUT_EFFECT = {"temperature", "top_k", "top_p", "min_p", "typical_p"}  # on greedy decoding
DEFAULT_NEW_TOKENS = 256  # lm_eval's own


def generation_options(options: Mapping[str, Any], task: str | None) -> tuple[list[str], int]:
    """Stop sequences and the most tokens that a request asks for.

    >>> generation_options({"until": "###", "max_gen_toks": 8, "do_sample": False}, "a task")
    (['###'], 8)

    Raises DataError when it asks for what greedy decoding cannot give: sampling, beams, penalties.
    """
    rest = dict(options)
    until = rest.pop("until", None) or []
    most = [length for name in LENGTHS if (length := rest.pop(name, None)) is not None]
    sampled = rest.pop("do_sample", None)
    if sampled or (sampled is None and float(rest.get("temperature") or 0.0) > 0.0):
        raise DataError(
            "the task samples its texts, and only greedy decoding is offered",
            where=f"task {task}",
            cure="pass force_greedy=True (to lm_eval itself: gen_kwargs={'do_sample': False})",
        )
    beams = rest.pop("num_beams", 1)
    unknown = sorted(rest.keys() - WITHOUT_EFFECT) + ["num_beams"] * (beams != 1)
    if unknown:
        raise DataError(
            f"the task sets {', '.join(unknown)}, which plain greedy decoding does not have",
            where=f"task {task}",
            cure="pass force_greedy=True, or leave it out of the task's generation_kwargs",
        )
    stops = [until] if isinstance(until, str) else list(until)
    return [stop for stop in stops if stop], int(most[0]) if most else DEFAULT_NEW_TOKENS


@dataclass
class Generation:
    """One text on its way: what was generated so far, and whether it is done."""

    document: int
    prompt: list[int]
    until: list[str]
    most: int
    truncated: bool
    made: list[int] = field(default_factory=list)
    log_likelihood: float = 0.0
    done: bool = False

    def extend(self, token: int, value: float, tokenizer: Any) -> None:
        """Add a token and its log-probability in nats; one that is NaN ends the text, as all after it is arbitrary."""
        self.made.append(token)
        self.log_likelihood += value
        written = tokenizer.decode(self.made)  # special tokens, too: a stop sequence may be one
        stopped = token == tokenizer.eos_token_id or any(stop in written for stop in self.until)
        self.done = stopped or len(self.made) >= self.most or math.isnan(value)

    def said(self, tokenizer: Any) -> str:
        """The text before its first stop sequence, without special tokens."""
        text = str(tokenizer.decode(self.made, skip_special_tokens=True))
        return text[: min((text.index(stop) for stop in self.until if stop in text), default=len(text))]


def equal_lengths(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Places of sequences of one length, at most `batch_size` at a time, the longest first.

    >>> list(equal_lengths([3, 5, 3, 3], 2))
    [[1], [0, 2], [3]]
    """
    places: dict[int, list[int]] = defaultdict(list)
    for place, length in enumerate(lengths):
        places[length].append(place)
    for length in sorted(places, reverse=True):
        for start in range(0, len(places[length]), batch_size):
            yield places[length][start : start + batch_size]
