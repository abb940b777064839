"""What was found, in sentences computed from the tables. Nothing here knows how a result should be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from lens_geometry.axes import interval, number, require
from lens_geometry.choice_sections import bits_sentence, drop_sentence
from lens_geometry.compression_gate import (
    COLUMNS,
    LOSS,
    PERPENDICULAR,
    default_mode,
    layer_rows,
    measured,
    site_row,
    whole_row,
)
from lens_geometry.dissociation_verdict import VERDICTS, groups, label, verdict
from lens_geometry.prediction_verdict import prediction_sentence
from lens_geometry.repair_plots import entry
from lens_geometry.results import Result

NEAR_PEAK = 0.95  # layers whose mean is at least this share of the highest one are named with it
SEVERAL = 4  # verdicts told with their contrasts; of more only which they are
NO_PROFILE = "How parallel the updates are to their references was not measured."
NO_REMOVAL = "What removing the parallel or the perpendicular part costs was not measured."
NO_CONTROLS = "How removing the parallel part compares with its controls was not measured."
NO_HEADS = "What single heads cost was not measured."
NO_REPAIR = "No repair of a pathway has a recovery: the damage could not be told from 0, or not be measured."
NO_STRENGTH = "How much of its branch an edit changes was not measured."
NO_ARMS = "No arm came to its end beside the baseline."
NO_ERROR = "How a compressed model's updates differ from the dense model's was not measured."
NO_GROWTH = "How displacements grow over several pushes was not measured."
CONTROLS = {
    "isotropic": "an isotropic change of the same size",
    "shuffled_reference": "removing along an earlier token's reference",
    "gain": "removing the whole update",
}  # at scale 0


def findings(results: Sequence[Result]) -> list[str]:
    """A sentence or two for each kind of result that is here, in a fixed order.

    Which update is most parallel (profile); what removal costs, and how its controls compare (scaling sweep); what
    single heads cost (head sweep); how much of its branch an edit changes (applied strength); whether direction and
    size hurt different things (dissociation); what comes back when one pathway is repaired (pathway repair); how
    displacements grow over several pushes (mediators); what training without a part does (arms); what compression
    does to the loss, and where and in which direction its error is (compression); which error predicts the damage
    (error prediction); what chosen widths and blanked layers cost (layer choice). Taken from the first result of each
    kind; what such a result does not hold is said not to be measured. To cost more is to have the higher change of
    loss. Two changes are called different only where their 95 % intervals are apart, or where one of them has no
    interval, which is then said.

    Raises ResultError for a table that lacks a column.
    """
    tables = {result.experiment: result.table for result in reversed(results)}
    told = [
        sentence(tables[experiment])
        for experiment, sentences in SENTENCES.items()
        if experiment in tables
        for sentence in sentences
    ]
    return [words for words in told if words]


def profile_sentence(table: pd.DataFrame) -> str:
    """Which site's update is most parallel (parallel_fraction, all heads together), and in which layers."""
    require(table, "site layer head metric mean", "profile")
    rows = table[table["head"].isna() & (table["metric"] == "parallel_fraction")]
    rows = rows[np.isfinite(rows["mean"].astype(float))]
    if rows.empty:
        return NO_PROFILE
    means = rows.groupby("site", sort=False)["mean"].mean()
    highest = number(means.max())
    best = [str(site) for site in means.index if number(means[site]) == highest]
    others = _join(f"{site} {number(means[site])}" for site in means.index if site not in best)
    peaks = _join(_peak(rows[rows["site"] == site], site if len(best) > 1 else "") for site in best)
    measure = f"parallel_fraction {highest} (mean over tokens, then over layers; {peaks})"
    against = f", against {others}" if others else ""
    if len(means) == 1:
        return f"At {best[0]}, the only site profiled, the update has {measure}."
    if len(best) > 1:
        return f"The most parallel updates are tied at {_join(best)}, each with {measure}{against}."
    return f"The update most parallel to its reference is that of {best[0]}, with {measure}{against}."


def removal_sentence(table: pd.DataFrame) -> str:
    """Loss change of removing the perpendicular part against removing the parallel one, per site."""
    rows, note = _main_rows(table)
    verdicts: dict[str, list[str]] = {}
    numbers = []
    for site, part in rows[rows["control"] == "none"].groupby("name", sort=False):
        parallel, perpendicular = (_at_zero(part, component) for component in ("parallel", "perpendicular"))
        verdicts.setdefault(_compare(perpendicular, parallel), []).append(str(site))
        ratio = ""
        if parallel and perpendicular and 0 < parallel[0] < math.inf and 0 < perpendicular[0] < math.inf:
            ratio = f" ({number(perpendicular[0] / parallel[0], digits=2)} times)"
        if parallel is not None or perpendicular is not None:
            numbers.append(f"{site} {_change(perpendicular)} against {_change(parallel)}{ratio}")
    if not numbers:
        return NO_REMOVAL
    verdict = _verdict(verdicts, "removing the parallel part (s_par = 0)")
    changes = f"change of loss in nats per token: {_join(numbers, '; ')}"
    return f"Removing the perpendicular part (s_perp = 0) {verdict}; {changes}{note}."


def controls_sentence(table: pd.DataFrame) -> str:
    """Removing the parallel part against each of `CONTROLS`, per site."""
    rows, note = _main_rows(table)
    clauses = []
    for control, words in CONTROLS.items():
        verdicts: dict[str, list[str]] = {}
        for site, part in rows.groupby("name", sort=False):
            edit, beside = (_at_zero(part[part["control"] == name], "parallel") for name in ("none", control))
            verdicts.setdefault(_compare(edit, beside), []).append(str(site))
        missing = set(verdicts) == {"missing"}
        clauses.append(f"was not measured beside {words}" if missing else _verdict(verdicts, words))
    if all(clause.startswith("was not measured") for clause in clauses):
        return NO_CONTROLS
    return f"Removing the parallel part (s_par = 0) {'; it '.join(clauses)}{note}."


def heads_sentence(table: pd.DataFrame) -> str:
    """The single head that costs most, all heads of a layer at once and their sum, at the first site swept."""
    require(table, "site grouping layer head kind method parallel perpendicular loss_change", "head_sweep")
    first = table[(table["site"] == table["site"].iloc[0]) & (table["method"] == table["method"].iloc[0])]
    singles = first[(first["kind"] == "single") & np.isfinite(first["loss_change"].astype(float))]
    if singles.empty:
        return NO_HEADS
    singles = singles[singles["grouping"] == singles["grouping"].iloc[0]]
    first = first[first["grouping"] == singles["grouping"].iloc[0]]
    dearest = singles.loc[singles["loss_change"].idxmax()]
    whole = [_mean_by_layer(first[first["kind"] == kind]) for kind in ("all", "sum_of_singles")]
    unit = "KV head" if dearest["grouping"] == "kv_group" else "head"
    method = "" if dearest["method"] == "exact" else " to first order"
    scales = f"s_par = {dearest['parallel']:g}, s_perp = {dearest['perpendicular']:g}"
    most, mean = (number(x, signed=True) for x in (dearest["loss_change"], singles["loss_change"].mean()))
    return (
        f"Of {len(singles):,} single {unit}s edited at {dearest['site']} ({scales}) the one that costs most{method} is "
        f"{unit} {dearest['head']} of layer {dearest['layer']} ({most} nats per token), against {mean} for one on "
        f"average; all {unit}s of a layer at once cost {whole[0]} on average over layers, the sum of single ones "
        f"{whole[1]}."
    )


def _mean_by_layer(rows: pd.DataFrame) -> str:
    return number(rows["loss_change"].mean(), signed=True) if len(rows) else "not measured"


def strength_sentence(table: pd.DataFrame) -> str:
    """How much of its branch the removal of the parallel part changes, per site, and what that costs."""
    require(table, "site component scale layer change_over_branch loss_change status", "applied_strength")
    removed = (table["component"] == "parallel") & (table["scale"].astype(float).abs() < 1e-9)
    rows = table[removed & table["layer"].isna()]
    if rows.empty:
        return NO_STRENGTH
    told = [
        f"{row.site} {number(100 * row.change_over_branch)} % for {number(row.loss_change, signed=True)}"
        for row in rows.itertuples()
    ]
    return (
        "Removing the parallel part (s_par = 0) changes this much of the branch (mean over layers and tokens) for this "
        f"change of loss, in nats per token: {_join(told, '; ')}."
    )


def dissociation_sentence(table: pd.DataFrame) -> str:
    """The verdict on direction against magnitude, with its numbers; of many variants only which has which."""
    if "matched" in table and (table["matched"] == "displacement").any():
        table = table[table["matched"] == "displacement"]
    decided = verdict(table)
    rows = decided[decided["regime"] == "all"]
    rows = rows[rows["quantity"] == rows["quantity"].iloc[0]]
    found = {label(rows, part): own.iloc[0] for part, own in groups(rows).items()}
    about = f"text against minimal pairs ({rows['quantity'].iloc[0]})" if rows["quantity"].iloc[0] else "text alone"
    if len(found) == 1:
        told = [f"{row['verdict']}, {row['sentence']}" for row in found.values()]
    elif len(found) <= SEVERAL:
        told = [f"{name} {row['verdict']} ({_both_contrasts(row)})" for name, row in found.items()]
    else:
        (name, first), *others = found.items()
        counts = {word: sum(row["verdict"] == word for _, row in others) for word in VERDICTS}
        rest = _join(f"{word} in {count}" for word, count in counts.items() if count)
        told = [f"{name}: {first['verdict']}, {first['sentence']}", f"of {len(others)} other comparisons {rest}"]
    return f"Hidden states turned and rescaled by the same distance, {about}: {_join(told, '; ')}."


def _both_contrasts(row: pd.Series) -> str:
    loss, pairs = (number(row[name], signed=True) for name in ("loss_contrast", "contrast"))
    return f"contrast {loss} of the loss, {pairs} of the {row['quantity']}" if row["quantity"] else f"contrast {loss}"


def repair_sentence(table: pd.DataFrame) -> str:
    """Which pathway gives most of the damage back by itself, for each kind at its smallest displacement with damage."""
    require(
        table, "kind displacement unit seed pathway head recovery recovery_low recovery_high status", "pathway_repair"
    )
    rows = table[table["seed"].isna() & table["head"].isna() & np.isfinite(table["recovery"].astype(float))]
    joint = rows["pathway"].str.contains("+", regex=False)
    rows = rows[~joint & ~rows["pathway"].isin(["nothing", "everything", "final_norm"])]
    told = []
    for kind, part in rows.groupby("kind", sort=False):
        part = part[part["displacement"] == part["displacement"].min()].sort_values("recovery", ascending=False)
        best, *others = part.to_dict("records")
        after = _join(f"{row['pathway']} {number(100 * row['recovery'])} %" for row in others)
        told.append(
            f"{kind} (displacement {best['displacement']:g} {best['unit']}) {best['pathway']} {entry(best)}"
            + (f", then {after}" if others else "")
        )
    if not told:
        return NO_REPAIR
    return f"The pathway whose repair alone gives most of the damage back is, for {_join(told, '; for ')}."


def mediators_sentence(table: pd.DataFrame) -> str:
    """How the displacement grows over the pushes of several layers, and how the pushes alone would."""
    require(table, "variant kind displacement mediator measure seed value low high", "mediators")
    rows = table[(table["measure"] == "growth_exponent") & table["seed"].isna()]
    rows = rows[np.isfinite(rows["value"].astype(float))]
    if rows.empty:
        return NO_GROWTH
    several, told = rows["displacement"].nunique() > 1, list[str]()
    if len(rows.drop_duplicates(["variant", "kind", "displacement"])) > SEVERAL:
        rows = rows[rows["displacement"] == rows["displacement"].min()]
        for mediator, whose in (("growth", ""), ("growth_of_pushes", "the pushes alone ")):
            for kind, part in rows[rows["mediator"] == mediator].groupby("kind", sort=False):
                each = _join(f"{number(row.value)} ({row.variant})" for row in part.itertuples())
                told.append(f"{whose}{kind} {each}")
        return (
            "Over n pushed layers the stream's displacement grows like n to the power of (1: the pushes add up, 0.5: a "
            f"random walk): {_join(told, '; ')}."
        )
    for (variant, kind, displacement), part in rows.groupby(["variant", "kind", "displacement"], sort=False):
        by_name = {row.mediator: interval(row.value, row.low, row.high) for row in part.itertuples()}
        size = f", d = {displacement:g}" if several else ""
        told.append(
            f"{kind} ({variant}{size}) {by_name.get('growth', 'not measured')}, the pushes alone "
            f"{by_name.get('growth_of_pushes', 'not measured')}"
        )
    return (
        "Over n pushed layers the stream's displacement grows like n to the power of (1: the pushes add up, 0.5: a "
        f"random walk; 95 % intervals): {_join(told, '; ')}."
    )


def arms_sentence(table: pd.DataFrame) -> str:
    """Which arms end with a lower or a higher loss than the baseline, at equal tokens."""
    require(table, "kind arm at change change_low change_high n_seeds", "compare_arms")
    ends = table[(table["kind"] == "final") & (table["at"] == "equal tokens") & (table["arm"] != "baseline")]
    ends = ends[ends["change"].notna()]
    if ends.empty:
        return NO_ARMS
    words = []
    for verdict_words, rows in (
        ("a lower loss", ends[ends["change_high"] < 0]),
        ("a higher loss", ends[ends["change_low"] > 0]),
        ("a loss that cannot be told from it", ends[(ends["change_low"] <= 0) & (ends["change_high"] >= 0)]),
    ):
        if len(rows):
            arms = [
                f"{row['arm']} ({interval(row['change'], row['change_low'], row['change_high'], signed=True)})"
                for _, row in rows.iterrows()
            ]
            words.append(f"{_join(arms)} with {verdict_words}")
    seeds = int(ends["n_seeds"].max())
    return f"Trained on equal tokens from equal weights ({seeds} seeds), beside the baseline end {'; '.join(words)}."


def compression_sentence(table: pd.DataFrame) -> str:
    """What compression does to the loss, how much of the error is perpendicular to the update, where it is largest."""
    require(table, COLUMNS, "compression")
    mode = default_mode(tuple(found for found, _ in measured(table)))
    rows = layer_rows(table, mode, PERPENDICULAR)
    rows = rows[np.isfinite(rows["mean"].astype(float)) & (rows["n_infinite"] == 0)]
    change, told = whole_row(table, LOSS), []
    if change is not None:
        value, low, high = (float(change[name]) for name in ("mean", "ci_low", "ci_high"))
        moved = "is not finite"
        if math.isfinite(value):
            verb = "raises" if low > 0 else "lowers" if high < 0 else "does not clearly change"
            moved = f"{verb} the loss ({interval(value, low, high, signed=True)} nats per token)"
        told.append(
            f"Compression {moved}" if math.isfinite(value) else "The loss of the compressed model is not finite"
        )
    if rows.empty:
        return f"{told[0]}; no finite error of its updates was measured." if told else NO_ERROR
    shares = {site: site_row(table, mode, site, "perpendicular_share") for site in map(str, rows["site"].unique())}
    share = _join(f"{number(100 * row['mean'])} % at {site}" for site, row in shares.items() if row is not None)
    worst = rows.loc[rows["mean"].idxmax()]
    size = interval(float(worst["mean"]), float(worst["ci_low"]), float(worst["ci_high"]))
    told += [f"of the error's square, {share} is perpendicular to the dense update ({mode}, mean over layers)"] * bool(
        share
    )
    told.append(
        f"the perpendicular error is largest at {worst['site']} of layer {worst['layer']}, {size} of the update"
    )
    words = "; ".join(told)
    return f"{words[0].upper()}{words[1:]}."


def layers_sentence(table: pd.DataFrame) -> str:
    """Which error orders the layers of a variant by the loss of each alone; empty where that was not measured."""
    return prediction_sentence(table, "layers")


SENTENCES = {
    "profile": (profile_sentence,),
    "scaling_sweep": (removal_sentence, controls_sentence),
    "mlp_sweep": (removal_sentence,),
    "head_sweep": (heads_sentence,),
    "applied_strength": (strength_sentence,),
    "dissociation": (dissociation_sentence,),
    "pathway_repair": (repair_sentence,),
    "mediators": (mediators_sentence,),
    "compare_arms": (arms_sentence,),
    "compression": (compression_sentence,),
    "error_prediction": (prediction_sentence, layers_sentence),
    "layer_choice": (bits_sentence, drop_sentence),
}
Change = tuple[float, float, float]


def _at_zero(rows: pd.DataFrame, component: str) -> Change | None:
    """Loss change, low and high where the component is removed; None where that was not measured."""
    chosen = rows[(rows["component"] == component) & (rows["scale"].astype(float).abs() < 1e-9)]
    if chosen.empty:
        return None
    row = chosen.iloc[0]
    change = float(row["loss_change"]) if row["status"] != "nonfinite" else math.nan
    return change, float(row["loss_change_low"]), float(row["loss_change_high"])


def _compare(one: Change | None, other: Change | None) -> str:
    """`more`, `less` or `open` (a suffix says where no interval is), `missing` or `lost` (not finite)."""
    if one is None or other is None:
        return "missing"
    if not (math.isfinite(one[0]) and math.isfinite(other[0])):
        return "lost"
    order = "more" if one[0] > other[0] else "less" if one[0] < other[0] else "open"
    if not np.isfinite([*one, *other]).all():
        return f"{order} without interval"
    return order if one[1] > other[2] or one[2] < other[1] else "open"


def _verdict(verdicts: dict[str, list[str]], other: str) -> str:
    """`costs more than ... at attn, less at mlp, cannot be told apart from it at value`: each site once."""
    phrases: list[str] = []
    for name in (
        "more",
        "less",
        "open",
        "more without interval",
        "less without interval",
        "open without interval",
    ):
        if name not in verdicts:
            continue
        sites = verdicts[name]
        place = f"every one of the {len(sites)} sites" if len(verdicts) == 1 and len(sites) > 1 else _join(sites)
        kind = name.split()[0]
        if kind == "open":
            verb = f"cannot be told apart from {'it' if phrases else other}"
        else:
            verb = kind if phrases else f"costs {kind} than {other}"
        remark = " (no interval)" if name != kind else " (intervals overlap)" if kind == "open" else ""
        phrases.append(f"{verb} at {place}{remark}")
    first = "" if phrases else f" with {other}"
    if "lost" in verdicts:
        phrases.append(f"cannot be compared{first} at {_join(verdicts['lost'])} (not finite)")
    if "missing" in verdicts:
        phrases.append(f"was not compared{first} at {_join(verdicts['missing'])} (not measured)")
    return _join(phrases)


def _main_rows(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Per site the set of layers and the grouping with most conditions, and a remark on which they are."""
    columns = "site layers grouping control component scale status loss_change loss_change_low loss_change_high"
    require(table, columns, "scaling_sweep")
    keys = ["site", "layers", "grouping"]
    sizes = table.groupby(keys, sort=False, dropna=False).size().reset_index(name="size")
    main = sizes.loc[sizes.groupby("site", sort=False)["size"].idxmax(), keys]
    rows = table.merge(main, on=keys)
    sets = [str(layers) for layers in main["layers"].unique()]
    site = rows["site"].astype(str)
    rows["name"] = site if len(sets) == 1 else site + " (layers " + rows["layers"].astype(str) + ")"
    note = f"; layers {sets[0]} were edited" if len(sets) == 1 and sets[0] != "all" else ""
    return rows, note + ("" if len(main) == len(sizes) else "; other layer sets or groupings are in the table")


def _change(value: Change | None) -> str:
    return "not measured" if value is None else number(value[0], signed=True)


def _peak(rows: pd.DataFrame, site: str) -> str:
    """In which layers a site's mean is highest: those near the peak, as ranges."""
    highest = rows["mean"].max()
    near = sorted(int(layer) for layer in rows.loc[rows["mean"] >= NEAR_PEAK * highest, "layer"])
    runs: list[list[int]] = []
    for layer in near:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    words = _join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    if len(runs) > 4:
        words = str(rows.loc[rows["mean"].idxmax(), "layer"])
    whose = f"{site} " if site else ""
    if len(near) == len(rows) > 1:
        return f"{whose}nearly the same in every layer"
    several = len(near) > 1 and len(runs) <= 4
    return f"{whose}highest in layer{'s' if several else ''} {words}, up to {number(highest)}"


def _join(words: Iterable[str], between: str = ", ") -> str:
    words = list(words)
    if len(words) < 2 or between != ", ":
        return between.join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
