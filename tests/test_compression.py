"""Compression error: against plain loops over tokens, on every class of model, and what is refused."""

import copy
import math

import numpy as np
import pandas as pd
import pytest
import reference
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

import lens_geometry as lg
from lens_geometry.block_runs import block_by_block
from lens_geometry.errors import DataError, ModelError, SiteError
from lens_geometry.sites import HOOKS, SITES
from lens_geometry.update_errors import DENSE, ERRORS, cosine_distance, dense_metrics, error_lengths, error_metrics

QUIET = {"progress": False, "replicates": 50}


def damaged(model, size=0.1, seed=0):
    """A copy whose matrices differ a little."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.add_((size * weight.std() * noise).to(weight.dtype))
    return other


def cached(model, ids, streams=None):
    """Every activation that the sites read; with `streams`, each block runs on the one that is given for it."""
    kept = {}
    names = [template.format(layer) for layer in range(zoo.LAYERS) for template in HOOKS.values()]
    given = [] if streams is None else [
        (HOOKS["resid_pre"].format(layer), lambda tensor, hook, stream=stream: stream.clone())
        for layer, stream in enumerate(streams)
    ]  # fmt: skip
    look = [
        (name, lambda tensor, hook, name=name: kept.update({name: tensor})) for name in names if name in model.hook_dict
    ]
    with torch.no_grad():
        logits = model.run_with_hooks(ids, fwd_hooks=given + look)
    return kept, logits


def norm(v):
    return math.sqrt(math.fsum(x * x for x in v))


def plain_numbers(u, v, x):
    """The definitions for one token, in plain floats."""
    e = [b - a for a, b in zip(u, v, strict=True)]
    alpha, parallel, perpendicular = reference.split(e, u)
    cosine = math.fsum(a * b for a, b in zip(u, v, strict=True)) / (norm(u) * norm(v))
    return {
        "error": norm(e) / norm(u),
        "perpendicular_error": norm(perpendicular) / norm(u),
        "parallel_error": norm(parallel) / norm(u),
        "parallel_shift": alpha,
        "perpendicular_share": norm(perpendicular) ** 2 / norm(e) ** 2,
        "parallel_share": norm(parallel) ** 2 / norm(e) ** 2,
        "update_cosine_distance": 1 - cosine,
        "error_over_reference": norm(e) / norm(x),
        "perpendicular_error_over_reference": norm(perpendicular) / norm(x),
    }


def plain_dense(u, x):
    _, parallel, perpendicular = reference.split(u, x)
    after = [a + b for a, b in zip(x, u, strict=True)]
    along = [a + b for a, b in zip(x, parallel, strict=True)]
    return {
        "update_over_reference": norm(u) / norm(x),
        "reference_cosine_distance": 1
        - math.fsum(a * b for a, b in zip(x, after, strict=True)) / norm(x) / norm(after),
        "cosine_link": 0.5 * (norm(perpendicular) / norm(along)) ** 2,
    }


@pytest.fixture(scope="module")
def pair():
    base = zoo.build("llama_gqa", dtype=torch.float64)
    return base, damaged(base)


@pytest.mark.parametrize("grouping", ["each", "kv_group", "merged"])
def test_every_number_equals_plain_loops_over_tokens(pair, grouping):
    base, other = pair
    ids = zoo.tokens(2, 6)
    sites = ("attn", "mlp", "block", "value", "value_excl_self")
    table = lg.compression_report(base, other, ids, sites=sites, grouping=grouping, batch_size=1, **QUIET).table
    ours, _ = cached(base, ids)
    local, _ = cached(other, ids, [ours[HOOKS["resid_pre"].format(layer)] for layer in range(zoo.LAYERS)])
    theirs = {"local": local, "propagated": cached(other, ids)[0]}
    checked = 0
    rows = table[table["layer"].isin((0, 2, 3)) & (table["site"] != "")]
    for (mode, site, layer), of_place in rows.groupby(["mode", "site", "layer"]):
        dense = reference.vectors(ours, site, layer, grouping)
        if mode == "dense":
            tokens = {at: plain_dense(*dense[at]) for at in dense if at[1] > 0}
        else:
            found = reference.vectors(theirs[mode], site, layer, grouping)
            tokens = {at: plain_numbers(dense[at][0], found[at][0], dense[at][1]) for at in dense if at[1] > 0}
        for row in of_place.itertuples():
            values = [n[row.metric] for at, n in tokens.items() if pd.isna(row.head) or at[2] == row.head]
            assert row.n_tokens == len(values)
            assert row.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-12), (mode, site, layer, row.metric)
            checked += 1
    assert checked > 200


@pytest.mark.parametrize(
    ("name", "backend"),
    zoo.cases(exclude=("opt_post_norm", "neox_sequential", "llama_gqa", "llama_bias", "qwen3", "gemma3", "granite")),
)
def test_a_model_run_block_by_block_is_the_model_and_local_blocks_see_the_dense_stream(name, backend):
    base = zoo.build(name, backend)
    other, ids = damaged(base), zoo.tokens(2, 6)
    result = lg.compression_report(base, other, ids, sites=("block",), batch_size=2, **QUIET)
    table = result.table[result.table["head"].isna()].set_index(["mode", "site", "layer", "metric"])["mean"]
    ours, base_logits = cached(base, ids)
    streams = [ours[HOOKS["resid_pre"].format(layer)] for layer in range(zoo.LAYERS)]
    local, (propagated, logits) = cached(other, ids, streams)[0], cached(other, ids)
    for mode, theirs in {"local": local, "propagated": propagated}.items():
        for layer in (0, zoo.LAYERS - 1):
            u, v = (
                (acts[HOOKS["resid_post"].format(layer)].double() - acts[HOOKS["resid_pre"].format(layer)].double())[
                    :, 1:
                ]
                for acts in (ours, theirs)
            )
            expected = ((v - u).norm(dim=-1) / u.norm(dim=-1)).mean()
            assert table[mode, "block", layer, "error"] == pytest.approx(float(expected), rel=1e-4)
    loss = [lg.metrics.token_losses(x.double(), ids).mean() for x in (base_logits, logits)]
    whole = result.table[(result.table["site"] == "") & result.table["layer"].isna()].set_index("metric")["mean"]
    assert whole["loss_base"] == pytest.approx(float(loss[0]), rel=1e-5)
    assert whole["loss_change"] == pytest.approx(float(loss[1] - loss[0]), rel=1e-3, abs=1e-5)
    p, q = base_logits[:, :-1].double().log_softmax(-1), logits[:, :-1].double().log_softmax(-1)
    assert whole["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3, abs=1e-6)
    assert whole["agreement"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_the_last_block_of_a_run_gives_the_logits_of_an_ordinary_pass_to_the_bit(backend):
    if ("llama_gqa", backend) not in zoo.cases():
        pytest.skip("not under this TransformerLens")
    model, ids = zoo.build("llama_gqa", backend), zoo.tokens(2, 6)
    with torch.no_grad():
        expected = model(ids, return_type="logits")
    with block_by_block(model) as blocks:
        assert blocks.steps_over
        stream = None
        for layer in range(blocks.n_layers):
            run = blocks.run(ids, layer, stream)
            stream = run.after
        last = blocks.n_layers - 1
        assert torch.equal(blocks.logits(ids, last, run.before), expected)
        blocks.steps_over = False  # the way for models that do not begin inside
        assert torch.equal(blocks.run(ids, last, run.before).after, run.after)
        assert torch.equal(blocks.logits(ids, last, run.before), expected)


def test_a_model_against_itself_has_no_error_and_undefined_shares(pair):
    base, _ = pair
    table = lg.compression_report(base, base, zoo.tokens(2, 6), **QUIET).table
    for metric in ("error", "perpendicular_error", "parallel_error", "update_cosine_distance", "loss_change", "kl"):
        assert (table.loc[table["metric"] == metric, "mean"] == 0).all(), metric
    assert (table.loc[table["metric"] == "agreement", "mean"] == 1).all()
    shares = table[table["metric"] == "perpendicular_share"]
    assert shares["mean"].isna().all()
    assert (shares["n_undefined"] > 0).all()
    assert (table.loc[table["metric"] == "weight_error", "mean"] == 0).all()


def test_one_layers_loss_is_that_of_the_dense_model_with_this_layer_exchanged(pair):
    base, other = pair
    ids = zoo.tokens(2, 6)
    table = lg.compression_report(base, other, ids, sites=("block",), layer_losses=True, **QUIET).table
    found = table[(table["mode"] == "local") & (table["site"] == "") & (table["metric"] == "loss_change")]
    assert found["layer"].tolist() == [0, 1, 2, 3]
    with torch.no_grad():
        clean = float(lg.metrics.token_losses(base(ids), ids).mean())
    for layer in (0, 2, 3):
        mixed = copy.deepcopy(base)
        theirs = dict(other.named_parameters())
        changed = [name for name in theirs if f"layers.{layer}." in name]
        assert changed
        with torch.no_grad():
            for name, weight in mixed.named_parameters():
                if name in changed:
                    weight.copy_(theirs[name])
            loss = float(lg.metrics.token_losses(mixed(ids), ids).mean())
        row = found.set_index("layer")["mean"]
        assert row[layer] == pytest.approx(loss - clean, rel=1e-6, abs=1e-9)


def test_a_blanked_block_has_an_error_that_is_all_parallel(pair):
    base, _ = pair
    blank = copy.deepcopy(base)
    with torch.no_grad():
        for name, weight in blank.named_parameters():
            if ".2." in name and ("o_proj" in name or "down_proj" in name):
                weight.zero_()
    table = lg.compression_report(base, blank, zoo.tokens(2, 6), sites=("block",), modes=("local",), **QUIET).table
    row = table[(table["layer"] == 2) & (table["mode"] == "local")].set_index("metric")["mean"]
    assert row["parallel_shift"] == pytest.approx(-1, abs=1e-12)
    assert row["perpendicular_error"] < 1e-12
    assert math.isnan(row["update_cosine_distance"])
    assert (table[(table["layer"] == 1) & (table["metric"] == "error")]["mean"] == 0).all()


def test_batches_change_nothing_and_the_last_token_is_the_last_real_one(pair):
    base, other = pair
    ids = zoo.tokens(3, 7)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 4:] = False
    given = lg.tokenize(base, ids)
    tokens = lg.Tokens(given.ids, mask, given.meta)
    several, single = (
        lg.compression_report(base, other, tokens, batch_size=size, measured="last", **QUIET).table for size in (3, 1)
    )
    pd.testing.assert_frame_equal(several, single, rtol=1e-9, atol=1e-12)
    row = several[(several["site"] == "attn") & (several["layer"] == 1) & (several["mode"] == "propagated")]
    ours, theirs = (cached(model, ids)[0]["blocks.1.hook_attn_out"] for model in (base, other))
    expected = [
        float((theirs[i, t] - ours[i, t]).norm() / ours[i, t].norm()) for i, t in enumerate((6, 3, 6))
    ]  # fmt: skip
    assert row.set_index("metric")["mean"]["error"] == pytest.approx(np.mean(expected), rel=1e-9)
    assert row.set_index("metric")["n_tokens"]["error"] == 3


def test_alignment_is_the_correlation_over_layers_of_the_printed_means(pair):
    base, other = pair
    table = lg.compression_report(base, other, zoo.tokens(4, 8), sites=("mlp",), **QUIET).table
    rows = table[(table["mode"] == "local") & (table["site"] == "mlp")]
    by_layer = rows[rows["layer"].notna()].pivot(index="layer", columns="metric", values="mean")
    over = rows[rows["layer"].isna()].set_index("metric")
    for part in ("perpendicular", "parallel"):
        x, y = by_layer["error"], by_layer[f"{part}_error"]
        assert over["mean"][f"pearson_{part}"] == pytest.approx(stats.pearsonr(x, y).statistic)
        assert over["mean"][f"spearman_{part}"] == pytest.approx(stats.spearmanr(x, y).statistic)
        assert over["ci_low"][f"pearson_{part}"] <= over["ci_high"][f"pearson_{part}"]
    assert over["mean"]["error"] == pytest.approx(by_layer["error"].mean())
    assert over["ci_low"]["error"] < over["mean"]["error"] < over["ci_high"]["error"]


def test_the_result_says_what_was_compared_and_survives_saving(pair, tmp_path):
    base, other = pair
    result = lg.compression_report(base, other, zoo.tokens(2, 6), **QUIET)
    result.save(tmp_path)
    again = lg.Result.load(tmp_path)
    pd.testing.assert_frame_equal(again.table, result.table)
    assert again.meta["model"]["fingerprint"] != again.meta["compressed"]["fingerprint"]
    assert again.meta["counts"]["tokens_measured"] == 10
    assert set(result.table.loc[result.table["mode"] == "local", "metric"]) >= set(ERRORS)
    assert set(result.table.loc[result.table["mode"] == "dense", "metric"]) == set(DENSE)


def test_names_are_loaded():
    text, small = lg.load_text("austen", max_characters=2000), {"max_sequences": 1, "sequence_length": 16, **QUIET}
    result = lg.compression_report(
        "twin-rmsnorm", "twin-rmsnorm", text, sites=("block",), modes=("propagated",), **small
    )
    assert result.meta["model"]["name"] == "twin-rmsnorm"
    assert any("same weights" in line for line in result.meta["warnings"])
    assert "local" not in set(result.table["mode"])


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ("twin-layernorm", "architecture is"),
        ("tiny-random-llama", "6 layers and the compressed model 4"),
    ],
)
def test_models_of_two_kinds_are_refused(other, problem):
    with pytest.raises(ModelError, match=problem):
        lg.compression_report("twin-rmsnorm", other, torch.arange(8)[None], **QUIET)


def test_models_of_two_dtypes_are_refused(pair):
    with pytest.raises(ModelError, match="float64.*float32.*Cure: load both in one dtype"):
        lg.compression_report(pair[0], zoo.build("llama_gqa"), zoo.tokens(2, 6), **QUIET)


@pytest.mark.skipif(zoo.MAJOR > 3, reason="TransformerLens 4 has no HookedTransformer")
def test_a_model_of_one_layer_can_be_compared():
    import transformer_lens

    settings = dict(n_layers=1, d_model=16, d_head=8, n_ctx=12, d_vocab=20, act_fn="gelu", seed=0)
    with zoo.quiet():
        base = transformer_lens.HookedTransformer(transformer_lens.HookedTransformerConfig(**settings)).eval()
    ids = torch.arange(16).reshape(2, 8)
    table = lg.compression_report(base, lg.compress.round_to_nearest(base, bits=3), ids, **QUIET).table
    values = table[table["layer"] == 0].set_index(["mode", "site", "head", "metric"])["mean"]
    for site in ("attn", "mlp", "block"):
        assert values["local", site, pd.NA, "error"] == values["propagated", site, pd.NA, "error"] > 0.01


def test_short_calibration_sequences_are_known_again():
    base, text = lg.load_model("twin-rmsnorm"), lg.load_text("austen", max_characters=4000)
    ids = lg.tokenize(base, text, sequence_length=20, max_sequences=9).ids
    mask = torch.ones(9, 40, dtype=torch.bool)
    mask[:8, 20:] = False
    padded = torch.zeros(9, 40, dtype=torch.int64)
    padded[:, :20], padded[8, 20:] = ids, ids[8].flip(0)
    sessions = lg.Tokens(padded, mask, lg.tokenize(base, padded).meta)
    sparse = lg.compress.wanda(base, sessions, sparsity=0.5)
    with pytest.raises(DataError, match="calibrated on this text"):
        lg.compression_report(base, sparse, ids[:8], sites=("block",), modes=("propagated",), **QUIET)


def test_models_under_two_edits_are_refused(monkeypatch, pair):
    described = lg.models.describe
    edit = {"status": "attached", "settings": {"site": "value"}}
    monkeypatch.setattr(lg.models, "describe", lambda m: described(m) | ({"suppression": edit} if m is pair[1] else {}))
    with pytest.raises(ModelError, match="base none; compressed attached"):
        lg.compression_report(*pair, zoo.tokens(2, 6), **QUIET)


def test_the_weights_of_a_bridges_own_queries_keys_and_values_count_once():
    base = zoo.build("neox")
    other = copy.deepcopy(base)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if "layers.1." in name and weight.ndim > 1 and "qkv" not in name:
                weight.mul_(1.5)
    table = lg.compression_report(base, other, zoo.tokens(2, 6), sites=("block",), **QUIET).table
    errors = table[table["metric"] == "weight_error"].set_index("layer")["mean"]
    assert errors[1] == pytest.approx(0.5)
    assert errors[0] == 0


def test_sites_of_two_shapes_are_refused_and_a_narrower_mlp_is_not():
    base, narrow = zoo.build("llama_gqa"), zoo.build("llama_gqa", d_mlp=80, fresh=True)
    table = lg.compression_report(base, narrow, zoo.tokens(2, 6), sites=("mlp",), **QUIET).table
    assert table.loc[table["metric"] == "weight_error", "mean"].isna().all()
    with pytest.raises(ModelError, match="per token"):
        lg.compression_report(base, narrow, zoo.tokens(2, 6), sites=("mlp_carrier",), **QUIET)


def test_two_tokenizers_are_refused_where_they_differ(monkeypatch):
    from tokenizers import normalizers

    base, other = (lg.load_model("tiny-random-llama") for _ in range(2))
    lower = copy.deepcopy(other.tokenizer)
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    monkeypatch.setattr(other, "tokenizer", lower)
    with pytest.raises(DataError, match=r"tokenizers differ on this text \(in sequence 0, token 3 is 73 and 105\)"):
        lg.compression_report(base, other, "as I was", **QUIET)
    lg.compression_report(base, other, "as i was", sites=("block",), **QUIET)


def test_weights_that_are_not_finite_are_named(pair):
    base, _ = pair
    broken = copy.deepcopy(base)
    with torch.no_grad():
        for name, weight in broken.named_parameters():
            if ".2." in name and "o_proj" in name:
                weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="a weight of the compressed model is not finite.*2.*o_proj"):
        lg.compression_report(base, broken, zoo.tokens(2, 6), **QUIET)


@pytest.mark.parametrize("changes", [{"modes": ()}, {"modes": ("both",)}, {"modes": "local"}, {"measured": "first"}])
def test_settings_that_mean_nothing_are_refused(pair, changes):
    with pytest.raises(DataError):
        lg.compression_report(*pair, zoo.tokens(2, 6), **changes, **QUIET)


def test_a_sequence_of_one_token_leaves_nothing_to_measure(pair):
    with pytest.raises((SiteError, DataError)):
        lg.compression_report(*pair, zoo.tokens(2, 1), **QUIET)


def test_text_that_the_compressed_model_was_calibrated_on_is_refused():
    base, text = lg.load_model("twin-rmsnorm"), lg.load_text("austen", max_characters=4000)
    calibrated = lg.tokenize(base, text, sequence_length=64, max_sequences=4)
    sparse = lg.compress.wanda(base, calibrated, sparsity=0.5)
    short = {"sites": ("block",), "modes": ("propagated",), **QUIET}
    with pytest.raises(DataError, match="the compressed model was calibrated on this text"):
        lg.compression_report(base, sparse, calibrated.take(slice(1, 2)), **short)
    other = lg.load_text("moby-dick", max_characters=4000)
    result = lg.compression_report(base, sparse, other, max_sequences=2, sequence_length=64, **short)
    assert result.meta["calibration"] == {"known": True, "windows": 66, "shared": 0}
    assert result.meta["compressed"]["compression"]["method"] == "wanda"
    unknown = lg.compression_report(base, damaged(base), other, max_sequences=2, sequence_length=64, **short)
    assert any("is not known" in line for line in unknown.meta["warnings"])


vectors = arrays(np.float64, (3, 5), elements=st.floats(-10, 10).map(lambda x: round(x, 3)))


@given(vectors, vectors, vectors)
def test_the_parts_of_an_error_are_orthogonal_and_add_up(u, v, x):
    u, v, x = map(torch.from_numpy, (u, v, x))
    found = error_lengths(u, v, x)
    torch.testing.assert_close(found.parallel**2 + found.perpendicular**2, found.error**2, rtol=1e-9, atol=1e-9)
    metrics = error_metrics(found)
    shares = metrics["parallel_share"] + metrics["perpendicular_share"]
    assert ((shares - 1).abs() < 1e-9)[found.error > 0].all()
    assert shares[found.error == 0].isnan().all()
    cosine = torch.nn.functional.cosine_similarity(u, v, dim=-1)
    there = (u.norm(dim=-1) > 1e-3) & (v.norm(dim=-1) > 1e-3)
    torch.testing.assert_close(metrics["update_cosine_distance"][there], (1 - cosine)[there], rtol=1e-7, atol=1e-9)


@given(st.floats(1e-6, 1e-3))
def test_a_small_turn_is_measured_without_cancellation_and_the_link_is_close_to_it(angle):
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    u = torch.tensor([0.0, math.tan(angle)], dtype=torch.float64)
    found = dense_metrics(lg.update_errors.dense_lengths(u, x))
    assert float(found["reference_cosine_distance"]) == pytest.approx(2 * math.sin(angle / 2) ** 2, rel=1e-12)
    assert float(found["cosine_link"]) == pytest.approx(float(found["reference_cosine_distance"]), rel=1e-5)
    assert cosine_distance(torch.tensor(0.0), torch.tensor(0.0)).isnan()


def test_every_site_can_be_compared():
    base = zoo.build("gpt2")
    sites = tuple(name for name in SITES if name != "resid")
    table = lg.compression_report(base, damaged(base), zoo.tokens(2, 6), sites=sites, modes=("local",), **QUIET).table
    assert set(table["site"]) == {*sites, ""}
