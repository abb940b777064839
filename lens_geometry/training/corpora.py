"""Where training documents come from, one after the other, from any place on.

Bundled prose and local files are read as wholes; Hugging Face data sets row by row, never as wholes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lens_geometry.arrangements import NATURAL
from lens_geometry.data_sets import DataSet, named, open_rows, readable, require_hub, row_text
from lens_geometry.errors import DataError
from lens_geometry.text import Text, load_text

Given = str | os.PathLike[str] | Text
Place = Any  # JSON that says where a corpus goes on; None is its start

DATA_SETS: Mapping[str, str] = {  # large ones, by the names that people give them
    "openwebtext": "hf:Skylion007/openwebtext::train:text",
    "fineweb": "hf:HuggingFaceFW/fineweb:sample-10BT:train:text",
}


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, which can be read from any of them on.

    Attributes:
        about: what they are: name, source, licence, and a hash or a revision that changes when they do.
        documents: called with a place, gives `(place, document)` from there on; with None, from the start.
        known: how many documents there are, where that is known.
    """

    about: dict[str, Any]
    documents: Callable[[Place], Iterator[tuple[Place, str]]]
    known: int | None = None


def open_corpora(
    texts: Given | Sequence[Given],
    max_documents: int | None = None,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> list[Corpus]:
    """The corpora of these texts, of each the first `max_documents`.

    `earlier` is what was said `about` them when their preparation was begun: a data set of the hub is then read in the
    revision that it had.
    Raises DataError for a text that is missing, unreachable or cannot be trained on.
    """
    listed = [texts] if isinstance(texts, str | os.PathLike | Text) else list(texts)
    if not listed:
        raise DataError("there is no text", where="texts", cure="give one or more, such as austen moby-dick")
    before = {about.get("name"): about for about in earlier}
    return [_opened(text, max_documents, before) for text in listed]


def _opened(given: Given, limit: int | None, before: Mapping[Any, Mapping[str, Any]]) -> Corpus:
    if isinstance(given, str):
        data_set = named(DATA_SETS.get(given, given)) if given in DATA_SETS or given.startswith("hf:") else None
        if data_set is not None:
            return _streamed(data_set, limit, before.get(data_set.name))
    return _whole(given if isinstance(given, Text) else load_text(given), limit)


def _whole(text: Text, limit: int | None) -> Corpus:
    """A text that is in memory. A place in it is a document's number."""
    if text.arrangement != NATURAL:
        cure = "give the text as it is written, such as austen"
        raise DataError(f"{text.arrangement} text is to be measured on, not trained on", where=text.name, cure=cure)
    about = {"name": text.name, "source": text.source, "licence": text.licence, "sha256": text.sha256}
    documents = text.documents[:limit]

    def read(place: Place) -> Iterator[tuple[Place, str]]:
        return islice(enumerate(documents), place or 0, None)

    return Corpus(about, read, len(documents))


def _streamed(data_set: DataSet, limit: int | None, before: Mapping[str, Any] | None) -> Corpus:
    """A data set of which a few rows at a time are in memory.

    A place is how many documents came before, and the reader's own state there.
    """
    local = Path(data_set.path).exists()
    about = dict(before) if before and not local else _about(data_set, local)

    def read(place: Place) -> Iterator[tuple[Place, str]]:
        cure = "go online, check its path, config and split on its page, and run it again: it goes on where it was"
        with readable(data_set.name, cure):
            rows, _ = open_rows(data_set, streaming=True, revision=about["revision"])
            if place is not None:
                rows.load_state_dict(place["state"])
            number, state = (0, rows.state_dict()) if place is None else (place["documents"], place["state"])
            for row in rows:
                if limit is not None and number >= limit:
                    return
                if text := row_text(row, data_set):
                    yield {"documents": number, "state": state}, text
                    number += 1
                state = rows.state_dict()

    return Corpus(about, read)


def _about(data_set: DataSet, local: bool) -> dict[str, Any]:
    """What a data set is, and what of it is read: the hub's commit, or a local directory's files."""
    about = {"name": data_set.name, "source": data_set.source, "licence": "unknown", "revision": None}
    if local:
        path = Path(data_set.path)
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        listing = "\n".join(f"{file.relative_to(path)} {file.stat().st_size}" for file in files)
        return {**about, "names_and_sizes_sha256": hashlib.sha256(listing.encode()).hexdigest()}
    found = require_hub(data_set.path, data_set.name)
    licence = getattr(getattr(found, "card_data", None), "license", None)
    licence = ", ".join(licence) if isinstance(licence, list) else licence
    return {**about, "licence": licence or "see the data set's page", "revision": getattr(found, "sha", None)}
