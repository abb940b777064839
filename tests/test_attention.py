"""Attention maps before and after an edit: their numbers, their figures, and what is refused."""

import json
import re

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
import zoo

from lens_geometry.attention_plots import attention_figure, attention_html, map_figure
from lens_geometry.edits import diagonal, observe_diagonal
from lens_geometry.errors import DataError, ResultError, SiteError
from lens_geometry.experiments import attention_maps, diagonal_numbers
from lens_geometry.report import write_report
from lens_geometry.results import Result


def patterns(model, ids, hooks=()):
    kept = {}
    keep = [
        (f"blocks.{layer}.attn.hook_pattern", lambda t, hook, layer=layer: kept.update({layer: t.clone()}))
        for layer in range(4)
    ]
    with torch.no_grad(), model.hooks(fwd_hooks=[*hooks, *keep]):
        model(ids, return_type="logits")
    return kept


@pytest.mark.parametrize("site", ["value", "value_excl_self", "attn", "attn_per_head"])
def test_the_table_holds_the_maps_of_a_clean_and_of_an_edited_pass(site):
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(1, 7)
    table = attention_maps(model, ids, site=site, parallel=0.25, layers="1-").table
    assert len(table) == 3 * 6 * 28  # layers, heads, keys up to the query
    before, after = patterns(model, ids), patterns(model, ids, diagonal(model, site, parallel=0.25, layers=[1, 2, 3]))
    for row in table.itertuples():
        place = 0, row.head, row.query, row.key
        assert row.before == before[row.layer][place]
        assert row.after == after[row.layer][place]
        assert row.difference == pytest.approx(row.after - row.before, abs=1e-15)
    assert not table.loc[table["query"] != table["key"], "edit"].any()
    first = table[table["layer"] == 1]  # nothing earlier is edited: the difference is the edit
    assert np.allclose(first["difference"], first["edit"], atol=1e-12)
    later = table[(table["layer"] == 3) & (table["query"] != table["key"])]
    assert later["difference"].abs().max() > 1e-4


def test_the_numbers_of_the_diagonal_are_those_of_its_entries():
    model, ids = zoo.build("gpt2", dtype=torch.float64), zoo.tokens(1, 7)
    result = attention_maps(model, ids, site="attn", parallel=0.0)
    found = diagonal_numbers(result.table).set_index("layer")
    changes = {}
    with (
        torch.no_grad(),
        model.hooks(fwd_hooks=observe_diagonal(model, "attn", lambda *x: changes.update({x[0]: x[2]}))),
    ):
        model(ids, return_type="logits")
    clean = patterns(model, ids)[0][0].diagonal(dim1=-2, dim2=-1)[:, 1:]
    edited = clean + changes[0][0, 1:, 0]
    assert found.loc[0, "before"] == pytest.approx(float(clean.mean()))
    assert found.loc[0, "after"] == pytest.approx(float(edited.mean()))
    assert found.loc[0, "edit"] == pytest.approx(float(np.median(changes[0][0, 1:, 0].numpy())))
    assert found.loc[0, "edit_largest"] == pytest.approx(float(changes[0][0, 1:].abs().max()))
    assert found.loc[0, "outside"] == pytest.approx(float(((edited < 0) | (edited > 1)).double().mean()))
    assert found["heads_agree"].all()
    assert (found["n_tokens"] == 6).all()
    by_head = attention_maps(model, ids, site="attn_per_head", parallel=0.0).table
    assert not diagonal_numbers(by_head)["heads_agree"].any()


def test_nothing_changes_at_a_scale_of_one():
    table = attention_maps(zoo.build("llama_gqa"), zoo.tokens(1, 7), parallel=1.0).table
    assert (table["before"] == table["after"]).all()
    assert not table["edit"].any()


def test_tokens_are_spelled_by_the_models_tokenizer(tmp_path):
    model = zoo.build("llama_gqa", tokenizer=True)
    result = attention_maps(model, "a </b>\n", layers="2")
    assert result.meta["token_words"] == ["a", " ", "<", "/", "b", ">", "\n"]
    loaded = Result.load(result.save(tmp_path))
    assert loaded.table["query_token"].unique().tolist() == result.meta["token_words"]
    page = attention_html(loaded.table)
    tokens = re.search(r'"tokens": (\[.*?\])', page)[1]
    assert json.loads(tokens) == ["a", "·", "<", "/", "b", ">", "↵"]
    assert "<" not in tokens


@pytest.mark.parametrize(
    ("data", "changes", "error", "words"),
    [
        (zoo.tokens(2, 6), {}, DataError, "one sequence"),
        (zoo.tokens(1, 50), {}, DataError, "at most 48 tokens"),
        ("abcdefghij", {"sequence_length": 8}, DataError, "at most 8 tokens"),
        (zoo.tokens(1, 6), {"layers": "9"}, SiteError, "layers 0 to 3"),
        (zoo.tokens(1, 6), {"site": "mlp"}, SiteError, "no diagonal form"),
    ],
)
def test_what_cannot_be_shown_is_refused(data, changes, error, words):
    with pytest.raises(error, match=words):
        attention_maps(zoo.build("llama_gqa", tokenizer=True), data, **changes)


@pytest.fixture(scope="module")
def result():
    return attention_maps(zoo.build("llama_gqa"), zoo.tokens(1, 6), layers="1-2")


def test_the_figure_shows_every_head_and_opens_on_the_one_that_changed_most(result):
    table, drawn = result.table, attention_figure(result.table)
    buttons = drawn.layout.updatemenus[0].buttons
    assert [button.label for button in buttons] == [f"layer {i}, head {h}" for i in (1, 2) for h in range(6)]
    sizes = table["edit"].abs().groupby([table["layer"], table["head"]]).sum()
    layer, head = sizes.idxmax()
    assert buttons[drawn.layout.updatemenus[0].active].label == f"layer {layer}, head {head}"
    part = table[(table["layer"] == layer) & (table["head"] == head)].set_index(["query", "key"])
    for trace, which in zip(drawn.data, ("before", "after", "difference"), strict=True):
        for query in range(6):
            for key in range(6):
                value = trace.z[query][key]
                expected = part[which].get((query, key))
                assert (value is None) if expected is None else value == pytest.approx(expected, abs=1e-5)
    assert drawn.data[0].coloraxis == drawn.data[1].coloraxis != drawn.data[2].coloraxis
    scale = drawn.layout.coloraxis2
    assert scale.cmin == -scale.cmax
    assert isinstance(result.plot(), go.Figure)


def test_a_map_of_a_layer_is_the_mean_over_its_heads(result):
    drawn = map_figure(result.table, 2, "after")
    part = result.table[(result.table["layer"] == 2) & (result.table["query"] == 4) & (result.table["key"] == 4)]
    assert drawn.data[0].z[4][4] == pytest.approx(part["after"].mean(), abs=1e-5)


def test_the_page_of_circuitsvis_loads_nothing_and_holds_what_was_asked_for(result):
    page = attention_html(result.table, layers=2, which=("before", "difference"))
    assert page.count("CircuitsVis;") == 2
    assert 'from "http' not in page
    assert "unpkg" not in page
    assert not re.search(r'<(script|link)[^>]+(src|href)="http', page)
    shown = [json.loads(x) for x in re.findall(r'"attention": (\[\[\[.*?\]\]\])', page)]
    part = result.table[result.table["layer"] == 2]
    for found, which in zip(shown, ("before", "difference"), strict=True):
        for row in part.itertuples():
            assert found[row.head][row.query][row.key] == pytest.approx(getattr(row, which), abs=1e-5)
    for wrong in ({"layers": 0}, {"which": "during"}, {"layers": []}):
        with pytest.raises(ResultError, match="choose layers among"):
            attention_html(result.table, **wrong)


def test_the_report_has_a_section_of_it(result, tmp_path):
    page = write_report([result], tmp_path / "report.html").read_text()
    assert "Attention before and after an edit" in page
    assert "A_tt before" in page
