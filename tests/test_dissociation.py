"""The direction-against-magnitude experiment on small models: numbers by hand, resuming, and what is counted."""

import json

import numpy as np
import pytest
import torch
import zoo

from lens_geometry.data import tokenize
from lens_geometry.edits import PRESETS, Batch, perturb
from lens_geometry.errors import DataError, ResultError, SiteError
from lens_geometry.experiments.calibration import median_norms, principal_directions
from lens_geometry.experiments.dissociation import dissociation, side_by_side
from lens_geometry.experiments.dissociation_plan import DissociationSettings
from lens_geometry.experiments.equal_loss import displacement_at
from lens_geometry.experiments.variants import VARIANTS
from lens_geometry.metrics import token_losses
from lens_geometry.pair_tokens import tokenize_pairs
from lens_geometry.pairs import load_pairs
from lens_geometry.runner import RunSettings

QUICK = dict(displacements=(0.1, 0.4), seeds=2, variants=("default",), max_pairs=6, progress=False, batch_size=3)


@pytest.fixture(scope="module")
def model():
    return zoo.build("llama_gqa", dtype=torch.float64, tokenizer=True)


@pytest.fixture(scope="module")
def found(model):
    settings = {**QUICK, "variants": ("default", "as_run"), "equal_loss": (0.02,)}
    return dissociation(model, zoo.tokens(4, 20), "agreement-simple", **settings)


def damages(result, **which):
    rows = result.table
    for name, value in which.items():
        rows = rows[rows[name] == value]
    return rows


def plain_losses(model, ids, hooks):
    with torch.no_grad():
        return token_losses(model.run_with_hooks(ids, return_type="logits", fwd_hooks=hooks), ids).double()


@pytest.mark.parametrize("variant", ["default", "as_run"])
@pytest.mark.parametrize("kind", ["angular", "magnitude"])
def test_damage_is_what_running_the_hooks_by_hand_gives(model, found, variant, kind):
    ids = zoo.tokens(4, 20)
    base = plain_losses(model, ids, []).mean()
    changes = []
    for seed in (0, 1):
        hooks = perturb(model, kind, 0.4, PRESETS[variant], layers=1, seed=seed, batch=Batch(ids=[0, 1, 2, 3]))
        changes.append(float(plain_losses(model, ids, hooks).mean() - base))
        row = damages(found, variant=variant, kind=kind, displacement=0.4, quantity="loss", seed=seed).iloc[0]
        assert row["value"] == pytest.approx(changes[-1], abs=1e-6)
        assert row["level"] == pytest.approx(float(base) + changes[-1], abs=1e-6)
        assert row["status"] == "ok"
    pooled = damages(found, variant=variant, kind=kind, displacement=0.4, quantity="loss", matched="displacement")
    assert pooled[pooled["seed"].isna()]["value"].item() == pytest.approx(np.mean(changes), abs=1e-6)


def test_margins_are_those_of_sentences_run_one_by_one_with_the_pair_s_noise(model, found):
    tokens = tokenize_pairs(model, load_pairs("agreement-simple", max_pairs=6))
    margins = []
    for pair in range(6):
        scores = []
        for row in (2 * pair, 2 * pair + 1):
            ids = tokens.ids[row : row + 1, : int(tokens.mask[row].sum())]
            hooks = perturb(model, "angular", 0.4, layers=1, seed=1, batch=Batch(ids=[tokens.noise_ids[row]]))
            scores.append(-float(plain_losses(model, ids, hooks).sum()))
        margins.append(scores[0] - scores[1])
    row = damages(found, variant="default", kind="angular", displacement=0.4, quantity="margin", seed=1).iloc[0]
    assert row["level"] == pytest.approx(np.mean(margins), abs=1e-4)
    accuracy = damages(found, variant="default", kind="angular", displacement=0.4, quantity="accuracy", seed=1).iloc[0]
    assert accuracy["level"] == pytest.approx(np.mean(np.array(margins) > 0))


def test_the_realised_displacement_stands_in_the_table(found):
    rows = damages(found, variant="default", matched="displacement", quantity="loss")
    rows = rows[rows["kind"].isin(["angular", "magnitude"]) & rows["seed"].notna()]
    assert len(rows) == 8
    assert rows["displacement_max_error"].max() < 1e-9
    assert (rows["n_places"] > 0).all()
    both = rows.groupby(["displacement", "seed"])["displacement_mean"]
    assert (both.max() / both.min() - 1).max() < 0.05  # the same norms, but for what earlier layers did to them
    meta = found.meta
    assert meta["counts"]["conditions"] == 24
    assert meta["counts"]["ok_conditions"] + meta["counts"]["not_reached_conditions"] == 24
    verdicts = {row["verdict"] for row in meta["verdicts"]}
    assert verdicts <= {"dissociation", "one-sided", "none", "reversed", "undecided"}
    assert {"model", "data", "pairs", "settings", "versions", "token_mask"} <= meta.keys()


def test_at_equal_loss_both_kinds_cost_what_was_asked(found):
    rows = damages(found, matched="loss", quantity="loss", displacement=0.02)
    rows = rows[rows["seed"].isna() & rows["kind"].isin(["angular", "magnitude"])]
    reached = rows[rows["status"] == "ok"]
    assert len(rows) == 4
    assert len(reached) >= 1
    assert reached["value"].between(0.015, 0.025).all()
    assert set(rows["status"]) <= {"ok", "not_reached"}
    assert (rows["unit"] == "nats").all()


def test_a_run_that_is_started_again_goes_on_and_may_ask_for_more(model, tmp_path, monkeypatch):
    ids = zoo.tokens(3, 16)
    first = dissociation(model, ids, "agreement-simple", **QUICK, out=tmp_path)
    lines = (tmp_path / "text.journal.jsonl").read_text().splitlines()
    assert len(lines) == 2 + 8  # head, base, two kinds, two displacements, two seeds
    (tmp_path / "text.journal.jsonl").write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])  # killed while writing
    ran = []
    real = perturb

    def counted(*args, **more):
        ran.append(args[1:3])
        return real(*args, **more)

    monkeypatch.setattr("lens_geometry.experiments.variants.perturb", counted)
    again = dissociation(model, ids, "agreement-simple", **QUICK, out=tmp_path)
    assert again.table.equals(first.table)
    assert len(ran) == 5  # those whose lines were lost
    ran.clear()
    more = dissociation(model, ids, "agreement-simple", **{**QUICK, "variants": ("default", "growing")}, out=tmp_path)
    assert len(ran) == 2 * 4  # only magnitude changes differ between the two variants, on text and pairs
    assert more.table[more.table["variant"] == "default"].reset_index(drop=True).equals(first.table)
    with pytest.raises(ResultError, match="tokens_sha256"):
        dissociation(model, zoo.tokens(3, 16, seed=1), "agreement-simple", **QUICK, out=tmp_path)


def test_impossible_displacements_are_counted_and_compared_no_further(model):
    with pytest.warns(UserWarning, match="impossible"):
        result = dissociation(model, zoo.tokens(3, 16), None, **{**QUICK, "displacements": (0.2, 1.5)})
    rows = damages(result, displacement=1.5, quantity="loss")
    assert set(rows[rows["kind"] == "magnitude"]["status"]) == {"impossible"}
    assert set(rows[rows["kind"] == "angular"]["status"]) == {"ok"}
    assert rows[rows["kind"] == "difference"]["value"].isna().all()
    assert result.meta["counts"]["impossible_conditions"] == 2
    assert json.dumps(result.meta["verdicts"])  # plain values
    whole = damages(result, kind="contrast", regime="all", quantity="loss").iloc[0]
    assert whole["n_left_out"] == 1


def test_variants_do_what_they_say_and_share_what_is_the_same():
    keys = {name: (v.key("angular", 10), v.key("magnitude", 10)) for name, v in VARIANTS.items()}
    assert keys["shared_noise"][1] == keys["default"][1]
    assert keys["fixed_signs"][0] == keys["default"][0]
    assert keys["with_position_0"][0] != keys["default"][0]
    assert keys["paper"] == keys["with_position_0"]
    assert len({both for name, both in keys.items() if name != "paper"}) == len(keys) - 1
    assert VARIANTS["as_run"].how == PRESETS["as_run"]


def test_windows_cover_the_depth_and_middle_is_the_middle_third():
    model = zoo.build("gpt2")
    settings = {**QUICK, "displacements": (0.1,), "seeds": 1, "layers": ("windows:2", "middle")}
    result = dissociation(model, zoo.tokens(2, 12), None, **settings)
    assert list(dict.fromkeys(result.table["layers"])) == ["0-1", "1-2", "2-3", "middle"]
    assert set(result.table["normalization"]) == {model.cfg.normalization_type}


def test_principal_directions_are_those_of_a_plain_svd(model):
    ids = zoo.tokens(6, 20)
    tokens = tokenize(model, ids)
    found = principal_directions(model, tokens, 3, layers=2, settings=RunSettings(progress=False, batch_size=4))
    kept = {}
    name = "blocks.2.hook_resid_pre"
    with torch.no_grad():
        model.run_with_hooks(ids, fwd_hooks=[(name, lambda x, hook: kept.update(x=x[:, 1:].flatten(0, 1)))])
    centred = kept["x"] - kept["x"].mean(0)
    expected = torch.linalg.svd(centred, full_matrices=False).Vh[:3]
    assert torch.allclose((found[2].double() @ expected.T).abs(), torch.eye(3, dtype=torch.float64), atol=1e-4)
    assert not found[1].any()
    medians = median_norms(model, tokens, layers=2, settings=RunSettings(progress=False, batch_size=4))
    assert float(medians[2]) == pytest.approx(float(kept["x"].norm(dim=-1).median()), rel=1e-6)


def test_the_median_unit_moves_all_tokens_of_a_layer_alike(model):
    ids = zoo.tokens(4, 20)
    result = dissociation(model, ids, None, **{**QUICK, "unit": "median", "seeds": 1, "layers": ("1",)})
    median = float(median_norms(model, tokenize(model, ids), layers=1, settings=RunSettings(progress=False))[1])
    rows = damages(result, kind="angular", displacement=0.4, quantity="loss", seed=0)
    assert rows["displacement_mean"].item() == pytest.approx(0.4 * median, rel=1e-5)


def test_a_loss_that_was_not_met_is_not_called_equal(model, monkeypatch):
    always = lambda target, doses, damages: 0.3  # noqa: E731
    monkeypatch.setattr("lens_geometry.experiments.dissociation_runs.displacement_at", always)
    with pytest.warns(UserWarning, match="not reached"):
        result = dissociation(model, zoo.tokens(2, 12), None, **{**QUICK, "equal_loss": (5.0,)})
    rows = damages(result, matched="loss", quantity="loss")
    assert set(rows[rows["kind"].isin(["angular", "magnitude"]) & (rows["regime"] == "")]["status"]) == {"not_reached"}


def test_a_journal_of_pairs_that_were_moved_by_another_text_s_medians_is_refused(model, tmp_path):
    settings = {**QUICK, "unit": "median", "seeds": 1}
    dissociation(model, zoo.tokens(2, 12), "agreement-simple", **settings, out=tmp_path)
    (tmp_path / "text.journal.jsonl").unlink()
    with pytest.raises(ResultError, match="measured_on_tokens_sha256"):
        dissociation(model, zoo.tokens(2, 12, seed=1), "agreement-simple", **settings, out=tmp_path)


def test_another_scoring_goes_on_with_the_text_s_journal_and_bos_reaches_the_pairs(model, tmp_path):
    settings = {**QUICK, "seeds": 1, "displacements": (0.2,)}
    text = "The cat sat on the mat and the dog ran after it all day long. " * 3
    settings |= {"sequence_length": 24, "max_sequences": 2}
    dissociation(model, text, "agreement-simple", **settings, out=tmp_path)
    before = (tmp_path / "text.journal.jsonl").read_text()
    (tmp_path / "pairs_agreement-simple.journal.jsonl").unlink()
    dissociation(model, text, "agreement-simple", **settings, scoring="normalised", out=tmp_path)
    assert (tmp_path / "text.journal.jsonl").read_text() == before
    found = dissociation(model, text, "agreement-simple", **settings, prepend_bos=True)
    assert found.meta["pairs"]["agreement-simple"]["prepend_bos"]


def test_a_semantic_tangent_where_tokens_repeat_is_impossible_and_no_crash():
    ids = torch.tensor([[5, 9, 5, 9, 5, 9, 5, 9]] * 2)
    settings = {**QUICK, "layers": ("0",), "variants": ("semantic",), "displacements": (0.1,), "seeds": 1}
    with pytest.warns(UserWarning, match="impossible"):
        result = dissociation(zoo.build("llama_gqa"), ids, None, **settings)
    rows = damages(result, quantity="loss", seed=0)
    assert dict(zip(rows["kind"], rows["status"], strict=True)) == {"angular": "impossible", "magnitude": "ok"}


def test_models_of_one_name_are_told_apart():
    settings = {**QUICK, "displacements": (0.1,), "seeds": 1}
    results = [dissociation(zoo.build("gpt2"), zoo.tokens(2, 12, seed=i), None, **settings) for i in range(2)]
    both = side_by_side(results)
    names = list(dict.fromkeys(both.table["model"]))
    assert len(names) == 2
    assert names[1] == f"{names[0]} #2"


def test_models_stand_side_by_side_with_their_norms():
    settings = {**QUICK, "displacements": (0.1,), "seeds": 1}
    results = [dissociation(zoo.build(name), zoo.tokens(2, 12), None, **settings) for name in ("gpt2", "llama_gqa")]
    both = side_by_side(results)
    assert both.table["model"].nunique() == 2
    assert both.table["normalization"].nunique() == 2
    assert len({row["model"] for row in both.meta["verdicts"]}) == 2


def test_equal_loss_is_read_off_in_logarithms():
    assert displacement_at(0.2, [0.1, 0.4], [0.1, 0.4]) == pytest.approx(0.2)
    assert displacement_at(0.4, [0.1, 0.2], [0.1, 0.4]) == pytest.approx(0.2)
    assert displacement_at(0.1, [0.2, 0.4], [0.4, 1.6]) == pytest.approx(0.1)  # the square law below the first dose
    assert np.isnan(displacement_at(3.0, [0.2, 0.4], [0.4, 1.6]))
    assert np.isnan(displacement_at(0.1, [0.2, 0.4], [-0.4, float("nan")]))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (dict(displacements=()), DataError, "displacements"),
        (dict(displacements=(0.1, 0.1)), DataError, "twice"),
        (dict(displacements=(0.0,)), DataError, "above 0"),
        (dict(variants=("loud",)), DataError, "as_run"),
        (dict(variants="default"), DataError, "tuple"),
        (dict(layers="middle"), DataError, "10-17"),
        (dict(layers=("windows:9",)), DataError, "windows:4"),
        (dict(layers=("7",)), SiteError, "layer 7"),
        (dict(seeds=0), DataError, "seeds"),
        (dict(unit="metres"), DataError, "median"),
        (dict(displacements=("far",)), DataError, "above 0"),
        (dict(low_regime="low"), DataError, "low_regime"),
        (dict(seed=2**70), DataError, "seed"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        dissociation(zoo.build("gpt2"), zoo.tokens(2, 8), None, DissociationSettings(progress=False, **settings))


def test_pairs_need_a_tokenizer_and_names_of_their_own():
    with pytest.raises(DataError, match="tokenizer"):
        dissociation(zoo.build("gpt2"), zoo.tokens(2, 8), "agreement-simple", **QUICK)
    with pytest.raises(DataError, match="twice"):
        dissociation(zoo.build("gpt2", tokenizer=True), zoo.tokens(2, 8), ["anaphor-number"] * 2, **QUICK)
