"""Documents: bundled, local and from data sets; every unusable file gets one clear sentence."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from dataclasses import replace
from importlib import resources

import pytest

from lens_geometry import text as text_module
from lens_geometry.errors import DataError
from lens_geometry.text import BUNDLED, Text, load_text

PROSE = {"austen": 61 + 55 + 50 + 48 + 31 + 24, "moby-dick": 135 + 1}  # chapters


@pytest.mark.parametrize("name", PROSE)
def test_bundled_text_is_whole_and_tells_where_it_is_from(name):
    text = load_text(name)
    assert len(text.documents) == len(text.titles) == len(set(text.titles)) == PROSE[name]
    assert "public domain" in text.licence
    assert len(text.sha256) == 64


@pytest.mark.parametrize("name", PROSE)
def test_bundled_text_holds_no_markup_headings_or_broken_lines(name):
    for title, document in zip(load_text(name).titles, load_text(name).documents, strict=True):
        stray = re.search(r"[_*\t\r<>|~^=+\\{}]|  |gutenberg|transcriber|^chapter \d|\n\n\n", document, re.IGNORECASE)
        assert stray is None, (title, stray)
        assert document == document.strip()
        # a paragraph that was left wrapped would have long lines that end in the middle of a sentence
        lines = document.split("\n")
        wrapped = [
            (line, after)
            for line, after in itertools.pairwise(lines)
            if len(line) > 60 and re.search(r"[a-z,]$", line) and re.match(r"[a-z]", after)
        ]
        assert not wrapped, (title, wrapped)


def test_bundled_text_has_the_sentences_one_knows():
    austen, moby_dick = load_text("austen"), load_text("moby-dick")
    by_title = dict(zip(austen.titles, austen.documents, strict=True))
    opening = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must"
    assert by_title["Pride and Prejudice, chapter 1"].startswith(
        opening + " be in want of a wife.\n\nHowever little known"
    )
    assert moby_dick.documents[0].startswith("Call me Ishmael. Some years ago--never mind how long precisely--having")
    assert moby_dick.documents[-1].endswith("only found another orphan.")


def test_the_sources_file_names_the_bytes_that_are_bundled():
    assets = resources.files("lens_geometry") / "assets"
    sources = (assets / "SOURCES.md").read_text(encoding="utf-8")
    for name in BUNDLED:
        lines = gzip.decompress((assets / f"{name}.jsonl.gz").read_bytes())
        assert text_module.hashlib.sha256(lines).hexdigest() in sources
        assert {frozenset(json.loads(line)) for line in lines.splitlines()} == {frozenset({"title", "text"})}


def test_bundled_python_is_whole_files_under_their_own_licence():
    text = load_text("python")
    assert 200_000 < sum(map(len, text.documents)) < 400_000
    for title, document in zip(text.titles, text.documents, strict=True):
        compile(document, title, "exec", dont_inherit=True)
    assert "def heappush(heap, item):" in dict(zip(text.titles, text.documents, strict=True))["heapq.py"]
    assert text.licence.startswith("PSF-2.0")
    assets = resources.files("lens_geometry") / "assets"
    assert len((assets / "python.jsonl.gz").read_bytes()) < 150_000
    notice = "2023 Python Software Foundation;\nAll Rights Reserved"
    assert notice in (assets / "PYTHON-LICENSE.txt").read_text(encoding="utf-8")
    assert "PYTHON-LICENSE.txt" in text.licence
    assert notice.replace("\n", " ") in " ".join((assets / "SOURCES.md").read_text(encoding="utf-8").split())


def test_a_text_file_is_one_document_with_plain_newlines_and_no_byte_order_mark(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n\nfour")
    text = load_text(path)
    assert text.documents == ("one\ntwo\nthree\n\nfour",)
    assert text.name == "notes.txt"
    assert str(path) in text.source


def test_a_directory_is_one_document_per_text_file_in_order_of_name(tmp_path):
    for name, content in {"b.txt": "second", "a.txt": "first", "c.md": "not text"}.items():
        (tmp_path / name).write_text(content)
    text = load_text(str(tmp_path))
    assert (text.documents, text.titles) == (("first", "second"), ("a.txt", "b.txt"))


def test_python_files_are_read_one_by_one_or_as_a_directory_without_text_files(tmp_path):
    for name, content in {"b.py": "x = 1\n", "a.py": "y = 2\n", "__init__.py": ""}.items():
        (tmp_path / name).write_text(content)
    assert load_text(str(tmp_path / "b.py")).documents == ("x = 1\n",)
    assert (load_text(tmp_path).documents, load_text(tmp_path).titles) == (("y = 2\n", "x = 1\n"), ("a.py", "b.py"))
    (tmp_path / "notes.txt").write_text("text goes first")
    assert load_text(tmp_path).titles == ("notes.txt",)


def test_a_shuffled_text_has_the_documents_and_the_hash_of_the_other(tmp_path):
    (tmp_path / "notes.txt").write_text("one two")
    for inner, name in (("moby-dick", "moby-dick"), (f"{tmp_path / 'notes.txt'}", "notes.txt")):
        plain = load_text(inner, max_characters=5_000)
        text = load_text(f"shuffled:{inner}", max_characters=5_000)
        assert text == replace(plain, name=f"shuffled:{name}", arrangement="shuffled")
        assert (plain.arrangement, text.sha256) == ("natural", plain.sha256)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shuffled:", r"names no text \[shuffled:\]"),
        ("shuffled:nope", r"no text of this name.*\[nope\].*austen"),
        ("shuffled:repeated-random", "repeated-random has no order to shuffle"),
        ("shuffled:shuffled:austen", "shuffled:austen has no order to shuffle"),
        ("repeated-randon", "no text of this name.*repeated-random"),
    ],
)
def test_a_name_that_cannot_be_arranged_is_one_error_with_a_cure(name, says):
    with pytest.raises(DataError, match=says) as caught:
        load_text(name)
    assert caught.value.cure


def test_random_tokens_have_no_text():
    text = load_text("repeated-random")
    assert (text.documents, text.arrangement) == ((), "repeated-random")
    with pytest.raises(DataError, match="no characters"):
        load_text("repeated-random", max_characters=10)
    with pytest.raises(DataError, match="drawn, not taken from documents"):
        Text("t", ("words",), arrangement="repeated-random")
    with pytest.raises(DataError, match="no arrangement 'sorted'.*natural, shuffled"):
        Text("t", ("words",), arrangement="sorted")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b" \n\t\r\n", "only white space"),
        (b"caf\xe9 au lait", r"not UTF-8 \[.*offset 3\]. Cure: re-encode"),
        (b"PNG\0\0", r"binary.*offset 3\]"),
        ("naïve".encode("utf-16"), "UTF-16.*Cure: re-encode it: iconv"),
        (b"ends in half a character \xc3", r"not UTF-8 .*offset 25"),
    ],
)
def test_an_unusable_file_is_refused_with_the_reason_and_a_cure(tmp_path, content, says):
    (tmp_path / "file.txt").write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        load_text(tmp_path / "file.txt")
    assert caught.value.cure


def test_names_that_lead_nowhere_list_what_can_be_passed(tmp_path):
    for name in ("austin", tmp_path / "missing.txt"):
        with pytest.raises(DataError, match="no text of this name.*austen, moby-dick"):
            load_text(name)
    with pytest.raises(DataError, match="holds no .txt file"):
        load_text(tmp_path)
    with pytest.raises(DataError, match="not an ordinary file"):
        load_text("/dev/null")


def test_an_enormous_file_is_refused_unless_only_its_start_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "LARGEST", 1000)
    path = tmp_path / "large.txt"
    path.write_text("é" * 2000, encoding="utf-8")
    with pytest.raises(DataError, match="4,000 bytes.*max_characters"):
        load_text(path)
    text = load_text(path, max_characters=300)
    assert text.documents == ("é" * 300,)
    assert text.max_characters == 300


@pytest.mark.parametrize("character", ["a", "é", "€", "𝄞", "\r\n"])
def test_a_file_cut_inside_a_character_is_read_up_to_exactly_the_limit(tmp_path, character):
    path = tmp_path / "cut.txt"
    for lead in range(1, 5):
        path.write_bytes(("x" * lead + character * 50).encode())
        expected = ("x" * lead + character.replace("\r\n", "\n") * 50)[:9]
        assert load_text(path, max_characters=9).documents == (expected,)


def test_the_first_characters_of_bundled_text_are_its_first_documents():
    whole, start = load_text("austen"), load_text("austen", max_characters=20_000)
    assert sum(map(len, start.documents)) == 20_000
    assert start.documents[0] == whole.documents[0]
    assert len(start.titles) == len(start.documents)
    with pytest.raises(DataError, match="max_characters is 0"):
        load_text("austen", max_characters=0)


def test_the_hash_tells_apart_where_documents_begin():
    same, other = Text("t", ("ab", "c")), Text("t", ("a", "bc"))
    assert same.sha256 == Text("renamed", ("ab", "c")).sha256 != other.sha256
    for documents, says in (
        ((), "no documents"),
        (("",), "empty"),
        (("\ud800",), "surrogate"),
        ((3,), "a int"),
    ):
        with pytest.raises(DataError, match=says):
            Text("t", documents)


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    """A directory that `datasets` reads, with rows as WikiText has them, and a temporary cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    rows = ["", " = Robin = \n", " The robin is a bird . \n", "", " It sings . \n"]
    lines = [json.dumps({"text": row, "body": row.upper(), "number": 1}) for row in rows]
    (tmp_path / "set" / "test.jsonl").write_text("\n".join(lines))
    return tmp_path / "set"


def test_a_data_set_is_a_document_per_row_or_one_joined_document(data_set):
    rows = load_text(f"hf:{data_set}")
    assert rows.documents == (" = Robin = \n", " The robin is a bird . \n", " It sings . \n")
    assert "split test, column text" in rows.source
    joined = load_text(f"hf-joined:{data_set}::test:body")
    assert joined.documents == (" = ROBIN = \n\n THE ROBIN IS A BIRD . \n\n IT SINGS . ",)
    assert load_text(f"hf:{data_set}", max_characters=15).documents == (" = Robin = \n", " Th")


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ("::test:words", "no column 'words'.*number"),
        ("::test:number", "'number' holds int"),
        ("::validation", "cannot be read"),
        ("::::more", "not a data set's name"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_refused(data_set, ending, says):
    with pytest.raises(DataError, match=says):
        load_text(f"hf:{data_set}{ending}")


def test_a_hub_out_of_reach_is_one_clear_error_at_once(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    def never(*args, **kwargs):
        raise AssertionError("load_dataset would retry for half a minute")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(datasets, "load_dataset", never)
    with pytest.raises(DataError, match="out of reach.*Cure: go online, or use bundled text"):
        load_text("hf:Salesforce/wikitext:wikitext-2-raw-v1:test:text")
