"""Tokens to train on: exact text, a split by document, windows, batches, and a preparation that can be killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lens_geometry import cli
from lens_geometry.errors import DataError
from lens_geometry.text import Text, load_text
from lens_geometry.training import corpora, data, preparation, shards, split, windows
from lens_geometry.training.data import batch_numbers, open_tokens, prepare_tokens
from lens_geometry.training.token_files import TokenSet
from lens_geometry.training.tokenizer import END, Encoder, load_tokenizer, train_tokenizer

PROSE = load_text("austen", max_characters=60_000).documents[0]
CHAPTERS = load_text("moby-dick", max_characters=60_000).documents
PARAGRAPHS = tuple(part[:200] for chapter in CHAPTERS for part in chapter.split("\n\n") if part.strip())[:72]
QUICK = dict(d_vocab=300, progress=False)
PINNED = ([0, 9, 1, 6, 3, 5, 4, 2, 8, 7], [7, 2, 6, 8, 0, 4, 9, 1, 3, 5])  # seed 0, epoch 0; seed 7, epoch 1


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([PROSE[:20_000]], 400)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Sixty paragraphs in several shards."""
    where = tmp_path_factory.mktemp("shared") / "tokens"
    return prepare_tokens(Text("book", PARAGRAPHS[:60]), where, held_out=0.2, shard_tokens=700, **QUICK)


def contents(directory):
    """Every file of a directory and its bytes."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# --- the tokenizer


def test_two_trainings_on_the_same_documents_give_the_same_file(tmp_path, monkeypatch):
    for name, parallel in (("a", "false"), ("b", "true")):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        train_tokenizer(PARAGRAPHS[:20], 350).save_pretrained(tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_the_end_token_is_zero_and_the_bytes_come_next(tokenizer):
    assert len(tokenizer) == 400
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.convert_ids_to_tokens(0) == END
    single = {token for token, number in tokenizer.get_vocab().items() if 1 <= number <= 256}
    assert len(single) == 256
    assert {len(token) for token in single} == {1}
    assert len(train_tokenizer(["a"], 257)) == 257


def test_no_token_crosses_from_one_word_into_the_next(tokenizer):
    merged = [tokenizer.decode([number]) for number in range(257, 400)]
    assert any(token.startswith(" ") and len(token) > 2 for token in merged)
    for token in merged:
        assert not token.strip() or " " not in token.removeprefix(" ")
        assert not token.strip() or "\n" not in token


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=200))
def test_any_text_comes_back_exactly_from_its_ids(text):
    encoder, found = any_encoder()
    ids = encoder([text])[0]
    assert ids[-1] == 0
    assert 0 not in ids[:-1]
    assert found.decode(ids[:-1]) == text
    assert ids[:-1].tolist() == found(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


_MADE: list = []


def any_encoder():
    """An encoder and its tokenizer, made once."""
    if not _MADE:
        found = train_tokenizer(PARAGRAPHS[:10], 320)
        _MADE.extend([Encoder(found), found])
    return _MADE


@pytest.mark.parametrize(
    "text", [END, f"one{END}two", " \t\r\n\u2028\u00a0\ufeff", "e\u0301\u00e9 naïve 🏳️‍🌈 \0", "𝄞" * 40]
)
def test_awkward_text_comes_back_too_and_a_written_end_token_is_only_text(text):
    encoder, found = any_encoder()
    ids = encoder([text])[0]
    assert np.count_nonzero(ids == 0) == 1
    assert found.decode(ids[:-1]) == text


def test_the_directory_is_a_tokenizer_for_auto_tokenizer_and_for_load_model(files, tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from lens_geometry.models import load_model

    plain = AutoTokenizer.from_pretrained(str(files.directory / "tokenizer"))
    text = "Call me Ishmael.\n\n  Some years ago--never\tmind"
    expected = files.tokenizer(text)["input_ids"]
    assert plain(text)["input_ids"] == expected
    assert plain.decode(expected) == text
    shape = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=300)
    LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path)
    shutil.copytree(files.directory / "tokenizer", tmp_path, dirs_exist_ok=True)
    model = load_model(str(tmp_path))
    assert model.tokenizer(text, add_special_tokens=False)["input_ids"] == expected
    assert model.to_tokens(text, prepend_bos=False).tolist() == [expected]


# --- the files


def test_the_files_hold_every_document_exactly_once_with_its_end(files):
    documents = {"train": [], "held_out": []}
    for side in (files.train, files.held_out):
        for number in range(side.n_documents):
            ids = side.document(number)
            assert ids[-1] == files.end == 0
            documents[side.side].append(files.tokenizer.decode(ids[:-1]))
    held_out = files.meta["split"]["held_out_documents"]
    assert documents["held_out"] == [PARAGRAPHS[number] for number in held_out]
    assert documents["train"] == [text for number, text in enumerate(PARAGRAPHS[:60]) if number not in held_out]
    assert len(held_out) == 12
    assert len(files.train.shards) > 3


def test_the_ids_are_mapped_from_their_files_and_not_loaded(files):
    assert all(isinstance(shard, np.memmap) and shard.dtype == np.uint16 for shard in files.train.shards)
    assert not any(shard.flags.writeable for shard in files.train.shards)


def test_meta_counts_and_hashes_what_is_there(files):
    meta = files.meta
    for side in (files.train, files.held_out):
        about = meta["sides"][side.side]
        assert (about["documents"], about["tokens"]) == (side.n_documents, sum(map(len, side.shards)))
    texts = meta["settings"]["texts"]
    assert [text["sha256"] for text in texts] == [Text("other name", PARAGRAPHS[:60]).sha256]
    assert sum(meta["sides"][side]["text_bytes"] for side in meta["sides"]) == sum(
        len(text.encode()) for text in PARAGRAPHS[:60]
    )
    assert len({meta["text_sha256"], meta["tokens_sha256"], meta["tokenizer"]["sha256"]}) == 3
    assert meta["versions"]["tokenizers"][0].isdigit()
    assert files.vocabulary == 300


def test_the_same_preparation_gives_the_same_bytes_and_is_not_done_twice(files, tmp_path, monkeypatch):
    arguments = dict(held_out=0.2, shard_tokens=700, **QUICK)
    prepare_tokens(Text("book", PARAGRAPHS[:60]), tmp_path / "again", **arguments)
    assert contents(tmp_path / "again") == contents(files.directory)
    monkeypatch.setattr(preparation, "Encoder", None)
    assert prepare_tokens(Text("book", PARAGRAPHS[:60]), tmp_path / "again", **arguments).meta == files.meta


def test_the_shard_size_changes_the_files_and_not_the_tokens(files, tmp_path):
    one = prepare_tokens(Text("book", PARAGRAPHS[:60]), tmp_path / "one", held_out=0.2, **QUICK)
    assert len(one.train.shards) == 1
    for side in ("train", "held_out"):
        whole, parts = getattr(one, side), getattr(files, side)
        assert whole.bounds.tolist() == parts.bounds.tolist()
        assert whole.between(0, whole.n_tokens).tolist() == parts.between(0, parts.n_tokens).tolist()


def test_a_large_vocabulary_is_written_in_four_bytes(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"w1": 1, "w2": 2, "w3": 3, "w65534": 65_534, END: 65_535, "last": 65_536}
    large = Tokenizer(models.WordLevel(words, unk_token=END))
    large.pre_tokenizer = pre_tokenizers.Whitespace()
    given = PreTrainedTokenizerFast(tokenizer_object=large, eos_token=END)
    text = Text("words", ("w1 last", "w65534 w2 w3"))
    found = prepare_tokens(text, tmp_path / "tokens", tokenizer=given, held_out=0.5, progress=False)
    ids = sorted(side.document(0).tolist() for side in (found.train, found.held_out))
    assert ids == [[1, 65_536, 65_535], [65_534, 2, 3, 65_535]]
    assert found.train.shards[0].dtype == np.uint32
    with pytest.raises(DataError, match=r"65,537 tokens, more than d_vocab 50,000.*Cure: raise d_vocab"):
        prepare_tokens(text, tmp_path / "small", tokenizer=given, d_vocab=50_000)


def test_an_existing_tokenizer_is_taken_from_its_directory_and_told_from_another(files, tmp_path):
    own = str(files.directory / "tokenizer")
    found = prepare_tokens(Text("book", PARAGRAPHS[:5]), tmp_path / "tokens", tokenizer=own, progress=False)
    written = [(one.directory / "tokenizer" / "tokenizer.json").read_bytes() for one in (found, files)]
    assert written[0] == written[1]
    assert found.tokenizer.decode(found.train.document(0)[:-1]) in PARAGRAPHS
    with pytest.raises(DataError, match="another preparation: tokenizer was"):
        prepare_tokens(Text("book", PARAGRAPHS[:5]), found.directory, tokenizer=train_tokenizer(["other"], 260))


# --- the split


def test_the_split_depends_on_the_documents_and_not_on_their_order(tmp_path):
    documents = PARAGRAPHS[:40]
    sides = []
    for name, order in (("a", documents), ("b", documents[::-1])):
        found = prepare_tokens(Text("t", order), tmp_path / name, **QUICK)
        sides.append({order[number] for number in found.meta["split"]["held_out_documents"]})
    assert sides[0] == sides[1]
    assert len(sides[0]) == 2


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=30), st.floats(0.01, 0.99), st.booleans())
def test_equal_documents_are_on_the_same_side_and_both_sides_have_some(documents, share, many):
    few, split.FEW = split.FEW, 1 if many else split.FEW
    try:
        if len(set(documents[: split.FEW + 1])) < 2:
            with pytest.raises(DataError, match="document cannot be on both sides"):
                split.find_split(documents, held_out=share, seed=0, where="t")
            return
        found = split.find_split(iter(documents), held_out=share, seed=0, where="t")
    finally:
        split.FEW = few
    side = {document: split.is_held_out(document, found) for document in documents}
    if not many:
        assert sum(side.values()) == min(max(1, round(share * len(side))), len(side) - 1)
        assert [documents[i] for i in found["held_out_documents"]] == [d for d in documents if side[d]]


def test_of_many_documents_each_has_the_same_chance(monkeypatch):
    monkeypatch.setattr(split, "FEW", 100)
    documents = [f"document {number}" for number in range(4000)]
    found = split.find_split(documents, held_out=0.1, seed=3, where="t")
    held_out = sum(split.is_held_out(document, found) for document in documents)
    assert abs(held_out - 400) < 5 * (4000 * 0.1 * 0.9) ** 0.5
    other = split.find_split(documents, held_out=0.1, seed=4, where="t")
    both = sum(split.is_held_out(d, found) and split.is_held_out(d, other) for d in documents)
    assert both < 90


def test_the_tokenizer_is_trained_on_the_training_documents_alone(tmp_path):
    words = [f"{letter * 9} " * 50 for letter in "abcdefghijkl"]
    found = prepare_tokens(Text("t", words), tmp_path / "tokens", held_out=0.3, d_vocab=400, progress=False)
    held_out = {words[number][:9] for number in found.meta["split"]["held_out_documents"]}
    assert len(held_out) == 4
    for word in (word[:9] for word in words):
        assert len(found.tokenizer(f" {word}")["input_ids"]) == (10 if word in held_out else 1)


# --- windows


def made_of(lengths, shard_sizes):
    """Documents of these lengths, their ids counting up from 1 in each, in shards of these numbers of documents."""
    documents = [np.array([*range(1, length), 0], np.uint16) for length in lengths]
    parts, at = [], 0
    for size in [*shard_sizes, len(documents)]:
        if documents[at : at + size]:
            parts.append(np.concatenate(documents[at : at + size]))
        at += size
    return TokenSet("made", 0, tuple(parts), np.cumsum([0, *lengths])), documents


def plain_windows(documents, length, packing, least):
    """The windows by loops over single tokens: `[(ids, scored)]`, padded."""
    pieces = []
    stretches = [[(token, n, at) for at, token in enumerate(ids)] for n, ids in enumerate(documents)]
    if packing == "stream":
        stretches = [[one for stretch in stretches for one in stretch]]
    for stretch in stretches:
        start = 0
        while start + 1 < len(stretch):
            piece = stretch[start : start + length + 1]
            if len(piece) - 1 >= min(least, length):
                ids = [int(token) for token, *_ in piece] + [0] * (length + 1 - len(piece))
                scored = [piece[i + 1][1] == piece[i][1] for i in range(len(piece) - 1)]
                pieces.append((ids, scored + [False] * (length - len(scored))))
            start += length
    return pieces


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(1, 25), min_size=1, max_size=12),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(1, 12),
    st.sampled_from(["documents", "stream"]),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_windows_are_those_of_plain_loops(lengths, shard_sizes, length, packing, least, random):
    tokens, documents = made_of(lengths, shard_sizes)
    expected = plain_windows(documents, length, packing, least)
    if not expected:
        with pytest.raises(DataError, match="no document has"):
            tokens.windows(length, packing=packing, least=least)
        return
    found = tokens.windows(length, packing=packing, least=least)
    assert len(found) == len(expected)
    order = list(range(len(found)))
    random.shuffle(order)
    ids, scored = found.batch(torch.tensor(order))
    assert (ids.dtype, scored.dtype) == (torch.int64, torch.bool)
    assert ids.tolist() == [expected[number][0] for number in order]
    assert scored.tolist() == [expected[number][1] for number in order]
    meta = found.meta
    assert meta["scored"] == int(scored.sum())
    assert meta["scored"] + meta["boundaries_not_scored"] + meta["padded"] == scored.numel()
    predictions = sum(lengths) - (len(lengths) if packing == "documents" else 1)
    assert meta["scored"] + meta["boundaries_not_scored"] + meta["predictions_dropped"] == predictions


def test_what_windows_drop_is_counted(files):
    tokens, _ = made_of([9, 3, 14, 1], [2])
    meta = tokens.windows(4, least=2).meta
    assert meta["windows"] == 2 + 1 + 3
    assert (meta["rests_dropped"], meta["predictions_dropped"], meta["documents_left_out"]) == (1, 1, 1)
    assert meta["padded"] == 2
    assert meta["packing"].startswith("documents: a window never leaves its document")
    assert json.loads(json.dumps(files.train.windows(16, packing="stream").meta))["packing"].startswith("stream: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (dict(length=0), "length is 0"),
        (dict(length=2.0), "length is 2.0"),
        (dict(length=4, least=0), "least is 0"),
        (dict(length=4, packing="tight"), "no packing 'tight'.*documents, stream"),
    ],
)
def test_windows_that_make_no_sense_are_refused(files, arguments, says):
    with pytest.raises(DataError, match=says) as caught:
        files.train.windows(**arguments)
    assert caught.value.cure


def test_window_numbers_that_are_not_there_are_refused(files):
    found = files.train.windows(16)
    for numbers in ([len(found)], [-1], [[0]]):
        with pytest.raises(DataError, match="window numbers must be"):
            found.batch(numbers)
    assert found.batch([])[0].shape == (0, 17)


# --- batches


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**40), st.integers(1, 60))
def test_every_epoch_has_every_window_exactly_once_at_any_batch_size(n_windows, seed, batch_size):
    steps = -(-3 * n_windows // batch_size)
    run = torch.cat([batch_numbers(n_windows, seed, step, batch_size) for step in range(steps)])
    for epoch in range(3):
        assert sorted(run[epoch * n_windows : (epoch + 1) * n_windows].tolist()) == list(range(n_windows))
    one_by_one = torch.cat([batch_numbers(n_windows, seed, step, 1) for step in range(3 * n_windows)])
    assert torch.equal(run[: 3 * n_windows], one_by_one)
    assert run.dtype == torch.int64


def test_epochs_and_seeds_have_orders_of_their_own_that_look_random():
    orders = [batch_numbers(5000, seed, epoch, 5000) for seed in (0, 1) for epoch in (0, 1)]
    ranks = np.corrcoef([[*range(5000)], *[order.numpy() for order in orders]])
    assert np.abs(ranks - np.eye(5)).max() < 0.06  # four standard deviations of 1/sqrt(5000)


def test_the_order_is_what_it_was():
    assert batch_numbers(10, seed=0, step=0, batch_size=10).tolist() == PINNED[0]
    assert batch_numbers(10, seed=7, step=1, batch_size=10).tolist() == PINNED[1]


def test_the_order_of_an_epoch_is_made_once(monkeypatch):
    windows._order.cache_clear()
    for step in range(50):
        batch_numbers(1000, 0, step, 16)
    assert windows._order.cache_info().misses == 1


@pytest.mark.parametrize("wrong", [(0, 0, 0, 1), (5, -1, 0, 1), (5, 0, -1, 1), (5, 0, 0, 0)])
def test_batches_that_cannot_be_are_refused(wrong):
    with pytest.raises(DataError, match="batch_numbers"):
        batch_numbers(*wrong)


# --- stopped and resumed


def dying(when, texts, where, **arguments):
    """Prepare in a process that kills itself with SIGKILL; `when` sets the trap."""

    def body():
        when()
        prepare_tokens(texts, where, **arguments)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at_call(module, name, number, *, after=False):
    """A trap: the process dies at the `number`-th call of this function, or just after it."""

    def trap():
        original, calls = getattr(module, name), [0]

        def counting(*args, **kwargs):
            calls[0] += 1
            if calls[0] == number and not after:
                die()
            found = original(*args, **kwargs)
            if calls[0] == number:
                die()
            return found

        setattr(module, name, counting)

    return trap


TRAPS = {
    "before the tokenizer": dies_at_call(preparation, "train_tokenizer", 1),
    "before the first file": dies_at_call(shards, "replace_file", 1),
    "between the files of a shard": dies_at_call(shards, "replace_file", 6),
    "in a file": dies_at_call(np, "save", 9),
    "between files and journal": dies_at_call(shards, "sha256_of", 8, after=True),
    "while encoding": dies_at_call(preparation, "is_held_out", 110),
    "before meta.json": dies_at_call(preparation, "replace_file", 1),
    "after meta.json": dies_at_call(preparation, "replace_file", 1, after=True),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_killed_anywhere_and_run_again_it_ends_with_the_same_bytes(files, tmp_path, trap):
    text, arguments = Text("book", PARAGRAPHS[:60]), dict(held_out=0.2, shard_tokens=700, **QUICK)
    where = tmp_path / "tokens"
    dying(TRAPS[trap], text, where, **arguments)
    if trap != "after meta.json":
        with pytest.raises(DataError, match="unfinished.*Cure: run the same preparation again"):
            open_tokens(where)
    before = {path.name: path.stat().st_mtime_ns for path in where.glob("train-00000*")}
    prepare_tokens(text, where, **arguments)
    assert contents(where) == contents(files.directory)
    if trap in ("in a file", "while encoding", "before meta.json"):  # finished files are not written again
        assert before == {path.name: path.stat().st_mtime_ns for path in where.glob("train-00000*")}


def test_a_half_written_journal_line_is_cut_off(files, tmp_path):
    text, arguments = Text("book", PARAGRAPHS[:60]), dict(held_out=0.2, shard_tokens=700, **QUICK)
    where = tmp_path / "tokens"
    dying(TRAPS["while encoding"], text, where, **arguments)
    journal = (where / "journal.jsonl").read_bytes()
    assert journal.count(b"\n") >= 4
    for cut in (10, len(journal) - 1):
        again = tmp_path / f"cut{cut}"
        shutil.copytree(where, again)
        (again / "journal.jsonl").write_bytes(journal[:cut])
        dying(TRAPS["before meta.json"], text, again, **arguments)
        assert prepare_tokens(text, again, **arguments).meta == files.meta
    (where / "journal.jsonl").write_bytes(b"{}\n" + journal)
    with pytest.raises(DataError, match=r"journal of an earlier preparation is damaged.*delete this one"):
        prepare_tokens(text, where, **arguments)


@pytest.mark.slow
def test_the_command_killed_at_any_moment_goes_on_and_ends_with_the_same_bytes(tmp_path):
    for number, paragraph in enumerate(PARAGRAPHS * 3):
        (tmp_path / f"{number:04d}.txt").write_text(f"{number} {paragraph}")
    texts = tmp_path / "texts"
    texts.mkdir()
    for path in tmp_path.glob("*.txt"):
        path.rename(texts / path.name)

    def command(out):
        options = ["--out", str(out), "--d-vocab", "1000", "--shard-tokens", "500", "--no-progress"]
        return [sys.executable, "-m", "lens_geometry.cli", "tokens", str(texts), *options]

    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    subprocess.run(command(tmp_path / "whole"), check=True, env=environment, capture_output=True)
    out = tmp_path / "killed"
    for files_seen in (10, 40):
        process = subprocess.Popen(command(out), env=environment, stdout=subprocess.DEVNULL)
        while len([*out.glob("*.npy")]) < files_seen:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    subprocess.run(command(out), check=True, env=environment, capture_output=True)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_full_disk_is_one_error_and_nothing_is_lost(files, tmp_path, monkeypatch):
    text, arguments = Text("book", PARAGRAPHS[:60]), dict(held_out=0.2, shard_tokens=700, **QUICK)
    where, calls, save = tmp_path / "tokens", [], np.save

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 7:
            raise OSError(28, "No space left on device")
        save(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(np, "save", full)
        with pytest.raises(DataError, match="the disk is full.*Cure: free some space.*goes on where it was"):
            prepare_tokens(text, where, **arguments)
    assert len(list(where.glob("*.npy"))) == 6
    assert prepare_tokens(text, where, **arguments).meta == files.meta
    with monkeypatch.context() as patched:  # the Rust part of tokenizers raises a bare Exception
        patched.setattr(preparation, "tokenizer_sha256", lambda _: raise_(Exception("No space left on device")))
        with pytest.raises(DataError, match="the disk is full"):
            prepare_tokens(text, tmp_path / "other", **arguments)


def raise_(error):
    raise error


def test_a_second_process_in_the_same_directory_waits_and_takes_what_the_first_made(files, tmp_path, monkeypatch):
    import filelock

    where = tmp_path / "tokens"
    where.mkdir()
    lock = filelock.FileLock(where / ".lock")
    lock.acquire()

    def first_ends(line):
        assert "another process is preparing tokens" in line
        shutil.copytree(files.directory, where, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".lock"))
        lock.release()

    monkeypatch.setattr(data, "_PATIENCE", 0)
    monkeypatch.setattr(data, "say", first_ends)
    monkeypatch.setattr(data, "write_tokens", None)
    text = Text("book", PARAGRAPHS[:60])
    assert prepare_tokens(text, where, held_out=0.2, shard_tokens=700, **QUICK).meta == files.meta


def test_no_more_documents_are_read_ahead_than_are_encoded_together(tmp_path, monkeypatch):
    drawn, ahead = [0], []

    def documents(place):
        drawn[0] = place or 0
        for number in range(place or 0, 3000):
            drawn[0] += 1
            yield number, f"number {number}"

    def written(shard, directory):
        ahead.append(drawn[0] - sum(written_before) - len(shard._ids["train"]) - len(shard._ids["held_out"]))
        written_before.append(len(shard._ids["train"]) + len(shard._ids["held_out"]))
        return write(shard, directory)

    written_before, write = [], shards.Shard.write
    monkeypatch.setattr(
        "lens_geometry.training.data.open_corpora", lambda *_: [corpora.Corpus({"name": "t"}, documents)]
    )
    monkeypatch.setattr(shards.Shard, "write", written)
    monkeypatch.setattr(split, "FEW", 50)
    prepare_tokens("t", tmp_path / "tokens", tokenizer_characters=1000, shard_tokens=2000, **QUICK)
    assert len(ahead) > 5
    assert sum(written_before) == 3000
    assert max(ahead) <= preparation._BATCH


# --- data sets, row by row


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    """A directory that `datasets` reads: three Parquet files, rows in groups, some of them empty."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    where = tmp_path / "set"
    where.mkdir()
    rows = [text for paragraph in PARAGRAPHS[:45] for text in (paragraph, " \n")]
    for number in range(3):
        part = pa.table({"text": rows[30 * number : 30 * number + 30], "size": [1] * 30})
        pq.write_table(part, where / f"train-{number}.parquet", row_group_size=7)
    return f"hf:{where}::train"


def test_a_data_set_is_read_row_by_row_into_the_same_tokens(data_set, tmp_path, monkeypatch):
    import datasets

    loaded = []
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: loaded.append(k["streaming"]) or load(*a, **k))
    streamed = prepare_tokens(data_set, tmp_path / "streamed", shard_tokens=500, **QUICK)
    assert set(loaded) == {True}
    whole = prepare_tokens(Text("t", PARAGRAPHS[:45]), tmp_path / "whole", shard_tokens=500, **QUICK)
    same = {name: data for name, data in contents(whole.directory).items() if name != "meta.json"}
    assert same == {name: data for name, data in contents(streamed.directory).items() if name != "meta.json"}
    assert whole.meta["text_sha256"] == streamed.meta["text_sha256"]
    (about,) = streamed.meta["settings"]["texts"]
    assert "split train, column text" in about["source"]
    first = prepare_tokens([data_set, Text("t", PARAGRAPHS[50:60])], tmp_path / "few", max_documents=4, **QUICK)
    assert first.train.n_documents + first.held_out.n_documents == 8


@pytest.mark.parametrize(
    "trap",
    ["in a file", *(pytest.param(trap, marks=pytest.mark.slow) for trap in ("before the tokenizer", "while encoding"))],
)
def test_a_data_set_goes_on_at_the_row_where_it_was(data_set, tmp_path, trap):
    arguments = dict(held_out=0.2, shard_tokens=400, **QUICK)
    whole = prepare_tokens([data_set, Text("t", PARAGRAPHS[50:70])], tmp_path / "whole", **arguments)
    dying(TRAPS[trap], [data_set, Text("t", PARAGRAPHS[50:70])], tmp_path / "killed", **arguments)
    prepare_tokens([data_set, Text("t", PARAGRAPHS[50:70])], tmp_path / "killed", **arguments)
    assert contents(tmp_path / "killed") == contents(whole.directory)


def test_files_of_a_data_set_that_changed_are_another_text(data_set, tmp_path):
    prepare_tokens(data_set, tmp_path / "tokens", **QUICK)
    directory = Path(data_set.split(":")[1])
    shutil.copy(directory / "train-0.parquet", directory / "train-3.parquet")
    with pytest.raises(DataError, match=r"another preparation: texts was hf:.* and is hf:"):
        prepare_tokens(data_set, tmp_path / "tokens", **QUICK)


def test_large_data_sets_have_names_and_keep_the_revision_they_were_begun_with(data_set, tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    told = iter(["commit-1", "commit-2", "commit-3"])
    local = data_set.split(":")[1]

    class Api:
        def dataset_info(self, path, timeout):
            card = type("Card", (), {"license": ["odc-by"]})
            return type("Info", (), {"sha": next(told, "commit-9"), "card_data": card})

    asked = []
    load = datasets.load_dataset

    def serve(path, config, *, split, streaming, revision):
        asked.append((path, config, split, streaming, revision))
        return load(local, split=split, streaming=streaming)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(datasets, "load_dataset", serve)
    with monkeypatch.context() as patched:
        patched.setattr(preparation, "Shard", lambda _: raise_(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            prepare_tokens("fineweb", tmp_path / "tokens", **QUICK)
    found = prepare_tokens("fineweb", tmp_path / "tokens", **QUICK)
    assert set(asked) == {("HuggingFaceFW/fineweb", "sample-10BT", "train", True, "commit-1")}
    (about,) = found.meta["settings"]["texts"]
    assert (about["revision"], about["licence"]) == ("commit-1", "odc-by")
    asked.clear()
    prepare_tokens("openwebtext", tmp_path / "other", max_documents=5, **QUICK)
    assert {row[:4] for row in asked} == {("Skylion007/openwebtext", None, "train", True)}


@pytest.mark.parametrize("name", ["fineweb", "openwebtext", "hf:some/set::train"])
def test_a_hub_out_of_reach_is_one_error_at_once_and_finished_tokens_open_without_it(name, tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("it would retry for half a minute"))
    with pytest.raises(DataError, match="out of reach.*Cure: go online, or use bundled text"):
        prepare_tokens(name, tmp_path / "tokens", **QUICK)
    assert not (tmp_path / "tokens").exists()


def test_a_data_set_that_breaks_off_says_that_it_can_be_gone_on_with(data_set, tmp_path, monkeypatch):
    rows = corpora.row_text
    seen = []

    def breaking(row, found):
        seen.append(row)
        if len(seen) == 250:
            raise ConnectionError("reset by peer")
        return rows(row, found)

    monkeypatch.setattr(preparation, "_BATCH", 4)
    with monkeypatch.context() as patched:
        patched.setattr(corpora, "row_text", breaking)
        with pytest.raises(DataError, match=r"cannot be read \(ConnectionError: reset by peer.*goes on where it was"):
            prepare_tokens(data_set, tmp_path / "tokens", shard_tokens=300, **QUICK)
    assert list((tmp_path / "tokens").glob("*.npy"))
    prepare_tokens(data_set, tmp_path / "tokens", shard_tokens=300, **QUICK)
    prepare_tokens(data_set, tmp_path / "whole", shard_tokens=300, **QUICK)
    assert contents(tmp_path / "tokens") == contents(tmp_path / "whole")


# --- what cannot be used


@pytest.mark.parametrize(
    ("texts", "arguments", "says"),
    [
        ([], {}, "there is no text"),
        ("austin", {}, "no text of this name"),
        ("shuffled:austen", {}, "to be measured on, not trained on"),
        ("repeated-random", {}, "to be measured on, not trained on"),
        (Text("t", ("only one",)), {}, r"1 document cannot be on both sides.*\[t\].*Cure: give several texts"),
        (Text("t", ("twice", "twice")), {}, "1 document cannot be on both sides"),
        ("austen", dict(d_vocab=256), "d_vocab is 256.*257"),
        ("austen", dict(d_vocab=True), "d_vocab is True"),
        ("austen", dict(held_out=0.0), "held_out is 0.0"),
        ("austen", dict(held_out=1), "held_out is 1"),
        ("austen", dict(seed=-1), "seed is -1"),
        ("austen", dict(max_documents=0), "max_documents is 0"),
        ("austen", dict(shard_tokens=0), "shard_tokens is 0"),
        ("austen", dict(tokenizer_characters=2.5), "tokenizer_characters is 2.5"),
        ("austen", dict(tokenizer="/nowhere/at/all", d_vocab=None), "tokenizer cannot be read"),
        ("austen", dict(tokenizer=3, d_vocab=None), "the tokenizer is a int"),
    ],
)
def test_what_cannot_be_prepared_is_refused_with_a_cure(tmp_path, monkeypatch, texts, arguments, says):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=says) as caught:
        prepare_tokens(texts, tmp_path / "tokens", **{**QUICK, **arguments})
    assert caught.value.cure
    found = prepare_tokens(Text("t", ("a b", "c d")), tmp_path / "tokens", **QUICK)  # nothing is in the way
    assert found.train.n_documents == found.held_out.n_documents == 1


def test_another_preparation_or_other_files_in_the_directory_are_left_alone(files, tmp_path):
    with pytest.raises(
        DataError, match=r"another preparation: d_vocab|another preparation: .*held_out was 0.2 and is 0.05"
    ):
        prepare_tokens(Text("book", PARAGRAPHS[:60]), files.directory, shard_tokens=700, **QUICK)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="holds other files"):
        prepare_tokens("austen", tmp_path, **QUICK)
    with pytest.raises(DataError, match="a file, not a directory"):
        prepare_tokens("austen", tmp_path / "notes.txt", **QUICK)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def damaged(files, tmp_path, change):
    where = tmp_path / "copy"
    shutil.copytree(files.directory, where)
    change(where)
    return where


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "verify", "says"),
    [
        (lambda where: cut(where / "train-00001.npy"), False, r"bytes, not .*train-00001.npy"),
        (lambda where: (where / "held_out-00000-ends.npy").unlink(), False, "is missing"),
        (lambda where: flip(where / "train-00000.npy"), True, "sha256 differs"),
        (lambda where: flip(where / "tokenizer" / "tokenizer.json"), True, "tokenizer is not the one"),
        (lambda where: shutil.rmtree(where / "tokenizer"), True, "damaged"),
        (lambda where: (where / "meta.json").unlink(), False, "no prepared tokens are here"),
        (lambda where: (where / "meta.json").write_text("{"), False, "not the meta.json of prepared tokens"),
        (lambda where: (where / "meta.json").write_text('{"tokens_format": 99}'), False, "format 99"),
        (lambda where: (where / "meta.json").write_text('{"tokens_format": 1}'), False, "damaged"),
    ],
)
def test_damaged_or_foreign_directories_are_refused_with_a_cure(files, tmp_path, change, verify, says):
    where = damaged(files, tmp_path, change)
    with pytest.raises(DataError, match=says) as caught:
        open_tokens(where, verify=verify)
    assert caught.value.cure


def test_whole_directories_pass_their_verification_and_may_be_moved(files, tmp_path):
    where = damaged(files, tmp_path, lambda where: None)
    assert open_tokens(where, verify=True).meta == files.meta
    with pytest.raises(DataError, match="there is no such directory.*Cure: prepare the tokens again"):
        open_tokens(tmp_path / "nowhere")


# --- the command


def test_the_command_prints_documents_tokens_windows_and_hashes(capsys, tmp_path):
    (tmp_path / "texts").mkdir()
    for number, paragraph in enumerate(PARAGRAPHS[:12]):
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(paragraph)
    arguments = ["tokens", str(tmp_path / "texts"), "--out", str(tmp_path / "out"), "--d-vocab", "300", "--no-progress"]
    assert cli.main([*arguments, "--sequence-length", "32", "--verify"]) == 0
    out = capsys.readouterr().out
    found = open_tokens(tmp_path / "out")
    assert found.meta["tokens_sha256"] in out
    assert str(found.meta["tokenizer"]["sha256"]) in out
    (row,) = [line.split() for line in out.splitlines() if line.strip().startswith("train ")]
    text = sum(len(found.tokenizer.decode(found.train.document(i)[:-1]).encode()) for i in range(11))
    assert row[:4] == ["train", "11", str(found.train.n_tokens), f"{text / (found.train.n_tokens - 11):.3f}"]
    assert row[4] == str(len(found.train.windows(32)))
    assert cli.main([*arguments, "--held-out", "0.5"]) == 2
    assert "held_out was 0.05 and is 0.5 now" in capsys.readouterr().err


def test_a_directory_loads_as_a_tokenizer_of_the_hub_would(files):
    assert load_tokenizer(files.directory / "tokenizer").get_vocab() == files.tokenizer.get_vocab()
    assert load_tokenizer(files.tokenizer) is files.tokenizer
