"""Which documents are held out: a function of their content, so that no document is on both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

from lens_geometry.errors import DataError

FEW = 10_000  # documents of which the held-out share is exact


def document_hash(document: str, seed: int) -> int:
    """A number below 2^64 that is a document's own, whatever stands around it."""
    data = seed.to_bytes(8, "little") + document.encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def find_split(documents: Iterable[str], *, held_out: float, seed: int, where: str) -> dict[str, Any]:
    """The split as JSON: documents are held out whose hash is at most `at_most`.

    Of few documents (up to 10,000) the share is exact: that of the smallest hashes, at least one and not all; their
    numbers, over all texts, are recorded. Of more, every document has the same chance. Equal documents have equal
    hashes and fall on the same side. Raises DataError when there are no two different documents.
    """
    hashes = [document_hash(document, seed) for document in islice(documents, FEW + 1)]
    different = sorted(set(hashes))
    if len(different) < 2:
        problem = f"{len(different) or 'no'} document cannot be on both sides of the held-out split"
        raise DataError(problem, where=where, cure="give several texts, or a directory with a .txt file per document")
    if len(hashes) > FEW:
        return {"rule": "every document alike, by its hash", "at_most": int(held_out * 2**64), "seed": seed}
    number = min(max(1, round(held_out * len(different))), len(different) - 1)
    at_most = different[number - 1]
    chosen = [place for place, found in enumerate(hashes) if found <= at_most]
    return {"rule": "an exact share, by hash", "at_most": at_most, "seed": seed, "held_out_documents": chosen}


def is_held_out(document: str, split: dict[str, Any]) -> bool:
    """Whether this split holds the document out."""
    return document_hash(document, split["seed"]) <= split["at_most"]
