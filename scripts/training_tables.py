"""The tables of docs/results/suppression.md, from what `lens-geometry train --arms ...` wrote.

python scripts/training_tables.py results/ablation        # prints markdown
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from results_tables import show

from lens_geometry.results import Result


def change(row: pd.Series) -> str:
    """Change and interval."""
    value, low, high = (row[f"change{end}"] for end in ("", "_low", "_high"))
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


def ends(table: pd.DataFrame, names: list[str]) -> None:
    """Every arm at the end: loss, change over seeds, change of each seed, change at equal time."""
    final = table[table["kind"] == "final"].set_index(["arm", "at"])
    last = table[table["kind"] == "evaluation"].sort_values("step").groupby(["arm", "seed"])["held_out_loss"].last()
    body = []
    for name in names:
        row = final.loc[(name, "equal tokens")]
        each = [f"{last[name, seed] - last['baseline', seed]:+.3f}" for seed in last[name].index]
        cells = ["", "", ""]
        if name != "baseline":
            cells = [change(row), ", ".join(each), change(final.loc[(name, "equal time")])]
        body.append([name, f"{row['held_out_loss']:.4f}", *cells, f"{row['n_seeds']:.0f}"])
    show(["arm", "loss", "change, equal tokens", "of each seed", "change, equal time", "seeds"], body)


def curve(table: pd.DataFrame, names: list[str]) -> None:
    """The paired change from the baseline as training goes on."""
    rows = table[table["kind"] == "difference"].set_index(["arm", "tokens"])
    tokens = sorted({token for _, token in rows.index})
    body = [
        [f"{token:,}", *(change(rows.loc[(name, token)]) for name in names if name != "baseline")] for token in tokens
    ]
    show(["tokens", *(name for name in names if name != "baseline")], body)


def first(table: pd.DataFrame, names: list[str]) -> None:
    """The loss before the first step, with the edit and without, each seed."""
    rows = table[table["kind"] == "first"].set_index(["arm", "seed"])
    seeds = sorted({seed for _, seed in rows.index})
    body = [["without any edit", *(f"{rows.loc[('baseline', seed), 'bare_loss']:.4f}" for seed in seeds)]]
    body += [[name, *(f"{rows.loc[(name, seed), 'held_out_loss']:.4f}" for seed in seeds)] for name in names]
    show(["before the first step", *(f"seed {seed:.0f}" for seed in seeds)], body)


def main() -> None:
    for place in sys.argv[1:]:
        result = Result.load(Path(place))
        table = result.table
        names = list(dict.fromkeys(table["arm"]))
        config = result.meta["config"]
        print(
            f"{result.meta['model']['name']}; {result.meta['data']['text']}; {config['steps']} steps of "
            f"{config['batch_size']} sequences of {config['shape']['n_ctx']} tokens; clock {result.meta['clock']}\n"
        )
        for part in (ends, curve, first):
            part(table, names)
            print()


if __name__ == "__main__":
    main()
