"""Where training documents come from, one after the other, from any place on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lens_geometry.arrangements import NATURAL
from lens_geometry.errors import DataError
from lens_geometry.text import Text, load_text

Given = str | os.PathLike[str] | Text


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, which can be read from any of them on.

    Attributes:
        about: name, source, licence and, of text that is read as a whole, its sha256.
        documents: called with how many to pass over.
        known: how many documents there are, where that is known.
    """

    about: dict[str, Any]
    documents: Callable[[int], Iterator[str]]
    known: int | None = None

    def limited(self, number: int | None) -> Corpus:
        """The first `number` documents."""
        if number is None:
            return self
        known = None if self.known is None else min(self.known, number)
        return Corpus(self.about, lambda skip: islice(self.documents(skip), max(0, number - skip)), known)


def open_corpora(texts: Given | Sequence[Given], max_documents: int | None = None) -> list[Corpus]:
    """The corpora of these texts. Raises DataError for one that is missing, unreachable or cannot be trained on."""
    listed = [texts] if isinstance(texts, str | os.PathLike | Text) else list(texts)
    if not listed:
        raise DataError("there is no text", where="texts", cure="give one or more, such as austen moby-dick")
    return [_opened(text).limited(max_documents) for text in listed]


def _opened(given: Given) -> Corpus:
    return _whole(given if isinstance(given, Text) else load_text(given))


def _whole(text: Text) -> Corpus:
    """A text that is in memory."""
    if text.arrangement != NATURAL:
        cure = "give the text as it is written, such as austen"
        raise DataError(f"{text.arrangement} text is to be measured on, not trained on", where=text.name, cure=cure)
    about = {"name": text.name, "source": text.source, "licence": text.licence, "sha256": text.sha256}
    return Corpus(about, lambda skip: iter(text.documents[skip:]), len(text.documents))
