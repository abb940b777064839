"""Tokens to train on: text in, a directory of memory-mapped token files out.

files = prepare_tokens(["austen", "moby-dick"], "tokens", d_vocab=2048)      # or open_tokens("tokens") later
windows = files.train.windows(256)
ids, scored = windows.batch(batch_numbers(len(windows), seed=0, step=0, batch_size=16))
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import filelock

from lens_geometry.cache import quiet_transformers
from lens_geometry.errors import DataError
from lens_geometry.results import replace_file, versions
from lens_geometry.runner import bar
from lens_geometry.training.corpora import Corpus, Given, open_corpora
from lens_geometry.training.shards import ANOTHER, JOURNAL, Journal, Shard, refuse_other_settings, written
from lens_geometry.training.split import find_split, is_held_out
from lens_geometry.training.token_files import (
    FORMAT,
    META,
    SIDES,
    TOKENIZER,
    TokenFiles,
    TokenSet,
    open_tokens,
    read_meta,
)
from lens_geometry.training.tokenizer import (
    Encoder,
    check_d_vocab,
    load_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
)
from lens_geometry.training.windows import PACKINGS, Packing, Windows, batch_numbers

__all__ = [
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
_BATCH = 64  # documents encoded side by side
_BATCH_CHARACTERS = 1_000_000  # but no more text than this, unless one document is longer


def prepare_tokens(
    texts: Given | Sequence[Given],
    directory: str | os.PathLike[str],
    *,
    d_vocab: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
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
        texts: one or more names of `load_text`, paths, or Text.
        directory: where the tokens go; a new one, or one that the same preparation began.
        d_vocab: size of the byte-level BPE that is trained on the training documents (2048 when left out); with a
            `tokenizer`, the most tokens that it may have.
        tokenizer: an existing one instead: a directory or a name on the Hugging Face hub.
        held_out: share of the documents that are never trained on, chosen by a hash of their content; equal documents
            are on the same side, and at least one document is on each.
        seed: of the split.
        max_documents: take only the first so many of every text.
        tokenizer_characters: train the BPE on the first training documents until they have so many characters.
        shard_tokens: tokens of a file, after which the next is begun; also what is held in memory.
        progress: show a progress bar.

    Raises:
        DataError: a text that cannot be used, fewer than two different documents, a vocabulary below 257 or above
            `d_vocab`, a directory that holds something else, or a disk that cannot be written.
    """
    where = Path(directory).expanduser()
    _check(d_vocab if tokenizer is None else None, held_out, seed, max_documents, tokenizer_characters, shard_tokens)
    corpora = open_corpora(texts, max_documents)
    given = None if tokenizer is None else load_tokenizer(os.fspath(tokenizer))
    if given is not None and d_vocab is not None and len(given) > d_vocab:
        problem = f"the tokenizer has {len(given):,} tokens, more than d_vocab {d_vocab:,}"
        raise DataError(problem, where=os.fspath(tokenizer or ""), cure="raise d_vocab, or choose a smaller tokenizer")
    settings: dict[str, Any] = {
        "texts": [corpus.about for corpus in corpora],
        "max_documents": max_documents,
        "held_out": held_out,
        "seed": seed,
        "tokenizer": {"trained": d_vocab or D_VOCAB, "characters": tokenizer_characters}
        if given is None
        else {"given": os.fspath(tokenizer or ""), "vocabulary": len(given)},
        "shard_tokens": shard_tokens,
    }
    with written(where):
        _refuse_foreign(where)
        where.mkdir(parents=True, exist_ok=True)
        with _alone(where):
            if (where / META).is_file():
                refuse_other_settings(read_meta(where)["settings"], settings, where)
            else:
                journal = Journal(where / JOURNAL, settings)
                _prepare(where, journal, corpora, given, settings, progress)
            (where / JOURNAL).unlink(missing_ok=True)
    return open_tokens(where)


def _prepare(
    where: Path, journal: Journal, corpora: list[Corpus], given: Any, settings: dict[str, Any], progress: bool
) -> None:
    """Split, tokenizer, shards and meta.json, but for what the journal says is done."""
    if "split" not in journal.done:
        split = find_split(
            (document for *_, document in _documents(corpora)),
            held_out=settings["held_out"],
            seed=settings["seed"],
            where=", ".join(corpus.about["name"] for corpus in corpora),
        )
        journal.add("split", split)
    split = journal.done["split"]
    if "tokenizer" not in journal.done:
        if given is None:
            given = _trained(corpora, split, settings["tokenizer"], progress)
        with quiet_transformers():
            given.save_pretrained(where / TOKENIZER)
        encoder = Encoder(given)
        about = {"vocabulary": encoder.size, "end": encoder.end, "sha256": tokenizer_sha256(where / TOKENIZER)}
        journal.add("tokenizer", about)
    encoder = Encoder(load_tokenizer(str(where / TOKENIZER)))
    _write_shards(where, journal, corpora, encoder, split, settings["shard_tokens"], progress)
    _write_meta(where, journal, settings)


def _documents(corpora: list[Corpus], corpus: int = 0, document: int = 0) -> Iterator[tuple[int, int, str]]:
    """`(corpus, document, text)` from this document of this corpus on."""
    for number in range(corpus, len(corpora)):
        skip = document if number == corpus else 0
        for at, text in enumerate(corpora[number].documents(skip), skip):
            yield number, at, text


def _trained(corpora: list[Corpus], split: dict[str, Any], about: dict[str, Any], progress: bool) -> Any:
    """A BPE trained on the first training documents."""

    def documents() -> Iterator[str]:
        left = about["characters"]
        with bar(left, "reading text for the tokenizer", progress) as shown:
            for *_, document in _documents(corpora):
                if left <= 0:
                    return
                if not is_held_out(document, split):
                    yield document[:left]
                    left -= len(document)
                    shown.update(len(document))

    return train_tokenizer(documents(), about["trained"])


def _write_shards(
    where: Path,
    journal: Journal,
    corpora: list[Corpus],
    encoder: Encoder,
    split: dict[str, Any],
    shard_tokens: int,
    progress: bool,
) -> None:
    """Encode what is left, writing a file of each side whenever `shard_tokens` tokens are there."""
    place = journal.shards[-1]["next"] if journal.shards else [0, 0]
    if place is None:
        return
    known = [corpus.known for corpus in corpora]
    total = None if None in known else sum(number or 0 for number in known)
    done = sum(side["documents"] for shard in journal.shards for side in shard["sides"].values())
    shard = Shard(len(journal.shards))
    with bar(total, "tokenising documents", progress) as shown:
        shown.update(done)
        for batch in _batches(_documents(corpora, *place)):
            encoded = encoder([document for *_, document in batch])
            for (corpus, at, document), ids in zip(batch, encoded, strict=True):
                if shard.n_tokens >= shard_tokens:
                    journal.add("shard", {**shard.write(where), "next": [corpus, at]})
                    shard = Shard(shard.number + 1)
                shard.add("held_out" if is_held_out(document, split) else "train", ids, document)
            shown.update(len(batch))
    journal.add("shard", {**shard.write(where), "next": None})


def _batches(documents: Iterator[tuple[int, int, str]]) -> Iterator[list[tuple[int, int, str]]]:
    """Documents to encode side by side: a bounded number of a bounded size."""
    batch: list[tuple[int, int, str]] = []
    size = 0
    for one in documents:
        if batch and (len(batch) == _BATCH or size + len(one[2]) > _BATCH_CHARACTERS):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += len(one[2])
    if batch:
        yield batch


def _write_meta(where: Path, journal: Journal, settings: dict[str, Any]) -> None:
    """meta.json, which makes the directory a finished one."""
    sides: dict[str, Any] = {}
    for side in SIDES:
        shards = [shard["sides"][side] for shard in journal.shards if side in shard["sides"]]
        sides[side] = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "text_bytes")}
        sides[side]["shards"] = [{"ids": shard["ids"], "ends": shard["ends"]} for shard in shards]
        if not shards:
            problem = f"the {side} side got no document"
            raise DataError(problem, where=str(where), cure="take more documents, or another held_out or seed")
    meta = {
        "tokens_format": FORMAT,
        "settings": settings,
        "text_sha256": _joined([shard["text_sha256"] for shard in journal.shards]),
        "tokens_sha256": _joined(
            [shard[kind]["sha256"] for side in SIDES for shard in sides[side]["shards"] for kind in ("ids", "ends")]
        ),
        "tokenizer": journal.done["tokenizer"],
        "split": journal.done["split"],
        "sides": sides,
        "versions": {**versions(), "tokenizers": metadata.version("tokenizers")},
    }
    text = json.dumps(meta, indent=2, ensure_ascii=False) + "\n"
    replace_file(where / META, lambda path: path.write_text(text, encoding="utf-8"))


def _joined(hashes: list[str]) -> str:
    """One hash of several."""
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


@contextlib.contextmanager
def _alone(where: Path) -> Iterator[None]:
    """Hold the directory's lock. Raises DataError when another process prepares tokens there."""
    lock = filelock.FileLock(where / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        problem = "another process is preparing tokens in this directory"
        raise DataError(problem, where=str(where), cure="wait for it, or give another directory") from error
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


def _check(
    d_vocab: int | None,
    held_out: float,
    seed: int,
    max_documents: int | None,
    tokenizer_characters: int,
    shard_tokens: int,
) -> None:
    """Raise DataError for settings that make no sense, before anything is read."""
    if d_vocab is not None:
        check_d_vocab(d_vocab)
    if not isinstance(held_out, int | float) or not 0 < held_out < 1:
        raise DataError(
            f"held_out is {held_out!r}", where="held_out", cure="give a share between 0 and 1, such as 0.05"
        )
    numbers = {"seed": (seed, 0), "tokenizer_characters": (tokenizer_characters, 1), "shard_tokens": (shard_tokens, 1)}
    if max_documents is not None:
        numbers["max_documents"] = (max_documents, 1)
    for name, (value, low) in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**63:
            raise DataError(f"{name} is {value!r}", where=name, cure=f"give a whole number of {low} or more")
