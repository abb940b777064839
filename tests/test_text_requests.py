"""What tasks need of us where lm_eval is not installed: greedy texts, equal lengths, paired intervals, the figure."""

import sys

import numpy as np
import pandas as pd
import pytest
import zoo

from lens_geometry.errors import DataError, ModelError
from lens_geometry.evals import edited_lm, own_random_state
from lens_geometry.evaluation_plots import evaluation_figure, score_names
from lens_geometry.plots import figure
from lens_geometry.report import write_report
from lens_geometry.results import Result
from lens_geometry.stats import paired_interval
from lens_geometry.text_requests import Generation, equal_lengths, generation_options


def test_without_the_extra_there_is_one_error_with_its_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ModelError, match=r'Cure: pip install "lens-geometry\[evals\]"'):
        edited_lm(zoo.build("llama_gqa", tokenizer=True))


def test_batches_hold_one_length_and_every_place_once():
    lengths = [4, 9, 4, 4, 9, 1, 4]
    found = list(equal_lengths(lengths, 3))
    assert found == [[1, 4], [0, 2, 3], [6], [5]]
    assert sorted(place for rows in found for place in rows) == list(range(7))


def test_the_longest_text_is_that_of_the_first_alias_that_is_set():
    assert generation_options({"max_gen_toks": None, "max_new_tokens": 3, "max_tokens": 9}, None) == ([], 3)
    assert generation_options({"until": "##", "top_k": 1, "temperature": 0}, None) == (["##"], 256)
    assert generation_options({"until": ["", "x"], "do_sample": False, "temperature": 1.0}, None)[0] == ["x"]
    for options in ({"do_sample": True, "temperature": 0.0}, {"temperature": "0.5"}, {"num_beams": 2}, {"penalty": 1}):
        with pytest.raises(DataError, match="task a"):
            generation_options(options, "a")


def test_a_text_ends_before_whichever_stop_sequence_comes_first():
    tokenizer = zoo.tokenizer()
    text = Generation(0, [5], ["cd", "b"], most=9, truncated=False)
    for token in tokenizer.encode("abc", add_special_tokens=False):
        text.extend(token, -0.5, tokenizer)
    assert (text.said(tokenizer), text.done, text.log_likelihood) == ("a", True, -1.5)
    lost = Generation(0, [5], [], most=9, truncated=False)
    lost.extend(7, float("nan"), tokenizer)
    assert lost.done


@pytest.mark.parametrize("seed", range(3))
def test_the_paired_interval_of_a_mean_is_the_ordinary_bootstrap_and_zero_where_nothing_differs(seed):
    rng = np.random.default_rng(seed)
    one = list(rng.normal(1.0, 1.0, 60))
    other = list(np.array(one) + rng.normal(0.3, 0.2, 60))
    low, high = paired_interval(one, other, np.mean, seed=seed)
    half = 1.96 * np.std(np.array(one) - other) / 60**0.5
    assert (low, high) == pytest.approx(
        (np.mean(one) - np.mean(other) - half, np.mean(one) - np.mean(other) + half), abs=0.02
    )
    assert paired_interval(one, one, np.mean) == (0.0, 0.0)
    assert np.isnan(paired_interval(one[:1], other[:1], np.mean)).all()


def test_scores_of_texts_are_resampled_a_tenth_as_often():
    calls = []

    def combine(items):
        calls.append(len(items))
        return len(set(items))

    paired_interval([("a", ["b"]), ("c", ["d"])], [("a", ["b"])] * 2, lambda items: combine([x for x, _ in items]))
    assert calls == [2] * (2 * 200)


def test_own_random_state_is_put_back_after_an_error():
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    with pytest.raises(ZeroDivisionError), own_random_state(4):
        raise ZeroDivisionError
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002


def scores(**changes):
    """Two tasks, three edits; the second task's metric through two filters."""
    rows = []
    for task, kind, higher in (("<b>quiz", "none", True), ("sums", "strict", None), ("sums", "flexible", None)):
        for place, edit in enumerate(("none", "attn parallel 0", "own")):
            status = ["ok", "ok", "no_effect"][place]
            change = [0.0, -0.25, 0.0][place]
            rows.append(
                {"task": task, "metric": "acc", "filter": kind, "edit": edit, "value": 0.5 + change, "base_value": 0.5,
                 "change": change, "change_low": change - 0.1, "change_high": change + 0.1, "higher_is_better": higher,
                 "n_documents": 40, "n_changed": 9 * (status == "ok"), "n_truncated": 0, "n_nonfinite": 0,
                 "status": status} | changes
            )  # fmt: skip
    return pd.DataFrame(rows)


def test_the_figure_has_a_panel_per_score_and_a_mark_per_status():
    table = scores()
    assert list(score_names(table).unique()) == ["<b>quiz: acc", "sums: acc (strict)", "sums: acc (flexible)"]
    drawn = figure("evaluate", table, {"model": "gpt2"})
    assert len(drawn.data) == 3
    for trace in drawn.data:
        assert list(trace.x) == [-0.25, 0.0]
        assert list(trace.marker.symbol) == ["circle", "circle-open"]
        np.testing.assert_allclose(trace.error_x.array, 0.1)
    assert list(drawn.layout.yaxis.ticktext) == ["attn parallel 0", "own"]
    assert drawn.layout.annotations[0].text == "&lt;b&gt;quiz: acc (unedited 0.500, higher is better)"
    assert drawn.layout.annotations[1].text == "sums: acc (strict) (unedited 0.500)"
    lost = scores(status="nonfinite", change=float("nan"), value=float("nan"), n_nonfinite=40, n_documents=0)
    assert set(evaluation_figure(lost).data[0].marker.symbol) == {"x-thin"}
    partly = table.copy()
    partly.loc[partly["edit"] == "own", ["status", "change"]] = ["nonfinite", float("nan")]
    assert list(evaluation_figure(partly).data[0].x) == [-0.25, pytest.approx(0.1)]
    assert [drawn.layout[f"yaxis{place}"].showticklabels for place in ("", "2", "3")] == [True, False, True]
    assert evaluation_figure(table[table["edit"] == "none"]).data[0].x[0] == 0.0


def test_the_report_has_a_row_per_edit_and_a_column_per_score(tmp_path):
    page = write_report(
        [Result("evaluate", scores(), {"data": {"text": "quiz", "n_documents": 40}})], tmp_path / "r.html"
    )
    words = page.read_text()
    for expected in ("Downstream tasks", "40 documents", "no answer changed", "&lt;b&gt;quiz: acc", "−0.250"):
        assert expected in words
    assert "<b>quiz" not in words
