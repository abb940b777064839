"""Schedules by layer: the greedy order in numbers, then budget, strengths and halves on live models."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st

from lens_geometry.data import tokenize
from lens_geometry.edits import scale
from lens_geometry.errors import DataError, SiteError
from lens_geometry.experiments import profile, schedule
from lens_geometry.experiments.joint import JointEdits
from lens_geometry.experiments.paths import (
    Step,
    after,
    at_strength,
    greedy_path,
    random_path,
    total_strength,
    uniform,
)
from lens_geometry.results import Result
from lens_geometry.runner import RunSettings

SITES = ("attn", "mlp", "value", "value_excl_self")
QUIET = {"progress": False}


def test_the_greedy_path_takes_the_least_cost_for_each_strength_first():
    costs = {0: {0.5: 0.1, 0.0: 0.4}, 1: {0.5: 0.1, 0.0: 0.2}, 2: {0.5: -0.05, 0.0: 1.0}}
    strengths = {0: 0.4, 1: 0.1, 2: 1.0}
    # cost per strength of the steps: layer 0 0.5, 1.5; layer 1 2, 2; layer 2 -0.1, 2.1
    assert greedy_path(costs, strengths) == [(2, 0.5), (0, 0.5), (0, 0.0), (1, 0.5), (1, 0.0), (2, 0.0)]


def test_no_layer_without_strength_is_lowered_nor_one_past_a_loss_that_is_not_finite():
    costs = {0: {0.5: 0.1, 0.0: 0.2}, 1: {0.5: 0.1, 0.25: math.nan, 0.0: 0.1}}
    assert greedy_path(costs, {0: 0.0, 1: 1.0}) == [(1, 0.5)]
    assert greedy_path(costs, {0: 0.0, 1: 0.0}) == []


NUMBERS = st.floats(-1, 1, allow_nan=False)


@given(data=st.data(), layers=st.integers(1, 5), ladder=st.sampled_from([(0.0,), (0.5, 0.0), (0.75, 0.5, -0.5)]))
@settings(deadline=None)
def test_paths_go_down_every_ladder_and_can_be_cut_at_any_strength(data, layers, ladder):
    costs = {layer: {s: data.draw(NUMBERS) for s in ladder} for layer in range(layers)}
    strengths = {layer: data.draw(st.floats(0.01, 2)) for layer in range(layers)}
    greedy = greedy_path(costs, strengths)
    for layer in range(layers):
        assert [step.scale for step in greedy if step.layer == layer] == sorted(ladder, reverse=True)
    order = random_path(strengths, min(ladder), np.random.default_rng(0))
    assert sorted(order) == [Step(layer, min(ladder)) for layer in range(layers)]
    whole = total_strength(after(greedy), strengths)
    assert whole == pytest.approx((1 - min(ladder)) * sum(strengths.values()))
    total = data.draw(st.floats(0, 1)) * whole
    for scales in (at_strength(greedy, strengths, total), at_strength(order, strengths, total)):
        assert total_strength(scales, strengths) == pytest.approx(total, abs=1e-9)
        assert all(min(ladder) <= s < 1 for _, s in scales)
        assert sum(s not in ladder for _, s in scales) <= 1  # one step in part, the others whole
    assert total_strength(uniform(strengths, total), strengths) == pytest.approx(total, abs=1e-9)
    assert len({s for _, s in uniform(strengths, total)}) <= 1


def edits(model, ids, **changes):
    settings_ = {"grouping": "each", "skip_position_0": False, "journal": None, "about": {}, **changes}
    return JointEdits(model, tokenize(model, ids), RunSettings(progress=False), **settings_)


@pytest.mark.parametrize(
    ("name", "backend"), [c for c in zoo.cases("bridge", "hooked") if c[0] in ("llama_gqa", "neox", "gemma2")]
)
def test_strength_is_proportional_to_1_minus_s(name, backend):
    model = zoo.build(name, backend, torch.float64)
    measured = edits(model, zoo.tokens(3, 9))
    for site in SITES:
        whole, half, turned = (measured.strengths(site, ((1, s), (3, s))) for s in (0.0, 0.5, -0.5))
        if name == "gemma2" and site.startswith("value"):  # a norm follows W_O
            assert half[1] != pytest.approx(0.5 * whole[1], rel=1e-3)
            continue
        for layer in (1, 3):
            assert whole[layer] > 0.01
            assert half[layer] == pytest.approx(0.5 * whole[layer], rel=1e-6)
            assert turned[layer] == pytest.approx(1.5 * whole[layer], rel=1e-6)


def test_strength_of_removal_in_the_stream_is_the_parallel_fraction():
    model, ids = zoo.build("qwen3"), zoo.tokens(4, 12)
    measured = edits(model, ids)
    table = profile(model, ids, sites=("attn", "mlp"), replicates=2, **QUIET).table
    rows = table[(table["metric"] == "parallel_fraction")].set_index(["site", "layer"])["mean"]
    for site in ("attn", "mlp"):
        found = measured.strengths(site, tuple((layer, 0.0) for layer in range(4)))
        assert [found[layer] for layer in range(4)] == pytest.approx(list(rows[site]), rel=1e-5)


def test_strength_of_a_value_edit_is_measured_after_w_o_with_clean_inputs():
    model, ids, layer = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(2, 7), 2
    found = edits(model, ids).strengths("value", ((0, 0.0), (layer, 0.0)))[layer]
    cache = {}
    keep = [(f"blocks.{layer}.hook_attn_out", lambda x, hook: cache.update(y=x.clone()))]
    with torch.no_grad():
        model.run_with_hooks(ids, fwd_hooks=keep)
        clean = cache["y"]
        model.run_with_hooks(ids, fwd_hooks=[*scale(model, "value", parallel=0.0, layers=layer), *keep])
    ratios = [
        math.dist(cache["y"][b, t].tolist(), clean[b, t].tolist()) / math.hypot(*clean[b, t].tolist())
        for b in range(2)
        for t in range(1, 7)  # not position 0
    ]
    assert found == pytest.approx(math.fsum(ratios) / len(ratios), rel=1e-9)


IDS = {"batch": 12, "length": 20}
GIVEN = {"sites": ("attn", "value"), "budget": 0.05, "random_orders": 2, **QUIET}


@pytest.fixture(scope="module")
def found():
    return schedule(zoo.build("gemma2"), zoo.tokens(**IDS), **{**GIVEN, "sites": ("mlp", "attn")})


def loss(model, ids, hooks=()):
    with torch.no_grad():
        logits = model.run_with_hooks(ids, return_type="logits", fwd_hooks=list(hooks)).double()
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def of_kind(result, kind, **labels):
    table = result.table[result.table["kind"] == kind]
    for name, value in labels.items():
        table = table[table[name] == value]
    return table


def chosen(result, site, variant):
    rows = of_kind(result, "layer", site=site, variant=variant)
    return dict(zip(rows["layer"].astype(int), rows["scale"], strict=True))


def hooks_of(model, site, scales):
    return [hook for layer, s in scales.items() for hook in scale(model, site, parallel=s, layers=layer) if s != 1]


def test_the_schedule_is_the_longest_prefix_found_within_the_budget(found):
    for site in ("mlp", "attn"):
        path = of_kind(found, "path", site=site)
        at = dict.fromkeys(range(4), 1.0)
        taken = 0
        for row in path.itertuples():
            if at == chosen(found, site, "greedy"):
                break
            at[row.layer], taken = row.scale, row.step
        assert at == chosen(found, site, "greedy")
        assert taken > 0
        tried = path[path["status"] == "ok"].set_index("step")
        assert tried.loc[taken, "loss_change_upper"] < 0.05
        assert tried.loc[taken, "loss_change"] < 0.05
        assert (tried.loc[:taken, "loss_change_upper"] < 0.05).all()
        if taken < len(path):
            assert tried.loc[taken + 1, ["loss_change", "loss_change_upper"]].max() >= 0.05
        row = of_kind(found, "comparison", site=site, variant="greedy", half="search").iloc[0]
        assert row["loss_change"] == tried.loc[taken, "loss_change"]
        assert row["strength"] == pytest.approx(tried.loc[taken, "strength"], rel=1e-4)
    assert len(path) < 16 or taken < 16  # one budget at least is felt


def test_losses_are_those_of_each_half_computed_by_hand(found):
    model, ids = zoo.build("gemma2"), zoo.tokens(**IDS)
    for half, part in (("search", ids[::2]), ("held_out", ids[1::2])):
        base = loss(model, part)
        changes = {}
        for variant in ("greedy", "uniform", "random 1", "random 2"):
            edited = loss(model, part, hooks_of(model, "attn", chosen(found, "attn", variant)))
            changes[variant] = edited - base
            row = of_kind(found, "comparison", site="attn", variant=variant, half=half).iloc[0]
            assert row["loss_change"] == pytest.approx(changes[variant], abs=1e-5)
            assert row["difference"] == pytest.approx(changes[variant] - changes["greedy"], abs=1e-5)
            assert row["difference_low"] <= row["difference"] <= row["difference_high"]
            assert row["n_sequences"] == 6
    single = of_kind(found, "single", site="mlp", layer=2, scale=0.25).iloc[0]
    edited = loss(model, ids[::2], scale(model, "mlp", parallel=0.25, layers=2))
    assert single["loss_change"] == pytest.approx(edited - loss(model, ids[::2]), abs=1e-5)


def test_all_variants_have_the_same_measured_strength(found):
    model, ids = zoo.build("gemma2"), zoo.tokens(**IDS)
    for site in ("mlp", "attn"):
        totals = {}
        for variant in ("greedy", "uniform", "random 1", "random 2"):
            scales = tuple((layer, s) for layer, s in chosen(found, site, variant).items() if s != 1)
            totals[variant] = sum(edits(model, ids[::2]).strengths(site, scales).values())
            rows = of_kind(found, "layer", site=site, variant=variant)
            assert rows["strength"].sum() == pytest.approx(totals[variant], rel=1e-6)
        assert list(totals.values()) == pytest.approx([totals["greedy"]] * 4, rel=1e-3)
        assert len(set(chosen(found, site, "uniform").values())) == 1
    assert not any("proportional" in warning for warning in found.meta["warnings"])


def test_a_norm_after_the_branch_is_said_to_spoil_equal_strength():
    with pytest.warns(UserWarning, match="strength is not proportional"):
        result = schedule(zoo.build("gemma2"), zoo.tokens(8, 16), **{**GIVEN, "sites": ("value",)})
    strengths = of_kind(result, "comparison", half="search").set_index("variant")["strength"]
    assert strengths["uniform"] != pytest.approx(strengths["greedy"], rel=1e-2)


def test_a_budget_that_no_step_fits_gives_an_empty_schedule_and_says_so():
    with pytest.warns(UserWarning, match="no step of the greedy path fits"):
        result = schedule(zoo.build("gpt2"), zoo.tokens(4, 10), sites=("mlp",), budget=1e-12, scales=(-40.0,), **QUIET)
    assert set(of_kind(result, "layer")["scale"]) == {1.0}
    compared = of_kind(result, "comparison")
    assert (compared[["loss_change", "strength", "difference"]] == 0).all(axis=None)


def test_a_schedule_that_is_started_again_ends_with_the_same_table(tmp_path):
    model, ids = zoo.build("gpt2"), zoo.tokens(6, 10)
    whole = schedule(model, ids, out=tmp_path / "whole", **GIVEN).table
    for name, kept in (("search", 12), ("search", 40), ("held_out", 3)):
        again = tmp_path / f"{name}{kept}"
        again.mkdir()
        for half in ("search", "held_out"):
            lines = (tmp_path / "whole" / f"{half}.jsonl").read_text().splitlines(keepends=True)
            if half == name:
                (again / f"{half}.jsonl").write_text("".join(lines[:kept]) + lines[kept][:30])
            elif half == "search":
                (again / f"{half}.jsonl").write_text("".join(lines))
        table = schedule(model, ids, out=again, **GIVEN).table
        pd.testing.assert_frame_equal(table, whole, check_exact=True)
    journals = [(tmp_path / place / "search.jsonl").read_text() for place in ("whole", "search40")]
    assert sorted(journals[0].splitlines()) == sorted(journals[1].splitlines())
    wider = schedule(model, ids, out=tmp_path / "whole", **{**GIVEN, "budget": 0.4}).table
    pd.testing.assert_frame_equal(wider, schedule(model, ids, **{**GIVEN, "budget": 0.4}).table, check_exact=True)


def test_layers_are_not_lowered_to_where_their_losses_are_not_finite():
    model = zoo.build("llama_gqa", dtype=torch.float16)
    with pytest.warns(UserWarning, match="4 of its conditions gave losses that are not finite"):
        result = schedule(model, zoo.tokens(4, 10), sites=("mlp",), scales=(0.9, -1e7), budget=50.0,
                          random_orders=0, **QUIET)  # fmt: skip
    assert (of_kind(result, "single", scale=-1e7)["status"] == "nonfinite").all()
    assert set(of_kind(result, "path")["scale"]) == {0.9}
    assert set(of_kind(result, "layer", variant="greedy")["scale"]) == {0.9}


def test_only_the_chosen_layers_are_lowered(tmp_path):
    result = schedule(zoo.build("neox"), zoo.tokens(6, 10), layers="1-2", skip_position_0=True, **GIVEN)
    assert set(result.table["layer"].dropna()) == {1, 2}
    pd.testing.assert_frame_equal(Result.load(result.save(tmp_path)).table, result.table)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"budget": -1.0}, DataError, "budget is -1"),
        ({"scales": ()}, DataError, "scales are"),
        ({"scales": (0.5, 1.0)}, DataError, "below 1"),
        ({"random_orders": -1}, DataError, "random_orders"),
        ({"sites": ("resid",)}, SiteError, "no branch"),
        ({"layers": "9"}, SiteError, "layers 0 to 3"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, error, words):
    with pytest.raises(error, match=words):
        schedule(zoo.build("llama_gqa"), zoo.tokens(4, 8), **{**QUIET, **changes})


def test_three_sequences_cannot_be_halved():
    with pytest.raises(DataError, match="3 sequences cannot be halved"):
        schedule(zoo.build("llama_gqa"), zoo.tokens(3, 8), **QUIET)
