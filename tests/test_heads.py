"""The head sweep: exact effects against plain runs, first-order ones against finite differences."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from scipy import stats

from lens_geometry.anatomy import inspect
from lens_geometry.data import load_text
from lens_geometry.edits import scale
from lens_geometry.errors import DataError, SiteError
from lens_geometry.experiments import head_sweep, scaling_sweep
from lens_geometry.sites import SITES

QUIET = {"progress": False, "max_sequences": None}


def loss(model, ids, **edit):
    """Mean loss per token, with an edit when one is named."""
    hooks = scale(model, **edit) if edit else []
    with torch.no_grad():
        return float(model.run_with_hooks(ids, return_type="loss", fwd_hooks=hooks))


def change_of(table, **where):
    rows = table[np.logical_and.reduce([table[name] == value for name, value in where.items()])]
    assert len(rows) == 1, where
    return rows["loss_change"].item()


@pytest.mark.parametrize("site", ["value", "value_excl_self"])
def test_every_head_has_the_change_of_loss_of_a_plain_run(site):
    model, ids = zoo.build("llama_gqa"), zoo.tokens(3, 14)
    table = head_sweep(model, ids, sites=(site,), groupings=("each", "kv_group"), method="exact", **QUIET).table
    base = loss(model, ids)
    for grouping, groups in (("each", 6), ("kv_group", 2)):
        for layer in (0, 1, 3):
            edit = {"site": site, "parallel": 0.0, "layers": layer, "grouping": grouping}
            for head in range(groups):
                found = change_of(table, grouping=grouping, layer=layer, kind="single", head=head)
                assert found == pytest.approx(loss(model, ids, **edit, heads=head) - base, abs=3e-6)
            found = change_of(table, grouping=grouping, layer=layer, kind="all")
            assert found == pytest.approx(loss(model, ids, **edit) - base, abs=3e-6)


@pytest.mark.parametrize(("name", "backend"), zoo.cases())
def test_the_sweep_runs_where_the_site_can_be_edited(name, backend):
    model = zoo.build(name, backend)
    facts = inspect(model)
    if facts.refusal(SITES["value_excl_self"], 1, editing=True):
        with pytest.raises(SiteError):
            head_sweep(model, zoo.tokens(2, 9), **QUIET)
        return
    result = head_sweep(model, zoo.tokens(2, 9), layers="2", **QUIET)
    heads = facts.layers[2].n_heads
    assert len(result.table) == 2 * heads + 3  # singles and their sum twice, all heads at once exactly
    assert set(result.table["status"]) == {"ok"}
    assert result.meta["agreement"][0]["heads"] == heads


def test_side_by_side_and_one_by_one_are_the_same():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(3, 10)
    tables = [head_sweep(model, ids, method="exact", batch_size=size, **QUIET).table for size in (1, 3, 7, 64)]
    for table in tables[1:]:
        assert table["head"].equals(tables[0]["head"])
        np.testing.assert_allclose(table["loss_change"], tables[0]["loss_change"], atol=2e-6)


def test_the_sum_of_singles_is_their_sum_and_differs_from_all_heads_at_once():
    table = head_sweep(zoo.build("gpt2"), zoo.tokens(3, 14), **QUIET).table
    for method in ("exact", "first_order"):
        part = table[table["method"] == method]
        singles = part[part["kind"] == "single"].groupby("layer")["loss_change"].sum()
        total = part[part["kind"] == "sum_of_singles"].set_index("layer")["loss_change"]
        np.testing.assert_allclose(total, singles, rtol=1e-9, atol=1e-12)
    exact = table[table["method"] == "exact"].pivot_table(index="layer", columns="kind", values="loss_change")
    assert (exact["all"] - exact["sum_of_singles"]).abs().max() > 1e-4


@pytest.mark.parametrize("grouping", ["each", "kv_group", "merged"])
@pytest.mark.parametrize("scales", [(0.0, 1.0), (1.0, 0.5), (0.4, 1.3)])
def test_the_first_order_effect_is_the_derivative_in_float64(grouping, scales):
    model, ids, step = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(2, 9), 1e-3
    parallel, perpendicular = scales
    table = head_sweep(
        model, ids, groupings=(grouping,), method="first_order", layers="1,3",
        parallel=parallel, perpendicular=perpendicular, **QUIET,
    ).table  # fmt: skip
    for row in table[table["kind"] != "sum_of_singles"].itertuples():
        ends = [
            loss(
                model, ids, site="value_excl_self", layers=row.layer, grouping=grouping,
                heads=None if pd.isna(row.head) else row.head,
                parallel=1 + sign * step * (parallel - 1), perpendicular=1 + sign * step * (perpendicular - 1),
            )
            for sign in (1, -1)
        ]  # fmt: skip
        # TransformerLens' loss is in float32 even here, which is what limits the difference quotient
        assert row.loss_change == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=4e-4, rel=0.02)


def test_the_agreement_is_the_rank_correlation_of_the_table():
    result = head_sweep(zoo.build("llama_gqa"), zoo.tokens(4, 16), parallel=0.5, **QUIET)
    singles = result.table[result.table["kind"] == "single"]
    exact, first = (singles[singles["method"] == m]["loss_change"] for m in ("exact", "first_order"))
    found = result.meta["agreement"][0]
    assert found["spearman"] == pytest.approx(stats.spearmanr(exact, first).statistic)
    assert found["spearman"] > 0.8
    assert found["spearman_low"] <= found["spearman"] + 1e-9
    assert found["heads"] == 24


def test_all_heads_at_once_is_the_scaling_sweep_of_that_layer():
    model, ids = zoo.build("neox"), zoo.tokens(3, 12)
    heads = head_sweep(model, ids, layers="2", method="exact", **QUIET).table
    sweep = scaling_sweep(
        model, ids, sites=("value_excl_self",), layers=("2",), parallel=(0.0,), perpendicular=(), controls=(), **QUIET
    ).table
    assert change_of(heads, kind="all") == change_of(sweep, scale=0.0)


def test_gradients_and_weights_are_left_as_they_were():
    model = zoo.build("llama_gqa", fresh=True)
    next(model.parameters()).requires_grad_(False)
    before = [parameter.requires_grad for parameter in model.parameters()]
    head_sweep(model, zoo.tokens(2, 9), layers="1", **QUIET)
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_position_0_can_be_left_alone():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 9)
    edit = {"site": "value", "parallel": 0.0, "layers": 1, "positions": slice(1, None)}
    table = head_sweep(model, ids, sites=("value",), layers="1", skip_position_0=True, **QUIET).table
    base = loss(model, ids)
    found = change_of(table, method="exact", kind="single", head=2)
    assert found == pytest.approx(loss(model, ids, **edit, heads=2) - base, abs=3e-6)
    assert abs(loss(model, ids, **{**edit, "positions": None}, heads=2) - base - found) > 1e-4


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path, monkeypatch):
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 9)
    whole = head_sweep(model, ids, method="exact", **QUIET).table
    import lens_geometry.runner as runner

    real, left = runner.sequence_losses, [12]

    def dies(*args):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(runner, "sequence_losses", dies)
    with pytest.raises(KeyboardInterrupt):
        head_sweep(model, ids, method="exact", out=tmp_path, **QUIET)
    left[0] = 10**6
    resumed = head_sweep(model, ids, method="exact", out=tmp_path, **QUIET).table
    pd.testing.assert_frame_equal(resumed, whole)
    assert left[0] > 10**6 - 12  # what was done is not run again


def test_what_cannot_be_swept_is_refused():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 9)
    with pytest.raises(SiteError, match="'attn' has no heads"):
        head_sweep(model, ids, sites=("attn",), **QUIET)
    with pytest.raises(SiteError, match="'vlaue' is no site"):
        head_sweep(model, ids, sites=("vlaue",), **QUIET)
    with pytest.raises(SiteError, match="no head grouping 'pairs'"):
        head_sweep(model, ids, groupings=("pairs",), **QUIET)
    with pytest.raises(DataError, match="both scales are 1"):
        head_sweep(model, ids, parallel=1.0, **QUIET)
    with pytest.raises(DataError, match="no method 'fast'"):
        head_sweep(model, ids, method="fast", **QUIET)
    with pytest.raises(SiteError, match="no layer 9"):
        head_sweep(model, ids, layers="9", **QUIET)


def test_only_scored_tokens_count_for_both_methods():
    model = zoo.build("llama_gqa")
    result = head_sweep(model, load_text("repeated-random"), sequence_length=16, max_sequences=3, layers="1",
                        parallel=0.9, progress=False)  # fmt: skip
    assert set(result.table["n_tokens"]) == {3 * 8}
    exact, first = (result.table[result.table["method"] == m] for m in ("exact", "first_order"))
    assert exact["base_loss"].iloc[0] == pytest.approx(first["base_loss"].iloc[0], rel=1e-6)
    singles = (part[part["kind"] == "single"]["loss_change"].to_numpy() for part in (exact, first))
    np.testing.assert_allclose(*singles, atol=3e-3, rtol=0.3)


@pytest.mark.skipif(zoo.MAJOR > 3, reason="HookedTransformer is in TransformerLens 3")
def test_a_first_token_that_is_the_padding_token_is_no_padding():
    from lens_geometry.experiments import profile

    model = zoo.build("gpt2", "hooked", tokenizer=True, fresh=True)
    ids = zoo.tokens(2, 9)
    ids[:, 0] = 0
    found = []
    for side in ("right", "left"):
        model.tokenizer.pad_token, model.tokenizer.padding_side = "<bos>", side
        found.append(head_sweep(model, ids, layers="1", method="exact", **QUIET).table["base_loss"].iloc[0])
        assert model.tokenizer.padding_side == side
        profile(model, ids, sites=("mlp",), **QUIET)
    assert found[0] == found[1]
