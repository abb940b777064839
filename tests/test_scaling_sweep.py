"""The sweep: its numbers by hand, its journal after a kill, its refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

from lens_geometry.data import tokenize
from lens_geometry.edits import remove_diagonal, scale
from lens_geometry.errors import DataError, HookError, ModelError, ResultError, SiteError
from lens_geometry.experiments import scaling_sweep
from lens_geometry.metrics import sequence_losses, token_losses
from lens_geometry.runner import check_effect
from lens_geometry.sites import choose_layers

SMALL = {"parallel": (0.0,), "perpendicular": (0.0,), "control_scales": (0.5,), "progress": False}


def rows(table, **labels):
    for name, value in labels.items():
        table = table[table[name] == value]
    return table


def test_changes_are_those_of_losses_computed_by_hand():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(3, 10)
    table = scaling_sweep(model, ids, sites=("value",), batch_size=2, **SMALL).table

    def loss(hooks):
        with torch.no_grad():
            logits = model.run_with_hooks(ids, return_type="logits", fwd_hooks=hooks)
        logs = torch.log_softmax(logits, -1)
        return -np.mean([float(logs[b, t, ids[b, t + 1]]) for b in range(3) for t in range(9)])

    base = loss([])
    for component in ("parallel", "perpendicular"):
        row = rows(table, control="none", component=component, scale=0.0).iloc[0]
        edited = loss(scale(model, "value", **{component: 0.0}))
        assert row["loss"] == pytest.approx(edited, rel=1e-10)
        assert row["loss_change"] == pytest.approx(edited - base, rel=1e-9)
        assert row["perplexity_change"] == pytest.approx(np.exp(edited) - np.exp(base), rel=1e-9)
        assert row["loss_change_low"] <= row["loss_change"] <= row["loss_change_high"]
        assert row["n_tokens"] == 27
    gain = rows(table, control="gain").iloc[0]
    halved = loss([(f"blocks.{i}.attn.hook_z", lambda tensor, hook: 0.5 * tensor) for i in range(4)])
    assert gain["loss"] == pytest.approx(halved, rel=1e-10)


def test_the_no_op_stands_in_the_table_and_changes_nothing():
    table = scaling_sweep(zoo.build("neox"), zoo.tokens(), **SMALL).table
    no_ops = rows(table, scale=1.0)
    assert set(no_ops["site"]) == {"attn", "mlp", "value", "value_excl_self"}
    assert (no_ops[["loss_change", "loss_change_low", "loss_change_high", "perplexity_change"]] == 0).all(axis=None)


def test_every_control_and_layer_set_has_its_row():
    table = scaling_sweep(zoo.build("llama_gqa"), zoo.tokens(), sites=("mlp",), layers=("all", "1-"), **SMALL).table
    assert set(table["layers"]) == {"all", "1-"}
    controls = {"none", "random_reference", "shuffled_reference", "isotropic", "gain"}
    assert set(table["control"]) == controls
    assert not table.duplicated(["layers", "control", "component", "scale"]).any()
    both = rows(table, control="none", component="parallel", scale=0.0).set_index("layers")["loss"]
    assert both["all"] != both["1-"]


def test_removals_of_the_diagonal_are_conditions_of_the_value_sites():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(3, 10)
    controls = ("matched_random_reference", "diagonal_removal", "diagonal_removal_renormalised")
    more = {**SMALL, "controls": controls, "layers": ("all", "1-")}
    table = scaling_sweep(model, ids, sites=("mlp", "value", "value_excl_self"), **more).table
    assert set(rows(table, site="mlp")["control"]) == {"none", "matched_random_reference"}
    for control, renormalise in (("diagonal_removal", False), ("diagonal_removal_renormalised", True)):
        found = rows(table, control=control)
        assert found[["site", "layers", "component", "scale"]].to_numpy().tolist() == [
            [site, layers, "parallel", 0.0] for layers in more["layers"] for site in ("value", "value_excl_self")
        ]
        assert found.groupby("layers")["loss"].nunique().eq(1).all()
        with torch.no_grad():
            hooks = remove_diagonal(model, layers=slice(1, None), renormalise=renormalise)
            loss = float(model.run_with_hooks(ids, return_type="loss", fwd_hooks=hooks))
        assert rows(found, layers="1-")["loss"].iloc[0] == pytest.approx(loss, rel=1e-10)


def test_removals_are_left_out_where_the_map_cannot_be_edited_and_refused_without_a_value_site():
    model, controls = zoo.build("opt"), ("gain", "diagonal_removal")
    with pytest.warns(UserWarning, match="diagonal_removal left out: the attention map cannot be edited"):
        result = scaling_sweep(model, zoo.tokens(), sites=("value",), **{**SMALL, "controls": controls})
    assert set(result.table["control"]) == {"none", "gain"}
    with pytest.raises(SiteError, match="control of the value sites"):
        scaling_sweep(zoo.build("gpt2"), zoo.tokens(), sites=("mlp",), **{**SMALL, "controls": controls})


def test_batch_size_changes_no_loss():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(5, 9)
    one, other = (scaling_sweep(model, ids, sites=("attn",), batch_size=size, **SMALL).table for size in (1, 3))
    pd.testing.assert_frame_equal(one, other, rtol=1e-9)


def test_a_model_that_cannot_be_edited_at_a_site_is_swept_without_it():
    with pytest.warns(UserWarning, match="value_excl_self was left out"):
        result = scaling_sweep(zoo.build("opt", dtype=torch.bfloat16), zoo.tokens(), **SMALL)
    assert "value_excl_self" not in set(result.table["site"])
    assert any("fires after" in warning for warning in result.meta["warnings"])


def test_a_sweep_that_is_started_again_runs_nothing_twice(tmp_path, monkeypatch):
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    whole = scaling_sweep(model, ids, sites=("mlp",), out=tmp_path / "whole", **SMALL).table
    journal = tmp_path / "whole" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    half = tmp_path / "half"
    half.mkdir()
    (half / "journal.jsonl").write_text("".join(lines[:4]) + lines[4][:25])  # killed while writing
    calls = []

    def counted(*arguments):
        calls.append(1)
        return sequence_losses(*arguments)

    monkeypatch.setattr("lens_geometry.runner.sequence_losses", counted)
    again = scaling_sweep(model, ids, sites=("mlp",), out=half, **SMALL).table
    pd.testing.assert_frame_equal(again, whole, check_exact=True)
    assert len(calls) == len(lines) - 4 + 1  # the unedited model is run again, to see that it is the same
    assert (half / "journal.jsonl").read_text() == journal.read_text()


def test_a_journal_of_another_run_is_refused_and_left_alone(tmp_path):
    model = zoo.build("llama_gqa")
    scaling_sweep(model, zoo.tokens(), sites=("mlp",), out=tmp_path, **SMALL)
    before = (tmp_path / "journal.jsonl").read_bytes()
    for model_, ids, changes, words in (
        (model, zoo.tokens(seed=1), {}, "tokens_sha256"),
        (model, zoo.tokens(), {"seed": 3}, "settings.seed"),
        (zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(), {}, "dtype"),
    ):
        with pytest.raises(ResultError, match=words):
            scaling_sweep(model_, ids, sites=("mlp",), out=tmp_path, **SMALL, **changes)
    assert (tmp_path / "journal.jsonl").read_bytes() == before
    scaling_sweep(model, zoo.tokens(), sites=("mlp",), out=tmp_path, batch_size=1, **SMALL)  # may differ


def test_a_damaged_journal_is_refused(tmp_path):
    model = zoo.build("llama_gqa")
    scaling_sweep(model, zoo.tokens(), sites=("mlp",), out=tmp_path, **SMALL)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "journal.jsonl").write_text(lines[0] + "{]\n" + lines[2])
    with pytest.raises(ResultError, match="damaged"):
        scaling_sweep(model, zoo.tokens(), sites=("mlp",), out=tmp_path, **SMALL)


def test_a_run_killed_in_its_first_line_starts_afresh(tmp_path):
    model = zoo.build("llama_gqa")
    (tmp_path / "journal.jsonl").write_text('{"class": "Tran')
    scaling_sweep(model, zoo.tokens(), sites=("mlp",), out=tmp_path, **SMALL)
    assert (tmp_path / "journal.jsonl").read_text().count("\n") > 5


@pytest.mark.parametrize("first", ["[]", "1", "null", '"x"'])
def test_a_journal_that_is_something_else_is_refused(tmp_path, first):
    (tmp_path / "journal.jsonl").write_text(first + "\n")
    with pytest.raises(ResultError):
        scaling_sweep(zoo.build("llama_gqa"), zoo.tokens(), sites=("mlp",), out=tmp_path, **SMALL)


def test_what_changed_around_the_model_is_noticed_when_a_sweep_goes_on(tmp_path):
    model = zoo.build("llama_gqa", fresh=True)
    scaling_sweep(model, zoo.tokens(), sites=("mlp",), out=tmp_path, **SMALL)
    model.add_hook("blocks.1.hook_mlp_out", lambda tensor, hook: 0.1 * tensor)
    with pytest.warns(UserWarning, match="hooks of its own"), pytest.raises(ResultError, match="other losses"):
        scaling_sweep(model, zoo.tokens(), sites=("mlp",), out=tmp_path, **SMALL)


def test_other_tokens_or_another_mask_under_an_old_name_are_noticed(tmp_path):
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 12)
    tokens = tokenize(model, ids)
    scaling_sweep(model, tokens, sites=("mlp",), out=tmp_path, **SMALL)
    shorter = tokens.mask.clone()
    shorter[0, 8:] = False
    for changed in (replace(tokens, mask=shorter), replace(tokens, ids=zoo.tokens(2, 12, seed=1))):
        with pytest.raises(ResultError, match="differs in"):
            scaling_sweep(model, changed, sites=("mlp",), out=tmp_path, **SMALL)


def test_masks_that_are_not_right_padding_are_refused():
    model = zoo.build("llama_gqa")
    tokens = tokenize(model, zoo.tokens(2, 12))
    left, one = tokens.mask.clone(), tokens.mask.clone()
    left[0, :3] = False
    one[0, 1:] = False
    for mask in (left, one, tokens.mask.long(), tokens.mask[:1]):
        with pytest.raises(DataError):
            scaling_sweep(model, replace(tokens, mask=mask), sites=("mlp",), **SMALL)


def test_a_blanked_layer_is_a_row_of_the_table_not_the_end_of_the_sweep():
    model = zoo.build("llama_gqa", fresh=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if (".0." in name and "down_proj" in name) or "blocks.0.mlp.out" in name:
                p.zero_()
    with pytest.warns(UserWarning, match="changed no loss"):
        table = scaling_sweep(model, zoo.tokens(), sites=("mlp",), layers=("0", "all"), **SMALL).table
    assert set(rows(table, layers="0", control="none", scale=0.0)["status"]) == {"no_effect"}
    assert set(rows(table, layers="all", control="none", scale=0.0)["status"]) == {"ok"}


KILLED = """
import torch, zoo
from lens_geometry.experiments import scaling_sweep
torch.set_num_threads(1)
scaling_sweep(zoo.build("llama_gqa"), zoo.tokens(4, 24), sites=("mlp", "value"), out="{out}", progress=False)
"""


def test_a_sweep_killed_on_the_way_ends_with_the_same_table(tmp_path):
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    code = KILLED.format(out=tmp_path / "killed")
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    journal = tmp_path / "killed" / "journal.jsonl"
    deadline = time.monotonic() + 120
    while (not journal.exists() or journal.read_bytes().count(b"\n") < 6) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = journal.read_bytes().count(b"\n")
    model, ids, sites = zoo.build("llama_gqa"), zoo.tokens(4, 24), ("mlp", "value")
    whole = scaling_sweep(model, ids, sites=sites, progress=False).table
    assert 6 <= done < len(whole) + 2
    resumed = scaling_sweep(model, ids, sites=sites, out=tmp_path / "killed", progress=False).table
    pd.testing.assert_frame_equal(resumed, whole, check_exact=True)


def test_a_condition_with_losses_that_are_not_finite_is_counted_not_dropped():
    model = zoo.build("llama_gqa", dtype=torch.float16)
    changes = {**SMALL, "parallel": (1e7,), "controls": (), "layers": ("3",)}
    table = scaling_sweep(model, zoo.tokens(), sites=("mlp",), **changes).table
    row = rows(table, component="parallel", scale=1e7).iloc[0]
    assert row["status"] == "nonfinite"
    assert row["n_nonfinite"] == row["n_tokens"]
    assert np.isnan(row["loss_change_low"])
    assert set(rows(table, component="perpendicular")["status"]) == {"ok"}


def test_a_model_without_finite_losses_is_refused_with_the_first_bad_layer():
    model = zoo.build("gpt2", fresh=True)
    scaling_sweep(model, zoo.tokens(), sites=("value",), **SMALL)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if ".2." in name and "mlp" in name).fill_(float("nan"))
    with pytest.raises(ModelError, match=r"not finite .*\[blocks\.2"):
        scaling_sweep(model, zoo.tokens(), sites=("value",), **SMALL)


def test_a_hook_that_is_shown_but_not_used_is_refused():
    model = zoo.build("opt")
    check_effect(model, "blocks.0.attn.hook_z")
    with pytest.raises(HookError, match="does not reach the model's output"):
        check_effect(model, "blocks.0.attn.hook_pattern")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"sites": ("atn",)}, SiteError, "choose among"),
        ({"layers": ("9",)}, SiteError, "layers 0 to 3"),
        ({"layers": ("first",)}, SiteError, "names no layers"),
        ({"layers": (range(1),)}, SiteError, "names no layer set"),
        ({"layers": ("²",)}, SiteError, "names no layers"),
        ({"controls": ("noise",)}, SiteError, "no control"),
        ({"parallel": (), "perpendicular": ()}, DataError, "grid is empty"),
        ({"grouping": "pairs"}, SiteError, "grouping"),
        ({"parallel": 0.0}, DataError, "tuple of numbers"),
        ({"parallel": ("abc",)}, DataError, "tuple of numbers"),
        ({"sites": "attn"}, SiteError, "tuple of sites"),
        ({"layers": "13"}, DataError, "tuple of layer sets"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, error, words):
    with pytest.raises(error, match=words):
        scaling_sweep(zoo.build("llama_gqa"), zoo.tokens(), **{**SMALL, **changes})


def test_layer_sets_are_read_as_written():
    assert choose_layers("all", 5) == (0, 1, 2, 3, 4)
    assert choose_layers("1-", 5) == (1, 2, 3, 4)
    assert choose_layers("0,3-4", 5) == (0, 3, 4)
    assert choose_layers("2", 5) == (2,)
    for wrong in ("", "-1", "a", "1-9", "3-1"):
        with pytest.raises(SiteError):
            choose_layers(wrong, 5)


def test_token_losses_are_cross_entropies_in_float32_at_least():
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    ids = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].double().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    assert torch.allclose(token_losses(logits, ids).double().flatten(), expected, atol=1e-5)


def test_the_journal_is_plain_json_lines(tmp_path):
    scaling_sweep(zoo.build("llama_gqa"), zoo.tokens(), sites=("mlp",), out=tmp_path, **SMALL)
    head, *lines = (json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines())
    assert head["settings.sites"] == ["mlp"]
    assert lines[0]["key"] == "base"
    assert len(lines[0]["sums"]) == 2
