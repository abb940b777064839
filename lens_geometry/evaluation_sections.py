"""The report's section for downstream tasks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pandas as pd

from lens_geometry import html_pieces as pieces
from lens_geometry.axes import interval, number
from lens_geometry.evaluation_plots import direction, evaluation_figure, score_names

TASK_WORDS = (
    "Every task was run with lm-evaluation-harness on the unedited model and under each edit. A point is what the "
    "edit changes of the score; its bar is the 95 % interval over documents, paired with the unedited run. A cross "
    "marks an edit with answers that are not finite, whose documents are left out, an open marker one that "
    "changed no answer."
)


def evaluation_section(table: pd.DataFrame, key: str) -> list[str]:
    """A figure per score, and every change with its interval: a row per edit, a column per score."""
    table = table.assign(score=score_names(table))
    figures, scores = [], list(table["score"].unique())
    for place, score in enumerate(scores):
        rows = table[table["score"] == score]
        unedited = f"Unedited {number(float(rows['base_value'].iloc[0]))}"
        caption = "; ".join(filter(None, (unedited, direction(rows), f"{int(rows['n_documents'].max()):,} documents")))
        drawn = evaluation_figure(rows.drop(columns="score"))
        figures.append(pieces.plot(drawn, f"{key}-score{place}", str(score), f"{caption}.", switched=False))
    cells = {(row["edit"], row["score"]): row for row in table.to_dict("records")}
    edits = [edit for edit in table["edit"].unique() if edit != "none"]
    entries = [[str(edit), *(_score_entry(cells.get((edit, score))) for score in scores)] for edit in edits]
    bases = [number(float(table.loc[table["score"] == score, "base_value"].iloc[0])) for score in scores]
    caption = "Change of each score against the unedited model, with 95 % intervals over documents."
    return [
        f"<p>{pieces.text(TASK_WORDS)}</p>",
        f'<div class="figures">{"".join(figures)}</div>',
        pieces.grid(caption, ["edit", *map(str, scores)], [["unedited", *bases], *entries]),
    ]


def _score_entry(row: dict[Hashable, Any] | None) -> str:
    if row is None:
        return "not measured"
    change = interval(row["change"], row["change_low"], row["change_high"], signed=True).replace(" [", "\n[")
    notes = {"nonfinite": f"{row['n_nonfinite']:,} not finite", "no_effect": "no answer changed"}
    return f"{change}\n{notes[row['status']]}" if row["status"] in notes else change
