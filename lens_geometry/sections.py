"""The report's section for one result: warnings, how to read it, figures, short tables, the whole table."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from lens_geometry import generation_sections, plots
from lens_geometry import html_pieces as pieces
from lens_geometry.attention_sections import attention_section
from lens_geometry.axes import interval, number, part_of
from lens_geometry.basin_sections import basin_section, schedule_section
from lens_geometry.choice_sections import choice_section
from lens_geometry.compression_sections import compression_section, compression_warnings
from lens_geometry.dissociation_sections import dissociation_section, dissociation_warnings
from lens_geometry.effect_sections import heads_section, strength_section
from lens_geometry.evaluation_sections import evaluation_section
from lens_geometry.mediator_sections import mediators_section
from lens_geometry.pair_sections import pairs_section
from lens_geometry.repair_sections import repair_section
from lens_geometry.results import Result
from lens_geometry.study_sections import prediction_section, study_section, study_warnings
from lens_geometry.sweep_plots import SCALES, UNITS, control, series_labels
from lens_geometry.training_sections import arms_section, run_section

SIZES = {"n_sequences": "sequences", "n_tokens": "tokens", "n_documents": "documents"}  # of the text, in words
TITLES = {
    "profile": "Directional profile",
    "scaling_sweep": "Component scaling",
    "mlp_sweep": "Inside the MLP",
    "head_sweep": "Single heads",
    "applied_strength": "Applied strength",
    "basin": "Tolerance basin",
    "schedule": "Schedule of scales by layer",
    "attention_maps": "Attention before and after an edit",
    "generation_profile": "Profile over generation steps",
    "continuations": "Edited continuations",
    "evaluate": "Downstream tasks",
    "minimal_pairs": "Minimal pairs",
    "dissociation": "Direction against magnitude",
    "pathway_repair": "Pathway repair",
    "mediators": "Mediators of the damage",
    "train": "Training",
    "compare_arms": "Training without the parallel part",
    "compression": "Compression error",
    "compression_study": "Compressed variants",
    "error_prediction": "What predicts the damage",
    "layer_choice": "Layer choice",
}
SITES = {
    "attn": "what attention adds to the residual stream, against the stream it is added to",
    "mlp": "what the MLP adds to the residual stream, against the stream it is added to",
    "block": "what the whole layer adds to the residual stream, against the layer's input",
    "value": "a head's attention-weighted sum of values, before W_O, against the token's own value",
    "value_excl_self": "the same sum over the other tokens only, against the token's own value",
    "mlp_carrier": "the MLP's activations before W_out, in slices as wide as the stream, against the MLP's input",
    "mlp_carrier_stream": "the same slices, against the stream that the MLP's input is normalised from",
    "mlp_contribution": "what each slice writes to the stream through W_out, against the slice itself",
}
METRICS = {
    "parallel_ratio": "Size of the parallel part over size of the perpendicular part: at 1 they are equal.",
    "alpha": "Length along the reference in units of the reference; below zero the update shrinks it.",
    "parallel_fraction": "Each part's share of the update's length; per token, their squares sum to 1.",
    "update_over_reference": "Length of the update over length of its reference: how large the step is.",
}
CONTROLS = {
    "isotropic": "a random change with, for every token, the same length as the edit's change",
    "gain": "both parts scaled alike, so the direction of the update is kept",
    "random_reference": "the edit made along a random direction instead of the reference",
    "shuffled_reference": "the edit made along the reference of an earlier token",
    "matched_random_reference": "the edit made along a random direction at the reference's own angle to the update: it "
    "changes the update by as much and leaves it as long",
    "diagonal_removal": "no token attends to itself (the first one keeps its only entry)",
    "diagonal_removal_renormalised": "the same, with the rest of each row scaled up to sum to 1",
}
PROFILE_WORDS = (
    "Every update is split into a part along its reference and a part perpendicular to it. A point is the "
    "mean over tokens at one layer, all heads together; its bar is the 95 % interval of that mean, and the "
    "band holds the middle 80 % of tokens. A cross marks a mean that is not finite, an open marker one that "
    "left tokens out."
)
SWEEP_WORDS = (
    "Each update becomes s_par times its parallel part plus s_perp times its perpendicular part. At 1 "
    "nothing is edited, so the change is zero by definition. Bars are 95 % intervals over sequences, paired "
    "with the unedited run. Axes of change are symmetric-log: even near zero, then every labelled step is a "
    "factor. A cross marks a condition where some losses were not finite and are left out."
)
BASIN_WORDS = (
    "How far one component can be scaled before the loss notices, the other kept. The thick line is the basin: every "
    "scale that was tried on it has a change of loss under the bound, and so has the one-sided 95 % upper end of "
    "that change. The thin line is the same by the change itself. An arrow is an end where the search's limit was "
    "reached without leaving; a hollow dot is a scale further out that is inside again. The interval holds for each "
    "scale by itself, and a bump narrower than the search's first step can have been stepped over."
)
SCHEDULE_WORDS = (
    "Layers are lowered one step at a time, always where a layer by itself adds the least loss for the change that "
    "it makes in its branch's output, until the joint change of loss (with its one-sided 95 % upper end) would leave "
    "the budget. Beside it stand one scale for all layers and random orders of the layers, all with the same "
    "applied strength: the sum over layers of the mean over tokens of the change's size over that of the output. "
    "The choice was made on half of the sequences; what it is worth is seen on the held-out half."
)


def heading(result: Result) -> str:
    """The section's title."""
    return TITLES.get(result.experiment, result.experiment.replace("_", " ").capitalize())


def section(result: Result, place: int) -> str:
    """HTML of one result; `place` makes its ids unique. An unknown experiment gets its table only."""
    key = f"part{place}"
    inside = SECTIONS.get(result.experiment, plain_section)
    warnings = [*map(str, result.meta.get("warnings") or []), *table_warnings(result)]
    return "\n".join(
        [
            f'<section id="{key}"><h2>{pieces.text(heading(result))}</h2>',
            f'<p class="run">{pieces.text(_measured_on(result))}</p>',
            pieces.notes(dict.fromkeys(warnings)),
            *inside(result.table, key),
            pieces.download(result.table, key, result.experiment),
            "</section>",
        ]
    )


def _measured_on(result: Result) -> str:
    """How much text this one result is from; results of one report may differ in that."""
    data = result.meta.get("data")
    counts = data if isinstance(data, dict) else {}
    sizes = [f"{counts[key]:,} {word}" for key, word in SIZES.items() if isinstance(counts.get(key), int)]
    mask = result.meta.get("token_mask")
    return "; ".join([", ".join(sizes), *([str(mask)] if mask else [])]).strip("; ")


def profile_section(table: pd.DataFrame, key: str) -> list[str]:
    """A panel per metric, a map of heads per site that has them, and the means over layers."""
    pooled = table[table["head"].isna()]
    metrics = [name for name in plots.METRICS if name in set(pooled["metric"])]
    sites = list(pooled["site"].unique())
    figures = [
        pieces.plot(plots.profile_figure(table, [name]), f"{key}-{name}", plots.METRICS[name][0], METRICS[name])
        for name in metrics
    ]
    heads = table[table["head"].notna() & (table["metric"] == "parallel_fraction")]
    if len(heads):
        scale = plots.profile_heads_figure(table).layout.coloraxis
        caption = "parallel_fraction of every head, mean over tokens; one colour scale for all sites."
        for site in heads["site"].unique():
            drawn = plots.profile_heads_figure(heads[heads["site"] == site])
            drawn.update_layout(coloraxis={"cmin": scale.cmin, "cmax": scale.cmax, "colorbar": {"title": None}})
            title = f"{site}, {part_of(str(site))} by {part_of(str(site))}"
            figures.append(pieces.plot(drawn, f"{key}-heads-{site}", title, caption, switched=False))
    switches = "".join(map(pieces.site_switch, sites)) + pieces.role_switch("band", "middle 80 % of tokens", on=True)
    rows = []
    for site, part in pooled.groupby("site", sort=False):
        means = [part.loc[part["metric"] == name, "mean"].astype(float) for name in metrics]
        rows.append([str(site), *(f"{number(m.mean())}\n{number(m.min())} to {number(m.max())}" for m in means)])
    caption = "Mean over tokens, then over layers; in small print the lowest and the highest layer."
    return [
        *_reading(PROFILE_WORDS, {site: SITES.get(site, "") for site in sites}),
        pieces.fieldset("Show in the figures", switches),
        f'<div class="figures">{"".join(figures)}</div>',
        pieces.grid(caption, ["site", *metrics], rows),
    ]


def sweep_section(table: pd.DataFrame, key: str) -> list[str]:
    """The two panels, the edit beside its controls at scale 0, and short tables of both."""
    table = table.assign(label=series_labels(table))
    components = [name for name in SCALES if name in set(table["component"])]
    quantities = [name for name in UNITS if f"{name}_change" in table]
    figures = []
    for quantity in quantities:
        for part in components:
            drawn, name = plots.sweep_figure(table, [part], [quantity]), f"{key}-{quantity}-{part}"
            title = f"{UNITS[quantity].capitalize()}, by {SCALES[part]}"
            caption = f"{SCALES[part]} is varied, the other part is kept. The dotted line is the unedited model."
            figures.append(pieces.plot(drawn, name, title, caption, quantity=quantity))
        for part in components:
            controls = _controls_at_zero(table, part)
            if not controls:
                continue
            marks = [f"{pieces.GLYPHS.get(control(name)[2], '✚')} {control(name)[0]}" for name in controls]
            caption = f"● the edit, {', '.join(marks)}. The axis is the same for both parts."
            title = f"Removing the {part} part, beside its controls"
            drawn, name = (
                plots.controls_figure(table, part, 0.0, quantity),
                f"{key}-{quantity}-{part}-controls",
            )
            figures.append(pieces.plot(drawn, name, title, caption, quantity=quantity, switched=False))
    sites = list(table["site"].unique())
    controls = [name for name in table["control"].unique() if name != "none"]
    switches = "".join(map(pieces.site_switch, sites))
    switches += "".join(pieces.role_switch(name, control(name)[0], control(name)[1]) for name in controls)
    meanings = {site: SITES.get(site, "") for site in sites}
    meanings |= {control(name)[0]: CONTROLS.get(name, "") for name in controls}
    return [
        *_reading(SWEEP_WORDS, meanings),
        pieces.fieldset("Show in the figures", switches),
        pieces.fieldset("Measured as change of", pieces.quantity_switches(f"{key}-quantity", quantities)),
        f'<div class="figures">{"".join(figures)}</div>',
        *_sweep_tables(table, components, quantities),
    ]


def _sweep_tables(table: pd.DataFrame, components: list[str], quantities: list[str]) -> Iterable[str]:
    edits, labels = table[table["control"] == "none"], list(table["label"].unique())
    wanted = [(part, scale) for part in components for scale in (0.5, 0.0) if len(_at(edits, part, scale))]
    for quantity in quantities if wanted else []:
        base = f"; unedited loss {number(table['base_loss'].iloc[0], digits=4)} nats per token"
        caption = f"Change of {quantity}, with 95 % intervals{base if quantity == 'loss' else ''}."
        columns = ["site", *(f"{SCALES[part]} = {scale:g}" for part, scale in wanted)]
        rows = [[label, *(_entry(_at(edits, *at), label, quantity) for at in wanted)] for label in labels]
        shown = pieces.grid(caption, columns, rows)
        yield shown if quantity == "loss" else pieces.details(f"The same in {quantity}", shown)
    for part in components:
        controls, removed = _controls_at_zero(table, part), _at(table, part, 0.0)
        if controls:
            by_name = [removed[removed["control"] == name] for name in ("none", *controls)]
            rows = [[label, *(_entry(found, label, "loss") for found in by_name)] for label in labels]
            caption = f"Change of loss without the {part} part ({SCALES[part]} = 0), beside its controls."
            yield pieces.grid(caption, ["site", "the edit", *(control(name)[0] for name in controls)], rows)


def _at(table: pd.DataFrame, component: str, scale: float) -> pd.DataFrame:
    return table[(table["component"] == component) & np.isclose(table["scale"].astype(float), scale)]


def _controls_at_zero(table: pd.DataFrame, component: str) -> list[str]:
    """The controls beside the removal of one component, in the table's order."""
    return [str(name) for name in _at(table, component, 0.0)["control"].unique() if name != "none"]


def _entry(rows: pd.DataFrame, label: str, quantity: str) -> str:
    rows = rows[rows["label"] == label]
    if rows.empty:
        return "not measured"
    row = rows.iloc[0]
    if row["status"] == "nonfinite":
        return f"not finite\nfor {row['n_nonfinite']:,} tokens"
    value, low, high = (row[f"{quantity}_change{end}"] for end in ("", "_low", "_high"))
    return interval(value, low, high, signed=True).replace(" [", "\n[")


def _sites_reading(words: str, table: pd.DataFrame) -> list[str]:
    return _reading(words, {str(site): SITES.get(str(site), "") for site in table["site"].unique()})


def generation_section(table: pd.DataFrame, key: str) -> list[str]:
    """Metrics by generation step, and maps of layer by step."""
    meanings = {str(site): SITES.get(str(site), "") for site in table["site"].unique()}
    return [
        *_reading(generation_sections.PROFILE_WORDS, meanings),
        *generation_sections.profile_parts(table, key, METRICS),
    ]


def continuations_section(table: pd.DataFrame, key: str) -> list[str]:
    """Edited continuations beside the unedited one, prompt by prompt."""
    meanings = {str(site): SITES.get(str(site), "") for site in table["site"].unique() if site != "none"}
    return [*_reading(generation_sections.WORDS, meanings), *generation_sections.continuation_parts(table)]


def plain_section(table: pd.DataFrame, key: str) -> list[str]:
    """The first rows of a table that has no section of its own."""
    rows = [
        [number(value) if isinstance(value, float) else str(value) for value in row]
        for row in table.head(20).itertuples(index=False)
    ]
    return [pieces.grid(f"The first {len(rows)} of {len(table):,} rows.", list(map(str, table.columns)), rows)]


SECTIONS = {
    "profile": profile_section,
    "scaling_sweep": sweep_section,
    "mlp_sweep": sweep_section,
    "evaluate": evaluation_section,
    "generation_profile": generation_section,
    "continuations": continuations_section,
    "attention_maps": attention_section,
    "head_sweep": heads_section,
    "applied_strength": strength_section,
    "basin": lambda table, key: [*_sites_reading(BASIN_WORDS, table), *basin_section(table, key)],
    "schedule": lambda table, key: [*_sites_reading(SCHEDULE_WORDS, table), *schedule_section(table, key)],
    "minimal_pairs": pairs_section,
    "dissociation": dissociation_section,
    "pathway_repair": repair_section,
    "mediators": mediators_section,
    "train": run_section,
    "compare_arms": arms_section,
    "compression": compression_section,
    "compression_study": study_section,
    "error_prediction": prediction_section,
    "layer_choice": choice_section,
}


def _reading(words: str, meanings: dict[str, str]) -> list[str]:
    return [
        f"<p>{pieces.text(words)}</p>",
        pieces.details("What the names mean", pieces.definitions(meanings)),
    ]


def table_warnings(result: Result) -> list[str]:
    """What a reader of the figures must know: conditions lost, tokens left out, no intervals, no controls."""
    table = result.table
    if result.experiment == "profile":
        left_out = table[(table["n_infinite"] + table["n_undefined"] > 0) & table["head"].isna()]
        return [
            f"{metric}: {len(rows):,} of the means over all heads leave out tokens where it is infinite or "
            f"undefined ({', '.join(map(str, rows['site'].unique()))})."
            for metric, rows in left_out.groupby("metric", sort=False)
        ]
    if result.experiment == "continuations":
        counts = table["status"].value_counts()
        words = {"nonfinite": "are not finite", "no_effect": "are of an edit that changed nothing"}
        return [f"{counts[key]:,} of {len(table):,} rows {means}." for key, means in words.items() if key in counts]
    if result.experiment == "dissociation":
        return dissociation_warnings(table)
    if result.experiment == "compression_study":
        return study_warnings(table)
    if result.experiment == "compression":
        return compression_warnings(table)
    if result.experiment == "compare_arms":
        lost = table[(table["kind"] == "final") & (table["n_diverged"] > 0)].drop_duplicates("arm")
        return [
            f"{row.arm}: {row.n_diverged:.0f} of {row.n_seeds + row.n_diverged:.0f} runs diverged, and "
            f"{'is' if row.n_diverged == 1 else 'are'} left out."
            for row in lost.itertuples()
        ]
    if result.experiment == "mediators":
        runs = table[(table["mediator"] == "loss") & table["seed"].notna()]
        words = {
            "nonfinite": "have losses that are not finite, which are left out",
            "no_effect": "changed no loss by a bit",
            "impossible": "could not be made: a token cannot be moved so far",
        }
        counts = runs["status"].value_counts()
        lost = {key: means for key, means in words.items() if key in counts}
        return [f"{counts[key]:,} of {len(runs):,} perturbed runs {means}." for key, means in lost.items()]
    if result.experiment not in ("scaling_sweep", "mlp_sweep"):
        return []
    found, lost = [], table[table["status"] == "nonfinite"]
    if len(lost):
        scales = lost["component"].map(lambda name: SCALES.get(name, name)) + " = " + lost["scale"].map("{:g}".format)
        named = list(dict.fromkeys(lost["site"].astype(str) + " at " + scales))
        more = f" and {len(named) - 5:,} more" if len(named) > 5 else ""
        count = f"{len(lost):,} of {len(table):,} conditions have losses that are not finite"
        found.append(f"{count}: {', '.join(named[:5])}{more}.")
    if (table["n_sequences"] < 2).any():
        found.append("There was one sequence only, so no number here has an interval.")
    if (table["control"] == "none").all():
        found.append("No controls were run, so an effect of direction can't be told from one of size.")
    return found
