"""What the report and the findings say of arms: from tables whose truth is known."""

from __future__ import annotations

import pandas as pd
import pytest

from lens_geometry.errors import ResultError
from lens_geometry.findings import findings
from lens_geometry.results import Result
from lens_geometry.sections import section, table_warnings
from lens_geometry.training_plots import arms_figure, run_figure


def arms_table() -> pd.DataFrame:
    rows = []
    changes = {
        "baseline": (0.0, 0.0, 0.0),
        "value": (-0.02, -0.03, -0.01),
        "attn": (0.05, 0.04, 0.06),
        "gate": (0.0, -0.1, 0.1),
    }
    for name, (change, low, high) in changes.items():
        common = {"arm": name, "n_seeds": 3, "n_diverged": int(name == "gate"), "status": "done"}
        rows.append(
            {"kind": "first", "seed": 0, "held_out_loss": 7.6, "bare_loss": 7.65, "step": 0, "tokens": 0, **common}
        )
        ends = {"held_out_loss": 5 + change, "change": change, "change_low": low, "change_high": high}
        for step in (0, 10, 20):
            rows.append({"kind": "difference", "step": step, "tokens": 100 * step, **ends, **common})
        for at, seconds in (("equal tokens", 30.0), ("equal time", 20.0)):
            rows.append({"kind": "final", "at": at, "seconds": seconds, **ends, **common})
    return pd.DataFrame(rows)


def test_findings_name_the_arms_that_are_better_worse_and_open() -> None:
    (sentence,) = findings([Result("compare_arms", arms_table(), {})])
    assert "value (−0.0200 [−0.0300, −0.0100]) with a lower loss" in sentence
    assert "attn (+0.0500 [+0.0400, +0.0600]) with a higher loss" in sentence
    assert "gate (0 [−0.100, +0.100]) with a loss that cannot be told from it" in sentence
    assert "3 seeds" in sentence


def test_the_section_has_every_arm_with_both_changes_and_says_what_diverged() -> None:
    result = Result("compare_arms", arms_table(), {})
    page = section(result, 0)
    assert page.count("<figure") == 3
    assert "5.0500" not in page
    assert "5.050" in page
    assert table_warnings(result) == ["gate: 1 of 4 runs diverged, and is left out."]


def test_an_arm_of_which_no_run_came_to_its_end_is_in_the_section() -> None:
    table = arms_table()
    lost = (table["arm"] == "gate") & (table["kind"] == "final")
    table.loc[lost, ["change", "change_low", "change_high", "held_out_loss"]] = float("nan")
    table = table[~(lost & (table["at"] == "equal time"))]
    assert "none came to its end" in section(Result("compare_arms", table, {}), 0)
    assert "gate" not in findings([Result("compare_arms", table, {})])[0]


def test_the_figure_draws_each_arm_but_the_baseline_against_it() -> None:
    drawn = arms_figure(arms_table())
    lines = [trace for trace in drawn.data if trace.mode == "lines" and trace.hoverinfo != "skip"]
    assert [trace.name for trace in lines] == ["baseline", "value", "attn", "gate", "value", "attn", "gate"]
    markers = [trace for trace in drawn.data if trace.mode == "markers"]
    assert [list(trace.x) for trace in markers] == [[-0.02, 0.05, 0.0]] * 2
    assert list(drawn.layout.yaxis3.ticktext) == ["value", "attn", "gate"]


def test_a_run_s_figure_needs_its_columns() -> None:
    with pytest.raises(ResultError, match="lacks the column"):
        run_figure(pd.DataFrame({"step": [1]}))
