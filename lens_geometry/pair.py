"""What a minimal pair is: two sentences, one grammatical and one not, and the word that tells them apart."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from lens_geometry.errors import DataError

Span = tuple[int, int]  # of characters: start, and the first one behind it

_WORD = re.compile(r"\w+(?:['’\-]\w+)*|[^\w\s]")


@dataclass(frozen=True)
class Pair:
    """A grammatical and an ungrammatical sentence.

    Attributes:
        good, bad: the sentences, whole.
        good_span, bad_span: the characters of the critical word (or words) in each. It is where the sentences differ,
            but for a pair that says otherwise: after two licensors it is the polarity item, and a SyntaxGym suite names
            a region. A span can be empty, where one sentence lacks a word that the other has.
        phenomenon, template: what is tested, and on which kind of sentence.
        features: what sentences can be told apart by, such as the number of subject and attractor.
    """

    good: str
    bad: str
    good_span: Span
    bad_span: Span
    phenomenon: str = ""
    template: str = ""
    features: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Pairs:
    """Minimal pairs with their provenance.

    `sha256` is over both sentences of every pair, in UTF-8, and their critical spans, each preceded by its length in 8
    bytes. Raises DataError without a pair, and for one that cannot be told apart, or whose span is not in its sentence.
    """

    name: str
    items: tuple[Pair, ...]
    source: str = "given by the caller"
    licence: str = "unknown"
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        if not self.items:
            raise DataError("there are no pairs", where=self.name, cure="pass at least one pair")
        digest = hashlib.sha256()
        for number, pair in enumerate(self.items):
            check_pair(pair, f"{self.name}, pair {number}")
            spans = " ".join(map(str, (*pair.good_span, *pair.bad_span)))
            for part in (pair.good, pair.bad, spans):
                data = part.encode()
                digest.update(len(data).to_bytes(8, "little") + data)
        object.__setattr__(self, "sha256", digest.hexdigest())


def check_pair(pair: Pair, where: str) -> None:
    """Raise DataError unless a pair has two different sentences with their spans inside them."""
    for sentence, (start, stop) in ((pair.good, pair.good_span), (pair.bad, pair.bad_span)):
        if not isinstance(sentence, str) or not sentence.strip():
            raise DataError("a sentence is empty or no text", where=where, cure="give both sentences")
        try:
            sentence.encode()
        except UnicodeEncodeError as error:
            raise DataError("a sentence holds half a surrogate pair", where=where, cure="decode it anew") from error
        if not 0 <= start <= stop <= len(sentence):
            problem = f"the critical span {start} to {stop} is not in a sentence of {len(sentence)} characters"
            raise DataError(problem, where=where, cure="give (start, stop) in characters")
    if pair.good == pair.bad:
        raise DataError("both sentences are the same", where=where, cure="correct the pair, or leave it out")


def critical_spans(good: str, bad: str) -> tuple[Span, Span]:
    """Where two sentences differ: from the first word that is not the same to the last one.

    Words are whole, with their apostrophes and hyphens, and without the punctuation around them. Where one sentence
    has no word there, its span is empty.

    >>> critical_spans("The boys walk.", "The boys walks.")
    ((9, 13), (9, 14))
    """
    words = [[match.span() for match in _WORD.finditer(sentence)] for sentence in (good, bad)]
    texts = [[s[slice(*span)] for span in spans] for s, spans in zip((good, bad), words, strict=True)]
    shorter = min(map(len, texts))
    first = next((i for i in range(shorter) if texts[0][i] != texts[1][i]), shorter)
    last = next((i for i in range(shorter - first) if texts[0][-1 - i] != texts[1][-1 - i]), shorter - first)
    return _stretch(words[0], first, last, good), _stretch(words[1], first, last, bad)


def _stretch(words: list[Span], first: int, last: int, sentence: str) -> Span:
    """From word `first` to the one before the `last` last ones; empty, at the place where it would be, without any."""
    inside = words[first : len(words) - last]
    if inside:
        return inside[0][0], inside[-1][1]
    place = words[first][0] if first < len(words) else len(sentence)
    return place, place
