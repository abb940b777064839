"""Figure, section, summary and sentence of pathway repair, from a table with numbers that are known."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import tables

from lens_geometry.errors import ResultError
from lens_geometry.findings import findings
from lens_geometry.repair_plots import repair_figure
from lens_geometry.repair_sections import repair_section
from lens_geometry.report import write_report
from lens_geometry.results import Result
from lens_geometry.summaries import repair_summary

RECOVERIES = {  # pathway: angular, magnitude
    "nothing": (0.0, 0.0),
    "attention_pattern": (0.25, 0.1),
    "layernorm_scale": (-3.0, 0.4),
    "mlp_output": (0.5, 0.2),
    "attention_pattern+mlp_output": (0.7, 0.35),
    "everything": (1.0, 1.0),
}


def repairs(*, heads=True, joint=True):
    rows = []
    for place, kind in enumerate(("angular", "magnitude")):
        for dose in (0.1, 0.2):
            for seed in (None, 0, 1):
                for name, values in RECOVERIES.items():
                    together = "+" in name
                    if together and not joint:
                        continue
                    single = sum(RECOVERIES[part][place] for part in name.split("+")) if together else np.nan
                    rows.append(_row(kind, dose, seed, name, values[place], single))
            rows += [
                _row(kind, dose, None, "head_output", 0.01 * (layer - 2 * head), layer=layer, head=head)
                for layer in (4, 5)
                for head in range(3)
                if heads
            ]
    table = pd.DataFrame(rows)
    for name in ("seed", "layer", "head"):
        table[name] = table[name].astype("Int64")
    return Result("pathway_repair", table, {"model": {"name": "a model"}, "warnings": []})


def _row(kind, dose, seed, name, recovery, single=np.nan, layer=None, head=None):
    gap = recovery - single
    return {
        "kind": kind, "displacement": dose, "unit": "relative", "seed": seed, "pathway": name, "layer": layer,
        "head": head, "clean_loss": 4.0, "perturbed_loss": 4.5, "repaired_loss": 4.5 - 0.5 * recovery, "damage": 0.5,
        "damage_low": 0.4, "damage_high": 0.6, "recovery": recovery, "recovery_low": recovery - 0.05,
        "recovery_high": recovery + 0.05, "sum_of_singles": single, "additivity_gap": gap,
        "additivity_gap_low": gap - 0.02, "additivity_gap_high": gap + 0.02, "n_nonfinite": 0, "status": "ok",
    }  # fmt: skip


def traces(drawn, role):
    return [trace for trace in drawn.data if trace.meta["role"] == role]


def test_every_displacement_has_a_panel_of_recoveries_and_one_of_gaps_beside_it():
    drawn = repair_figure(repairs().table)
    for place, kind in enumerate(("angular", "magnitude")):
        recovery, gap, *_ = traces(drawn, kind)
        assert list(recovery.customdata) == [values[place] for values in RECOVERIES.values()]
        assert list(gap.customdata) == pytest.approx([(0.7 - 0.75, 0.35 - 0.3)[place]])
        assert round(gap.y[0]) == [*RECOVERIES].index("attention_pattern+mlp_output")  # on its own line
        assert len(traces(drawn, kind)) == 4
    first = traces(drawn, "angular")[0]
    assert first.x[2] == -1.0  # beyond the view: an arrow at its edge, the number in the hover text
    assert first.marker.symbol[2] == "triangle-left"
    assert "−300 % [−305, −295]" in first.text[2]
    titles = [note.text for note in drawn.layout.annotations]
    assert titles[:2] == ["displacement 0.1 relative: recovery", "joint repair − sum of single ones"]
    maps = traces(drawn, "heads")
    assert len(maps) == 4
    assert np.asarray(maps[0].z).tolist() == pytest.approx(np.array([[4, 5], [2, 3], [0, 1]]) / 100)


def test_without_joint_repairs_and_heads_there_is_one_panel_for_each_displacement():
    drawn = repair_figure(repairs(heads=False, joint=False).table)
    assert len(drawn.data) == 4
    assert len(drawn.layout.annotations) == 2


def test_a_repair_without_a_number_says_why_in_words():
    table = repairs().table
    lost = (table["kind"] == "magnitude") & (table["displacement"] == 0.1)
    table.loc[lost, [c for c in table if c.startswith(("recovery", "additivity"))]] = np.nan
    table.loc[lost, "status"] = "no_damage"
    first, words = traces(repair_figure(table), "magnitude")[:2]
    assert not np.isfinite(np.array(first.x, dtype=float)).any()  # no mark that could be read as a number
    assert words.mode == "text"
    assert set(words.text) == {"magnitude: damage cannot be told from 0"}
    assert "damage cannot be told from 0" in first.text[0]
    assert "damage cannot be told from 0" in repair_summary(table)
    assert "nan" not in "".join(repair_section(table, "p")).lower()


def test_the_section_has_a_figure_for_each_panel_and_the_numbers():
    section = "".join(repair_section(repairs().table, "p"))
    assert section.count("<figure") == 2 * 2 + 4
    assert "25.0 %<small>[20.0, 30.0]</small>" in section
    assert "+0.500<small>[+0.400, +0.600]</small>" in section
    assert "gives back" in section


def test_the_summary_has_a_column_for_each_perturbation_and_names_the_best_heads():
    shown = repair_summary(repairs().table)
    line = next(line for line in shown.splitlines() if line.startswith("mlp_output"))
    assert re.findall(r"[\d.]+ %", line) == ["50.0 %", "50.0 %", "20.0 %", "20.0 %"]
    assert "angular: single heads (layer.head) that give most back: 5.0 5.0% (0.1)" in shown
    assert "angular 0.1: +0.500 [+0.400, +0.600]" in shown


def test_the_sentence_names_the_pathway_that_gives_most_back_and_follows_the_table():
    (sentence,) = findings([repairs()])
    assert "for angular (displacement 0.1 relative) mlp_output 50.0 % [45.0, 55.0], then attention_pattern" in sentence
    assert "for magnitude (displacement 0.1 relative) layernorm_scale 40.0 % [35.0, 45.0], then mlp_output" in sentence
    assert "everything" not in sentence
    table = repairs().table
    table["recovery"] = np.nan
    (sentence,) = findings([Result("pathway_repair", table, {})])
    assert "could not be told from 0" in sentence


def test_it_is_in_a_report_and_a_table_of_something_else_is_refused(tmp_path):
    page = write_report([repairs()], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Pathway repair" in page
    with pytest.raises(ResultError, match="table lacks the column"):
        repair_figure(tables.sweep_table())
