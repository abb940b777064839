"""Figures, report sections, findings, summaries and commands of compression studies and layer choice, from tables."""

import math

import numpy as np
import pytest
from study_tables import report, study

from lens_geometry import cli
from lens_geometry.axes import SymlogAxis, symlog
from lens_geometry.choice_plots import choice_figure
from lens_geometry.choice_sections import bits_sentence, drop_sentence
from lens_geometry.errors import ResultError
from lens_geometry.experiments.error_prediction import error_prediction
from lens_geometry.experiments.layer_choice import choice_table
from lens_geometry.experiments.study_rows import lost_row, study_rows
from lens_geometry.findings import findings
from lens_geometry.report import write_report
from lens_geometry.results import Result
from lens_geometry.study_plots import prediction_figure, study_figure
from lens_geometry.study_summaries import choice_summary, prediction_summary, study_summary


@pytest.fixture(scope="module")
def made():
    special = [
        *study_rows("blank:layers=1", "depth", report([0, 0, 0, 0], [0, 1, 0, 0], 2.0)),
        *study_rows("rtn:bits=2", "rtn", report([3] * 4, [1] * 4, math.nan, kl=math.nan, lost=9)),
        lost_row("awq:bits=4", "rtn", "failed", "llmcompressor <is> not installed"),
    ]
    return study(*special, n=8)


@pytest.fixture(scope="module")
def predicted(made):
    with pytest.warns(UserWarning, match="2 of 11 variants are left out"):
        return error_prediction(made, resamples=50)


def choice(best="perpendicular", low=0.01, high=0.03):
    """A table of both parts in which one choice is cheaper than uniform by 0.1."""
    rows = []
    for number, name in enumerate(("perpendicular", "error", "uniform", "random 1", "random 2")):
        cost = 0.1 if name == best else 0.2
        rows += [{"part": "bits", "kind": "allocation", "choice": name, "layer": layer, "bits": 3 + (layer == number)}
                 for layer in range(4)]  # fmt: skip
        rows.append({"part": "bits", "kind": "comparison", "choice": name, "mean_bits": 3.25, "size_bytes": 1000,
                     "loss_change": cost, "loss_change_low": cost - 0.01, "loss_change_high": cost + 0.01,
                     "against": "uniform", "difference": cost - 0.2, "difference_low": cost - 0.2 - 0.01,
                     "difference_high": cost - 0.2 + 0.01, "n_sequences": 4, "status": "ok"})  # fmt: skip
        rows += [{"part": "bits", "kind": "sensitivity", "measure": measure, "layer": layer, "bits": bits,
                  "value": 0.1 / bits, "value_low": 0.05, "value_high": 0.2, "status": "ok"}
                 for layer in range(4) for bits in (3, 4) for measure in ("error", "perpendicular_error")
                 if number == 0]  # fmt: skip
    rows.append({"part": "bits", "kind": "contrast", "choice": "perpendicular", "against": "error", "difference": 0.02,
                 "difference_low": low, "difference_high": high, "n_sequences": 4})  # fmt: skip
    for name in ("cosine", "perpendicular", "greedy_loss", "random 1"):
        rows += [{"part": "drop", "kind": "score", "choice": name, "layer": layer, "value": 0.1 * (1 + layer),
                  "value_low": 0.1, "value_high": 0.5, "status": "ok"} for layer in range(4)]  # fmt: skip
        for n in (1, 2):
            lost = name == "random 1" and n == 2
            cost = math.nan if lost else 0.3 * n - 0.1 * (name == "greedy_loss")
            rows.append({"part": "drop", "kind": "curve", "choice": name, "n_blanked": n, "layer": n,
                         "loss_change": cost, "loss_change_low": cost - 0.1, "loss_change_high": cost + 0.1,
                         "against": "cosine",
                         "difference": 0.0, "difference_low": 0.0 if name == "perpendicular" else -0.1,
                         "difference_high": 0.0 if name == "perpendicular" else 0.1, "n_sequences": 4,
                         "status": "nonfinite" if lost else "ok"})  # fmt: skip
    meta = {"model": {"name": "base"}, "data": {"text": "t"}, "seed": 0}
    return Result("layer_choice", choice_table(rows), meta)


def test_every_variant_with_numbers_is_a_point_at_its_values_and_zero_has_its_place(made):
    drawn = study_figure(made.table, ["perpendicular_error"])
    points = [(x, y, text) for trace in drawn.data for x, y, text in zip(trace.x, trace.y, trace.text, strict=True)]
    assert len(points) == 10
    at = {text.split("</b>")[0].removeprefix("<b>"): (x, y) for x, y, text in points}
    rows = made.table[(made.table["mode"] == "local") & (made.table["site"] == "pooled") & made.table["layer"].isna()]
    rows = rows[rows["predictor"] == "perpendicular_error"].set_index("variant")
    across, damage = SymlogAxis(rows["value"].dropna()), SymlogAxis(rows["loss_change"])
    for label, (x, y) in at.items():
        assert x == pytest.approx(symlog(rows.loc[label, "value"], across.linear))
        if label != "rtn:bits=2":
            assert y == pytest.approx(symlog(rows.loc[label, "loss_change"], damage.linear))
    assert at["blank:layers=1"][0] == 0
    assert at["rtn:bits=2"][1] == max(y for _, y, _ in points)
    symbols = {s for trace in drawn.data for s in trace.marker.symbol}
    assert "x-thin" in symbols
    looks = {(trace.marker.color, next(s for s in trace.marker.symbol if s != "x-thin")) for trace in drawn.data}
    assert len(looks) == len(drawn.data) == made.table["family"].nunique()


def test_correlations_are_dots_with_their_intervals(predicted):
    drawn = prediction_figure(predicted.table)
    assert [a.text for a in drawn.layout.annotations] == [
        "local, whole variants",
        "propagated, whole variants",
        "single layers",
    ]
    trace = next(t for t in drawn.data if t.name == "mean over sites" and t.meta["role"] == "edit")
    rows = predicted.table[(predicted.table["site"] == "pooled") & (predicted.table["mode"] == "local")]
    rows = rows[(rows["question"] == "variants") & (rows["against"] == "loss_change") & rows["value"].notna()]
    assert list(trace.x) == pytest.approx(rows["value"].tolist())
    reach = np.asarray(trace.x, dtype=float) + np.asarray(trace.error_x.array, dtype=float)
    assert reach[0] == pytest.approx(max(rows["high"].iloc[0], rows["value"].iloc[0]))


def test_choices_that_are_not_finite_are_crosses_at_the_top():
    drawn = choice_figure(choice().table, ["curve"])
    lost = next(trace for trace in drawn.data if trace.name == "random")
    assert lost.marker.symbol[1] == "x-thin-open"
    assert lost.y[1] == max(y for trace in drawn.data for y in trace.y)
    drawn = choice_figure(choice().table)
    assert len(drawn.layout.annotations) == 5
    with pytest.raises(ResultError, match="no rows"):
        choice_figure(choice().table, ["no such panel"][:0])


def test_what_was_chosen_is_told_with_its_costs():
    told = bits_sentence(choice().table)
    assert "cheapest first) |e_perp| / |u| +0.100, |e| / |u| +0.200, uniform +0.200, random (mean of 2) +0.200" in told
    assert "|e_perp| / |u| (difference +0.0200 [+0.0100, +0.0300]) costs more than |e| / |u|" in told
    assert "(difference −0.100 [−0.110, −0.0900]) costs less than uniform" in told
    assert "cannot be told from |e| / |u|" in bits_sentence(choice(low=-0.01).table)
    told = drop_sentence(choice().table)
    assert told.startswith("Without 2 layers, left out in these orders")
    assert "greedy by loss +0.500, 1 − cos(x, x + u) +0.600" in told
    assert "|u_perp| / |x| chooses the same as 1 − cos(x, x + u)" in told
    only = choice().table
    assert bits_sentence(only[only["part"] == "drop"]) == ""
    assert drop_sentence(only[only["part"] == "bits"]) == ""


def test_the_report_holds_all_of_it(made, predicted, tmp_path):
    page = write_report([made, predicted, choice()], tmp_path / "report.html").read_text(encoding="utf-8")
    for words in (
        "Compressed variants",
        "What predicts the damage",
        "Layer choice",
        "llmcompressor &lt;is&gt; not installed",
        "1 of 11 variants failed: awq:bits=4.",
        "1 of 11 variants have losses or activations that are not finite: rtn:bits=2.",
        "cannot be told from the whole error",
        "Widths under one budget",
        "Blanked layers; change of loss",
    ):
        assert words in page or words.replace("cannot be told from", "does not predict better than") in page, words
    assert "pooled;" not in page
    told = findings([made, predicted, choice()])
    assert len(told) == 4
    assert told[0].startswith("Over 9 variants")
    assert "of one layer alone" in told[1]


def test_summaries_say_what_failed_and_why(made, predicted):
    told = study_summary(made.table)
    assert "failed: llmcompressor <is> not installed" in told
    assert "blank:layers=1" in told
    assert "|e_perp| / |u| less |e| / |u|" in prediction_summary(predicted.table)
    told = choice_summary(choice().table)
    assert "4 3 3 3" in told
    assert "greedy by loss" in told


@pytest.mark.parametrize("command", ["compression-study", "layer-choice"])
def test_the_text_that_is_evaluated_is_no_calibration_text(command, capsys):
    arguments = [command, "--model", "twin-rmsnorm", "--text", "moby-dick", "--calibration", "moby-dick"]
    assert cli.main(arguments) == 2
    assert "--text and --calibration are both 'moby-dick'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_commands_write_everything_that_they_say(tmp_path, capsys):
    small = ["--model", "twin-rmsnorm", "--sequence-length", "32", "--max-sequences", "4", "--replicates", "4"]
    small += ["--no-progress"]
    variants = ["rtn:bits=4", "rtn:bits=3", "rtn:bits=2", "magnitude:sparsity=0.5", "blank:layers=2"]
    assert cli.main(["compression-study", *small, "--variants", *variants, "--out", str(tmp_path / "study")]) == 0
    assert Result.load(tmp_path / "study").table["variant"].nunique() == 5
    assert Result.load(tmp_path / "study" / "prediction").experiment == "error_prediction"
    assert (tmp_path / "study" / "rtn-bits=4" / "figure.html").exists()
    out = ["--out", str(tmp_path / "choice")]
    assert (
        cli.main(["layer-choice", *small, "--bits", "4", "3", "2", "--mean-bits", "3.2", "--max-blanked", "1", *out])
        == 0
    )
    assert set(Result.load(tmp_path / "choice").table["part"]) == {"bits", "drop"}
    assert "widths under one budget" in capsys.readouterr().out
