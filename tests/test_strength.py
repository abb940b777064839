"""Applied strength: measured on the live branch, against the weights and against plain edited runs."""

import numpy as np
import pytest
import torch
import zoo

from lens_geometry.edits import scale
from lens_geometry.errors import DataError, SiteError
from lens_geometry.experiments import applied_strength, profile, scaling_sweep

QUIET = {"progress": False, "max_sequences": None}
ATTENTION, MLP = ("attn", "value", "value_excl_self"), ("mlp", "mlp_carrier", "mlp_contribution")
BRANCH = {**dict.fromkeys(ATTENTION, "hook_attn_out"), **dict.fromkeys(MLP, "hook_mlp_out")}


def branch(model, ids, name, hooks=()):
    kept = {}
    with torch.no_grad():
        reader = [(name, lambda tensor, hook: kept.update(found=tensor.double().clone()))]
        model.run_with_hooks(ids, return_type=None, fwd_hooks=[*hooks, *reader])
    return kept["found"]


@pytest.mark.parametrize("name", ["llama_gqa", "neox", "gemma2"])
@pytest.mark.parametrize("site", BRANCH)
def test_each_layer_has_the_strength_of_a_run_with_that_layer_edited_alone(name, site):
    model, ids = zoo.build(name), zoo.tokens(3, 11)
    table = applied_strength(
        model, ids, sites=(site,), parallel=(0.25,), perpendicular=(0.5,), batch_size=2, **QUIET
    ).table
    for layer in range(4):
        hook = f"blocks.{layer}.{BRANCH[site]}"
        clean = branch(model, ids, hook)[:, 1:]
        for component, number in (("parallel", 0.25), ("perpendicular", 0.5)):
            hooks = scale(model, site, layers=layer, **{component: number})
            edited = branch(model, ids, hook, hooks)[:, 1:]
            ratio = (edited - clean).norm(dim=-1) / clean.norm(dim=-1)
            row = table[(table["layer"] == layer) & (table["component"] == component)].iloc[0]
            assert row["change_over_branch"] == pytest.approx(float(ratio.mean()), rel=1e-4)
            assert row["change_energy"] == pytest.approx(float(ratio.square().mean()), rel=1e-4)
            gain = edited.norm(dim=-1) / clean.norm(dim=-1)
            assert row["norm_ratio"] == pytest.approx(float(gain.mean()), rel=1e-4)


def test_the_strength_of_removal_at_a_residual_site_is_the_parallel_fraction():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(3, 11)
    table = applied_strength(model, ids, sites=("attn", "mlp", "block"), perpendicular=(), **QUIET).table
    fractions = profile(model, ids, sites=("attn", "mlp", "block"), **QUIET).table
    fractions = fractions[fractions["metric"] == "parallel_fraction"].set_index(["site", "layer"])["mean"]
    alone = table[table["layer"].notna()].set_index(["site", "layer"])["change_over_branch"]
    np.testing.assert_allclose(alone, fractions.loc[alone.index], rtol=1e-4)


def test_strength_grows_in_proportion_to_what_is_taken_away():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(3, 11)
    table = applied_strength(
        model, ids, sites=("value_excl_self",), parallel=(0.0, 0.5, 0.75), perpendicular=(), **QUIET
    ).table
    by_scale = table[table["layer"].notna()].pivot_table(index="layer", columns="scale", values="change_over_branch")
    np.testing.assert_allclose(by_scale[0.5], by_scale[0.0] / 2, rtol=1e-4)
    np.testing.assert_allclose(by_scale[0.75], by_scale[0.0] / 4, rtol=1e-4)


@pytest.mark.parametrize(("name", "backend"), zoo.cases())
def test_every_class_of_model_has_strengths(name, backend):
    model = zoo.build(name, backend)
    sites = ("block",) if name in zoo.NOT_ADDITIVE else ("attn", "mlp", "value")
    result = applied_strength(model, zoo.tokens(2, 8), sites=sites, **QUIET)
    assert (result.table["change_over_branch"] > 0).all()
    assert set(result.table["status"]) == {"ok"}
    assert len(result.table) == len(sites) * 2 * 5


def test_losses_are_those_of_the_scaling_sweep_to_the_last_bit():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(3, 11)
    table = applied_strength(model, ids, sites=("value",), perpendicular=(), **QUIET).table
    sweep = scaling_sweep(
        model, ids, sites=("value",), layers=("all", "2"), parallel=(0.0,), perpendicular=(), controls=(), **QUIET
    ).table
    sweep = sweep[(sweep["scale"] == 0.0)].set_index("layers")["loss_change"]
    assert table[table["layer"].isna()]["loss_change"].item() == sweep["all"]
    assert table[table["layer"] == 2]["loss_change"].item() == sweep["2"]


def test_all_layers_together_have_the_mean_of_the_local_strengths():
    table = applied_strength(zoo.build("gpt2"), zoo.tokens(3, 11), sites=("mlp",), **QUIET).table
    for _, part in table.groupby("component"):
        alone, pooled = part[part["layer"].notna()], part[part["layer"].isna()].iloc[0]
        assert pooled["change_over_branch"] == pytest.approx(alone["change_over_branch"].mean())
        assert pooled["change_over_branch_low"] < pooled["change_over_branch"] < pooled["change_over_branch_high"]


def test_a_branch_of_zero_is_counted_and_left_out():
    model = zoo.build("llama_gqa", fresh=True)
    with torch.no_grad():
        model.blocks[1].mlp.out.weight.zero_()
    table = applied_strength(model, zoo.tokens(2, 8), sites=("mlp",), perpendicular=(), **QUIET).table
    row = table[table["layer"] == 1].iloc[0]
    assert row["n_undefined"] == 14
    assert np.isnan(row["change_over_branch"])
    assert row["status"] == "no_effect"
    assert np.isfinite(table[table["layer"].isna()]["change_over_branch"].item())


def test_what_cannot_be_measured_is_refused():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 8)
    with pytest.raises(DataError, match="nothing is edited"):
        applied_strength(model, ids, parallel=(1.0,), perpendicular=(), **QUIET)
    with pytest.raises(SiteError, match="'resid' is no site"):
        applied_strength(model, ids, sites=("resid",), **QUIET)
    with pytest.raises(SiteError, match="no token is left"):
        applied_strength(model, ids, exclude_positions=tuple(range(8)), **QUIET)
