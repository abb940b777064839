"""Layer choice on a small model: budgets, what choices cost, orders of layers, halves, and what is refused."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

from lens_geometry.allocation import allocate
from lens_geometry.compress import blank_layers, round_to_nearest
from lens_geometry.data import tokenize
from lens_geometry.errors import CompressionError, DataError, ResultError
from lens_geometry.experiments import bit_choice
from lens_geometry.experiments.bit_choice import costs, layer_sizes
from lens_geometry.experiments.compression import compression_report
from lens_geometry.experiments.layer_choice import LayerChoiceSettings, layer_choice
from lens_geometry.experiments.layer_drop import stream_scores
from lens_geometry.provenance import describe

SMALL = {"bits": (2, 3, 8), "mean_bits": 3.5, "replicates": 4, "random_allocations": 2, "random_orders": 1,
         "max_blanked": 2, "group_size": 16, "progress": False}  # fmt: skip


@pytest.fixture(scope="module")
def base():
    return zoo.build("llama_gqa")


@pytest.fixture(scope="module")
def tokens(base):
    return tokenize(base, zoo.tokens(6, 32))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("choice")


@pytest.fixture(scope="module")
def made(base, tokens, kept):
    return layer_choice(base, tokens, out=kept, **SMALL)


def alike(base, searched, widths, settings, out):
    """Sensitivities that are the same in every layer."""
    names = ("perpendicular_error", "error", "perpendicular_error_over_reference", "error_over_reference")
    ends = {"value_low": 0.0, "value_high": 1.0, "loss_change_low": 0.0, "loss_change_high": 1.0, "status": "ok"}
    return pd.DataFrame(
        {"predictor": name, "layer": layer, "bits": bits, "value": 2.0**-bits, "loss_change": 4.0**-bits, **ends}
        for name in names
        for layer in range(4)
        for bits in widths
    )


def rows_of(made, kind):
    return made.table[made.table["kind"] == kind]


def mean_loss(model, ids):
    """Next-token loss by hand."""
    with torch.no_grad():
        logits = model(ids, return_type="logits").double()
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def test_every_choice_fits_the_budget_and_costs_what_its_model_costs(base, tokens, made):
    held_out = tokens.ids[1::2]
    dense = mean_loss(base, held_out)
    compared = rows_of(made, "comparison").set_index("choice")
    assert {"perpendicular", "error", "perpendicular_of_stream", "error_of_stream", "loss", "uniform"} <= {
        *compared.index
    }
    for choice, given in rows_of(made, "allocation").groupby("choice"):
        bits = dict(zip(given["layer"], given["bits"], strict=True))
        small = round_to_nearest(base, bits={int(k): int(v) for k, v in bits.items()}, group_size=16)
        row = compared.loc[choice]
        assert row["mean_bits"] <= 3.5 + 1e-9
        assert row["mean_bits"] == pytest.approx(np.mean([*bits.values()]))  # the layers are of one size
        assert describe(small)["compression"]["bits_per_weight"] == pytest.approx(row["mean_bits"] + 32 / 16)
        if choice in ("perpendicular", "uniform", "loss"):
            assert row["loss_change"] == pytest.approx(mean_loss(small, held_out) - dense, abs=1e-5)
        assert row["loss_change_low"] <= row["loss_change"] <= row["loss_change_high"]
        against = compared.loc["uniform", "loss_change"]
        assert row["difference"] == pytest.approx(row["loss_change"] - against, abs=1e-9)


def test_sensitivities_are_those_of_reports_on_the_other_half(base, tokens, made):
    compressed = round_to_nearest(base, bits=3, group_size=16)
    settings = {"sites": ("block",), "modes": ("local",), "layer_losses": True, "replicates": 4, "progress": False}
    report = compression_report(base, compressed, tokens.ids[::2], **settings).table
    found = rows_of(made, "sensitivity")
    found = found[found["bits"] == 3].set_index(["measure", "layer"])["value"]
    for measure in ("perpendicular_error", "error_over_reference", "loss_change"):
        expected = report[(report["metric"] == measure) & report["layer"].notna() & (report["mode"] == "local")]
        assert len(expected) == 4
        for row in expected.itertuples():
            assert found[measure, row.layer] == pytest.approx(row.mean, rel=1e-6, abs=1e-9)


def test_the_widths_are_the_best_for_the_sensitivities_in_the_table(base, made):
    sizes, _ = layer_sizes(base, [2, 3, 8], LayerChoiceSettings(**SMALL))
    found = rows_of(made, "sensitivity").rename(columns={"measure": "predictor"})
    cost = costs(found, "error", 2.0, [2, 3, 8], 4)
    chosen = [(2, 3, 8)[c] for c in allocate(cost, sizes, int(3.5 * sizes[:, 0].sum() / 2))]
    table = rows_of(made, "allocation")
    assert table[table["choice"] == "error"]["bits"].tolist() == chosen


def test_layers_that_are_all_alike_get_one_width(base, tokens, monkeypatch):
    monkeypatch.setattr(bit_choice, "sensitivities", alike)
    with pytest.warns(UserWarning, match="no choice has another order"):
        found = layer_choice(base, tokens, **{**SMALL, "bits": (2, 3, 4), "mean_bits": 3.0}, parts=("bits",))
    assert set(rows_of(found, "allocation")["bits"]) == {3}
    assert (rows_of(found, "comparison")["difference"] == 0).all()


def test_the_budget_in_bytes_counts_the_scales(base):
    settings = LayerChoiceSettings(group_size=16)
    plain, stored = layer_sizes(base, [2, 4, 16], settings)
    small = describe(round_to_nearest(base, bits=4, group_size=16))["compression"]
    assert stored[:, 1].sum() / (plain[:, 1].sum() / 4) == pytest.approx(small["bits_per_weight"])
    assert stored[:, 2].tolist() == plain[:, 2].tolist()  # a layer that is left alone has no scales
    whole = describe(round_to_nearest(base, bits=2, group_size=16, symmetric=True))["compression"]
    _, symmetric = layer_sizes(base, [2], LayerChoiceSettings(group_size=16, symmetric=True))
    assert symmetric.sum() / (plain[:, 0].sum() / 2) == pytest.approx(whole["bits_per_weight"])


def test_a_budget_that_cannot_be_met_or_leaves_nothing_to_choose_is_refused(base, tokens):
    for mean_bits, words in ((1.5, "cannot be met"), (8.0, "leaves nothing to choose: 8 bits")):
        with pytest.raises(DataError, match=words):
            layer_choice(base, tokens, **{**SMALL, "mean_bits": mean_bits}, parts=("bits",))
    with pytest.raises(DataError, match="cannot be met"):
        layer_choice(base, tokens, **SMALL, budget_bytes=1000, parts=("bits",))


def test_blanked_layers_cost_what_blanked_models_cost(base, tokens, made):
    held_out = tokens.ids[1::2]
    dense = mean_loss(base, held_out)
    curves = rows_of(made, "curve")
    assert {"cosine", "perpendicular", "update", "loss", "greedy_loss", "random 1"} == {*curves["choice"]}
    for name in ("cosine", "greedy_loss", "random 1"):
        line = curves[curves["choice"] == name].sort_values("n_blanked")
        gone = [int(layer) for layer in line["layer"]]
        small = blank_layers(base, gone)
        assert line["loss_change"].iloc[-1] == pytest.approx(mean_loss(small, held_out) - dense, abs=1e-5)
        assert len({*gone}) == 2


def test_orders_by_loss_are_made_on_the_other_half(base, tokens, made):
    searched = tokens.ids[::2]
    dense = mean_loss(base, searched)
    alone = [mean_loss(blank_layers(base, [layer]), searched) - dense for layer in range(4)]
    scores = rows_of(made, "score")
    by_loss = scores[scores["choice"] == "loss"].sort_values("layer")["value"]
    assert by_loss.tolist() == pytest.approx(alone, abs=1e-5)
    curves = rows_of(made, "curve").set_index(["choice", "n_blanked"])["layer"]
    first = int(np.argmin(alone))
    assert curves["loss", 1] == curves["greedy_loss", 1] == first
    both = {layer: mean_loss(blank_layers(base, [first, layer]), searched) for layer in range(4) if layer != first}
    assert curves["greedy_loss", 2] == min(both, key=both.get)


def test_scores_of_the_stream_are_those_of_a_plain_loop(base, tokens):
    ids = tokens.ids[:2]
    found = stream_scores(base, tokenize(base, ids), LayerChoiceSettings(progress=False))
    _, cache = base.run_with_cache(ids)
    for layer in (0, 3):
        x, y = (cache[f"blocks.{layer}.hook_resid_{end}"].double() for end in ("pre", "post"))
        values = []
        for b in range(2):
            for t in range(1, 32):
                u, r = y[b, t] - x[b, t], x[b, t]
                aside = u - (u @ r) / (r @ r) * r
                cosine = float(r @ y[b, t] / (r.norm() * y[b, t].norm()))
                values.append([1 - cosine, float(aside.norm() / r.norm()), float(u.norm() / r.norm())])
        expected = np.mean(values, 0)
        for name, value in zip(("cosine", "perpendicular", "update"), expected, strict=True):
            mean, low, high = found[name][layer]
            assert mean == pytest.approx(value, rel=1e-4)
            assert low <= mean <= high
    order = {name: np.argsort(values[:, 0]).tolist() for name, values in found.items()}
    curves = {name: order[name][:2] for name in order}
    assert all(len({*layers}) == 2 for layers in curves.values())


def test_a_stopped_run_goes_on_with_the_same_numbers_and_refuses_another(base, tokens, made, kept, monkeypatch):
    monkeypatch.setattr(bit_choice, "round_to_nearest", None)  # nothing is made again
    again = layer_choice(base, tokens, out=kept, **SMALL)
    pd.testing.assert_frame_equal(again.table, made.table)
    with pytest.raises(ResultError, match="differs in"):
        layer_choice(base, tokens.ids[:4], out=kept, **SMALL)
    with pytest.raises(ResultError, match=r"differs in.*settings.group_size"):
        layer_choice(base, tokens, out=kept, **{**SMALL, "group_size": 8})


def test_another_text_can_be_chosen_on(base, tokens):
    found = layer_choice(base, tokens.ids[:2], calibration=tokens.ids[2:], **SMALL, parts=("drop",))
    assert set(rows_of(found, "curve")["n_sequences"]) == {2}
    assert found.meta["chosen_on"] == "the calibration text"
    with pytest.raises(DataError, match="passages of 32 tokens of the calibration text"):
        layer_choice(base, tokens.ids[:3], calibration=tokens.ids[2:], **SMALL)


def test_settings_that_make_no_sense_are_refused(base, tokens):
    for wrong in ({"parts": ("bit",)}, {"parts": "bits"}, {"bits": (4,)}, {"mean_bits": -1.0}, {"max_blanked": 0}):
        with pytest.raises(DataError):
            LayerChoiceSettings(**wrong)
    with pytest.raises(CompressionError, match="12 bits"):
        LayerChoiceSettings(bits=(4, 12))
    with pytest.raises(DataError, match="max_blanked is 7, and there are 4 layers"):
        layer_choice(base, tokens, **{**SMALL, "max_blanked": 7}, parts=("drop",))
    with pytest.raises(DataError, match="takes two"):
        layer_choice(base, tokens.ids[:3], **SMALL)


def test_what_is_not_finite_is_said(base, tokens, monkeypatch):
    real = bit_choice.losses_of

    def losing(model, tokens_, settings):
        found = real(model, tokens_, settings)
        return found if model is base else found._replace(nonfinite=found.nonfinite + 1)

    monkeypatch.setattr(bit_choice, "losses_of", losing)
    monkeypatch.setattr(bit_choice, "sensitivities", alike)
    with pytest.warns(
        UserWarning, match="(losses are not finite with the widths of perpendicular|no choice has another)"
    ):
        found = layer_choice(base, tokens, **SMALL, parts=("bits",))
    compared = rows_of(found, "comparison")
    assert set(compared["status"]) == {"nonfinite"}
    assert all(math.isnan(low) for low in compared["loss_change_low"])
    assert found.meta["counts"]["nonfinite_conditions"] == len(compared)
