"""The report's parts about generation: figures by step, and edited continuations beside the unedited one."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from lens_geometry import html_pieces as pieces
from lens_geometry import plots
from lens_geometry.axes import interval, number, require
from lens_geometry.generation_plots import CONTINUATIONS, MAPPED, METRICS, edit_label, edit_numbers, parted
from lens_geometry.stats import bootstrap_interval

PROFILE_WORDS = (
    "The unedited model continues each prompt, always with its most probable token. At every step the update of the "
    "newest token is split into a part along its reference and a part perpendicular to it; step 0 is the last token "
    "of the prompt. A point is the mean over prompts and layers, its bar the 95 % interval over prompts. A cross "
    "marks a mean that is not finite, an open marker one that left numbers out."
)
WORDS = (
    "Each prompt is continued with the most probable token at every step, by the unedited model and under each edit; "
    "s_par is how much of an update's parallel part is kept. From the first token that differs from the unedited "
    "continuation on, text is underlined and in bold type. The log-probability is that of the continuation under the "
    "unedited model, per token in nats: how usual it finds the text."
)


def profile_parts(table: pd.DataFrame, key: str, captions: dict[str, str]) -> list[str]:
    """Switches, a figure per metric by step, and a map of layer by step per site."""
    pooled = table[table["layer"].isna()]
    sites = [str(site) for site in pooled["site"].unique()]
    metrics = [name for name in METRICS if name in set(pooled["metric"])]
    captions = {**captions, "parallel_fraction": "The parallel part's share of the update's length."}
    figures = [
        pieces.plot(
            plots.generation_figure(table, [name], sites=[]), f"{key}-{name}", METRICS[name][0], captions.get(name, "")
        )
        for name in metrics
    ]
    scale = plots.generation_figure(table, [], sites=sites).layout.coloraxis
    for site in sites:
        drawn = plots.generation_figure(table, [], sites=[site])
        drawn.update_layout(coloraxis={"cmin": scale.cmin, "cmax": scale.cmax, "colorbar": {"title": None}})
        caption = f"{MAPPED} of every layer at every step, mean over prompts; one colour scale for all sites."
        figures.append(pieces.plot(drawn, f"{key}-map-{site}", f"{site}, layer by step", caption, switched=False))
    rows = []
    for site, part in pooled.groupby("site", sort=False):
        means = [part.loc[part["metric"] == name, "mean"].astype(float) for name in metrics]
        rows.append([str(site), *(f"{number(m.mean())}\n{number(m.min())} to {number(m.max())}" for m in means)])
    caption = "Mean over prompts and layers, then over steps; in small print the lowest and the highest step."
    return [
        pieces.fieldset("Show in the figures", "".join(map(pieces.site_switch, sites))),
        f'<div class="figures">{"".join(figures)}</div>',
        pieces.grid(caption, ["site", *metrics], rows),
    ]


def continuation_parts(table: pd.DataFrame) -> list[str]:
    """A short table of the edits, then each prompt with its continuations side by side."""
    require(table, CONTINUATIONS, "continuations")
    labelled = table.assign(label=[edit_label(row) for row in table.itertuples()])
    caption = (
        "Mean over prompts, with 95 % intervals by bootstrap over prompts. The change of log-probability is against "
        "the unedited continuation of the same prompt; rows that are not finite are left out."
    )
    columns = ["edit", "first tokens that agree", "prompts that differ", "change of log-probability", "repetition"]
    return [
        pieces.grid(caption, columns, _summary(labelled), "edits"),
        *(_beside(rows) for _, rows in _prompts(labelled)),
    ]


def _prompts(table: pd.DataFrame) -> Iterator[tuple[int, pd.DataFrame]]:
    yield from table.groupby("prompt", sort=False)


def _summary(table: pd.DataFrame) -> Iterator[list[str]]:
    for label, rows in table.groupby("label", sort=False):
        kept = rows[rows["status"] != "nonfinite"]
        lost = f"\n{len(rows) - len(kept)} not finite" if len(kept) < len(rows) else ""
        if kept.empty:
            yield [str(label), "not finite", "", "", ""]
            continue
        numbers = [_mean(kept[name]) for name in ("n_agree", "logprob_change", "repetition")]
        differ = int((kept["n_agree"] < kept["n_new"]).sum())
        plain = (kept["site"] == "none").all()
        yield [
            str(label),
            "" if plain else numbers[0],
            "" if plain else f"{differ} of {len(kept)}{lost}",
            "" if plain else numbers[1],
            numbers[2],
        ]


def _mean(values: pd.Series) -> str:
    sample = values.to_numpy(dtype=float)
    low, high = bootstrap_interval([sample], lambda x, axis: x.mean(axis))
    return interval(float(sample.mean()), low, high).replace(" [", "\n[")


def _beside(rows: pd.DataFrame) -> str:
    """One prompt: what the unedited model writes, and what it writes under each edit."""
    items = []
    for row in rows.itertuples():
        same, other = (pieces.text(part) for part in parted(row))
        items.append(
            f"<dt>{pieces.text(row.label)}<small>{pieces.text(edit_numbers(row))}</small></dt>"
            f"<dd>{same}{f'<mark>{other}</mark>' if other else ''}</dd>"
        )
    prompt = pieces.text(rows["prompt_text"].iloc[0])
    return f'<div class="card beside"><p class="caption"><b>{prompt}</b> …</p><dl>{"".join(items)}</dl></div>'
