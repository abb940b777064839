"""Minimal pairs from files and data sets: what is read, where the critical word is, and what is refused by line."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from lens_geometry.errors import DataError
from lens_geometry.pair import Pair, Pairs, critical_spans
from lens_geometry.pairs import load_pairs

ROWS = [
    {
        "sentence_good": "The boys walk.",
        "sentence_bad": "The boys walks.",
        "one_prefix_prefix": "The boys",
        "one_prefix_word_good": "walk",
        "one_prefix_word_bad": "walks",
        "one_prefix_method": True,
        "linguistics_term": "subject_verb_agreement",
        "UID": "some_agreement_1",
        "pairID": "0",
    },
    {"sentence_good": "Omar hasn't left.", "sentence_bad": "Omar haven't left."},
    {"sentence_good": "Two cats sleep here.", "sentence_bad": "One cats sleep here."},
]


def write_lines(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ("The boys walk.", "The boys walks.", ("walk", "walks")),
        ("Omar hasn't left.", "Omar haven't left.", ("hasn't", "haven't")),
        ("A well-known man is here.", "A well-read man is here.", ("well-known", "well-read")),
        ("He saw them.", "He saw the dogs.", ("them", "the dogs")),
        ("Who did he see?", "Did he see who?", ("Who did he see", "Did he see who")),
        ("She left.", "She quickly left.", ("", "quickly")),
        ("a a b", "a b", ("a", "")),
        ("It is so.", "It is so", (".", "")),
        ("é walks, ok", "é walk, ok", ("walks", "walk")),
    ],
)
def test_the_critical_words_are_whole_words_where_the_sentences_differ(good, bad, words):
    spans = critical_spans(good, bad)
    assert (good[slice(*spans[0])], bad[slice(*spans[1])]) == words
    rest = [s[:start] + "|" + s[stop:] for s, (start, stop) in zip((good, bad), spans, strict=True)]
    assert rest[0].split() == rest[1].split() or "" in words


def test_a_blimp_file_gives_its_pairs_with_what_is_recorded_about_them(tmp_path):
    pairs = load_pairs(write_lines(tmp_path / "some.jsonl", *ROWS))
    assert pairs.name == "some"
    assert [(pair.good, pair.bad) for pair in pairs.items] == [(r["sentence_good"], r["sentence_bad"]) for r in ROWS]
    first = pairs.items[0]
    assert first.good[slice(*first.good_span)] == first.features["one_prefix_word_good"] == "walk"
    assert first.bad[slice(*first.bad_span)] == first.features["one_prefix_word_bad"] == "walks"
    assert first.features["one_prefix_prefix"] == "The boys"
    assert first.features["one_prefix_method"] == "True"
    assert (first.phenomenon, first.template) == ("subject_verb_agreement", "some_agreement_1")
    assert "local file" in pairs.source
    assert pairs.licence == "unknown"


def test_a_byte_order_mark_blank_lines_and_unicode_separators_are_no_lines(tmp_path):
    path = tmp_path / "marked.jsonl"
    separated = json.dumps({"sentence_good": "a\u2028b c", "sentence_bad": "a\u2028b d"}, ensure_ascii=False)
    path.write_bytes("\ufeff".encode() + (json.dumps(ROWS[1]) + "\r\n\n" + separated).encode())
    assert [pair.good for pair in load_pairs(path).items] == ["Omar hasn't left.", "a\u2028b c"]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([""], "empty"),
        ([ROWS[0], "{not json"], r"not JSON.*bad.jsonl, line 2"),
        ([ROWS[0], ["list"]], r"list is no pair.*line 2"),
        ([{"sentence_good": "Only one."}], r"'sentence_bad'.*line 1"),
        ([ROWS[0], "", {"sentence_good": "a b", "sentence_bad": ""}], r"'sentence_bad'.*line 3"),
        ([{"sentence_good": 3, "sentence_bad": "a"}], r"'sentence_good'.*line 1"),
        ([{"sentence_good": "Same.", "sentence_bad": "Same."}], r"are the same.*line 1"),
        ([{"sentence_good": "\ud800 a", "sentence_bad": "b"}], r"surrogate.*line 1"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path, rows, says):
    with pytest.raises(DataError, match=says) as caught:
        load_pairs(write_lines(tmp_path / "bad.jsonl", *rows))
    assert caught.value.cure


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"sentence_good": "\xe9"}')
    with pytest.raises(DataError, match=r"not UTF-8.*byte offset 19"):
        load_pairs(tmp_path / "latin.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        load_pairs(tmp_path / "folder.jsonl")
    (tmp_path / "pairs.txt").write_text("a\tb")
    with pytest.raises(DataError, match="neither .jsonl nor .json"):
        load_pairs(tmp_path / "pairs.txt")
    with pytest.raises(DataError, match="no pairs of this name.*agreement-simple"):
        load_pairs("agreement-simpel")


def region(number, content):
    return {"region_number": number, "content": content}


def suite(predictions, **changes):
    """Two items; region 2 is the verb, and region 3 comes after it."""
    items = []
    for number, (noun, verbs) in enumerate([("woman", ("plays", "play")), ("man", ("sings", "sing"))], 1):
        conditions = [
            {"condition_name": name, "regions": [region(1, f"The {noun}"), region(2, verb), region(3, "well .")]}
            for name, verb in zip(("match", "mismatch"), verbs, strict=True)
        ]
        items.append({"item_number": number, "conditions": conditions})
    return {"meta": {"name": "verbs", "metric": "sum"}, "predictions": predictions, "items": items} | changes


def write_suite(path, *args, **changes):
    path.write_text(json.dumps(suite(*args, **changes)))
    return path


@pytest.mark.parametrize(
    "formula", ["(2;%match%) < (2;%mismatch%)", "(2;%mismatch%)>(2;%match%)", " ( 2 ; %match% ) < (2;%mismatch%) "]
)
def test_the_condition_that_should_surprise_less_is_the_good_one_and_its_region_is_critical(tmp_path, formula):
    pairs = load_pairs(write_suite(tmp_path / "suite.json", [{"type": "formula", "formula": formula}]))
    assert pairs.name == "verbs"
    first, second = pairs.items
    assert (first.good, first.bad) == ("The woman plays well .", "The woman play well .")
    assert (first.good[slice(*first.good_span)], first.bad[slice(*first.bad_span)]) == ("plays", "play")
    assert second.bad[slice(*second.bad_span)] == "sing"
    assert (first.template, second.features["item"]) == ("match against mismatch", "2")


def test_a_region_after_the_difference_can_be_critical_and_the_whole_sentence_too(tmp_path):
    path = write_suite(tmp_path / "suite.json", ["(3;%match%) < (3;%mismatch%)"])
    pair = load_pairs(path).items[0]
    assert pair.good[slice(*pair.good_span)] == pair.bad[slice(*pair.bad_span)] == "well ."
    whole = load_pairs(write_suite(tmp_path / "whole.json", [{"formula": "(*;%match%) < (*;%mismatch%)"}])).items[0]
    assert whole.good[slice(*whole.good_span)] == "plays"


def test_conditions_and_region_can_be_named_instead(tmp_path):
    path = write_suite(tmp_path / "suite.json", ["((2;%match%) + (3;%match%)) < (2;%mismatch%)"])
    with pytest.raises(DataError, match=r"\+.*not one comparison.*conditions="):
        load_pairs(path)
    turned = load_pairs(path, conditions=("mismatch", "match"), region=3).items[0]
    assert turned.good == "The woman play well ."
    assert turned.good[slice(*turned.good_span)] == "well ."
    assert load_pairs(path, conditions=("match", "mismatch")).items[0].good_span == (10, 15)


def test_empty_regions_leave_no_blanks(tmp_path):
    found = suite(["(4;%match%) < (4;%mismatch%)"])
    for item in found["items"]:
        for condition in item["conditions"]:
            condition["regions"] = [region(1, ""), region(2, "We"), region(3, ""), *condition["regions"][1:2]]
            condition["regions"][3] = region(4, condition["regions"][3]["content"])
    (tmp_path / "suite.json").write_text(json.dumps(found))
    pair = load_pairs(tmp_path / "suite.json").items[0]
    assert (pair.good, pair.good_span) == ("We plays", (3, 8))


@pytest.mark.parametrize(
    ("predictions", "changes", "arguments", "says"),
    [
        ([], {}, {}, "says nowhere"),
        (["(2;%match%) = (2;%mismatch%)"], {}, {}, "not one comparison.*="),
        (["(2;%match%) < (2;%mismatch%) & (3;%match%) < (3;%mismatch%)"], {}, {}, "not one comparison"),
        ([7], {}, {}, "not one comparison"),
        (["(2;%match%) < (2;%other%)"], {}, {}, "no condition 'other'.*item 1.*match, mismatch"),
        (["(9;%match%) < (9;%mismatch%)"], {}, {}, "no region 9.*item 1, condition match"),
        (["(1;%match%) < (1;%mismatch%)"], {}, {}, "before the sentences differ.*item 1"),
        ([], {"items": []}, {}, "no list of items"),
        (["(2;%a%) < (2;%b%)"], {"items": [{"item_number": 5}]}, {}, "no list of conditions.*item 5"),
        ([], {}, {"region": 2}, "region without its conditions"),
        ([], {}, {"conditions": ("match",)}, "name two"),
        ([], {}, {"conditions": ("match", "match")}, "the same.*item 1"),
    ],
)
def test_suites_that_cannot_be_used_are_refused_with_item_and_condition(
    tmp_path, predictions, changes, arguments, says
):
    with pytest.raises(DataError, match=says) as caught:
        load_pairs(write_suite(tmp_path / "suite.json", predictions, **changes), **arguments)
    assert caught.value.cure


def test_a_suite_that_is_no_json_and_conditions_of_what_has_none_are_refused(tmp_path):
    (tmp_path / "suite.json").write_text('{"items": [1,\n}')
    with pytest.raises(DataError, match=r"not JSON \(line 2"):
        load_pairs(tmp_path / "suite.json")
    (tmp_path / "suite.json").write_text("[]")
    with pytest.raises(DataError, match="no list of items.*jsonl"):
        load_pairs(tmp_path / "suite.json")
    for name in ("agreement-simple", write_lines(tmp_path / "some.jsonl", *ROWS)):
        with pytest.raises(DataError, match="those of a SyntaxGym suite"):
            load_pairs(name, conditions=("a", "b"))


@pytest.fixture
def hub(monkeypatch):
    """A hub that has one data set, and says what was asked of it."""
    import datasets
    import huggingface_hub

    asked = []

    class Rows(list):
        info = SimpleNamespace(license="cc-by-4.0")

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        if split != "train":
            raise ValueError(f"Unknown split {split}\nand more")
        return Rows(ROWS)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, path, timeout: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_blimp_comes_by_name_from_the_hub(hub):
    pairs = load_pairs("hf:nyu-mll/blimp:anaphor_gender_agreement")
    assert hub == [("nyu-mll/blimp", "anaphor_gender_agreement", "train")]
    assert [pair.good for pair in pairs.items] == [row["sentence_good"] for row in ROWS]
    assert pairs.licence == "cc-by-4.0"
    assert "config anaphor_gender_agreement, split train" in pairs.source


@pytest.mark.parametrize(
    ("name", "says"),
    [("hf:a:b:c:d", "not a data set's name"), ("hf:", "not a data set's name"), ("hf:a:b:test", "Unknown split test")],
)
def test_a_data_set_that_cannot_be_used_is_refused_in_one_line(hub, name, says):
    with pytest.raises(DataError, match=says) as caught:
        load_pairs(name)
    assert "and more" not in str(caught.value)


def test_a_hub_out_of_reach_is_one_clear_error_at_once(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(DataError, match="out of reach.*generated pairs"):
        load_pairs("hf:nyu-mll/blimp:anaphor_gender_agreement")


def test_a_draw_is_in_order_the_same_every_time_and_says_what_it_is():
    whole = load_pairs("anaphor-gender")
    drawn, again, other = (load_pairs("anaphor-gender", max_pairs=50, seed=seed) for seed in (1, 1, 2))
    assert drawn == again
    assert drawn.items != other.items
    places = [whole.items.index(pair) for pair in drawn.items]
    assert places == sorted(set(places))
    assert places[0] < 40 < 400 < places[-1]
    assert "50 of 480, drawn with seed 1" in drawn.source
    assert drawn.sha256 not in (whole.sha256, other.sha256)
    assert load_pairs("anaphor-gender", max_pairs=480).items == whole.items
    for wrong in ({"max_pairs": 0}, {"max_pairs": 1.5}, {"seed": -1, "max_pairs": 3}):
        with pytest.raises(DataError, match="whole number"):
            load_pairs("anaphor-gender", **wrong)


def test_pairs_are_checked_and_named_by_content():
    pair = Pair("a b", "a c", (2, 3), (2, 3))
    first = Pairs("one", (pair,))
    assert first.sha256 == Pairs("another name", (Pair(*("a b", "a c"), (2, 3), (2, 3), "p", "t"),)).sha256
    assert first.sha256 != Pairs("one", (Pair("a b", "a c", (0, 3), (2, 3)),)).sha256
    assert first.sha256 != Pairs("one", (Pair("a c", "a b", (2, 3), (2, 3)),)).sha256
    assert hash(pair) == hash(Pair("a b", "a c", (2, 3), (2, 3), features={"number": "singular"}))
    for wrong, says in [
        ((), "no pairs"),
        ((Pair("a", "a", (0, 1), (0, 1)),), "the same"),
        ((Pair("a", " ", (0, 1), (0, 1)),), "empty"),
        ((Pair("a", "b", (0, 2), (0, 1)),), "span 0 to 2"),
    ]:
        with pytest.raises(DataError, match=says):
            Pairs("wrong", wrong)
