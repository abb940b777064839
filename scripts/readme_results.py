"""The table and the figure of README.md, from what `make demo` wrote.

python scripts/readme_results.py demo        # prints the table, writes demo/sweep.html (docs/sweep.png shows it)
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from lens_geometry.plots import sweep_figure
from lens_geometry.results import Result

ROWS = {
    "parallel part removed": ("none", "parallel", 0.0),
    "parallel part halved": ("none", "parallel", 0.5),
    "perpendicular part removed": ("none", "perpendicular", 0.0),
    "perpendicular part halved": ("none", "perpendicular", 0.5),
    "control: isotropic change, as large as removing the parallel part": ("isotropic", "parallel", 0.0),
    "control: as if an earlier token's reference were its own": ("shuffled_reference", "parallel", 0.0),
    "control: isotropic change, as large as removing the perpendicular part": ("isotropic", "perpendicular", 0.0),
    "control: the whole update halved": ("gain", "parallel", 0.5),
}


def main(demo: Path) -> None:
    result = Result.load(demo / "scale")
    table = result.table.set_index(["control", "component", "scale", "site"])
    sites = list(dict.fromkeys(result.table["site"]))
    first = result.table.iloc[0]
    print(
        f"base loss {first['base_loss']:.2f}, {first['n_sequences']} sequences, {first['n_tokens']} predicted tokens\n"
    )
    print("| | " + " | ".join(f"`{site}`" for site in sites) + " |\n|---|" + "---|" * len(sites))
    for name, key in ROWS.items():
        print(f"| {name} | " + " | ".join(cell(table.loc[(*key, site)]) for site in sites) + " |")
    edits = result.table[result.table["control"] == "none"]
    figure = sweep_figure(edits).update_layout(width=1100, height=430, paper_bgcolor="white", plot_bgcolor="white")
    figure.write_html(demo / "sweep.html", config={"displayModeBar": False, "staticPlot": True})


def cell(row: pd.Series, digits: int = 2) -> str:
    ends = (row.loss_change, row.loss_change_low, row.loss_change_high)
    return "{} ({} to {})".format(*(f"{value:+.{digits}f}" for value in ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
