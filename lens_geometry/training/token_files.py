"""Prepared tokens on disk: what a directory holds, and how it is read without loading it.

meta.json              what was prepared from what; written last, so its presence says that all is there
tokenizer/             a Hugging Face tokenizer
train-00000.npy        ids of whole documents, each with its end token (uint16, or uint32 for large vocabularies)
train-00000-ends.npy   where each of these documents ends in that file (int64)
held_out-00000.npy     the same of the documents that are never trained on
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lens_geometry.cache import sha256_of
from lens_geometry.errors import DataError
from lens_geometry.training.tokenizer import load_tokenizer, tokenizer_sha256
from lens_geometry.training.windows import Packing, Windows

FORMAT = 1
META, TOKENIZER = "meta.json", "tokenizer"
SIDES = ("train", "held_out")
AGAIN = "prepare the tokens again in a new directory (prepare_tokens, or lens-geometry tokens TEXT --out DIR)"


@dataclass(frozen=True, eq=False)
class TokenSet:
    """The documents of one side as one stream of ids, mapped from its files and not read into memory.

    Attributes:
        name: where it is, for messages.
        end: the id that ends every document.
        shards: the ids of each file.
        bounds: where each document begins in the stream, and where the last one ends.
        side: "train" or "held_out".
    """

    name: str
    end: int
    shards: tuple[np.ndarray, ...]
    bounds: np.ndarray
    side: str = "train"

    @property
    def n_documents(self) -> int:
        return len(self.bounds) - 1

    @property
    def n_tokens(self) -> int:
        """Tokens of all documents, their end tokens included."""
        return int(self.bounds[-1])

    @cached_property
    def _shard_starts(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self.shards)])

    def between(self, start: int, stop: int) -> np.ndarray:
        """The ids from place `start` to before `stop` of the stream."""
        first = int(np.searchsorted(self._shard_starts, start, side="right")) - 1
        parts = []
        for shard, offset in zip(self.shards[first:], self._shard_starts[first:], strict=False):
            if offset >= stop:
                break
            parts.append(shard[max(start - offset, 0) : stop - offset])
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint16), *parts])

    def document(self, number: int) -> np.ndarray:
        """The ids of one document, its end token included."""
        return self.between(int(self.bounds[number]), int(self.bounds[number + 1]))

    def windows(self, length: int, *, packing: Packing = "documents", least: int = 8) -> Windows:
        """All windows of `length` predictions, that is `length` + 1 tokens.

        Args:
            length: predictions per window.
            packing: "documents": a window never leaves its document; its rest is a shorter window, padded on the
                right. "stream": windows over the running stream, in which the end token stands between documents; the
                first token of a document is not scored.
            least: a rest of fewer predictions is dropped (and counted in `Windows.meta`).

        Raises DataError when there is no window, and for settings that make no sense.
        """
        return Windows(self, length, packing, least)


@dataclass(frozen=True, eq=False)
class TokenFiles:
    """A directory of prepared tokens.

    Attributes:
        directory: where it is.
        meta: settings, hashes of texts, tokenizer and ids, counts by side, versions.
        train, held_out: the documents to train on, and those never trained on.
    """

    directory: Path
    meta: dict[str, Any]
    train: TokenSet
    held_out: TokenSet

    @cached_property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer that made the ids."""
        return load_tokenizer(self.directory / TOKENIZER)

    @property
    def end(self) -> int:
        """The id that ends every document."""
        return int(self.meta["tokenizer"]["end"])

    @property
    def vocabulary(self) -> int:
        """How many tokens the tokenizer has; a model needs a `d_vocab` of that or more."""
        return int(self.meta["tokenizer"]["vocabulary"])


def open_tokens(directory: str | os.PathLike[str], *, verify: bool = False) -> TokenFiles:
    """What `prepare_tokens` wrote. Sizes are always checked, hashes when asked for.

    Raises DataError for a directory that is not one of prepared tokens, is unfinished, damaged or of another format.
    """
    where = Path(directory).expanduser()
    meta = read_meta(where)
    try:
        if verify and (found := tokenizer_sha256(where / TOKENIZER)) != meta["tokenizer"]["sha256"]:
            problem = f"the tokenizer is not the one that was written (sha256 {found[:12]})"
            raise DataError(problem, where=str(where / TOKENIZER), cure=AGAIN)
        sides = [_open_side(where, meta, side, verify) for side in SIDES]
    except (KeyError, TypeError, ValueError, OSError) as error:
        problem = f"the directory is damaged ({type(error).__name__}: {error})"
        raise DataError(problem, where=str(where), cure=AGAIN) from error
    return TokenFiles(where, meta, *sides)


def read_meta(where: Path) -> dict[str, Any]:
    """The meta.json of finished tokens. Raises DataError when it is not there or not ours."""
    path = where / META
    if not path.is_file():
        begun = (where / "journal.jsonl").is_file()
        missing = "no prepared tokens are here" if where.is_dir() else "there is no such directory"
        problem = "the preparation of these tokens is unfinished" if begun else missing
        raise DataError(problem, where=str(where), cure="run the same preparation again to go on" if begun else AGAIN)
    try:
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        number = meta["tokens_format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"this is not the meta.json of prepared tokens ({type(error).__name__})"
        raise DataError(problem, where=str(path), cure=AGAIN) from error
    if number != FORMAT:
        problem = f"these tokens have format {number}, and this version reads {FORMAT}"
        raise DataError(problem, where=str(path), cure=AGAIN)
    return meta


def _open_side(where: Path, meta: Mapping[str, Any], side: str, verify: bool) -> TokenSet:
    """The files of one side, checked and mapped."""
    about = meta["sides"][side]
    shards, bounds = [], [np.zeros(1, np.int64)]
    for shard in about["shards"]:
        ids, ends = (_open_array(where / shard[kind]["name"], shard[kind], verify) for kind in ("ids", "ends"))
        if not len(ends) or ends[-1] != len(ids):
            raise DataError("the ends do not belong to the ids", where=shard["ends"]["name"], cure=AGAIN)
        shards.append(ids)
        bounds.append(bounds[-1][-1] + ends)
    joined = np.concatenate(bounds)
    if len(joined) - 1 != about["documents"] or joined[-1] != about["tokens"]:
        raise DataError("meta.json counts other documents or tokens than the files hold", where=str(where), cure=AGAIN)
    return TokenSet(f"{where}, {side}", int(meta["tokenizer"]["end"]), tuple(shards), joined, side)


def _open_array(path: Path, about: Mapping[str, Any], verify: bool) -> np.ndarray:
    """One file, mapped. Raises DataError when its size, or on request its hash, is not what meta.json says."""
    if not path.is_file() or path.stat().st_size != about["bytes"]:
        found = f"has {path.stat().st_size:,} bytes" if path.is_file() else "is missing"
        raise DataError(f"the file {found}, not {about['bytes']:,} bytes", where=str(path), cure=AGAIN)
    if verify and sha256_of(path) != about["sha256"]:
        raise DataError("the file is not what was written (its sha256 differs)", where=str(path), cure=AGAIN)
    return np.load(path, mmap_mode="r", allow_pickle=False)
