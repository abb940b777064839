"""The tables of docs/results/dissociation.md, from what `lens-geometry dissociate` wrote.

python scripts/dissociation_tables.py results/dissociate [results/windows ...]        # prints markdown
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pandas as pd
from results_tables import show

from lens_geometry.dissociation_verdict import groups, label, verdict
from lens_geometry.results import Result


def number(row: pd.Series, digits: int = 2, sign: str = "+") -> str:
    """Value and interval."""
    if not math.isfinite(row["value"]):
        return "not compared" if row["status"] != "ok" else "-"
    value, low, high = (f"{row[name] + 0.0:{sign}.{digits}f}" for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})".replace("-inf to inf", "anything").replace("to inf", "or more")


def pick(rows: pd.DataFrame, **which: object) -> pd.Series | None:
    for name, value in which.items():
        rows = rows[rows[name] == value]
    rows = rows[rows["seed"].isna()]
    return rows.iloc[0] if len(rows) else None


def text_of(row: pd.Series | None, digits: int = 2, sign: str = "+") -> str:
    return "-" if row is None else number(row, digits, sign)


def about(result: Result) -> None:
    data, table = result.meta["data"], result.table
    base = {name: rows["base"].dropna() for name, rows in table.groupby("quantity", sort=False)}
    words = [f"base {name} {values.iloc[0]:.3f}" for name, values in base.items() if len(values)]
    exact = table.loc[~table["variant"].isin(["as_run", "mean_displacement"]), "displacement_max_error"]
    print(
        f"{result.meta['model']['name']} on {data['text']}, {data['n_sequences']} sequences of "
        f"{data['sequence_length']} tokens; {', '.join(words)}; {result.meta['settings']['seeds']} seeds; where "
        f"displacements are exact per token, their largest relative error is {exact.max():.1g}\n"
    )
    print("counts:", ", ".join(f"{name} {n}" for name, n in result.meta["counts"].items()), "\n")


def doses(rows: pd.DataFrame, quantity: str, digits: int) -> None:
    """Damage by displacement: angular, magnitude, their ratio, and whether they differ over seeds and items."""
    own = rows[(rows["quantity"] == quantity) & (rows["regime"] == "")]
    body = []
    for displacement in own["displacement"].dropna().unique():
        at = own[own["displacement"] == displacement]
        kinds = [pick(at, kind=kind) for kind in ("angular", "magnitude", "ratio", "difference")]
        test = kinds[3]
        p = "-" if test is None else f"{test['p_seeds_holm']:.2g}, {test['p_items_holm']:.2g}"
        body.append([f"{displacement:g}", *(text_of(row, digits) for row in kinds[:2]), text_of(kinds[2], 1, ""), p])
    show(["displacement", "angular", "magnitude", "ratio", "p (Holm) over seeds, items"], body)
    print()


def verdicts(table: pd.DataFrame) -> None:
    """One row for each way of perturbing: contrasts, cross-over index, verdict."""
    found = verdict(table)
    found = found[found["regime"] == "all"]
    body = []
    for key, rows in groups(found).items():
        for row in rows[rows["quantity"].isin(["margin", ""])].to_dict("records"):
            cells = [
                f"{row[name]:+.2f} ({row[f'{name}_low']:+.2f} to {row[f'{name}_high']:+.2f})"
                for name in ("loss_contrast", "contrast", "crossover")
            ]
            ratio = pick(table_of(table, key), quantity="loss", kind="ratio", regime="all")
            body.append([label(found, key) or "default", text_of(ratio, 1, ""), *cells, row["verdict"]])
    show(["perturbation", "ratio of losses", "contrast of loss", "contrast of margin", "cross-over", "verdict"], body)
    print()


def table_of(table: pd.DataFrame, key: tuple[str, ...]) -> pd.DataFrame:
    return groups(table)[key]


def main(directories: list[str]) -> None:
    for directory in directories:
        result = Result.load(Path(directory))
        print(f"## {directory}\n")
        about(result)
        shown = set()
        for key, rows in groups(result.table).items():
            print(f"### {label(result.table, key) or 'default'}\n")
            of_loss = tuple(rows.iloc[0][["model", "variant", "layers", "matched"]])
            for quantity, digits in (("loss", 3), ("margin", 2), ("accuracy", 3)):
                if quantity in set(rows["quantity"]) and not (quantity == "loss" and of_loss in shown):
                    print(f"{quantity}:\n")  # that of the loss once, whatever pairs it stands beside
                    doses(rows, quantity, digits)
            shown.add(of_loss)
        verdicts(result.table)


if __name__ == "__main__":
    main(sys.argv[1:])
