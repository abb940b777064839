"""Sequences that are no natural text: what is shuffled, what is drawn, and which of their tokens are scored."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

from lens_geometry.arrangements import drawable_ids
from lens_geometry.data import Text, Tokens, load_text, tokenize
from lens_geometry.errors import DataError, ResultError
from lens_geometry.experiments import profile, scaling_sweep

TOKENIZER = zoo.tokenizer()  # <bos> 0, <pad> 1, then a token for each byte
MODEL = SimpleNamespace(tokenizer=TOKENIZER, cfg=SimpleNamespace(n_ctx=64, d_vocab=258))
BARE = SimpleNamespace(tokenizer=None, cfg=SimpleNamespace(n_ctx=64, d_vocab=10))
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
ONE_EDIT = dict(sites=("mlp",), parallel=(0.0,), perpendicular=(), controls=(), progress=False)


def text_of(*documents: str, arrangement: str = "shuffled") -> Text:
    return Text("letters", documents, arrangement=arrangement)


def both(*documents: str, **arguments) -> tuple[Tokens, Tokens]:
    """The natural sequences and the shuffled ones."""
    kinds = ("natural", "shuffled")
    return tuple(tokenize(MODEL, text_of(*documents, arrangement=kind), **arguments) for kind in kinds)


@pytest.mark.parametrize("bos", [False, True])
def test_shuffled_sequences_hold_the_same_tokens_in_another_order(bos):
    plain, mixed = both(LETTERS * 3, LETTERS[:7], sequence_length=12, prepend_bos=bos)
    assert mixed.ids.shape == plain.ids.shape
    assert mixed.mask.equal(plain.mask)
    assert not mixed.mask.all(), "there is padding"
    assert mixed.ids.sort(1).values.equal(plain.ids.sort(1).values)
    assert mixed.ids[~mixed.mask].equal(plain.ids[~plain.mask])
    assert not (mixed.ids == plain.ids).all(1).any(), "every sequence was changed"
    if bos:
        assert (mixed.ids[:, 0] == TOKENIZER.bos_token_id).all()


def test_every_place_is_as_likely_as_any_other():
    texts = [LETTERS[:8]] * 800
    mixed = tokenize(MODEL, text_of(*texts), sequence_length=8)
    counts = torch.stack([(mixed.ids == token).sum(0) for token in mixed.ids[0].sort().values])
    assert ((counts - 100).abs() < 5 * math.sqrt(800 * 7 / 64)).all()


def test_a_sequence_is_shuffled_alike_whatever_else_is_taken():
    documents = (LETTERS * 2, LETTERS[::-1] * 2)
    whole = tokenize(MODEL, text_of(*documents), sequence_length=18)
    some = tokenize(MODEL, text_of(*documents), sequence_length=18, max_sequences=4)
    assert len(whole.ids) == 8
    assert some.ids.equal(whole.ids[1::2])
    assert some.meta["sampling"] == "evenly spaced"
    padded = tokenize(MODEL, text_of(documents[0] + "xyz", documents[1]), sequence_length=18, drop_short=False)
    assert padded.ids[[0, 1, 2, 3, 5, 6, 7, 8]].equal(whole.ids)


def test_every_sequence_has_an_order_of_its_own():
    mixed = tokenize(MODEL, text_of(LETTERS[:12] * 3, LETTERS[:12] * 3), sequence_length=12)
    assert len({tuple(row) for row in mixed.ids.tolist()}) == 6


def test_shuffling_follows_the_seed_and_is_recorded():
    text = text_of(LETTERS)
    first, again, other = (tokenize(MODEL, text, sequence_length=36, seed=seed) for seed in (0, 0, 1))
    assert first.ids.equal(again.ids)
    assert not first.ids.equal(other.ids)
    assert (other.meta["arrangement"], other.meta["arrangement_seed"]) == ("shuffled within sequences", 1)
    plain, _ = both(LETTERS, sequence_length=36, seed=7)
    assert (plain.meta["arrangement"], plain.meta["arrangement_seed"]) == ("as written", None)
    assert plain.meta["text_sha256"] == first.meta["text_sha256"]
    assert first.meta["tokens_sha256"] != plain.meta["tokens_sha256"]
    with pytest.raises(DataError, match="seed is -1"):
        tokenize(MODEL, text, sequence_length=36, seed=-1)


@pytest.mark.parametrize(("length", "bos", "half"), [(16, False, 8), (17, False, 8), (17, True, 8), (16, True, 7)])
def test_the_second_half_repeats_the_first_and_alone_is_scored(length, bos, half):
    tokens = tokenize(MODEL, load_text("repeated-random"), sequence_length=length, max_sequences=5, prepend_bos=bos)
    assert tokens.ids.shape == (5, 2 * half + bos)
    first, second = tokens.ids[:, bos : bos + half], tokens.ids[:, bos + half :]
    assert second.equal(first)
    assert tokens.mask.all()
    assert tokens.scored.tolist() == [[False] * (half + bos) + [True] * half] * 5
    assert len({tuple(row) for row in first.tolist()}) == 5
    if bos:
        assert (tokens.ids[:, 0] == TOKENIZER.bos_token_id).all()
    meta = tokens.meta
    assert (meta["repeat_length"], meta["odd_place_left_out"]) == (half, (length - bos) % 2 == 1)
    assert (meta["arrangement"], meta["arrangement_seed"]) == ("random tokens, repeated once", 0)
    assert (meta["scored"], meta["sampling"]) == ("only the repeat is scored", "drawn at random")
    assert (meta["n_sequences"], meta["sequence_length"], meta["text_sha256"]) == (5, 2 * half + bos, None)


def test_a_sequence_is_drawn_alike_however_many_are():
    text = load_text("repeated-random")
    whole = tokenize(MODEL, text, sequence_length=12)
    assert len(whole.ids) == 64, "the default"
    assert tokenize(MODEL, text, sequence_length=12, max_sequences=3).ids.equal(whole.ids[:3])
    assert not tokenize(MODEL, text, sequence_length=12, seed=1).ids.equal(whole.ids)


def test_every_id_but_the_special_ones_is_drawn_as_often():
    tokens = tokenize(MODEL, load_text("repeated-random"), sequence_length=64, max_sequences=800)
    counts = torch.bincount(tokens.ids[:, :32].flatten(), minlength=258)
    assert counts[:2].tolist() == [0, 0]
    assert ((counts[2:] - 100).abs() < 60).all()
    assert tokens.meta["ids_drawn_from"] == 256


def test_markers_without_a_role_and_ids_that_no_token_has_are_not_drawn():
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER.name_or_path)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.add_tokens(["<file>"], special_tokens=True)  # id 258
    tokenizer.add_tokens(["word"])  # id 259
    assert 258 not in tokenizer.all_special_ids
    padded = SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(n_ctx=64, d_vocab=320))
    assert drawable_ids(padded).tolist() == [*range(2, 258), 259]
    cut = SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(n_ctx=64, d_vocab=100))
    assert drawable_ids(cut).tolist() == [*range(2, 100)]
    plain = SimpleNamespace(all_special_ids=[3], get_vocab=lambda: {letter: i for i, letter in enumerate("abcde")})
    assert drawable_ids(SimpleNamespace(tokenizer=plain, cfg=padded.cfg)).tolist() == [0, 1, 2, 4]
    with pytest.raises(DataError, match="leaves 1 ids.*tokenizer that belongs"):
        drawable_ids(SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(n_ctx=64, d_vocab=3)))


def test_without_a_tokenizer_every_id_is_drawn_and_there_is_no_bos():
    text = load_text("repeated-random")
    tokens = tokenize(BARE, text, sequence_length=32)
    assert tokens.ids.unique().tolist() == list(range(10))
    with pytest.raises(DataError, match="no BOS.*prepend_bos=False"):
        tokenize(BARE, text, sequence_length=32, prepend_bos=True)
    with pytest.raises(DataError, match=r"sequence_length is 3 \[repeated-random\].*at least 4"):
        tokenize(BARE, text, sequence_length=3)
    with pytest.raises(DataError, match="context of 64"):
        tokenize(BARE, text, sequence_length=65)


def losses_of(model, ids) -> list[list[float]]:
    """The loss of every token but the first of each sequence, from the logits, in plain Python."""
    with torch.no_grad():
        logits = model(ids, return_type="logits").double().tolist()
    return [
        [
            math.log(math.fsum(map(math.exp, places[at]))) - places[at][token]
            for at, token in enumerate(sequence.tolist()[1:])
        ]
        for places, sequence in zip(logits, ids, strict=True)
    ]


@pytest.mark.parametrize(("name", "backend"), zoo.cases(exclude=zoo.NOT_ADDITIVE))
def test_the_loss_of_random_tokens_is_the_mean_over_the_repeat(name, backend):
    model = zoo.build(name, backend)
    result = scaling_sweep(
        model, load_text("repeated-random"), sequence_length=10, max_sequences=3, batch_size=2, **ONE_EDIT
    )
    ids = tokenize(model, load_text("repeated-random"), sequence_length=10, max_sequences=3).ids
    repeat = [loss for row in losses_of(model, ids) for loss in row[4:]]  # token 5 is predicted at place 4
    assert len(repeat) == 15
    assert result.table["base_loss"].iloc[0] == pytest.approx(math.fsum(repeat) / 15, abs=2e-5)
    assert set(result.table["n_tokens"]) == {15}
    assert result.meta["token_mask"].endswith("every position is edited; only the repeat is scored")


def test_scored_is_honoured_beside_padding_and_in_every_batch():
    model = zoo.build("llama_gqa", tokenizer=True)
    tokens = tokenize(model, ["abcdefgh", "abcd", "hgfedcba"], sequence_length=8)
    scored = torch.zeros(3, 8, dtype=torch.bool)
    scored[0, [0, 3]] = scored[1, 2:] = scored[2, 7] = True  # the first token and padding are never scored
    every = losses_of(model, tokens.ids)
    expected = [every[0][2], every[1][1], every[1][2], every[2][6]]
    for batch_size in (1, 2, 8):
        table = scaling_sweep(model, replace(tokens, scored=scored), batch_size=batch_size, **ONE_EDIT)
        assert set(table.table["n_tokens"]) == {4}
        assert table.table["base_loss"].iloc[0] == pytest.approx(math.fsum(expected) / 4, abs=2e-5)
    assert "only the tokens of a mask given by the caller are scored" in table.meta["token_mask"]
    whole = scaling_sweep(model, replace(tokens, scored=torch.ones(3, 8, dtype=torch.bool)), **ONE_EDIT).table
    pd.testing.assert_frame_equal(whole, scaling_sweep(model, tokens, **ONE_EDIT).table)


@pytest.mark.parametrize(
    ("scored", "says"),
    [
        (torch.ones(2, 3, dtype=torch.bool), r"does not belong.*\(2, 3\).*\(2, 4\)"),
        (torch.ones(2, 4), "does not belong.*float32"),
        (torch.tensor([[True] * 4, [True] + [False] * 3]), "sequence 1 has no token to score"),
        (torch.tensor([[False] * 3 + [True]] * 2), "sequence 1 has no token to score"),  # that one is padding
    ],
)
def test_a_scored_mask_that_cannot_be_used_is_refused(scored, says):
    tokens = tokenize(MODEL, ["abcd", "abc"], sequence_length=4)
    with pytest.raises(DataError, match=says) as caught:
        tokenize(MODEL, replace(tokens, scored=scored))
    assert caught.value.cure


def test_random_tokens_come_back_with_their_mask_and_say_when_it_was_changed():
    tokens = tokenize(MODEL, load_text("repeated-random"), sequence_length=8, max_sequences=2)
    again = tokenize(MODEL, tokens)
    assert again.scored is tokens.scored
    assert again.meta == tokens.meta
    other = tokenize(MODEL, replace(tokens, scored=~tokens.scored))
    assert other.meta["scored"] == "only the tokens of a mask given by the caller are scored"
    assert other.meta["scored_sha256"] != tokens.meta["scored_sha256"]
    whole = tokenize(MODEL, replace(tokens, scored=None))
    assert (whole.meta["scored"], whole.meta["scored_sha256"]) == ("every token is scored", None)
    assert whole.meta["tokens_sha256"] == tokens.meta["tokens_sha256"]


def test_a_journal_of_other_scored_tokens_is_refused(tmp_path):
    model = zoo.build("llama_gqa")
    tokens = tokenize(model, load_text("repeated-random"), sequence_length=8, max_sequences=2)
    scaling_sweep(model, tokens, out=tmp_path, **ONE_EDIT)
    before = (tmp_path / "journal.jsonl").read_bytes()
    with pytest.raises(ResultError, match="differs in: scored_sha256"):
        scaling_sweep(model, replace(tokens, scored=None), out=tmp_path, **ONE_EDIT)
    assert (tmp_path / "journal.jsonl").read_bytes() == before
    scaling_sweep(model, tokens, out=tmp_path, **ONE_EDIT)


def test_the_profile_of_random_tokens_is_that_of_the_repeat():
    model = zoo.build("llama_gqa", dtype=torch.float64)
    quiet = dict(sites=("attn", "value"), progress=False)
    text = load_text("repeated-random")
    result = profile(model, text, sequence_length=10, max_sequences=3, batch_size=2, **quiet)
    ids = tokenize(model, text, sequence_length=10, max_sequences=3).ids
    alone = profile(model, ids, exclude_positions=range(5), **quiet)
    pd.testing.assert_frame_equal(result.table, alone.table)
    assert result.meta["counts"]["tokens_measured"] == 15
    assert result.meta["token_mask"] == "real tokens, positions [0] left out; only the repeat is scored"
    assert alone.meta["token_mask"] == "real tokens, positions [0, 1, 2, 3, 4] left out"


def test_the_seed_of_a_run_is_that_of_its_tokens():
    model = zoo.build("llama_gqa")
    data = {seed: profile(model, load_text("repeated-random"), sequence_length=8, max_sequences=2, seed=seed,
                          sites=("mlp",), progress=False).meta["data"] for seed in (0, 5)}  # fmt: skip
    assert data[5]["arrangement_seed"] == 5
    assert data[0]["tokens_sha256"] != data[5]["tokens_sha256"]


def test_arranging_leaves_the_global_random_states_alone():
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    tokenize(MODEL, text_of(LETTERS), sequence_length=12)
    tokenize(MODEL, load_text("repeated-random"), sequence_length=12)
    assert torch.get_rng_state().equal(before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
