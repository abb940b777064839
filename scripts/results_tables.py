"""The tables of docs/results/, from what the commands named there wrote.

python scripts/results_tables.py heads results/heads        # prints markdown; also strength, basin, schedule, texts
python scripts/results_tables.py texts results/austen results/python ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd
from readme_results import cell

from lens_geometry.basin_plots import basin_range, basins
from lens_geometry.results import Result


def show(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A markdown table."""
    names = list(columns)
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def about(result: Result) -> None:
    """What the table is of, in a line."""
    row = result.table.iloc[0]
    base = f", base loss {row['base_loss']:.3f}" if "base_loss" in row else ""
    data = result.meta["data"]
    print(f"{result.meta['model']['name']} on {data['text']}{base}, {data['n_sequences']} sequences of ", end="")
    print(f"{data['sequence_length']} tokens, seed {result.meta['seed']}\n")


def heads(directory: Path) -> None:
    """Single heads over layers, all at once, their sum; then the agreement of the two methods and the dearest heads."""
    result = Result.load(directory)
    about(result)
    rows = []
    for (by, method), part in result.table.groupby(["grouping", "method"], sort=False):
        cells = []
        for kind in ("single", "all", "sum_of_singles"):
            changes = part.loc[part["kind"] == kind, "loss_change"]
            cells.append(
                f"{changes.mean():+.4f} ({changes.min():+.4f} to {changes.max():+.4f})" if len(changes) else ""
            )
        rows.append([f"`{by}`", str(method).replace("_", " "), *cells])
    show(["grouping", "method", "one head", "all heads of a layer", "sum of single heads"], rows)
    print()
    for found in result.meta["agreement"]:
        spearman = f"{found['spearman']:.3f} ({found['spearman_low']:.3f} to {found['spearman_high']:.3f})"
        print(f"- `{found['grouping']}`: rank correlation of {found['heads']} exact and first-order effects {spearman}")
    exact = result.table[(result.table["method"] == "exact") & (result.table["grouping"] == "each")]
    layers = exact[exact["kind"] != "single"].pivot_table(index="layer", columns="kind", values="loss_change")
    singles = exact[exact["kind"] == "single"]
    print("\nby layer (grouping `each`, exact):\n")
    extremes = singles.groupby("layer")["loss_change"].agg(["min", "mean", "max"])
    show(
        ["layer", "cheapest head", "mean head", "dearest head", "all heads", "sum of singles"],
        (
            [str(layer), *(f"{extremes.loc[layer, name]:+.4f}" for name in ("min", "mean", "max")),
             f"{row['all']:+.4f}", f"{row['sum_of_singles']:+.4f}"]
            for layer, row in layers.iterrows()
        ),
    )  # fmt: skip
    print("\nthe ten dearest heads:\n")
    top = singles.nlargest(10, "loss_change")
    show(["layer", "head", "change of loss"], ([str(r.layer), str(r.head), cell(r, 4)] for r in top.itertuples()))


def strength(directory: Path) -> None:
    """All layers at once: how much of the branch changes and what it costs; the range over single layers."""
    result = Result.load(directory)
    about(result)
    rows = []
    for (site, component), part in result.table.groupby(["site", "component"], sort=False):
        whole, alone = part[part["layer"].isna()].iloc[0], part[part["layer"].notna()]
        of_layers = alone["change_over_branch"]
        ratio = f"{whole['change_over_branch']:.3f} ({of_layers.min():.3f} to {of_layers.max():.3f})"
        numbers = [f"{whole['change_energy']:.3f}", f"{whole['norm_ratio']:.3f}", cell(whole, 3)]
        dearest = alone.loc[alone["loss_change"].idxmax()]
        numbers += [f"{whole['loss_per_strength']:.2f}", f"{alone['loss_change'].median():+.4f}"]
        numbers += [f"{dearest['loss_change']:+.3f} (layer {dearest['layer']})"]
        rows.append([f"`{site}`, {component} part removed", ratio, *numbers])
    names = ["edit", "change over branch (range of layers)", "its square", "norm ratio", "all layers: change of loss"]
    show([*names, "loss per strength", "one layer, median", "one layer, dearest"], rows)


def basin(directory: Path) -> None:
    """The basin of each target."""
    result = Result.load(directory)
    about(result)
    found = basins(result.table)
    print(f"bound {found['bound'].iloc[0]:g} nats per token; `<=` and `>=`: the search's limit was reached\n")
    rows = [
        [f"`{row['label']}`", basin_range(row), basin_range(row, "_estimate"), "yes" if row["reentrant"] else "no"]
        for _, row in found.iterrows()
    ]
    show(["target", "basin (with its 95 % upper end)", "by the change itself", "inside again further out"], rows)


def schedule(directory: Path) -> None:
    """The variants on both halves, and the greedy scales by layer."""
    result = Result.load(directory)
    about(result)
    compared = result.table[result.table["kind"] == "comparison"]
    rows = []
    for (site, variant), part in compared.groupby(["site", "variant"], sort=False):
        halves = part.set_index("half")
        cells = [cell(halves.loc[half], 3) for half in ("search", "held_out")]
        against = halves.loc["held_out"]
        difference = (
            f"{against['difference']:+.3f} ({against['difference_low']:+.3f} to {against['difference_high']:+.3f})"
        )
        rows.append([f"`{site}`, {variant}", f"{halves['strength'].iloc[0]:.3f}", *cells, difference])
    names = ["variant", "strength, sum over layers", "searched half", "held-out half", "held out, against greedy"]
    show(names, rows)
    greedy = result.table[(result.table["kind"] == "layer") & (result.table["variant"] == "greedy")]
    scales = ", ".join(f"{row.layer}: {row.scale:g}" for row in greedy.itertuples() if row.scale != 1)
    print(f"\ngreedy scales of the layers that are not left at 1: {scales}")


def texts(*directories: Path) -> None:
    """Removal of each part by text, beside its controls."""
    results = [Result.load(directory) for directory in directories]
    wanted = {
        "parallel removed": ("none", "parallel", 0.0),
        "isotropic, as large": ("isotropic", "parallel", 0.0),
        "along a random reference": ("random_reference", "parallel", 0.0),
        "parallel halved": ("none", "parallel", 0.5),
        "perpendicular removed": ("none", "perpendicular", 0.0),
        "isotropic, as large as that": ("isotropic", "perpendicular", 0.0),
    }
    rows = []
    for site in results[0].table["site"].unique():
        for name, key in wanted.items():
            cells = []
            for result in results:
                table = result.table.set_index(["site", "control", "component", "scale"])
                cells.append(cell(table.loc[(site, *key)]))
            rows.append([f"`{site}`, {name}", *cells])
    bases = [f"{result.meta['data']['text']} (base {result.table['base_loss'].iloc[0]:.2f})" for result in results]
    show(["change of loss", *bases], rows)


TABLES: dict[str, Callable[..., None]] = {
    "heads": heads,
    "strength": strength,
    "basin": basin,
    "schedule": schedule,
    "texts": texts,
}


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in TABLES:
        sys.exit(__doc__)
    pd.set_option("display.width", None)
    TABLES[sys.argv[1]](*map(Path, sys.argv[2:]))
