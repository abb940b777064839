"""Tokens to train on: text in, a directory of memory-mapped token files out.

files = prepare_tokens(["austen", "moby-dick"], "tokens", d_vocab=2048)      # or open_tokens("tokens") later
windows = files.train.windows(256)
ids, scored = windows.batch(batch_numbers(len(windows), seed=0, step=0, batch_size=16))
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock

from lens_geometry.cache import say
from lens_geometry.errors import DataError
from lens_geometry.training.corpora import DATA_SETS, Given, open_corpora
from lens_geometry.training.preparation import write_tokens
from lens_geometry.training.shards import (
    ANOTHER,
    JOURNAL,
    Journal,
    earlier_settings,
    refuse_other_settings,
    sweep,
    written,
)
from lens_geometry.training.token_files import META, TokenFiles, TokenSet, open_tokens, read_meta
from lens_geometry.training.tokenizer import about_given, check_d_vocab, load_tokenizer
from lens_geometry.training.windows import PACKINGS, Packing, Windows, batch_numbers

__all__ = [
    "DATA_SETS",
    "PACKINGS",
    "Packing",
    "TokenFiles",
    "TokenSet",
    "Windows",
    "batch_numbers",
    "open_tokens",
    "prepare_tokens",
]

D_VOCAB = 2048
_PATIENCE = 1.0  # seconds to wait for a lock in silence


def prepare_tokens(
    texts: Given | Sequence[Given],
    directory: str | os.PathLike[str],
    *,
    d_vocab: int | None = None,
    tokenizer: Any = None,
    held_out: float = 0.05,
    seed: int = 0,
    max_documents: int | None = None,
    tokenizer_characters: int = 100_000_000,
    shard_tokens: int = 2**24,
    progress: bool = True,
) -> TokenFiles:
    """Tokenise texts into a directory of memory-mapped files, with a held-out split by document.

    Stopped at any point, the same call goes on where it was, and ends with the same bytes. Finished tokens are opened.

    Args:
        texts: one or more of
            names of `load_text`, paths, or Text, which are read as wholes;
            `"openwebtext"`, `"fineweb"` (its sample of 10 billion tokens) and `"hf:PATH[:CONFIG[:SPLIT[:COLUMN]]]"`,
            which are read row by row; an empty split is `test`, as everywhere.
        directory: where the tokens go; a new one, or one that the same preparation began.
        d_vocab: size of the byte-level BPE that is trained on the training documents (2048 when left out); with a
            `tokenizer`, the most tokens that it may have, which is what the model has room for.
        tokenizer: an existing one instead: a directory, a name on the Hugging Face hub, or the object.
        held_out: share of the documents that are never trained on, chosen by a hash of their content; equal documents
            are on the same side, and at least one document is on each.
        seed: of the split.
        max_documents: take only the first so many of every text.
        tokenizer_characters: train the BPE on the first training documents until they have so many characters.
        shard_tokens: tokens of a file, after which the next is begun; so many are held in memory.
        progress: show progress bars.

    Raises:
        DataError: a text that cannot be used, fewer than two different documents, a vocabulary below 257 or above
            `d_vocab`, a directory that holds something else, or a disk that cannot be written.
    """
    where = Path(directory).expanduser()
    _check_numbers(held_out, seed, max_documents, tokenizer_characters, shard_tokens)
    if d_vocab is not None:
        check_d_vocab(d_vocab)
    _refuse_foreign(where)
    earlier = earlier_settings(where)
    corpora = open_corpora(texts, max_documents, earlier.get("texts", ()))
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    about: dict[str, Any]
    if given is None:
        about = {"trained": d_vocab or D_VOCAB, "characters": tokenizer_characters}
    else:
        about = about_given(tokenizer, given)
        if d_vocab is not None and about["vocabulary"] > d_vocab:
            problem = f"the tokenizer has {about['vocabulary']:,} tokens, more than d_vocab {d_vocab:,}"
            raise DataError(problem, where=about["given"], cure="raise d_vocab, or choose a smaller tokenizer")
    settings: dict[str, Any] = {
        "texts": [corpus.about for corpus in corpora],
        "max_documents": max_documents,
        "held_out": held_out,
        "seed": seed,
        "tokenizer": about,
        "shard_tokens": shard_tokens,
    }
    if not (where / META).is_file():
        with written(where), _alone(where):
            sweep(where)
            if not (where / META).is_file():  # another process may have finished them meanwhile
                journal = Journal(where / JOURNAL, settings)
                write_tokens(where, journal, corpora, given, settings, progress)
    refuse_other_settings(read_meta(where)["settings"], settings, where)
    with contextlib.suppress(OSError):
        (where / JOURNAL).unlink(missing_ok=True)
    return open_tokens(where)


@contextlib.contextmanager
def _alone(where: Path) -> Iterator[None]:
    """Hold the directory's lock; wait while another process prepares tokens there."""
    where.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(where / ".lock")
    with contextlib.suppress(filelock.Timeout):
        lock.acquire(timeout=_PATIENCE)
    if not lock.is_locked:
        say(f"another process is preparing tokens in {where}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _refuse_foreign(where: Path) -> None:
    """Raise DataError for a place that holds something else."""
    if where.exists() and not where.is_dir():
        raise DataError("this is a file, not a directory", where=str(where), cure="give another directory")
    if where.is_dir():
        names = {path.name for path in where.iterdir()} - {".lock"}
        if names and not names & {META, JOURNAL}:
            raise DataError("the directory holds other files", where=str(where), cure=ANOTHER)


def _check_numbers(held_out: Any, seed: Any, max_documents: Any, tokenizer_characters: Any, shard_tokens: Any) -> None:
    """Raise DataError for settings that make no sense, before anything is read."""
    if not isinstance(held_out, int | float) or not 0 < held_out < 1:
        cure = "give a share between 0 and 1, such as 0.05"
        raise DataError(f"held_out is {held_out!r}", where="held_out", cure=cure)
    numbers = {"seed": (seed, 0), "tokenizer_characters": (tokenizer_characters, 1), "shard_tokens": (shard_tokens, 1)}
    if max_documents is not None:
        numbers["max_documents"] = (max_documents, 1)
    for name, (value, low) in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**63:
            raise DataError(f"{name} is {value!r}", where=name, cure=f"give a whole number of {low} or more")
