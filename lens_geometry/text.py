"""Documents and where they come from: bundled prose and code, local files, Hugging Face data sets.

load_text("austen")                        bundled, public domain, needs no network; "python" is source code
load_text("my-notes.txt")                  one document; a directory is a document per .txt file
load_text("hf-joined:Salesforce/wikitext:wikitext-2-raw-v1:test:text")
load_text("shuffled:austen")               the same sequences, the tokens of each in random order
load_text("repeated-random")               no text at all: random tokens, repeated once
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from tqdm import tqdm

from lens_geometry.arrangements import ARRANGEMENTS, NATURAL, REPEATED, SHUFFLED, Arrangement
from lens_geometry.data_sets import named, open_rows, plain, readable, row_texts
from lens_geometry.errors import DataError

PUBLIC_DOMAIN = "public domain (published before 1929; the author died more than 70 years ago)"
BUNDLED = {
    "austen": "six novels of Jane Austen, by chapters (see lens_geometry/assets/SOURCES.md)",
    "moby-dick": "Herman Melville, Moby-Dick, by chapters (see lens_geometry/assets/SOURCES.md)",
    "python": "modules of CPython 3.11.7's standard library, by files (see lens_geometry/assets/SOURCES.md)",
}
LICENCES = {
    "python": "PSF-2.0 (copyright 2001-2023 Python Software Foundation; see lens_geometry/assets/PYTHON-LICENSE.txt)"
}  # of bundled texts that are not in the public domain
LARGEST = 1_000_000_000  # bytes of a file, or characters of a data set, read without being asked for fewer
PREFIXES = ("hf:", "hf-joined:", "shuffled:")
TEXT_NAMES = (
    f"pass a bundled name ({', '.join(BUNDLED)}), a .txt file or a directory of them, "
    "hf:PATH[:CONFIG[:SPLIT[:COLUMN]]], shuffled: before any of these, or repeated-random"
)


@dataclass(frozen=True)
class Text:
    """Documents with their provenance. Sequences of tokens are never cut across two documents.

    `arrangement` says what `tokenize` makes of them: "natural" sequences, as they are written; "shuffled", the same
    with the tokens of each in random order; "repeated-random" has no documents, its tokens are drawn.
    `sha256` is computed over the UTF-8 bytes of every document, each preceded by its length in 8 bytes; so it is
    that of the text as it is written, however it is arranged.
    Raises DataError without a document, and for one that is empty or not encodable.
    """

    name: str
    documents: tuple[str, ...]
    source: str = "given by the caller"
    licence: str = "unknown"
    titles: tuple[str, ...] = ()
    max_characters: int | None = None  # set when only the first characters of the source were read
    arrangement: Arrangement = NATURAL
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for number, document in enumerate(self.documents):
            where = f"{self.name}, document {number}"
            if not isinstance(document, str):
                raise DataError(f"a document is a {type(document).__name__}", where=where, cure="pass strings")
            if not document.strip():
                raise DataError("the document is empty or only white space", where=where, cure="leave it out")
            try:
                data = document.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    "the document holds half a surrogate pair", where=where, cure="decode it anew"
                ) from error
            digest.update(len(data).to_bytes(8, "little") + data)
        if self.arrangement not in ARRANGEMENTS:
            cure = f"choose one of {', '.join(ARRANGEMENTS)}"
            raise DataError(f"there is no arrangement {self.arrangement!r}", where=self.name, cure=cure)
        if self.arrangement == REPEATED and self.documents:
            cure = "leave the documents out, or choose another arrangement"
            raise DataError("random tokens are drawn, not taken from documents", where=self.name, cure=cure)
        if self.arrangement != REPEATED and not self.documents:
            raise DataError("the text has no documents", where=self.name, cure="pass at least one document")
        object.__setattr__(self, "sha256", digest.hexdigest())


def load_text(name: str | os.PathLike[str], *, max_characters: int | None = None) -> Text:
    """Text by name. Line ends become line feeds and a byte order mark is dropped; nothing else is changed.

    Args:
        name: one of
            `"austen"`, `"moby-dick"`: bundled, a document per chapter;
            `"python"`: bundled, modules of Python's standard library, a document per file;
            a path: a UTF-8 file such as `.txt` or `.py` (one document), or a directory whose `.txt` files (where there
            are none, `.py` files that are not empty) are a document each;
            `"hf:PATH[:CONFIG[:SPLIT[:COLUMN]]]"`: a Hugging Face data set (or a local directory that
            `datasets` reads), a document per row; an empty part means no config, split `test`, column `text`;
            `"hf-joined:..."`: the same, the rows being the paragraphs of one long document, as in WikiText:
            `"hf-joined:Salesforce/wikitext:wikitext-2-raw-v1"`;
            `"shuffled:NAME"`: the sequences of any of these, with the tokens of each in random order: the same words
            as often, and no grammar;
            `"repeated-random"`: no text; sequences of random tokens, repeated once, of which only the repeat is
            scored. A model can know it from its first half alone (induction). Needs no tokenizer.
        max_characters: read only this many characters from the start; recorded in the result.

    Raises DataError when the source is missing, unreachable, empty, binary, not UTF-8 or larger than 1 GB.
    """
    if max_characters is not None and max_characters < 1:
        problem = f"max_characters is {max_characters}"
        raise DataError(problem, where=str(name), cure="pass 1 or more, or None for everything")
    if isinstance(name, str) and name in BUNDLED:
        return _bundled(name, max_characters)
    if name == REPEATED:
        if max_characters is not None:
            raise DataError("random tokens have no characters", where=name, cure="leave max_characters out")
        return Text(name, (), "drawn at random from the model's vocabulary", "none needed", arrangement=REPEATED)
    if isinstance(name, str) and name.startswith("shuffled:"):
        return _shuffled(name.removeprefix("shuffled:"), max_characters)
    if isinstance(name, str) and name.startswith(("hf:", "hf-joined:")):
        return _from_hugging_face(name, max_characters)
    path = Path(name).expanduser()
    if not path.exists():
        raise DataError("there is no text of this name, and no such file", where=str(name), cure=TEXT_NAMES)
    files = _files_in(path) if path.is_dir() else [path]
    documents = _first_characters((_read(file, max_characters) for file in files), max_characters)
    titles = tuple(file.name for file in files)[: len(documents)]
    return Text(path.name, documents, f"local file {path}", titles=titles, max_characters=max_characters)


def is_text_name(name: str) -> bool:
    """Whether `load_text` takes this for a name of its own, which no file has."""
    return name in BUNDLED or name == REPEATED or name.startswith(PREFIXES)


def _shuffled(name: str, max_characters: int | None) -> Text:
    """The text of another name, to be shuffled within sequences."""
    if not name or name == REPEATED or name.startswith("shuffled:"):
        problem = f"{name} has no order to shuffle" if name else "shuffled: names no text"
        cure = "put the name of a text behind it, such as shuffled:austen"
        raise DataError(problem, where=f"shuffled:{name}", cure=cure)
    text = load_text(name, max_characters=max_characters)
    return replace(text, name=f"shuffled:{text.name}", arrangement=SHUFFLED)


def _files_in(directory: Path) -> list[Path]:
    """The directory's .txt files by name; where there are none, its .py files that are not empty."""
    files = sorted(directory.glob("*.txt"))
    files = files or [file for file in sorted(directory.glob("*.py")) if file.stat().st_size]
    if not files:
        cure = "put one document per .txt file into it"
        raise DataError("the directory holds no .txt file, nor a .py file", where=str(directory), cure=cure)
    return files


def _bundled(name: str, max_characters: int | None) -> Text:
    """A text of the package's assets, gzip'd JSON lines of {"title", "text"}."""
    path = resources.files("lens_geometry") / "assets" / f"{name}.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    documents = _first_characters((row["text"] for row in rows), max_characters)
    titles = tuple(row["title"] for row in rows)[: len(documents)]
    return Text(name, documents, BUNDLED[name], LICENCES.get(name, PUBLIC_DOMAIN), titles, max_characters)


def _first_characters(documents: Iterable[str], limit: int | None) -> tuple[str, ...]:
    """All documents, or those that start within the first `limit` characters, the last one cut."""
    kept, left = [], LARGEST if limit is None else limit
    for document in documents:
        if len(document) > left and limit is None:
            raise DataError(f"the text is longer than {LARGEST:,} characters", cure="pass max_characters")
        kept.append(document[:left])
        left -= len(document)
        if left <= 0 and limit is not None:
            break
    return tuple(kept)


def _read(path: Path, max_characters: int | None) -> str:
    """One UTF-8 file; of a very large one no more bytes than `max_characters` can need."""
    if not path.is_file():
        raise DataError("this is not an ordinary file", where=str(path), cure="pass a .txt file")
    try:
        size = path.stat().st_size
        if size > LARGEST and max_characters is None:
            raise DataError(
                f"the file has {size:,} bytes", where=str(path), cure="pass max_characters, or split the file"
            )
        with path.open("rb") as file:
            # a character takes 4 bytes at most, and a byte order mark comes before them
            data = file.read(-1 if max_characters is None else 4 * max_characters + 3)
    except OSError as error:
        raise DataError(f"the file cannot be read ({error.strerror})", where=str(path), cure=TEXT_NAMES) from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        cure = f"re-encode it: iconv -f UTF-16 -t UTF-8 {path.name} > utf8.txt"
        raise DataError("the file is UTF-16, not UTF-8", where=f"{path}, byte offset 0", cure=cure)
    if b"\0" in data:
        where = f"{path}, byte offset {data.index(0)}"
        raise DataError("the file is binary: it holds a zero byte", where=where, cure="pass plain UTF-8 text")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        if len(data) < size and error.reason == "unexpected end of data":  # our cut, not the file's fault
            text = data[: error.start].decode("utf-8")
        else:
            cure = f"re-encode it, for example: iconv -f LATIN1 -t UTF-8 {path.name} > utf8.txt"
            raise DataError("the file is not UTF-8", where=f"{path}, byte offset {error.start}", cure=cure) from error
    text = plain(text)
    if not text.strip():
        raise DataError("the file is empty or only white space", where=str(path), cure="pass a file with text in it")
    return text


def _from_hugging_face(name: str, max_characters: int | None) -> Text:
    """`hf:PATH:CONFIG:SPLIT:COLUMN` through `datasets`; fails within seconds without a connection."""
    data_set = named(name)
    with readable(name):
        rows, licence = open_rows(data_set, streaming=max_characters is not None)
        shown = tqdm(rows, f"reading {data_set.path}", delay=2, disable=None, leave=False)
        documents = _first_characters(row_texts(shown, data_set), max_characters)
    if data_set.joined and documents:
        documents = ("\n\n".join(document.strip("\n") for document in documents),)
    return Text(name, documents, data_set.source, licence, max_characters=max_characters)
