"""The experiment on pathways: what it repairs, what it divides, and what it refuses."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

from lens_geometry.anatomy import attached
from lens_geometry.edits import Batch, clean_run, perturb, repair
from lens_geometry.errors import DataError, HookError, ModelError, ResultError, SiteError
from lens_geometry.experiments import pathway_repair
from lens_geometry.experiments.clean_batches import CleanBatches
from lens_geometry.experiments.recovery import Repaired, recovery_row
from lens_geometry.metrics import SequenceLosses, sequence_losses

SMALL = {"displacements": (0.5,), "seeds": 2, "layers": "1-2", "batch_size": 4, "progress": False}
QUICK = {**SMALL, "kinds": ("angular",), "seeds": 1, "pathways": ("mlp_output",)}


@cache
def said(model, rows=6, length=14):
    """Tokens that the model finds likely, so that perturbing it does damage."""
    ids = zoo.tokens(rows, length)
    with torch.no_grad():
        for place in range(3, length):
            ids[:, place] = model(ids[:, :place], return_type="logits")[:, -1].argmax(-1)
    return ids


def row(table, kind, pathway, seed=None):
    found = table[(table["kind"] == kind) & (table["pathway"] == pathway) & table["head"].isna()]
    found = found[found["seed"].isna()] if seed is None else found[found["seed"] == seed]
    assert len(found) == 1
    return found.iloc[0]


@pytest.fixture(scope="module")
def result():
    model = zoo.build("llama_gqa")
    pathways = ("attention_pattern", "layernorm_scale", "attention_output+mlp_output")
    return pathway_repair(model, said(model), **{**SMALL, "seeds": 4, "batch_size": 6, "pathways": pathways})


def test_recoveries_are_those_of_losses_computed_by_hand(result):
    model = zoo.build("llama_gqa")
    ids = said(model)

    def loss(hooks):
        with torch.no_grad(), attached(model, hooks):
            logs = model(ids, return_type="logits").double().log_softmax(-1)
        return -float(logs[:, :-1].gather(-1, ids[:, 1:, None]).mean())

    base = loss([])
    for kind in ("angular", "magnitude"):
        for seed in (0, 1):
            push = perturb(model, kind, 0.5, layers="1-2", seed=seed, batch=Batch(ids=[*range(6)]))
            damage = loss(push) - base
            for joint in ("attention_pattern", "layernorm_scale", "attention_output+mlp_output"):
                pathways = joint.split("+")
                hooks = push + repair(model, pathways, clean_run(model, ids, pathways, layers="1-"), layers="1-")
                found = row(result.table, kind, joint, seed)
                assert found["damage"] == pytest.approx(damage, abs=1e-5)
                assert found["repaired_loss"] == pytest.approx(loss(hooks), abs=1e-5)
                assert found["recovery"] == pytest.approx((loss(push) - loss(hooks)) / damage, abs=1e-4)


def test_everything_gives_all_back_nothing_gives_nothing_back(result):
    for kind in ("angular", "magnitude"):
        for seed in (None, 0, 1):
            whole, none = (row(result.table, kind, name, seed) for name in ("everything", "nothing"))
            assert (whole["recovery"], whole["repaired_loss"]) == (1.0, whole["clean_loss"])
            assert (none["recovery"], none["repaired_loss"]) == (0.0, none["perturbed_loss"])
    pooled = result.table[result.table["seed"].isna()]
    assert set(pooled["status"]) == {"ok"}
    fine = pooled[pooled["pathway"] != "nothing"]
    assert (fine["recovery_low"] <= fine["recovery"]).all()
    assert (fine["recovery"] <= fine["recovery_high"]).all()
    assert result.meta["perturbed_layers"] == [1, 2]
    assert result.meta["repaired_layers"] == [1, 2, 3]
    assert pooled["displacement_max_error"].max() < 1e-4


def test_a_joint_repair_stands_beside_the_sum_of_its_parts(result):
    for kind in ("angular", "magnitude"):
        joint = row(result.table, kind, "attention_output+mlp_output")
        singles = [row(result.table, kind, name)["recovery"] for name in ("attention_output", "mlp_output")]
        assert joint["sum_of_singles"] == pytest.approx(sum(singles), rel=1e-9)
        assert joint["additivity_gap"] == pytest.approx(joint["recovery"] - sum(singles), rel=1e-6, abs=1e-9)
        assert joint["additivity_gap_low"] <= joint["additivity_gap"] <= joint["additivity_gap_high"]
        assert np.isnan(row(result.table, kind, "mlp_output")["additivity_gap"])


def test_single_heads_have_a_row_each_and_are_what_a_plain_repair_of_one_gives():
    model = zoo.build("llama_gqa")
    ids, more = said(model), {"single_heads": True, "head_layers": "2"}
    table = pathway_repair(model, ids, **{**QUICK, **more}).table
    heads = table[table["head"].notna()]
    assert heads[["layer", "head"]].to_numpy().tolist() == [[2, head] for head in range(6)]
    assert heads["seed"].isna().all()
    assert set(heads["pathway"]) == {"head_output"}
    assert set(heads["repaired_layers"]) == {"2"}
    hooks = perturb(model, "angular", 0.5, layers="1-2", seed=0, batch=Batch(ids=[*range(6)]))
    hooks += repair(model, "head_output", clean_run(model, ids, "head_output", layers=2), layers=2, heads=3)
    with torch.no_grad(), attached(model, hooks):
        loss = float(model(ids, return_type="loss"))
    assert heads["repaired_loss"].iloc[3] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(
            *case, marks=[] if case in (("neox", "bridge"), ("opt", "bridge"), ("gpt2", "hooked")) else pytest.mark.slow
        )
        for case in zoo.cases()
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_model_gets_its_clean_losses_back_exactly(name, backend):
    model = zoo.build(name, backend)
    changes = {**QUICK, "kinds": ("magnitude",), "pathways": ("attention_output", "layernorm_scale", "final_norm")}
    table = pathway_repair(model, zoo.tokens(3, 10), **{**changes, "batch_size": 2}).table
    whole = table[table["pathway"].isin(["everything", "final_norm"])]
    assert (whole["repaired_loss"] == whole["clean_loss"]).all()
    none = table[table["pathway"] == "nothing"]
    assert (none["repaired_loss"] == none["perturbed_loss"]).all()
    assert not (table["perturbed_loss"] == table["clean_loss"]).any()


def test_a_parallel_model_is_told_that_its_norms_reset_both_branches():
    model = zoo.build("neox")
    with pytest.warns(UserWarning, match="resets the inputs of both branches"):
        result = pathway_repair(model, said(model), **{**QUICK, "pathways": ("layernorm_output",)})
    assert any("both branches" in warning for warning in result.meta["warnings"])


def test_pathways_that_a_model_lacks_are_left_out_by_name_and_their_joints_with_them():
    model = zoo.build("opt")
    with pytest.warns(UserWarning, match="attention_pattern was left out: the attention map cannot be edited"):
        table = pathway_repair(
            model, said(model), **{**QUICK, "pathways": ("mlp_output", "attention_pattern+mlp_output")}
        ).table
    assert list(table["pathway"].unique()) == ["nothing", "mlp_output", "everything"]
    with pytest.raises(SiteError, match="cannot be edited"):
        pathway_repair(model, said(model), **{**QUICK, "pathways": ("attention_pattern",)})


def test_a_run_that_is_started_again_runs_nothing_twice(tmp_path, monkeypatch):
    model = zoo.build("llama_gqa")
    ids, whole = said(model), pathway_repair(model, said(model), out=tmp_path / "whole", **QUICK).table
    lines = (tmp_path / "whole" / "journal.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 2 + 4  # head and base; perturbed, nothing, mlp_output, everything
    half = tmp_path / "half"
    half.mkdir()
    (half / "journal.jsonl").write_text("".join(lines[:4]) + lines[4][:25])  # killed while writing
    calls = []
    monkeypatch.setattr("lens_geometry.runner.sequence_losses", lambda *a: calls.append(1) or sequence_losses(*a))
    again = pathway_repair(model, ids, out=half, **QUICK).table
    pd.testing.assert_frame_equal(again, whole, check_exact=True)
    assert len(calls) == 2 * (2 + 1)  # two batches of what was missing, and of the unedited model
    with pytest.raises(ResultError, match="batch_size"):  # the last bits of a loss depend on it
        pathway_repair(model, ids, out=half, **{**QUICK, "batch_size": 3})


def test_one_batch_and_many_give_the_same_recoveries():
    model = zoo.build("gpt2", dtype=torch.float64)
    tables = [pathway_repair(model, said(model), **{**QUICK, "batch_size": size}).table for size in (2, 6)]
    pd.testing.assert_frame_equal(*tables, rtol=1e-9)


def test_clean_batches_are_run_once_while_there_is_room_and_are_right_without_it():
    model, name = zoo.build("llama_gqa"), "blocks.2.hook_mlp_out"
    batches = [zoo.tokens(2, 8, seed=seed) for seed in range(3)]
    expected = [clean_run(model, ids, "mlp_output", layers=2)[name] for ids in batches]
    one = expected[0].numel() * 4
    for room in (1e9, 2 * one, 0):
        clean = CleanBatches(model, [name], most_bytes=room)
        for number in (0, 1, 2, 1, 0, 2):
            with torch.no_grad():
                clean.take(batches[number])
            assert torch.equal(clean[name], expected[number])
        assert len(clean.kept) == min(3, int(room // one))
        assert dict(clean).keys() == {name}


def test_a_check_that_fails_is_an_error_and_no_table(monkeypatch):
    model = zoo.build("llama_gqa")
    ids = said(model)
    wrong = lambda self, batch: setattr(self, "current", {n: a + 1 for n, a in _keep(self, batch).items()})  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(CleanBatches, "take", wrong)
        with pytest.raises(HookError, match="repairing everything does not give the clean losses"):
            pathway_repair(model, ids, **QUICK)
    runs = iter(range(99))
    monkeypatch.setattr(
        "lens_geometry.experiments.variants.perturb", lambda *a, **k: perturb(*a, **{**k, "seed": next(runs)})
    )
    with pytest.raises(HookError, match="repairing nothing does not give the perturbed losses"):
        pathway_repair(model, ids, **QUICK)


def _keep(self, batch):
    from lens_geometry.edits import keep_activations

    return keep_activations(self.model, batch, self.names)


def losses(sums, nonfinite=0):
    sums = np.asarray(sums, np.float64)
    counts = np.full(len(sums), 10)
    return SequenceLosses(sums, counts, np.full(len(sums), nonfinite))


def test_recovery_of_known_losses():
    clean = losses([10, 20, 30, 40])
    hurt = 2 * [losses([30, 40, 50, 60]), losses([40, 50, 60, 70])]  # damage 2 and 3 nats per token
    part = {"a": 2 * [losses([20, 30, 40, 50]), losses([30, 40, 50, 60])], "b": 4 * [losses([25, 35, 45, 55])]}
    found = Repaired(clean, hurt, {**part, "a+b": 4 * [losses([15, 25, 35, 45])], "idle": hurt, "all": 4 * [clean]})
    first = recovery_row(found.seed(0), "a")
    assert (first["clean_loss"], first["perturbed_loss"], first["repaired_loss"]) == (2.5, 4.5, 3.5)
    assert (first["damage"], first["recovery"], first["n_seeds"]) == (2.0, 0.5, 1)
    assert (first["recovery_low"], first["recovery_high"]) == pytest.approx((0.5, 0.5))  # every sequence recovers alike
    pooled = recovery_row(found, "a+b", ("a", "b"))
    assert pooled["damage"] == 2.5
    assert pooled["recovery"] == pytest.approx(2.0 / 2.5)
    assert pooled["sum_of_singles"] == pytest.approx(1.0 / 2.5 + 1.0 / 2.5)
    assert pooled["additivity_gap"] == pytest.approx(0.0, abs=1e-12)
    assert pooled["damage_low"] < 2.5 < pooled["damage_high"]  # seeds differ
    assert recovery_row(found, "idle")["status"] == "no_effect"
    assert recovery_row(found, "all")["recovery"] == 1.0


def test_what_cannot_be_divided_is_marked_and_not_divided():
    clean = losses([10, 20, 30, 40])
    mixed = [losses([12, 18, 33, 38])]
    row_ = recovery_row(Repaired(clean, mixed, {"a": [clean]}), "a")
    assert (row_["status"], row_["damage_low"] <= 0 <= row_["damage_high"]) == ("no_damage", True)
    assert np.isnan(row_["recovery"])
    better = [losses([9, 18, 28, 37])]
    assert recovery_row(Repaired(clean, better, {"a": [clean]}), "a")["status"] == "no_damage"
    lost = recovery_row(Repaired(clean, [losses([20, 30, 40, 50])], {"a": [losses([20, 30, 40, 50], 3)]}), "a")
    assert (lost["status"], lost["n_nonfinite"]) == ("nonfinite", 12)
    assert np.isnan(lost["recovery"])
    one = recovery_row(Repaired(losses([10]), [losses([20])], {"a": [losses([15])]}), "a")
    assert (one["status"], one["recovery"]) == ("ok", 0.5)
    assert np.isnan(one["recovery_low"])


def test_a_displacement_that_is_impossible_is_a_row():
    model = zoo.build("llama_gqa")
    table = pathway_repair(model, said(model), **{**QUICK, "displacements": (0.5, 3.0)}).table
    assert set(table[table["displacement"] == 3.0]["status"]) == {"impossible"}
    assert set(table[table["displacement"] == 0.5]["status"]) == {"ok"}


def test_layers_are_the_middle_third_and_what_follows_unless_they_are_named():
    model = zoo.build("llama_gqa")
    for changes, perturbed, repaired in (
        ({"layers": "middle"}, [1], [1, 2, 3]),
        ({"repaired_layers": "perturbed"}, [1, 2], [1, 2]),
        ({"repaired_layers": "2-3"}, [1, 2], [2, 3]),
    ):
        meta = pathway_repair(model, said(model), **{**QUICK, **changes}).meta
        assert (meta["perturbed_layers"], meta["repaired_layers"]) == (perturbed, repaired)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"repaired_layers": "0-3"}, SiteError, "nothing is perturbed before layer 1"),
        ({"pathways": ("attention",)}, SiteError, "no pathway 'attention'"),
        ({"pathways": ("mlp_output+mlp_output",)}, SiteError, "no pathway"),
        ({"pathways": "mlp_output"}, DataError, "give a tuple"),
        ({"kinds": ()}, DataError, "give a tuple"),
        ({"displacements": (0.1, "x")}, DataError, "give a tuple"),
        ({"layers": 3}, DataError, "write it as text"),
        ({"repaired_layers": None}, DataError, "write it as text"),
        ({"seeds": 0}, DataError, "seeds is 0"),
        ({"layers": "9"}, SiteError, "layers 0 to 3"),
        ({"single_heads": True, "head_layers": "0"}, SiteError, "choose among the repaired layers: 1, 2, 3"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, error, words):
    with pytest.raises(error, match=words):
        pathway_repair(zoo.build("llama_gqa"), zoo.tokens(), **{**QUICK, **changes})


def test_a_model_with_hooks_of_its_own_is_refused():
    model = zoo.build("llama_gqa", fresh=True)
    model.add_hook("blocks.1.hook_mlp_out", lambda tensor, hook: 0.9 * tensor)
    with pytest.raises(ModelError, match="hooks of its own"):
        pathway_repair(model, zoo.tokens(), **QUICK)
