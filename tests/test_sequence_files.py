"""Token ids from files: what is read, padded and counted, and one clear error for everything that is no id."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lens_geometry as lg
from lens_geometry.data import tokenize
from lens_geometry.errors import DataError
from lens_geometry.training import prepare_tokens

ROWS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
PADDED = [[3, 1, 4, 1, 5], [9, 2, 0, 0, 0], [6, 5, 3, 0, 0]]
LINES = {
    "rows.jsonl": "[3, 1, 4, 1, 5]\n\n[9, 2]\n" + json.dumps({"input_ids": [6, 5, 3]}),
    "rows.txt": "3 1 4 1 5\n9,2\n6, 5 3\n",
    "rows.csv": "3,1,4,1,5\n9,2,,,\n6,5,3\n\n",
}


Items = SimpleNamespace(cfg=SimpleNamespace(d_vocab=10, n_ctx=6), tokenizer=None)  # what of a model is looked at


@pytest.fixture
def written(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_text(content) if isinstance(content, str) else np.save(path, content)
        return path

    return write


@pytest.mark.parametrize("name", LINES)
def test_lines_of_different_lengths_are_padded_on_the_right_and_masked(written, name):
    path = written(name, LINES[name])
    tokens = lg.load_tokens(path, model=Items)
    assert tokens.ids.tolist() == PADDED
    assert tokens.mask.sum(1).tolist() == [5, 2, 3]
    assert tokens.mask[1].tolist() == [True, True, False, False, False]
    assert tokens.meta["text_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert tokens.meta["tokens_sha256"] == hashlib.sha256(np.array(PADDED, "<i8").tobytes()).hexdigest()
    assert (tokens.meta["text"], tokens.meta["n_tokens"], tokens.meta["n_sequences"]) == (name, 10, 3)
    assert tokenize(Items, tokens).ids.tolist() == PADDED


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", "uint64"])
def test_an_array_of_any_integers_is_taken_as_it_is(written, dtype):
    tokens = lg.load_tokens(written("ids.npy", np.array([[1, 2, 3], [4, 5, 6]], dtype)))
    assert tokens.ids.dtype == torch.int64
    assert tokens.ids.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert tokens.mask.all()


def test_a_sample_is_spread_evenly_and_says_so(written):
    path = written("ids.txt", "\n".join(f"{n} {n}" + " 7" * (n == 1) for n in range(9)))
    tokens = lg.load_tokens(path, max_sequences=3)
    assert tokens.ids.tolist() == [[1, 1, 7], [4, 4, 0], [7, 7, 0]]
    assert (tokens.meta["sampling"], tokens.meta["sequences_available"]) == ("evenly spaced", 9)
    assert lg.load_tokens(path, max_sequences=2).ids.shape == (2, 2)  # no wider than the longest that is taken


def test_a_prepared_directory_gives_its_held_out_documents(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Document {number} says little, and says it twice. " * 3)
    files = prepare_tokens([str(tmp_path / "texts")], tmp_path / "tokens", d_vocab=300, held_out=0.4, progress=False)
    tokens = lg.load_tokens(tmp_path / "tokens", sequence_length=16)
    held_out = files.held_out
    assert tokens.ids[0].tolist() == held_out.document(0)[:16].tolist()
    assert int(tokens.mask[:, 1:].sum()) == held_out.windows(15).meta["scored"]
    assert tokens.meta["text_sha256"] == files.meta["tokens_sha256"]
    assert tokens.meta["documents"] == held_out.n_documents > 0
    assert len(lg.load_tokens(tmp_path / "tokens", sequence_length=16, max_sequences=2).ids) == 2


BAD = [
    ("sign.txt", "+-1 2", "is no integer"),
    ("long.txt", "1" * 6000 + " 2", "is no integer"),
    ("deep.jsonl", "[" * 100_000, "the line is no JSON"),
    ("wide.csv", '"' + "1" * 140_000 + '",2', "the line is no CSV"),
    ("none.jsonl", "", "no sequence"),
    ("none.txt", "\n\n", "no sequence"),
    ("none.npy", np.zeros((0, 4), int), "no sequence"),
    ("empty.jsonl", "[1, 2]\n[]", "line 2"),
    ("single.txt", "1 2\n7\n8\n", "2 of 3 are too short"),
    ("single.npy", np.ones((4, 1), int), "single token"),
    ("names.csv", "item,item\n1,2", "'item' is no integer"),
    ("float.jsonl", "[1, 2.0]", "2.0 is no integer"),
    ("float.txt", "1 2.0", "'2.0' is no integer"),
    ("truth.jsonl", "[1, true]", "True is no integer"),
    ("float.npy", np.ones((2, 3)), "must be integers"),
    ("object.npy", np.array([[1], [1, 2]], dtype=object), "no array of numbers"),
    ("flat.npy", np.arange(4), "[sequence, pos]"),
    ("negative.npy", np.array([[1, 2], [1, -1]]), "negative ids (in 1 of 2"),
    ("negative.txt", "1 2\n1 -100", "-100 is negative [{path}, line 2]"),
    ("huge.txt", f"1 {2**63}", "no token id"),
    ("huge.npy", np.array([[1, 2**63]], "uint64"), "no token id"),
    ("beyond.txt", "1 2\n1 10\n3 4", "ids up to 10 are outside the model's vocabulary of 10, in 1 of 3"),
    ("long.jsonl", "[1,1,1,1,1,1,1]\n[1,2]\n[1,1,1,1,1,1,1,1]", "2 of 3 sequences are longer than the model's context"),
    ("object.jsonl", '{"ids": [1, 2]}', "no list of ids"),
    ("broken.jsonl", "[1, 2", "no JSON"),
    ("ids.bin", "1 2", "'.bin'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "words"), BAD, ids=[name for name, *_ in BAD])
def test_what_is_no_sequence_of_ids_is_named_with_its_place(written, name, content, words):
    path = written(name, content)
    with pytest.raises(DataError) as raised:
        lg.load_tokens(path, model=Items)
    assert words.format(path=path) in str(raised.value)
    assert name in str(raised.value)
    assert "Cure:" in str(raised.value)


def test_a_file_that_is_not_there_or_is_no_text_is_an_error(tmp_path):
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(DataError, match="no UTF-8 text"):
        lg.load_tokens(tmp_path / "image.txt")
    with pytest.raises(DataError, match="no such file"):
        lg.load_tokens(tmp_path / "nothing.txt")
    with pytest.raises(DataError, match="no prepared tokens"):
        lg.load_tokens(tmp_path)
    with pytest.raises(DataError, match="max_sequences is 0"):
        lg.load_tokens(tmp_path, max_sequences=0)


def test_a_long_sequence_that_is_not_taken_is_still_an_error(written):
    path = written("long.txt", "1 2\n" + "1 " * 7 + "\n3 4")
    with pytest.raises(DataError, match="1 of 3 sequences"):
        lg.load_tokens(path, model=Items, max_sequences=1)
