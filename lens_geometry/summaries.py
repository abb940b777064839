"""What a command prints of its result: the short table, as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from lens_geometry.basin_plots import basin_range, basins
from lens_geometry.dissociation_plots import KINDS, ratio_words
from lens_geometry.dissociation_verdict import groups, label, verdict
from lens_geometry.experiments import VARIANTS, diagonal_numbers
from lens_geometry.generation_plots import edit_label, edit_numbers, parted
from lens_geometry.repair_plots import entry, head_rows, pooled
from lens_geometry.results import Result
from lens_geometry.training.data import PACKINGS, Packing, TokenFiles


def profile_summary(table: pd.DataFrame) -> str:
    """Mean over layers of the main numbers, a row for each site."""
    whole = table[table["head"].isna() & table["metric"].isin(("alpha", "parallel_fraction", "update_over_reference"))]
    shown = whole.pivot_table(index="site", columns="metric", values="mean", sort=False)
    parallel = whole[whole["metric"] == "parallel_fraction"].set_index("layer").groupby("site")["mean"]
    shown["most parallel layer"] = parallel.idxmax()
    return "mean over layers of the mean over tokens\n" + shown.to_string(float_format="{:.3f}".format)


def scaling_summary(table: pd.DataFrame) -> str:
    """Change of loss, a row for each site and kind, a column for each scale."""
    shown = table.pivot_table(
        index=["layers", "site", "control", "component"], columns="scale", values="loss_change", sort=False
    )
    shown = shown[sorted(shown.columns)]
    return "change of loss (nats) by retained scale\n" + shown.to_string(float_format="{:+.3f}".format, na_rep="")


def heads_summary(result: Result) -> str:
    """Per site and grouping over layers: single heads, all at once, the sum; then how the two methods agree."""
    table = result.table
    changes = table.pivot_table(
        index=["site", "grouping", "method", "layer"], columns="kind", values="loss_change", aggfunc=["mean", "max"]
    )
    shown = pd.DataFrame({"mean of singles": changes["mean"].get("single"), "largest": changes["max"].get("single")})
    for kind in ("all", "sum_of_singles"):
        shown[kind.replace("_", " ")] = changes["mean"].get(kind)
    keys = ["site", "grouping", "method"]
    over_layers = (
        shown.groupby(level=keys, sort=False)
        .mean()
        .join(shown[["largest"]].groupby(level=keys, sort=False).max().rename(columns={"largest": "largest of all"}))
    )
    lines = [
        f"{found['site']}, {found['grouping']}: first order ranks {found['heads']} heads as the exact sweep does with "
        f"Spearman {found['spearman']:.3f} [{found['spearman_low']:.3f}, {found['spearman_high']:.3f}]"
        for found in result.meta["agreement"]
    ]
    words = "change of loss (nats) when heads are edited, mean over layers"
    return "\n".join([words, over_layers.to_string(float_format="{:+.4f}".format, na_rep="-"), *lines])


def strength_summary(table: pd.DataFrame) -> str:
    """All layers at once: how much of the branch changes, and what it costs."""
    whole = table[table["layer"].isna()].set_index(["site", "component", "scale"])
    columns = ["change_over_branch", "change_energy", "norm_ratio", "loss_change", "loss_per_strength"]
    shown = whole[columns].to_string(float_format="{:.3f}".format)
    return "all layers edited; strengths are means over layers and tokens, losses in nats per token\n" + shown


def basin_summary(table: pd.DataFrame) -> str:
    """The basin of each target, and the one by the change itself."""
    rows = basins(table)
    shown = pd.DataFrame(
        {
            "basin": [basin_range(row) for _, row in rows.iterrows()],
            "by the change itself": [basin_range(row, "_estimate") for _, row in rows.iterrows()],
            "inside again": ["further out" if again else "" for again in rows["reentrant"]],
        },
        index=rows["label"].rename(None),
    )
    bound = f"scales with a change of loss under {rows['bound'].iloc[0]:g} nats (basin: with its 95 % upper end)\n"
    return bound + shown.to_string()


def schedule_summary(table: pd.DataFrame) -> str:
    """Per-layer scales of the schedule, and the loss of each variant on both halves."""
    layers = table[(table["kind"] == "layer") & (table["variant"] == "greedy")]
    scales = layers.pivot_table(index="layer", columns="site", values="scale", sort=False)
    compared = table[table["kind"] == "comparison"]
    index, columns = ["site", "variant", "strength"], "half"
    change = compared.pivot_table(index=index, columns=columns, values="loss_change", sort=False)
    return (
        f"retained scale s_par of each layer, joint change of loss under {table['budget'].iloc[0]:g} nats\n"
        f"{scales.to_string(float_format='{:.2f}'.format)}\n"
        "change of loss (nats) at equal applied strength, where it was searched and held out\n"
        + change.to_string(float_format="{:+.3f}".format)
    )


def attention_summary(table: pd.DataFrame, site: str) -> str:
    """A_tt before and after, and what the edit added to it, a row for each layer."""
    shown = diagonal_numbers(table).drop(columns=["heads_agree"]).set_index("layer")
    kind = "one number per token for all heads of a layer" if site == "attn" else "by head"
    return (
        f"A_tt, position 0 left out: mean before and after; the edit's median and largest size ({kind}); the share of "
        "A_tt outside 0 to 1 afterwards\n" + shown.to_string(float_format="{:.4g}".format)
    )


def side_by_side(table: pd.DataFrame) -> str:
    """Every prompt with its continuations, a bar where each parts from the unedited one."""
    lines = []
    for _, rows in table.groupby("prompt", sort=False):
        lines.append(f"prompt: {rows['prompt_text'].iloc[0]}")
        for row in rows.itertuples():
            same, other = parted(row)
            lines.append(f"  {edit_label(row)} ({edit_numbers(row)})")
            lines.append(f"    {same}{f'┃{other}' if other else ''}".replace("\n", "\n    "))
    return "\n".join([*lines, "┃ first difference from the unedited continuation"])


def mediators_summary(table: pd.DataFrame) -> str:
    """How displacements grow, then the shares of the damage, a row for each perturbation; all seeds together."""
    keys, pooled = ["variant", "kind", "displacement"], table[table["seed"].isna()]
    grown = pooled[pooled["measure"] == "growth_exponent"]
    shares = pooled[pooled["measure"] == "explained"]
    loss = pooled[pooled["mediator"] == "loss"].set_index(keys)["change"].rename("change of loss")
    exponents = pd.DataFrame(
        {
            f"{words}{end}": grown[grown["mediator"] == name].set_index(keys)[column]
            for name, words in (("growth", "stream"), ("growth_of_pushes", "pushes alone"))
            for column, end in (("value", ""), ("low", " low"), ("high", " high"))
        },
        index=loss.index,
    )
    by_mediator = shares.pivot_table(index="mediator", columns=keys, values="value", sort=False)
    return (
        "exponent p of displacement ~ n^p after n pushes (1 they add up, 0.5 a random walk), 95 % intervals\n"
        + loss.to_frame().join(exponents).to_string(float_format="{:.3f}".format, na_rep="-")
        + "\nshare of the variance of the loss change that goes with each mediator (R^2)\n"
        + (by_mediator.to_string(float_format="{:.3f}".format, na_rep="-") if len(by_mediator) else "too few points")
    )


def evaluation_summary(table: pd.DataFrame) -> str:
    """Score and its change with interval, a row for each task, metric and edit."""
    shown = table[["task", "metric", "edit", "value", "change", "change_low", "change_high", "n_documents", "status"]]
    return shown.to_string(index=False, float_format="{:.4g}".format, na_rep="-")


def pairs_summary(table: pd.DataFrame) -> str:
    """Accuracy and mean margin with intervals, a row for each set and scoring."""
    whole = table[table["feature"] == "all"]
    shown = pd.DataFrame(
        {
            "set": whole["set"],
            "scoring": whole["scoring"],
            "pairs": whole["n_pairs"],
            "accuracy": [_with_interval(row, "accuracy", "{:.1%}") for row in whole.to_dict("records")],
            "margin": [_with_interval(row, "margin", "{:+.3f}") for row in whole.to_dict("records")],
            "ties": whole["n_ties"],
            "status": whole["status"],
        }
    )
    words = "share of pairs with the grammatical sentence ahead, and log p(good) - log p(bad) in nats; 95 % intervals\n"
    return words + shown.to_string(index=False)


def _with_interval(row: Any, name: str, pattern: str) -> str:
    value, *ends = (pattern.format(row[f"{name}{end}"]) for end in ("", "_low", "_high"))
    return f"{value} [{', '.join(ends)}]"


def dissociation_summary(table: pd.DataFrame) -> str:
    """Of every variant the damage by displacement, both kinds beside each other, and the verdict in words."""
    lines = [
        "damage by displacement: change of loss, drop of margin (both in nats) and of accuracy; ratios with 95 % "
        "intervals",
        "(largest error: of a token's realised displacement against what was asked; in as_run and mean_displacement "
        "tokens of one sequence differ by design, and only their mean is what was asked)",
    ]
    decided = groups(verdict(table))
    for part, rows in groups(table).items():
        lines.append(f"\n{label(table, part)}".rstrip())
        variant = str(rows["variant"].iloc[0]) if "variant" in rows else ""
        if variant in VARIANTS:
            lines.append(f"({VARIANTS[variant].changes})")
        single = rows[(rows["regime"] == "") & rows["seed"].isna() & rows["displacement"].notna()]
        shown = []
        for (name, displacement), found in single.groupby(["quantity", "displacement"], sort=False):
            by_kind = found.set_index("kind")
            cells = {kind: by_kind.loc[kind, "value"] for kind in KINDS}
            ratio = by_kind.loc["ratio"]
            error = 100 * by_kind.loc[list(KINDS), "displacement_max_error"].max()
            words = ratio_words(ratio) if ratio["status"] == "ok" else ratio["status"]
            about = {"quantity": name, "displacement": displacement}
            shown.append({**about, **cells, "angular / magnitude": words, "largest error %": error})
        formats: dict[str, Callable[[float], str]] = {
            "displacement": "{:g}".format,
            "largest error %": "{:.2g}".format,
        }
        formats |= dict.fromkeys(KINDS, lambda value: f"{value:+.4f}" if value == value else "-")
        lines.append(pd.DataFrame(shown).to_string(index=False, formatters=formats, na_rep="-"))
        for row in decided[part].query("regime == 'all'").itertuples():
            lines.append(f"{row.verdict}: {row.sentence}")
    return "\n".join(lines)


def repair_summary(table: pd.DataFrame) -> str:
    """Recovery of every pathway with its interval, a column per kind and displacement; the heads that help most."""
    whole = pooled(table)
    whole = whole.assign(
        shown=[entry(row) for row in whole.to_dict("records")],
        perturbation=whole["kind"] + " " + whole["displacement"].map("{:g}".format),
    )
    shown = whole.pivot(index="pathway", columns="perturbation", values="shown")
    shown = shown.loc[whole["pathway"].unique(), whole["perturbation"].unique()]
    first = whole.drop_duplicates("perturbation")
    damages = [f"{row['perturbation']}: {_with_interval(row, 'damage', '{:+.3f}')}" for row in first.to_dict("records")]
    lines = [
        "share of the damage that a repair gives back, over seeds; 95 % intervals",
        shown.to_string(),
        f"damage (nats per token): {'; '.join(damages)}",
    ]
    heads = head_rows(table)
    heads = heads[np.isfinite(heads["recovery"].astype(float))]
    for kind in KINDS:
        best = heads[heads["kind"] == kind].nlargest(3, "recovery")
        if len(best):
            named = [f"{row.layer}.{row.head} {row.recovery:.1%} ({row.displacement:g})" for row in best.itertuples()]
            lines.append(f"{kind}: single heads (layer.head) that give most back: {', '.join(named)}")
    return "\n".join(lines)


def training_summary(table: pd.DataFrame) -> str:
    """Every arm at the end: its loss on held-out documents, and what it is better or worse than the baseline."""
    lines = [f"{'arm':<20}{'at':<14}{'held-out loss':>14}{'change [95 %]':>28}{'seconds':>10}  seeds"]
    for _, row in table[table["kind"] == "final"].iterrows():
        if row.status != "done":
            why = f"no run came to its end ({row.n_diverged:.0f} diverged)"
            if row.status == "no baseline":
                why = "the baseline of its seeds came to no end"
            lines.append(f"{row.arm:<20}{why}")
            continue
        change = _with_interval(row, "change", "{:+.4f}")
        seeds = f"{row.n_seeds:.0f}" + (f", {row.n_diverged:.0f} diverged" if row.n_diverged else "")
        lines.append(f"{row.arm:<20}{row['at']:<14}{row.held_out_loss:>14.4f}{change:>28}{row.seconds:>10.0f}  {seeds}")
    lines.append("before the first step, with the arm's edit and without it (equal weights, hence equal without):")
    first = table[table["kind"] == "first"]
    for name, rows in first.groupby("arm", sort=False):
        lines.append(f"{name:<20}{rows['held_out_loss'].mean():.4f} with, {rows['bare_loss'].mean():.4f} without")
    return "\n".join(lines)


def tokens_summary(files: TokenFiles, sequence_length: int, packing: Packing) -> str:
    """Documents, tokens and windows of both sides, bytes per token, and the hash of it all."""
    rows = []
    for side in (files.train, files.held_out):
        about, windows = files.meta["sides"][side.side], side.windows(sequence_length, packing=packing).meta
        rows.append(
            {
                "side": side.side,
                "documents": side.n_documents,
                "tokens": side.n_tokens,
                "bytes per token": about["text_bytes"] / (side.n_tokens - side.n_documents),
                "windows": windows["windows"],
                "scored": windows["scored"],
                "padded": windows["padded"],
                "dropped": windows["predictions_dropped"],
            }
        )
    about = files.meta["tokenizer"]
    lines = [
        f"windows of {sequence_length} predictions, packed by {packing}: {PACKINGS[packing]}",
        pd.DataFrame(rows).to_string(index=False, float_format="{:.3f}".format),
        f"tokenizer: {about['vocabulary']:,} tokens, sha256 {about['sha256']}",
        f"tokens: sha256 {files.meta['tokens_sha256']}",
    ]
    return "\n".join(lines)
