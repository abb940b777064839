"""Token ids: what is cut where, what is padded, what is recorded, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lens_geometry.data import Text, Tokens, load_text, tokenize
from lens_geometry.errors import DataError


def byte_tokenizer(**special: str):
    """One id per byte value, then the special tokens. Its model_max_length is far below our documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=16, **special)


def model_with(tokenizer, n_ctx: int | None = 64, d_vocab: int = 260):
    return SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(n_ctx=n_ctx, d_vocab=d_vocab))


FULL = byte_tokenizer(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
MODEL = model_with(FULL)


def decoded(tokens: Tokens) -> list[str]:
    return [FULL.decode(ids[mask]) for ids, mask in zip(tokens.ids, tokens.mask, strict=True)]


def test_sequences_are_consecutive_and_never_cross_documents():
    tokens = tokenize(MODEL, ["abcdefghij", "klmnopqrs"], sequence_length=4)
    assert decoded(tokens) == ["abcd", "efgh", "klmn", "opqr"]
    assert tokens.mask.all()
    assert tokens.meta["tokens_dropped"] == 3
    assert (tokens.meta["documents"], tokens.meta["n_sequences"], tokens.meta["n_tokens"]) == (2, 4, 16)


def test_a_short_document_is_kept_and_padded_on_the_right():
    tokens = tokenize(MODEL, ["abcdef", "xyz", "q"], sequence_length=4)
    assert decoded(tokens) == ["abcd", "xyz"]
    assert tokens.mask.tolist() == [[True] * 4, [True] * 3 + [False]]
    assert tokens.ids[1, 3] == FULL.pad_token_id == tokens.meta["pad_token_id"]
    assert tokens.meta["tokens_dropped"] == 3


def test_remainders_are_kept_on_request_from_two_tokens_on():
    tokens = tokenize(MODEL, ["abcdef", "ghijk"], sequence_length=4, drop_short=False)
    assert decoded(tokens) == ["abcd", "ef", "ghij"]
    assert tokens.meta["tokens_dropped"] == 1


def test_nothing_is_as_wide_as_asked_when_all_documents_are_short():
    assert tokenize(MODEL, ["abc", "de"], sequence_length=64).ids.shape == (2, 3)


def test_bos_takes_the_first_place_of_every_sequence():
    tokens = tokenize(MODEL, "abcdefgh", sequence_length=4, prepend_bos=True)
    assert tokens.ids.shape == (2, 4)
    assert (tokens.ids[:, 0] == FULL.bos_token_id).all()
    assert FULL.decode(tokens.ids[0, 1:]) == "abc"
    assert (tokens.meta["prepend_bos"], tokens.meta["bos_token_id"]) == (True, FULL.bos_token_id)
    assert tokenize(MODEL, "abcdefgh", sequence_length=4).meta["bos_token_id"] is None


def test_no_special_token_comes_in_unasked_and_nothing_is_truncated():
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer(bos_token="<bos>", eos_token="<eos>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    tokenizer._tokenizer.enable_truncation(max_length=8)
    assert tokenizer("ab")["input_ids"][0] == tokenizer.bos_token_id
    tokens = tokenize(model_with(tokenizer), "x" * 64, sequence_length=32)
    assert tokens.ids.shape == (2, 32)
    assert tokens.ids.unique().numel() == 1


def test_a_sample_is_evenly_spaced_and_the_same_every_time():
    text = Text("digits", tuple(f"{i:02d}" * 3 for i in range(20)))
    tokens = tokenize(MODEL, text, sequence_length=6, max_sequences=4)
    assert decoded(tokens) == ["020202", "070707", "121212", "171717"]
    assert tokens.meta["sampling"] == "evenly spaced"
    assert (tokens.meta["sequences_available"], tokens.meta["documents_used"]) == (20, 4)
    assert tokens.meta == tokenize(MODEL, text, sequence_length=6, max_sequences=4).meta
    assert tokenize(MODEL, text, sequence_length=6, max_sequences=99).meta["sampling"] == "all"


@settings(deadline=None, max_examples=50)
@given(
    documents=st.lists(st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1), min_size=1),
    length=st.integers(2, 9),
    bos=st.booleans(),
)
def test_every_token_is_either_used_in_order_or_counted_as_dropped(documents, length, bos):
    documents = [document for document in documents if document.strip()] or ["ab"]
    length += bos
    total = sum(len(FULL(document, add_special_tokens=False)["input_ids"]) for document in documents)
    if max(map(len, documents)) < 2:
        return
    tokens = tokenize(MODEL, documents, sequence_length=length, prepend_bos=bos, drop_short=False)
    real = int(tokens.mask.sum()) - bos * len(tokens.ids)
    assert real + tokens.meta["tokens_dropped"] == total
    assert tokens.meta["n_tokens"] == int(tokens.mask.sum())
    assert (tokens.mask.int().diff(dim=1) <= 0).all(), "padding is on the right only"
    joined = "".join(FULL.decode(ids[mask][int(bos) :]) for ids, mask in zip(tokens.ids, tokens.mask, strict=True))
    source = iter("".join(documents))
    assert all(character in source for character in joined), "what is used is a subsequence of the text"


def test_provenance_names_text_and_ids_by_hash():
    text = load_text("moby-dick", max_characters=5_000)
    tokens = tokenize(MODEL, text, sequence_length=32, max_sequences=3)
    assert tokens.meta["text"] == "moby-dick"
    assert tokens.meta["text_sha256"] == text.sha256
    assert tokens.meta["max_characters"] == 5_000
    assert tokens.meta["licence"] == text.licence
    given_ids = tokenize(MODEL, tokens.ids)
    assert given_ids.meta["tokens_sha256"] == tokens.meta["tokens_sha256"]
    changed = tokens.ids.clone()
    changed[0, 0] += 1
    assert tokenize(MODEL, changed).meta["tokens_sha256"] != tokens.meta["tokens_sha256"]


def test_token_ids_are_taken_as_they_are():
    ids = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    tokens = tokenize(model_with(None), ids, max_sequences=2)
    assert tokens.ids.tolist() == ids[[1, 3]].tolist()
    assert tokens.ids.dtype == torch.int64
    assert tokens.mask.all()
    assert tokens.meta["text"] == "token ids"


def test_tokens_come_back_unchanged_and_are_checked_against_the_model():
    tokens = tokenize(MODEL, "abcdefgh", sequence_length=4)
    again = tokenize(MODEL, tokens, sequence_length=2, prepend_bos=True)
    assert again.ids is tokens.ids
    assert again.mask is tokens.mask
    assert again.meta == tokens.meta
    with pytest.raises(DataError, match="outside the vocabulary of 10"):
        tokenize(model_with(None, d_vocab=10), tokens)
    with pytest.raises(DataError, match="context is 2 tokens"):
        tokenize(model_with(None, n_ctx=2), replace(tokens, meta={}))


@pytest.mark.parametrize(
    ("special", "pad"),
    [({"pad_token": "<pad>", "eos_token": "<eos>"}, "<pad>"), ({"eos_token": "<eos>"}, "<eos>"), ({}, None)],
)
def test_the_padding_is_the_tokenizers_pad_or_its_eos_or_zero(special, pad):
    tokenizer = byte_tokenizer(**special)
    expected = 0 if pad is None else tokenizer.convert_tokens_to_ids(pad)
    assert tokenize(model_with(tokenizer), ["abcd", "ab"], sequence_length=4).ids[1, -1] == expected
    small = model_with(tokenizer, d_vocab=256)  # a pad token outside the model's vocabulary is never used
    assert tokenize(small, ["abcd", "ab"], sequence_length=4).ids[1, -1] == 0


@pytest.mark.parametrize(
    ("data", "arguments", "says"),
    [
        ("a", {"sequence_length": 8}, "fewer than two tokens"),
        ("", {}, "empty"),
        ([], {}, "no documents"),
        ("austen", {}, r"name of a text.*load_text\('austen'\)"),
        ("shuffled:austen", {}, "name of a text"),
        ("repeated-random", {}, "name of a text"),
        (["fine", 3], {}, "data is a list"),
        (np.zeros((2, 3)), {}, "data is a ndarray"),
        ("abcd", {"sequence_length": 65}, "context of 64.*sequence_length=64"),
        ("abcd", {"sequence_length": 1}, "pass at least 2"),
        ("abcd", {"sequence_length": 2, "prepend_bos": True}, "pass at least 3"),
        ("abcd", {"max_sequences": 0}, "max_sequences is 0"),
        (torch.zeros(2, 3), {}, "must be integers"),
        (torch.full((2, 3), float("nan")), {}, "must be integers"),
        (torch.ones(2, 3, dtype=torch.bool), {}, "must be integers"),
        (torch.arange(4), {}, r"\[sequence, pos\].*ids\[None\]"),
        (torch.zeros(0, 4, dtype=torch.int64), {}, "must be a sequence"),
        (torch.zeros(4, 1, dtype=torch.int64), {}, "two tokens"),
        (torch.tensor([[0, 260]]), {}, "260 is outside the vocabulary of 260"),
        (torch.tensor([[0, -1]]), {}, "-1 is outside"),
        (torch.zeros(1, 65, dtype=torch.int64), {}, "context is 64 tokens"),
        (torch.tensor([[1, 2]]), {"prepend_bos": True}, "without a BOS"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_cure(data, arguments, says):
    with pytest.raises(DataError, match=says) as caught:
        tokenize(MODEL, data, **arguments)
    assert caught.value.cure


def test_a_model_without_tokenizer_or_bos_says_what_to_do():
    with pytest.raises(DataError, match="no tokenizer.*pass token ids"):
        tokenize(model_with(None), "abcd", sequence_length=4)
    with pytest.raises(DataError, match="no BOS token.*prepend_bos=False"):
        tokenize(model_with(byte_tokenizer()), "abcd", sequence_length=4, prepend_bos=True)
    with pytest.raises(DataError, match="outside the vocabulary of 50.*tokenizer that belongs"):
        tokenize(model_with(FULL, d_vocab=50), "abcd", sequence_length=4)
    assert tokenize(model_with(FULL, n_ctx=None), "x" * 300, sequence_length=300).ids.shape == (1, 300)
