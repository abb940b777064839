"""The profile: against plain loops, and the same whatever the batches."""

import math

import numpy as np
import pandas as pd
import pytest
import reference
import torch
import zoo

from lens_geometry.errors import DataError, GeometryError, ModelError, SiteError
from lens_geometry.experiments import profile
from lens_geometry.geometry import METRICS
from lens_geometry.results import Result
from lens_geometry.sites import HOOKS
from lens_geometry.stats import QUANTILES

QUIET = {"progress": False}


@pytest.fixture(scope="module")
def gqa():
    return zoo.build("llama_gqa", dtype=torch.float64)


def cached(model, ids):
    kept = {}
    names = [template.format(layer) for layer in range(4) for template in HOOKS.values()]
    hooks = [(name, lambda tensor, hook, name=name: kept.update({name: tensor})) for name in names]
    with torch.no_grad():
        model.run_with_hooks(ids, fwd_hooks=[(name, fn) for name, fn in hooks if name in model.hook_dict])
    return kept


@pytest.mark.parametrize("grouping", ["each", "kv_group", "merged"])
def test_every_number_equals_plain_loops_over_tokens(gqa, grouping):
    ids = zoo.tokens(2, 7)
    table = profile(gqa, ids, grouping=grouping, batch_size=1, **QUIET).table
    cache = cached(gqa, ids)
    for (site, layer), rows in table[table["layer"].isin((0, 3))].groupby(["site", "layer"]):
        found = reference.vectors(cache, site, layer, grouping)
        tokens = {key: reference.numbers(u, r) for key, (u, r) in found.items() if key[1] > 0}
        for row in rows.itertuples():
            values = [n[row.metric] for key, n in tokens.items() if pd.isna(row.head) or key[2] == row.head]
            assert row.n_tokens == len(values)
            assert row.mean == pytest.approx(np.mean(values), rel=1e-12), (site, layer, row.metric)
            assert row.std == pytest.approx(np.std(values, ddof=1), rel=1e-9, abs=1e-9)
            ordered = sorted(values)
            for q in QUANTILES:
                expected = ordered[max(math.ceil(q * len(values)) - 1, 0)]
                assert getattr(row, f"q{round(q * 100):02d}") == pytest.approx(expected, rel=1e-5)


def test_ratio_of_norms_is_made_of_root_sum_squares(gqa):
    ids = zoo.tokens(2, 7)
    table = profile(gqa, ids, sites=("mlp",), **QUIET).table.set_index(["layer", "metric"])["ratio_of_norms"]
    found = reference.vectors(cached(gqa, ids), "mlp", 1)
    kept = [(u, r, *reference.split(u, r)) for key, (u, r) in found.items() if key[1] > 0]
    total = lambda vectors: math.fsum(x * x for v in vectors for x in v)  # noqa: E731
    u, r, _, par, perp = (list(part) for part in zip(*kept, strict=True))
    dot = math.fsum(a * b for x, y in zip(u, r, strict=True) for a, b in zip(x, y, strict=True))
    assert table[1, "parallel_ratio"] == pytest.approx(math.sqrt(total(par) / total(perp)))
    assert table[1, "parallel_energy"] == pytest.approx(total(par) / total(u))
    assert table[1, "update_over_reference"] == pytest.approx(math.sqrt(total(u) / total(r)))
    assert table[1, "alpha"] == pytest.approx(dot / total(r))
    assert table[1, "cosine"] == pytest.approx(dot / math.sqrt(total(u) * total(r)))


def test_the_batch_size_changes_no_number():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(5, 9)
    one, other = (profile(model, ids, batch_size=size, quantile_sample=8, **QUIET).table for size in (1, 4))
    pd.testing.assert_frame_equal(one, other, rtol=1e-6, atol=1e-9)


def test_padding_is_not_measured():
    model = zoo.build("llama_gqa", dtype=torch.float64, tokenizer=True)
    texts = ["abcdefgh", "abcd"]
    padded = profile(model, texts, sequence_length=8, **QUIET).table
    alone = [profile(model, [text], sequence_length=8, **QUIET).table for text in texts]
    both = (alone[0]["mean"] * alone[0]["n_tokens"] + alone[1]["mean"] * alone[1]["n_tokens"]) / padded["n_tokens"]
    assert (padded["n_tokens"] == alone[0]["n_tokens"] + alone[1]["n_tokens"]).all()
    assert np.allclose(padded["mean"], both, rtol=1e-5, atol=1e-7)


def test_position_0_is_out_by_default_and_infinite_when_it_is_asked_for():
    model, ids = zoo.build("gpt2", dtype=torch.float64), zoo.tokens(2, 6)
    table = profile(model, ids, exclude_positions=(), sites=("value_excl_self", "value"), **QUIET).table
    rows = table[(table["metric"] == "parallel_ratio") & table["head"].isna()].set_index(["site", "layer"])
    assert (rows.loc["value_excl_self", "n_undefined"] > 0).all() or (
        rows.loc["value_excl_self", "mean"] > 1e3
    ).any()  # c_0 is zero, or rounding
    assert (rows["n_tokens"] + rows["n_infinite"] + rows["n_undefined"] == 2 * 6 * 4).all()
    default = profile(model, ids, sites=("value",), **QUIET)
    assert default.meta["counts"]["tokens_measured"] == 2 * 5
    assert "[0]" in default.meta["token_mask"]


def test_intervals_hold_the_mean_and_narrow_with_more_sequences():
    model = zoo.build("llama_gqa")
    width = {}
    for n in (8, 128):
        table = profile(model, zoo.tokens(n, 12), sites=("mlp",), max_sequences=None, **QUIET).table
        assert ((table["ci_low"] <= table["mean"]) & (table["mean"] <= table["ci_high"])).mean() > 0.9
        width[n] = (table["ci_high"] - table["ci_low"]).median()
    assert 2 < width[8] / width[128] < 8  # sqrt(128 / 8) = 4


def test_one_sequence_has_no_interval():
    table = profile(zoo.build("llama_gqa"), zoo.tokens(1, 12), **QUIET).table
    assert table["mean"].notna().all()
    assert table[["ci_low", "ci_high"]].isna().all(axis=None)


def test_a_site_named_twice_is_measured_once():
    once, twice = (
        profile(zoo.build("llama_gqa"), zoo.tokens(), sites=s, **QUIET).table for s in (("mlp",), ("mlp",) * 2)
    )
    pd.testing.assert_frame_equal(once, twice)


def test_hooks_that_were_left_on_the_model_are_named():
    model = zoo.build("llama_gqa", fresh=True)
    model.add_hook("blocks.1.hook_mlp_out", lambda tensor, hook: 0.1 * tensor)
    with pytest.warns(UserWarning, match="carries hooks of its own"):
        result = profile(model, zoo.tokens(), **QUIET)
    assert any("hooks of its own" in warning for warning in result.meta["warnings"])


def test_a_model_without_a_site_is_profiled_without_it_and_says_so():
    result = profile(zoo.build("opt_post_norm"), zoo.tokens(), **QUIET)
    assert set(result.table["site"]) == {"block", "value", "value_excl_self"}
    assert any("site attn was left out" in warning for warning in result.meta["warnings"])
    with pytest.raises(SiteError, match="none of the sites"):
        profile(zoo.build("opt_post_norm"), zoo.tokens(), sites=("attn",), **QUIET)


def test_both_classes_give_the_same_profile():
    if zoo.MAJOR > 3:
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    bridge, hooked = (profile(zoo.build("gemma2", b), zoo.tokens(), **QUIET).table for b in ("bridge", "hooked"))
    assert np.allclose(bridge["mean"], hooked["mean"], rtol=1e-3, atol=1e-5)


def test_activations_that_are_not_finite_are_named():
    model = zoo.build("llama_gqa", fresh=True)
    profile(model, zoo.tokens(), **QUIET)  # inspected while it was sound
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if ".2." in name and "mlp" in name).fill_(float("inf"))
    with pytest.raises(GeometryError, match=r"layer 2 are not finite \[blocks.2.hook_mlp_out\]"):
        profile(model, zoo.tokens(), **QUIET)


@pytest.mark.parametrize(
    ("data", "changes", "error", "words"),
    [
        ("", {"sequence_length": 16}, DataError, "empty|no text|no tokenizer"),
        ("no tokenizer here", {"sequence_length": 16}, DataError, "no tokenizer"),
        (torch.zeros(1, 65, dtype=torch.int64), {}, DataError, "context"),
        (zoo.tokens(), {"sites": ("resid",)}, SiteError, "no site to decompose"),
        (zoo.tokens(), {"sites": ("atn",)}, SiteError, "choose among attn"),
        (zoo.tokens(), {"grouping": "pairs"}, SiteError, "grouping"),
        (zoo.tokens(1, 2), {"exclude_positions": (0, 1)}, SiteError, "no token is left"),
        (zoo.tokens(), {"batch_size": 0}, DataError, "batch_size"),
        (zoo.tokens(), {"seed": -1}, DataError, "seed"),
        (zoo.tokens(), {"quantile_sample": 0}, DataError, "quantile_sample"),
        (zoo.tokens(), {"replicates": 0}, DataError, "replicates"),
        (zoo.tokens(), {"max_sequences": 2.5}, DataError, "max_sequences"),
    ],
)
def test_bad_input_is_one_clear_error(data, changes, error, words):
    with pytest.raises(error, match=words):
        profile(zoo.build("llama_gqa"), data, **changes, **QUIET)


def test_a_raw_hugging_face_model_is_refused_with_the_cure():
    with pytest.raises(ModelError, match="boot_transformers"):
        profile(zoo.hugging_face("gpt2"), zoo.tokens(), **QUIET)


def test_a_result_carries_its_provenance_and_survives_saving(tmp_path):
    result = profile(zoo.build("llama_gqa"), zoo.tokens(), **QUIET)
    assert set(result.table["metric"]) == set(METRICS)
    assert {"model", "data", "settings", "seed", "versions", "created", "token_mask", "counts"} <= set(result.meta)
    assert len(result.meta["data"]["tokens_sha256"]) == 64
    loaded = Result.load(result.save(tmp_path / "out"))
    pd.testing.assert_frame_equal(loaded.table, result.table)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "figure.html", "meta.json", "table.csv", "table.parquet",
    ]  # fmt: skip
    assert loaded.meta["settings"]["sequence_length"] == 256


def test_the_users_hooks_and_gradients_are_left_alone():
    model = zoo.build("llama_gqa", fresh=True)
    model.train()
    profile(model, zoo.tokens(), **QUIET)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
