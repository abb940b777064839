"""Make the bundled texts: `lens_geometry/assets/{austen,moby-dick}.jsonl.gz` from two Debian packages,

    apt-get download r-cran-janeaustenr r-cran-tokenizers
    pip install rdata
    python scripts/build_assets.py r-cran-janeaustenr_*.deb r-cran-tokenizers_*.deb

and `python.jsonl.gz`, with its licence, from the standard library of the CPython 3.11.7 that runs this:

    python3.11 scripts/build_assets.py python

The first needs `dpkg-deb` and the PyPI package `rdata` (reads R's format); neither is a dependency of the package.
The files hold one JSON object per chapter or module, {"title", "text"}, and are the same bytes on every run. The
modules are as they were published.

What is done to the prose, and nothing else: title pages, prefaces, editors' notes, chapter headings, closing
words ("FINIS") and ornaments are left out; a chapter is a document and its heading the title; hard line
breaks inside a paragraph become spaces, paragraphs stay apart by an empty line, verse keeps its lines;
`_emphasis_` loses its underscores; footnote marks are dropped (Melville's own notes stay where they stood);
runs of spaces become one. Spelling and punctuation (`--` for a dash) are as transcribed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1] / "lens_geometry" / "assets"
SHA256 = {
    "janeaustenr": "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    "tokenizers": "6312f013ebfde5650235bfd7ba5c44d9e4cf9f2da9855337c9483fe778f0d8c7",
}
NOVELS = {  # R object -> title, in order of publication
    "sensesensibility": "Sense and Sensibility",
    "prideprejudice": "Pride and Prejudice",
    "mansfieldpark": "Mansfield Park",
    "emma": "Emma",
    "northangerabbey": "Northanger Abbey",
    "persuasion": "Persuasion",
}
MODULES = {  # of CPython 3.11.7, with the sha256 of each file
    "collections/__init__.py": "303701de55e434c0fbcc478ae8a79a28537d9ebe83b3150508438ffd6e3e14c7",
    "dataclasses.py": "4b7e1c99ebea53b546317d218a0261895a1769f83a6b95dc0136f13578066a7f",
    "fractions.py": "b11e850e354808b882d13a70a911c29accd1dbdd41757566704e3b7206c74edb",
    "heapq.py": "6d43277e5c76fc0f073cd388fcff852d14d068f6bb6d4886c340f8b75a1229a9",
    "random.py": "b931a2d452db89ab9e1f79d59b66ce194dbd6748049cfe44699726da52b9c956",
    "statistics.py": "889a066f1b8063e73387ceb84018efc507a89b365b56c6afb9cc15b2ed25c2d9",
    "textwrap.py": "62867e40cdea6669b361f72af4d7daf0359f207c92cbeddfc7c7506397c1f31c",
}
LICENCE = {"LICENSE.txt": "3b2f81fe21d181c499c59a256c8e1968455d6689d269aa85373bfb6af41da3bf"}
CHAPTER = re.compile(r"^(?:chapter ([0-9ivxlc]+)\.?(?: (\S.*))?|(epilogue))$", re.IGNORECASE)
VOLUME = re.compile(r"^volume ([ivx]+)$", re.IGNORECASE)
ENDINGS = re.compile(r"^(?:finis|the end|\*vide a letter.*|end of project gutenberg.*)$", re.IGNORECASE)
EDITORS = re.compile(r"^\[(?:end volume|at this point in the first)", re.IGNORECASE)


def r_objects(package: Path, name: str) -> dict[str, list[str]]:
    """The character vectors in the lazy-load database of the R package `name` inside a .deb."""
    found = hashlib.sha256(package.read_bytes()).hexdigest()
    if found != SHA256[name]:
        sys.exit(f"{package} has sha256 {found}, expected {SHA256[name]}: take the version named in SOURCES.md")
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        base = f"./usr/lib/R/site-library/{name}/data/Rdata"
        index, database = (archive.extractfile(base + end).read() for end in (".rdx", ".rdb"))  # type: ignore[union-attr]
    spans = unserialise(zlib.decompress(index, wbits=47))["variables"]
    # each entry: four bytes of length, then zlib
    pieces = {str(key): database[start + 4 : start + length] for key, (start, length) in spans.items()}
    return {key: [str(line) for line in unserialise(zlib.decompress(piece))] for key, piece in pieces.items()}


def unserialise(data: bytes) -> dict | list:
    import rdata  # the modules need neither R nor this

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rdata warns that it has to guess the format
        return rdata.conversion.convert(rdata.parser.parse_data(data))


def chapters(book: str, lines: list[str]) -> Iterator[dict[str, str]]:
    """One document per chapter; everything before the first chapter and after the last is dropped."""
    volume, title, body = "", None, []
    for line in lines:
        stripped = line.strip()
        heading, new_volume = CHAPTER.match(stripped), VOLUME.match(stripped)
        ending = title is not None and ENDINGS.match(stripped)
        if not (heading or new_volume or ending):
            body.append(line)
            continue
        if title:
            yield {"title": title, "text": paragraphs(body)}
        title, body = None, []
        if ending:
            return
        if new_volume:
            volume = f", volume {new_volume[1].upper()}"
        elif heading:
            number, name, epilogue = heading.groups()
            title = f"{book}{volume}, " + ("epilogue" if epilogue else f"chapter {number.upper()}")
            title += f": {name.rstrip('.')}" if name else ""
    if title:
        yield {"title": title, "text": paragraphs(body)}


def paragraphs(lines: list[str]) -> str:
    """Unwrapped paragraphs, apart by an empty line."""
    blocks = [block.split("\n") for block in re.split(r"\n(?:[ \t]*\n)+", "\n".join(lines).strip("\n"))]
    kept = [unwrap(block) for block in blocks if not EDITORS.match(block[0].strip())]
    return "\n\n".join(block for block in kept if block)


def unwrap(block: list[str]) -> str:
    """One paragraph on one line; verse (indented, its lines opening with capitals) keeps its lines."""
    texts = [re.sub(r"[ \t]+", " ", line.replace("_", "").replace("*", "")).strip() for line in block]
    texts = [text for text in texts if text]
    later = [text.lstrip("\"'(-")[:1] for text in texts[1:]]
    capitals = sum(first.isupper() for first in later)
    is_verse = bool(block[0][:1].isspace() and later and capitals >= 0.6 * len(later))
    if is_verse:
        return "\n".join(texts)
    return re.sub(r"(?<=[^-]--)\n", "", "\n".join(texts)).replace("\n", " ")  # no space after a dash


def library_files(wanted: dict[str, str]) -> dict[str, bytes]:
    """Files of the running Python's standard library, checked against their sha256."""
    library, files = Path(sysconfig.get_paths()["stdlib"]), {}
    for name, expected in wanted.items():
        files[name] = (library / name).read_bytes()
        found = hashlib.sha256(files[name]).hexdigest()
        if found != expected:
            sys.exit(f"{library / name} has sha256 {found}, expected {expected}: run this with CPython 3.11.7")
    return files


def write(name: str, documents: list[dict[str, str]]) -> None:
    """A gzip file without name or time in it, so that equal documents are equal bytes."""
    data = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents).encode()
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=buffer, mode="wb", compresslevel=9, mtime=0) as stream:
        stream.write(data)
    path = ASSETS / f"{name}.jsonl.gz"
    path.write_bytes(buffer.getvalue())
    characters, size = sum(len(document["text"]) for document in documents), len(buffer.getvalue())
    print(f"{path.name}: {len(documents)} documents, {characters:,} characters, {size:,} bytes")
    print(f"  sha256 of the file {hashlib.sha256(buffer.getvalue()).hexdigest()}")
    print(f"  sha256 of the JSON lines {hashlib.sha256(data).hexdigest()}")


def python() -> None:
    write("python", [{"title": name, "text": data.decode()} for name, data in library_files(MODULES).items()])
    (ASSETS / "PYTHON-LICENSE.txt").write_bytes(library_files(LICENCE)["LICENSE.txt"])


def prose(janeaustenr: str, tokenizers: str) -> None:
    novels = r_objects(Path(janeaustenr), "janeaustenr")
    write("austen", [doc for key, title in NOVELS.items() for doc in chapters(title, novels[key])])
    (moby_dick,) = r_objects(Path(tokenizers), "tokenizers")["mobydick"]
    lines = moby_dick.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    write("moby-dick", list(chapters("Moby-Dick", lines)))


if __name__ == "__main__":
    if sys.argv[1:] == ["python"]:
        python()
    elif len(sys.argv) == 3:
        prose(*sys.argv[1:])
    else:
        sys.exit(__doc__)
