"""Scores of minimal pairs against a plain loop over log-softmax, whatever the padding and the batches."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

from lens_geometry.data import tokenize
from lens_geometry.errors import DataError, ResultError
from lens_geometry.experiments import PairSettings, minimal_pairs
from lens_geometry.experiments.pair_accuracy import pair_columns
from lens_geometry.metrics import SCORINGS, SequenceLosses, pair_accuracy, pair_margins, sequence_losses
from lens_geometry.pair import Pair, Pairs, critical_spans
from lens_geometry.pair_plots import pairs_figure
from lens_geometry.pair_sections import pairs_section
from lens_geometry.pair_tokens import kept_pairs, tokenize_pairs
from lens_geometry.report import write_report
from lens_geometry.results import Result
from lens_geometry.summaries import pairs_summary

SENTENCES = [
    ("The boys walk home.", "The boys walks home."),
    ("A dog near the cats sleeps.", "A dog near the cats sleep."),
    ("Mary hurt herself today.", "Mary hurt themselves today."),
    ("We saw these mice.", "We saw these mouse."),
    ("I think that no men have ever left.", "I think that most men have ever left."),
]


def pair_of(good, bad, **features):
    return Pair(good, bad, *critical_spans(good, bad), "agreement", "made up", features)


PAIRS = Pairs("some", (
    *(pair_of(good, bad, number=number) for (good, bad), number in
      zip(SENTENCES[:4], ("plural", "singular", "singular", "plural"), strict=True)),
    Pair(*SENTENCES[4], (25, 29), (27, 31), "polarity", "made up"),
))  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return zoo.build("llama_gqa", dtype=torch.float64, tokenizer=True)


def in_a_plain_loop(model, pair, scoring, bos):
    """log p(good) - log p(bad), byte by byte: the zoo's tokenizer has a token for each."""
    scores = []
    for sentence, (start, stop) in ((pair.good, pair.good_span), (pair.bad, pair.bad_span)):
        ids = ([model.tokenizer.bos_token_id] if bos else []) + model.tokenizer(sentence, add_special_tokens=False)[
            "input_ids"
        ]
        assert len(ids) == len(sentence) + bos
        logits = model(torch.tensor([ids]), return_type="logits")[0].tolist()
        found = []
        for place in range(1, len(ids)):
            if scoring == "word" and not start <= place - bos < stop:
                continue
            row = logits[place - 1]
            highest = max(row)
            found.append(row[ids[place]] - highest - math.log(math.fsum(math.exp(x - highest) for x in row)))
        scores.append(math.fsum(found) / (len(found) if scoring == "normalised" else 1))
    return scores[0] - scores[1]


def margins_of(model, pairs, scoring, *, batch_size=100, **options):
    tokens = tokenize_pairs(model, pairs, scoring=scoring, **options)
    found = []
    for start in range(0, len(tokens.ids), batch_size):
        part = tokens.take(slice(start, start + batch_size))
        found.append(sequence_losses(model, part.ids, part.mask, part.scored))
    return pair_margins(SequenceLosses(*map(np.concatenate, zip(*found, strict=True))), scoring)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_margins_are_those_of_a_plain_loop(model, scoring, bos):
    expected = [in_a_plain_loop(model, pair, scoring, bos) for pair in PAIRS.items]
    found = margins_of(model, PAIRS, scoring, prepend_bos=bos)
    assert found == pytest.approx(expected, rel=1e-9)
    assert found.dtype == np.float64
    assert pair_accuracy(found) == sum(one > 0 for one in expected) / len(expected)


def test_the_three_scorings_are_three_numbers(model):
    one, two, three = (margins_of(model, PAIRS, scoring) for scoring in SCORINGS)
    assert (abs(one - two) > 1e-3).all()
    assert (abs(one - three) > 1e-3).all()


SEVERAL = [("gpt2", "native"), ("neox", "bridge"), ("gemma3", "bridge"), ("opt", "bridge"), ("llama_gqa", "hooked")]


@pytest.mark.parametrize(("name", "backend"), [case for case in SEVERAL if case in zoo.cases()])
def test_padding_and_batches_change_no_margin(name, backend):
    model = zoo.build(name, backend, tokenizer=True)
    for scoring in ("word", "normalised"):
        together = margins_of(model, PAIRS, scoring)
        alone = np.concatenate([margins_of(model, Pairs("one", (pair,)), scoring) for pair in PAIRS.items])
        assert together == pytest.approx(alone, abs=2e-4)
        assert margins_of(model, PAIRS, scoring, batch_size=3) == pytest.approx(together, abs=2e-4)


def test_rows_alternate_and_share_their_noise_and_only_the_critical_word_is_scored(model):
    tokens = tokenize_pairs(model, PAIRS, scoring="word", prepend_bos=True)
    assert tokens.noise_ids == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
    for row, (ids, mask, scored) in enumerate(zip(tokens.ids, tokens.mask, tokens.scored, strict=True)):
        pair = PAIRS.items[row // 2]
        sentence, span = (pair.bad, pair.bad_span) if row % 2 else (pair.good, pair.good_span)
        assert model.tokenizer.decode(ids[mask][1:]) == sentence
        assert model.tokenizer.decode(ids[scored]) == sentence[slice(*span)]
        assert (mask.int().diff() <= 0).all()
    assert tokenize_pairs(model, PAIRS).scored is None
    assert tokens.take(slice(2, 6)).noise_ids == (1, 1, 2, 2)
    again = tokenize(model, tokens)
    assert again.noise_ids == tokens.noise_ids
    assert again.meta == tokens.meta
    with pytest.raises(DataError, match="3 noise ids do not belong to 10"):
        tokenize(model, replace(tokens, noise_ids=(0, 0, 1)))


def test_what_was_tokenised_is_recorded_and_counted(model):
    meta = tokenize_pairs(model, PAIRS, scoring="word").meta
    assert (meta["text"], meta["text_sha256"], meta["licence"]) == ("some", PAIRS.sha256, "unknown")
    assert (meta["n_pairs"], meta["pairs_dropped"], meta["n_sequences"]) == (5, 0, 10)
    assert meta["critical_words_of_several_tokens"] == 10
    assert meta["pairs_of_unequal_critical_words"] == 4  # all but "ever"
    assert meta["scoring"] == "word"
    assert "critical word" in meta["scored"]
    whole = tokenize_pairs(model, PAIRS).meta
    assert whole["tokens_sha256"] == meta["tokens_sha256"]
    assert (whole["scored_sha256"], whole["scored"]) == (None, "every token is scored")


class Words:
    """A tokenizer of whole words, each with the blank before it; " home" is two tokens."""

    is_fast, pad_token_id, eos_token_id, bos_token_id = True, 1, 1, 0

    def __call__(self, sentences, **_):
        found = {"input_ids": [], "offset_mapping": []}
        for sentence in sentences:
            ends = [i for i, letter in enumerate(sentence) if letter in " ."]
            cuts = sorted({0, *ends, len(sentence), *([sentence.index("home") + 2] if "home" in sentence else [])})
            spans = list(pairwise(cuts))
            found["offset_mapping"].append(spans)
            found["input_ids"].append([2 + sum(map(ord, sentence[slice(*span)])) % 250 for span in spans])
        return found


def test_tokens_that_begin_with_the_blank_belong_to_their_word_and_not_to_the_one_before():
    model = SimpleNamespace(tokenizer=Words(), cfg=SimpleNamespace(n_ctx=20, d_vocab=260))
    pairs = Pairs("words", (pair_of("They walk home.", "They walks home."), pair_of("We go home.", "We go there.")))
    tokens = tokenize_pairs(model, pairs, scoring="word")
    assert tokens.scored.int().tolist() == [[0, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 0]]
    assert tokens.meta["critical_words_of_several_tokens"] == 1
    assert tokens.meta["pairs_of_unequal_critical_words"] == 1


def test_pairs_that_differ_in_their_first_token_are_refused_or_dropped_and_counted(model):
    first = pair_of("We left.", "I left.")
    pairs = Pairs("mixed", (first, PAIRS.items[0], pair_of("No one left.", "Everyone left."), PAIRS.items[1]))
    says = "of 4 pairs 2 differ in their first token.*pair 0: 'We left.'.*prepend_bos=True.*on_unscorable='drop'"
    with pytest.raises(DataError, match=says):
        tokenize_pairs(model, pairs)
    tokens = tokenize_pairs(model, pairs, on_unscorable="drop")
    assert tokens.noise_ids == (1, 1, 3, 3)
    assert kept_pairs(pairs, tokens) == [PAIRS.items[0], PAIRS.items[1]]
    assert (tokens.meta["n_pairs"], tokens.meta["pairs_dropped"]) == (2, 2)
    assert tokens.meta["sequences_available"] == 8
    assert len(tokenize_pairs(model, pairs, prepend_bos=True).ids) == 8
    with pytest.raises(DataError, match=r"of 1 pairs 1 differ.*Cure: pass prepend_bos=True\."):
        tokenize_pairs(model, Pairs("one", (first,)), on_unscorable="drop")


def test_pairs_without_a_critical_word_can_be_scored_by_sentence_only(model):
    pairs = Pairs("lacking", (pair_of("She left.", "She quickly left."), PAIRS.items[0]))
    with pytest.raises(DataError, match="1 have no critical word in one sentence.*scoring='sentence'"):
        tokenize_pairs(model, pairs, scoring="word")
    assert len(tokenize_pairs(model, pairs, scoring="word", on_unscorable="drop").ids) == 2
    assert len(tokenize_pairs(model, pairs).ids) == 4
    first = Pairs("first", (Pair("abc d", "abc e", (0, 3), (0, 3)),))
    with pytest.raises(DataError, match="critical word in the first token.*prepend_bos=True"):
        tokenize_pairs(model, first, scoring="word")


@pytest.mark.parametrize(
    ("change", "arguments", "says"),
    [
        ({"tokenizer": None}, {}, "no tokenizer"),
        ({}, {"scoring": "letters"}, "no scoring 'letters'.*normalised"),
        ({}, {"on_unscorable": "ignore"}, "no on_unscorable 'ignore'"),
        ({"n_ctx": 20}, {}, "37 tokens.*context is 20.*some, pair 4"),
        ({"d_vocab": 40}, {}, "outside the vocabulary"),
        ({"tokenizer": SimpleNamespace(is_fast=False)}, {"scoring": "word"}, "where its tokens are"),
    ],
)
def test_what_cannot_be_tokenised_is_refused_with_a_cure(model, change, arguments, says):
    tokenizer = change.get("tokenizer", model.tokenizer)
    cfg = SimpleNamespace(n_ctx=change.get("n_ctx", 64), d_vocab=change.get("d_vocab", 258))
    with pytest.raises(DataError, match=says) as caught:
        tokenize_pairs(SimpleNamespace(tokenizer=tokenizer, cfg=cfg), PAIRS, **arguments)
    assert caught.value.cure


def test_margins_of_losses_that_are_not_finite_are_nan_and_a_tie_is_no_success():
    losses = SequenceLosses(
        sums=np.array([1.0, 3.0, 2.0, 2.0, 1.0, 4.0, 0.0, 1.0]),
        counts=np.array([2, 4, 3, 3, 2, 2, 0, 1]),
        nonfinite=np.array([0, 0, 0, 0, 0, 1, 0, 0]),
    )
    assert pair_margins(losses, "sentence") == pytest.approx([2.0, 0.0, math.nan, math.nan], nan_ok=True)
    assert pair_margins(losses, "normalised") == pytest.approx([0.25, 0.0, math.nan, math.nan], nan_ok=True)
    assert pair_accuracy(pair_margins(losses, "word")) == 0.5
    assert math.isnan(pair_accuracy(np.array([math.nan])))
    columns = pair_columns(pair_margins(losses, "sentence"), seed=0)
    assert (columns["n_pairs"], columns["n_ties"], columns["n_nonfinite"]) == (4, 1, 2)
    assert (columns["status"], columns["accuracy"], columns["margin"]) == ("nonfinite", 0.5, 1.0)
    assert math.isnan(columns["accuracy_low"])
    with pytest.raises(DataError, match="3 rows are no pairs"):
        pair_margins(SequenceLosses(*(array[:3] for array in losses)), "sentence")
    with pytest.raises(DataError, match="no scoring"):
        pair_margins(losses, "words")


def test_intervals_hold_the_mean_and_narrow_with_pairs():
    margins = np.random.default_rng(0).normal(0.5, 1.0, 400)
    columns = pair_columns(margins, seed=0)
    assert columns["margin"] == pytest.approx(margins.mean())
    for name, spread in (("accuracy", math.sqrt(0.7 * 0.3 / 400)), ("margin", 1 / 20)):
        assert columns[f"{name}_low"] < columns[name] < columns[f"{name}_high"]
        assert columns[f"{name}_high"] - columns[f"{name}_low"] == pytest.approx(2 * 1.96 * spread, rel=0.15)


SHORT = Pairs("short", (*PAIRS.items[:4], pair_of("The cow eats.", "The cow eat.", number="singular")))


@pytest.fixture(scope="module")
def result(model):
    return minimal_pairs(model, [PAIRS, SHORT], progress=False, batch_size=4)


def test_the_experiment_has_a_row_for_every_set_scoring_and_group(model, result):
    table = result.table
    assert not table.duplicated(["set", "feature", "value", "scoring"]).any()
    assert set(table["scoring"]) == set(SCORINGS)
    for pairs in (PAIRS, SHORT):
        for scoring in SCORINGS:
            margins = margins_of(model, pairs, scoring)
            rows = table[(table["set"] == pairs.name) & (table["scoring"] == scoring)].set_index("value")
            assert rows.loc["all", "margin"] == pytest.approx(margins.mean(), rel=1e-9)
            assert rows.loc["all", "accuracy"] == (margins > 0).mean()
            singular = [one.features.get("number") == "singular" for one in pairs.items]
            assert rows.loc["singular", "margin"] == pytest.approx(margins[singular].mean(), rel=1e-9)
            assert rows.loc["singular", "n_pairs"] == sum(singular)
            assert set(rows["feature"]) == {"all", "number"}
    assert set(table["status"]) == {"ok"}
    assert result.experiment == "minimal_pairs"
    assert result.meta["data"]["text"] == "some, short"
    assert (result.meta["data"]["n_pairs"], result.meta["data"]["n_sequences"]) == (10, 20)
    assert result.meta["sets"]["short"]["word"]["text_sha256"] == SHORT.sha256
    assert result.meta["settings"]["batch_size"] == 4
    assert "sequence_length" not in result.meta["settings"]
    assert "critical word" in result.meta["token_mask"]


def test_batches_change_no_row_and_names_are_drawn_from(model, result):
    again = minimal_pairs(model, [PAIRS, SHORT], progress=False, batch_size=100)
    pd.testing.assert_frame_equal(again.table, result.table, rtol=1e-9)
    one = minimal_pairs(model, PAIRS, progress=False, scorings=("word",))
    assert set(one.table["scoring"]) == {"word"}
    assert set(one.meta["sets"]["some"]) == {"word"}
    drawn = minimal_pairs(model, "anaphor-gender", max_pairs=7, progress=False, scorings=("sentence",))
    assert drawn.table["n_pairs"].max() == 7


def test_pairs_that_one_scoring_cannot_use_are_left_out_of_that_scoring_alone(model):
    lacking = pair_of("At last the old woman left.", "At last the very old woman left.")
    mixed = Pairs("mixed", (pair_of("We left.", "I left."), PAIRS.items[0], lacking, *PAIRS.items[1:3]))
    table = minimal_pairs(model, mixed, on_unscorable="drop", progress=False, batch_size=2).table
    rows = table[table["feature"] == "all"].set_index("scoring")
    assert rows["n_pairs"].to_dict() == {"sentence": 4, "word": 3, "normalised": 4}
    for scoring in SCORINGS:
        expected = margins_of(model, mixed, scoring, on_unscorable="drop").mean()
        assert rows.loc[scoring, "margin"] == pytest.approx(expected, rel=1e-9)


def test_a_model_that_overflows_has_no_finite_margin_and_says_so():
    broken = zoo.build("gpt2", tokenizer=True, fresh=True)
    with torch.no_grad():
        broken.unembed.weight.fill_(math.inf)
    table = minimal_pairs(broken, SHORT, progress=False).table
    assert set(table["status"]) == {"nonfinite"}
    assert (table["n_nonfinite"] == table["n_pairs"]).all()
    assert table["accuracy"].isna().all()


@pytest.mark.parametrize(
    ("pairs", "changes", "says"),
    [
        ([], {}, "no sets"),
        ([PAIRS, PAIRS], {}, "two sets have the name 'some'"),
        (PAIRS, {"scorings": ()}, "scorings are"),
        (PAIRS, {"scorings": ("letters",)}, "choose from sentence"),
        (PAIRS, {"batch_size": 0}, "batch_size is 0"),
        (PAIRS, {"max_pairs": 0}, "max_pairs is 0"),
    ],
)
def test_what_cannot_be_run_is_refused(model, pairs, changes, says):
    with pytest.raises(DataError, match=says):
        minimal_pairs(model, pairs, PairSettings(progress=False), **changes)


def test_figure_section_and_summary_hold_the_tables_numbers(result, tmp_path):
    table = result.table.copy()
    chosen = (table["set"] == "short") & (table["feature"] == "all") & (table["scoring"] == "word")
    numbers = {"accuracy": 0.8, "accuracy_low": 0.6, "accuracy_high": 0.95, "margin": 1.25, "margin_low": -0.5}
    table.loc[chosen, list(numbers)] = list(numbers.values())
    table.loc[chosen, "margin_high"] = 2.0
    lost = (table["set"] == "some") & (table["feature"] == "all") & (table["scoring"] == "sentence")
    table.loc[lost, ["status", "n_nonfinite"]] = ["nonfinite", 2]
    drawn = pairs_figure(table)
    word = [trace for trace in drawn.data if trace.meta and trace.meta["role"] == "word"]
    assert len(word) == 2
    assert word[0].x[1] == 0.8
    assert word[0].error_x.array[1] == pytest.approx(0.15)
    assert word[1].x[1] == 1.25
    assert "accuracy 0.800 [0.600, 0.950]" in word[0].text[1]
    sentence = next(trace for trace in drawn.data if trace.meta and trace.meta["role"] == "sentence")
    assert list(sentence.marker.symbol) == ["x-thin", "circle"]
    assert [shape.x0 for shape in drawn.layout.shapes if shape.x0 == shape.x1] == [0.5, 0.0, 0.0]
    section = "".join(pairs_section(table, "p"))
    assert "0.800<small>[0.600, 0.950]</small>" in section
    assert "not finite<small>for 2 pairs</small>" in section
    assert section.count("<figure") == 5
    assert "80.0% [60.0%, 95.0%]" in pairs_summary(table)
    page = write_report([Result("minimal_pairs", table, result.meta)], tmp_path / "report.html")
    assert "Minimal pairs" in page.read_text(encoding="utf-8")
    saved = result.save(tmp_path / "saved")
    assert Result.load(saved).table.equals(result.table)
    with pytest.raises(ResultError, match="lacks the column"):
        pairs_figure(table.drop(columns="margin"))
