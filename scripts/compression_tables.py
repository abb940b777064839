"""The tables of docs/results/compression.md, from what the commands named there wrote; prints markdown.

python scripts/compression_tables.py study results/compression-study    # variants, alignment, what predicts the loss
python scripts/compression_tables.py layers results/single-layers       # the same over single layers
python scripts/compression_tables.py choice results/layer-choice        # widths under a budget, layers left out
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from results_tables import show

from lens_geometry.axes import interval
from lens_geometry.results import Result

SITES = ("attn", "mlp", "block", "value")


def about(result: Result) -> None:
    """What the table is of, in a line."""
    data, base = result.meta["data"], result.meta["model"]
    print(f"{base['name']} on {data['text']}, {data['n_sequences']} sequences of {data['sequence_length']} tokens\n")


def entry(row: pd.Series, name: str = "value", *, signed: bool = False) -> str:
    """A number and its interval."""
    low, high = (row[f"{name}_{end}"] if f"{name}_{end}" in row else row[end] for end in ("low", "high"))
    return interval(row[name], low, high, signed=signed)


def variants(study: Result) -> None:
    """Every variant: bits, change of loss, KL, local parts of the error at each site, the weights' error."""
    whole = study.table[study.table["layer"].isna()]
    body = []
    for name, rows in whole.groupby("variant", sort=False):
        first = rows.iloc[0]
        if first["status"] == "failed":
            body.append([f"`{name}`", first["reason"], *[""] * 7])
            continue
        local = rows[rows["mode"] == "local"].set_index(["site", "predictor"])["value"]
        parts = [f"{local[s, 'perpendicular_error']:.3f} / {local[s, 'parallel_error']:.3f}" for s in SITES]
        weights = rows.loc[rows["mode"] == "weights", "value"]
        size = f"{first['bits_per_weight']:.2f}" if first["bits_per_weight"] > 0 else ""
        weight = f"{weights.iloc[0]:.3f}" if len(weights) else ""
        loss = [entry(first, "loss_change", signed=True), f"{first['kl']:.3f}"]
        body.append([f"`{name}`", size, *loss, *parts, weight])
    show(["variant", "bits", "change of loss", "KL", *(f"{s}: perp / par" for s in SITES), "weights"], body)
    print()


def alignment(place: Path) -> None:
    """Over layers of each variant: how the error goes with its parts, lowest to highest of all variants, median."""
    found = []
    for directory in sorted(place.iterdir()):
        if (directory / "table.parquet").is_file() and directory.name != "prediction":
            table = Result.load(directory).table
            found.append(table[table["metric"].str.startswith(("pearson", "spearman", "perpendicular_share"))])
    rows = pd.concat(found)
    rows = rows[rows["layer"].isna() & (rows["mode"] == "local")]
    body = []
    for site in SITES:
        cells = [site]
        for name in ("perpendicular_share", "pearson_perpendicular", "spearman_perpendicular", "pearson_parallel",
                     "spearman_parallel"):  # fmt: skip
            values = rows.loc[(rows["site"] == site) & (rows["metric"] == name), "mean"].dropna()
            cells.append(f"{values.median():.3f} ({values.min():.3f} to {values.max():.3f}, {len(values)})")
        body.append(cells)
    show(
        ["site", "perpendicular share of |e|²", "Pearson, perp", "Spearman, perp", "Pearson, par", "Spearman, par"],
        body,
    )
    print()


def predictions(found: Result, question: str) -> None:
    """Rank correlations with the change of loss, partial ones and the difference, by mode and site."""
    rows = found.table[(found.table["question"] == question) & (found.table["against"] == "loss_change")]
    for mode in rows["mode"].unique():
        part = rows[rows["mode"] == mode]
        sites = list(part["site"].unique())
        body = []
        for (kind, predictor, given), group in part.groupby(["kind", "predictor", "given"], sort=False):
            name = {
                "spearman": predictor,
                "partial": f"{predictor} given {given}",
                "difference": f"{predictor} - {given}",
            }
            cells = group.set_index("site")
            body.append([name[kind], *(entry(cells.loc[site], signed=kind != "spearman") for site in sites)])
        print(f"{mode} errors, {int(part['n'].max())} variants\n")
        show(["rank correlation with the change of loss", *sites], body)
        print()
    for sentence in found.meta["verdicts"]:
        if ("of one layer alone" in sentence) == (question == "layers"):
            print(f"{sentence}\n")


def study(place: Path) -> None:
    """Variants, alignment over layers, what predicts the loss."""
    result = Result.load(place)
    about(result)
    variants(result)
    alignment(place)
    predictions(Result.load(place / "prediction"), "variants")


def layers(place: Path) -> None:
    """What predicts the loss with one layer alone compressed."""
    about(Result.load(place))
    predictions(Result.load(place / "prediction"), "layers")


def choice(place: Path) -> None:
    """Mixed precision by several rules; the loss against the number of layers left out."""
    result = Result.load(place)
    about(result)
    table = result.table
    rows = table[table["kind"] == "comparison"]
    widths = table[table["kind"] == "allocation"].groupby("choice", sort=False)["bits"]
    written = {name: "".join(str(int(bits)) for bits in group) for name, group in widths}
    body = []
    for _, row in rows.iterrows():
        ends = [entry(row, name, signed=True) for name in ("loss_change", "difference")]
        size = [f"{row['mean_bits']:.3f}", f"{row['size_bytes'] / 1e6:.1f}"]
        body.append([row["choice"], *size, *ends, f"`{written[row['choice']]}`"])
    show(["widths by", "mean bits", "MB", "change of loss", "against uniform", "bits of layers 0, 1, ..."], body)
    print()
    contrasts = table[table["kind"] == "contrast"]
    show(
        ["", "less", "difference of their losses"],
        [[r["choice"], r["against"], entry(r, "difference", signed=True)] for _, r in contrasts.iterrows()],
    )
    print()
    curves = table[table["kind"] == "curve"]
    numbers = [int(n) for n in sorted(curves["n_blanked"].unique())]
    body = []
    for name, group in curves.groupby("choice", sort=False):
        by_n = group.set_index("n_blanked")
        order = " ".join(str(int(layer)) for layer in group.sort_values("n_blanked")["layer"])
        body.append([name, *(f"{by_n.loc[n, 'loss_change']:+.3f}" for n in numbers), order])
    show(["left out by", *map(str, numbers), "in this order"], body)


TABLES: dict[str, Callable[[Path], None]] = {"study": study, "layers": layers, "choice": choice}


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        TABLES[sys.argv[1]](Path(argument))
