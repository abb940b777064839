"""The tolerance basin on live models: its edges against a dense sweep, its statuses, resuming, refusals."""

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

from lens_geometry.anatomy import inspect
from lens_geometry.edits import scale
from lens_geometry.errors import DataError, ResultError, SiteError
from lens_geometry.experiments import basin, scaling_sweep
from lens_geometry.experiments.changes import change
from lens_geometry.metrics import SequenceLosses, sequence_losses
from lens_geometry.results import Result
from lens_geometry.sites import SITES

QUIET = {"progress": False}
FEW = {"low": 0.5, "high": 1.5, "step": 0.5, "tolerance": 0.5, **QUIET}  # two scales for each target


def of_kind(result, kind, **labels):
    table = result.table[result.table["kind"] == kind]
    for name, value in labels.items():
        table = table[table[name] == value]
    return table


@pytest.fixture(scope="module")
def found():
    return basin(zoo.build("qwen3"), zoo.tokens(8, 24), sites=("mlp", "value"), bound=0.1, **QUIET)


def test_edges_are_where_a_dense_sweep_crosses_the_bound(found):
    grid = tuple(np.round(np.arange(-1, 3.001, 0.04), 9))
    sweep = scaling_sweep(
        zoo.build("qwen3"), zoo.tokens(8, 24), sites=("value",), parallel=grid, perpendicular=(1.0,), controls=(),
        **QUIET,
    ).table.drop_duplicates("scale")  # fmt: skip
    outside = sweep[(sweep["loss_change"] >= 0.1)]["scale"]
    row = of_kind(found, "basin", site="value").iloc[0]
    assert row["low_estimate"] == pytest.approx(outside[outside < 1].max(), abs=0.04 + 0.02)
    assert row["high_estimate"] == pytest.approx(outside[outside > 1].min(), abs=0.04 + 0.02)
    assert not row[["low_open", "high_open", "low_estimate_open", "high_estimate_open"]].any()
    assert -1 < row["low_estimate"] < row["low"] < 1 < row["high"] < row["high_estimate"] < 3
    surely = sweep[(sweep["loss_change_high"] < 0.1)]["scale"]  # the two-sided end is further up than the one-sided
    lasting = [s for s in surely if all(x in set(surely) for x in sweep["scale"] if min(s, 1) < x < max(s, 1))]
    assert row["low"] <= min(lasting) + 0.02
    assert row["high"] >= max(lasting) - 0.02


def test_every_scale_between_the_edges_is_inside_and_the_next_one_is_not(found):
    for row in of_kind(found, "basin").itertuples():
        tried = of_kind(found, "evaluation", site=row.site).sort_values("scale")
        assert len(tried) == row.n_evaluations
        within = tried[(tried["scale"] >= row.low) & (tried["scale"] <= row.high)]
        assert within["inside"].all()
        assert (within["loss_change_upper"] < 0.1).all()
        assert (tried["inside"] == (tried[["loss_change", "loss_change_upper"]].max(axis=1) < 0.1)).all()
        for end, further in (("low", tried["scale"] < row.low), ("high", tried["scale"] > row.high)):
            beyond = tried[further]
            assert getattr(row, f"{end}_open") == beyond.empty
            if len(beyond):
                nearest = beyond.iloc[-1 if end == "low" else 0]
                assert not nearest["inside"]
                assert abs(nearest["scale"] - getattr(row, end)) <= 0.02
        assert row.width == row.high - row.low
    mlp = of_kind(found, "basin", site="mlp").iloc[0]
    assert mlp[["low_open", "high_estimate_open"]].all()
    assert (mlp["low"], mlp["high_estimate"]) == (-1.0, 3.0)


def test_changes_of_loss_are_those_computed_by_hand_and_ordered_with_their_ends(found):
    model, ids = zoo.build("qwen3"), zoo.tokens(8, 24)
    row = of_kind(found, "evaluation", site="value", scale=0.5).iloc[0]
    mask = torch.ones_like(ids, dtype=torch.bool)
    base = sequence_losses(model, ids, mask).sums.sum()
    with model.hooks(fwd_hooks=scale(model, "value", parallel=0.5)):
        edited = sequence_losses(model, ids, mask).sums.sum()
    assert row["loss_change"] == pytest.approx((edited - base) / (8 * 23), abs=1e-6)
    tried = of_kind(found, "evaluation")
    ends = tried[["loss_change_low", "loss_change", "loss_change_upper", "loss_change_high"]].to_numpy()
    assert (np.diff(ends, axis=1) > 0).all()


def test_the_one_sided_end_is_that_of_the_normal_approximation_for_many_sequences():
    generator = np.random.default_rng(0)
    base, shift = generator.normal(100, 20, 400), generator.normal(1, 3, 400)
    counts, none = np.full(400, 50), np.zeros(400, dtype=np.int64)
    one = change(SequenceLosses(base + shift, counts, none), SequenceLosses(base, counts, none), seed=0)
    error = shift.std() / np.sqrt(400) / 50
    assert one.value == pytest.approx(shift.mean() / 50)
    assert one.upper == pytest.approx(one.value + 1.645 * error, abs=0.1 * error)
    assert one.low == pytest.approx(one.value - 1.96 * error, abs=0.15 * error)


def test_a_change_of_the_losses_that_are_left_is_under_no_bound():
    base = SequenceLosses(np.array([9.0, 12.0]), np.array([3, 4]), np.array([0, 0]))
    lost = SequenceLosses(np.array([6.0, 12.0]), np.array([3, 4]), np.array([1, 0]))  # one of the three is gone
    one = change(lost, base, seed=0)
    assert one.value == 0.0
    assert (one.status, one.n_nonfinite) == ("nonfinite", 1)
    assert not one.under(1.0)
    assert not one.surely_under(1.0)
    assert change(base, lost, seed=0).status == "nonfinite"


@pytest.mark.parametrize(("name", "backend"), zoo.cases(exclude=zoo.NOT_ADDITIVE))
@pytest.mark.filterwarnings("ignore:.*left out")
def test_every_model_has_basins_at_the_sites_it_can_be_edited_at(name, backend):
    model = zoo.build(name, backend)
    result = basin(model, zoo.tokens(2, 8), bound=1e6, **FEW)
    expected = [s for s in ("attn", "mlp", "value", "value_excl_self")
                if not any(inspect(model).refusal(SITES[s], layer, editing=True) for layer in range(4))]  # fmt: skip
    rows = of_kind(result, "basin")
    assert list(rows["site"]) == expected
    assert rows[["low_open", "high_open"]].all(axis=None)
    assert (of_kind(result, "evaluation")["loss_change"] != 0).all()


def test_each_layer_and_each_head_has_a_basin_of_its_own():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(3, 8)
    result = basin(model, ids, sites=("attn", "value"), layers=("all", "each", "0,2"), **FEW)
    rows = of_kind(result, "basin")
    assert list(rows["site"] + " " + rows["layers"]) == [
        "attn all", "value all", *(f"attn {layer}" for layer in range(4)), *(f"value {layer}" for layer in range(4)),
        "attn 0,2", "value 0,2",
    ]  # fmt: skip
    heads = basin(model, ids, sites=("attn", "value"), layers=("1-2",), heads="each", **FEW)
    rows = of_kind(heads, "basin", site="value")
    assert list(zip(rows["layers"], rows["head"], strict=True)) == [(layer, h) for layer in "12" for h in range(6)]
    assert of_kind(heads, "basin", site="attn")["head"].isna().all()
    groups = basin(model, ids, sites=("value",), layers=("3",), heads="each", grouping="kv_group", **FEW)
    assert list(of_kind(groups, "basin")["head"]) == [0, 1]
    for result, layer, head, grouping in ((heads, 2, 4, "each"), (groups, 3, 1, "kv_group")):
        row = of_kind(result, "evaluation", site="value", layers=str(layer), head=head, scale=0.5).iloc[0]
        mask = torch.ones_like(ids, dtype=torch.bool)
        base = sequence_losses(model, ids, mask).sums.sum()
        edit = scale(model, "value", parallel=0.5, layers=layer, heads=head, grouping=grouping)
        with model.hooks(fwd_hooks=edit):
            expected = (sequence_losses(model, ids, mask).sums.sum() - base) / 21
        assert row["loss_change"] == pytest.approx(expected, rel=1e-6)


def test_the_perpendicular_part_is_scaled_when_asked_for():
    model, ids = zoo.build("gpt2"), zoo.tokens(3, 8)
    result = basin(model, ids, sites=("mlp",), component="perpendicular", **FEW)
    sweep = scaling_sweep(model, ids, sites=("mlp",), parallel=(), perpendicular=(0.5,), controls=(), **QUIET).table
    row = of_kind(result, "evaluation", scale=0.5).iloc[0]
    assert row["loss_change"] == sweep[sweep["scale"] == 0.5]["loss_change"].item()


def test_a_search_that_is_started_again_ends_with_the_same_table(tmp_path, monkeypatch):
    model, ids, settings = zoo.build("gpt2"), zoo.tokens(4, 12), {"sites": ("mlp", "value"), **QUIET}
    whole = basin(model, ids, out=tmp_path / "whole", **settings).table
    lines = (tmp_path / "whole" / "journal.jsonl").read_text().splitlines(keepends=True)
    half = tmp_path / "half" / "journal.jsonl"
    half.parent.mkdir()
    half.write_text("".join(lines[:17]) + lines[17][:30])  # killed in the first round, while writing
    calls = []

    def counted(*arguments):
        calls.append(1)
        return sequence_losses(*arguments)

    monkeypatch.setattr("lens_geometry.runner.sequence_losses", counted)
    again = basin(model, ids, out=half.parent, **settings).table
    pd.testing.assert_frame_equal(again, whole, check_exact=True)
    pd.testing.assert_frame_equal(basin(model, ids, **settings).table, whole, check_exact=True)  # without a journal
    assert half.read_text() == "".join(lines)
    calls.clear()
    wider = basin(model, ids, out=half.parent, bound=0.5, **settings)
    monkeypatch.undo()
    pd.testing.assert_frame_equal(wider.table, basin(model, ids, bound=0.5, **settings).table, check_exact=True)
    new = len(half.read_text().splitlines()) - len(lines)
    assert 0 < new < wider.meta["counts"]["evaluations"]  # of another bound, only what was not tried yet
    assert new < len(calls) < wider.meta["counts"]["evaluations"]  # and the unedited model, once a round
    with pytest.raises(ResultError, match="skip_position_0"):
        basin(model, ids, out=half.parent, skip_position_0=True, **settings)


def test_losses_that_are_not_finite_are_outside_and_said_so():
    model = zoo.build("llama_gqa", dtype=torch.float16)
    limits = {"low": 1.0, "high": 1e7, "step": 2.5e6, "tolerance": 1e6, "bound": 1e9}
    with pytest.warns(UserWarning, match="losses that are not finite, and count as outside"):
        result = basin(model, zoo.tokens(), sites=("mlp",), layers=("3",), **limits, **QUIET)
    row = of_kind(result, "basin").iloc[0]
    assert row["status"] == "nonfinite"
    assert not row["high_open"]
    assert row["high"] < 1e7
    assert (row["low"], row["low_open"]) == (1.0, True)
    lost = of_kind(result, "evaluation", status="nonfinite")
    assert len(lost) == result.meta["counts"]["nonfinite_evaluations"] > 0
    assert not lost["inside"].any()
    assert (lost["n_nonfinite"] > 0).all()


def test_a_target_that_no_scale_changes_is_called_without_effect():
    model = zoo.build("llama_gqa", fresh=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if (".0." in name and "down_proj" in name) or "blocks.0.mlp.out" in name:
                p.zero_()
    with pytest.warns(UserWarning, match="no scale changed a loss"):
        result = basin(model, zoo.tokens(), sites=("mlp",), layers=("0", "all"), **FEW)
    rows = of_kind(result, "basin").set_index("layers")
    assert rows.loc["0", "status"] == "no_effect"
    assert rows.loc["0", ["low_open", "high_open"]].all()
    assert rows.loc["all", "status"] == "ok"
    assert result.meta["counts"]["no_effect_basins"] == 1


def test_a_result_survives_saving_and_loading(found, tmp_path):
    loaded = Result.load(found.save(tmp_path))
    pd.testing.assert_frame_equal(loaded.table, found.table)
    assert loaded.meta["settings"]["bound"] == 0.1


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"bound": 0.0}, DataError, "bound is 0"),
        ({"bound": float("nan")}, DataError, "bound is nan"),
        ({"step": -0.1}, DataError, "step is"),
        ({"tolerance": 0.3}, DataError, "tolerance is 0.3"),
        ({"low": 1.5}, DataError, "with 1 between them"),
        ({"high": float("inf")}, DataError, "with 1 between them"),
        ({"beyond": -1}, DataError, "beyond"),
        ({"component": "both"}, DataError, "parallel or perpendicular"),
        ({"heads": "all"}, DataError, "together or each"),
        ({"layers": ("9",)}, SiteError, "layers 0 to 3"),
        ({"sites": ("attn",), "heads": "each"}, SiteError, "has heads"),
        ({"sites": ("atn",)}, SiteError, "choose among"),
        ({"max_sequences": 1}, DataError, "one sequence has no interval"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, error, words):
    with pytest.raises(error, match=words):
        basin(zoo.build("llama_gqa", tokenizer=True), "a long text " * 20, sequence_length=16, **{**QUIET, **changes})
