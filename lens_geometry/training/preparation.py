"""Preparing tokens: split, tokenizer, shards, meta.json. What the journal says is done is not done again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from lens_geometry.cache import quiet_transformers
from lens_geometry.errors import DataError
from lens_geometry.results import replace_file, versions
from lens_geometry.runner import bar
from lens_geometry.training.corpora import Corpus, Place
from lens_geometry.training.shards import ANOTHER, Journal, Shard
from lens_geometry.training.split import find_split, is_held_out
from lens_geometry.training.token_files import FORMAT, META, SIDES, TOKENIZER
from lens_geometry.training.tokenizer import Encoder, load_tokenizer, tokenizer_sha256, train_tokenizer

_BATCH = 256  # documents encoded side by side
_BATCH_CHARACTERS = 4_000_000  # but no more text than this, unless one document is longer


def write_tokens(
    where: Path, journal: Journal, corpora: list[Corpus], given: Any, settings: dict[str, Any], progress: bool
) -> None:
    """Split, tokenizer, shards and meta.json, but for what the journal says is done."""
    _check_written(where, journal)
    if "split" not in journal.done:
        journal.add("split", _split(corpora, settings, progress))
    split = journal.done["split"]
    if "tokenizer" not in journal.done:
        tokenizer = _trained(corpora, split, settings["tokenizer"], progress) if given is None else given
        with quiet_transformers():
            tokenizer.save_pretrained(where / TOKENIZER)
        encoder = Encoder(tokenizer)
        about = {"vocabulary": encoder.vocabulary, "end": encoder.end, "sha256": tokenizer_sha256(where / TOKENIZER)}
        journal.add("tokenizer", about)
    encoder = Encoder(load_tokenizer(where / TOKENIZER))
    _write_shards(where, journal, corpora, encoder, settings["shard_tokens"], progress)
    _write_meta(where, journal, settings)


def _check_written(where: Path, journal: Journal) -> None:
    """Raise DataError when what an earlier run wrote is not there any more."""
    files = [array for shard in journal.shards for side in shard["sides"].values() for array in _arrays(side)]
    for file in files:
        path = where / file["name"]
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            raise DataError("a file that was finished is gone or changed", where=str(path), cure=ANOTHER)
    expected = journal.done.get("tokenizer", {}).get("sha256")
    if expected and ((where / TOKENIZER).is_dir() and tokenizer_sha256(where / TOKENIZER)) != expected:
        raise DataError("the tokenizer is gone or changed", where=str(where / TOKENIZER), cure=ANOTHER)


def _arrays(side: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is said of the two files of one side of a shard."""
    return side["ids"], side["ends"]


def _split(corpora: list[Corpus], settings: dict[str, Any], progress: bool) -> dict[str, Any]:
    """The held-out split, from the first documents or from all."""

    def documents() -> Iterator[str]:
        with bar(_known(corpora), "reading documents for the split", progress) as shown:
            for *_, document in _documents(corpora):
                shown.update()
                yield document

    names = ", ".join(corpus.about["name"] for corpus in corpora)
    return find_split(documents(), held_out=settings["held_out"], seed=settings["seed"], where=names)


def _known(corpora: list[Corpus]) -> int | None:
    """How many documents there are, where that is known of each corpus."""
    known = [corpus.known for corpus in corpora]
    return None if None in known else sum(number or 0 for number in known)


def _documents(corpora: list[Corpus], number: int = 0, place: Place = None) -> Iterator[tuple[int, Place, str]]:
    """`(corpus, place, document)` from this place of this corpus on."""
    for at in range(number, len(corpora)):
        for here, document in corpora[at].documents(place if at == number else None):
            yield at, here, document


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
    shard_tokens: int,
    progress: bool,
) -> None:
    """Encode what is left, writing a file of each side whenever `shard_tokens` tokens are there."""
    start = journal.shards[-1]["next"] if journal.shards else [0, None]
    if start is None:  # all of them were written
        return
    shard, split = Shard(len(journal.shards)), journal.done["split"]
    with bar(_known(corpora), "tokenising documents", progress) as shown:
        shown.update(sum(side["documents"] for done in journal.shards for side in done["sides"].values()))
        for batch in _batches(_documents(corpora, *start)):
            encoded = encoder([document for *_, document in batch])
            for (corpus, place, document), ids in zip(batch, encoded, strict=True):
                if shard.n_tokens >= shard_tokens:
                    journal.add("shard", {**shard.write(where), "next": [corpus, place]})
                    shard = Shard(shard.number + 1)
                shard.add("held_out" if is_held_out(document, split) else "train", ids, document)
            shown.update(len(batch))
    journal.add("shard", {**shard.write(where), "next": None})


def _batches(documents: Iterator[tuple[int, Place, str]]) -> Iterator[list[tuple[int, Place, str]]]:
    """Documents to encode side by side: a bounded number of a bounded size."""
    batch: list[tuple[int, Place, str]] = []
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
            problem = f"no document fell on the side {side}"
            raise DataError(problem, where=str(where), cure=f"take more documents, or another share or seed; {ANOTHER}")
    arrays = [array for side in SIDES for shard in sides[side]["shards"] for array in _arrays(shard)]
    meta = {
        "tokens_format": FORMAT,
        "settings": settings,
        "text_sha256": _joined(shard["text_sha256"] for shard in journal.shards),
        "tokens_sha256": _joined(array["sha256"] for array in arrays),
        "tokenizer": journal.done["tokenizer"],
        "split": journal.done["split"],
        "sides": sides,
        "versions": {**versions(), "tokenizers": metadata.version("tokenizers")},
    }
    text = json.dumps(meta, indent=2, ensure_ascii=False) + "\n"
    replace_file(where / META, lambda path: path.write_text(text, encoding="utf-8"))


def _joined(hashes: Iterable[str]) -> str:
    """One hash of several."""
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()
