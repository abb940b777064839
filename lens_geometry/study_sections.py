"""The report's sections for a compression study and for what predicts the damage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from lens_geometry import html_pieces as pieces
from lens_geometry.axes import interval, number
from lens_geometry.prediction_verdict import TARGETS, VERDICTS, prediction_sentence
from lens_geometry.study_plots import SHOWN, WORDS, prediction_figure, question_words, study_figure

STUDY_WORDS = (
    "Each point is a compressed variant of the same model on the same text: what compression did to the output, "
    "against one measure of what it did to the layers' updates (e is the compressed model's update less the dense "
    "one's, u), mean over tokens, layers and sites. Local errors are those of each layer by itself, on the dense "
    "model's stream. Axes are symmetric-log: even near zero, then every labelled step is a factor."
)
PREDICTION_WORDS = (
    "How well each error orders the damage: rank correlations (Spearman) over variants with 95 % intervals, and the "
    "range when each kind of method is left out (grey), since variants of one kind are not independent. The "
    "perpendicular part is nearly the whole error, so that its own value is in the difference between the two "
    "correlations, and in the partial one: what is left of it once the whole error is given. Single layers are "
    "compared with the other layers of the same variant only. Where there is no dot, too few variants or no "
    "variation is left."
)
STATUSES = {"failed": "failed", "nonfinite": "not finite", "no_effect": "no effect"}


def study_section(table: pd.DataFrame, key: str) -> list[str]:
    """The damage against every predictor, for each mode, and a table of the variants."""
    whole = table[table["layer"].isna()]
    modes = [str(name) for name in whole["mode"].unique() if name not in ("", "weights")]
    figures = []
    for mode in modes:
        for name in SHOWN:
            known = whole[(whole["predictor"] == name) & np.isfinite(whole["value"].astype(float))]
            if known.empty or (name == "weight_error" and mode != modes[0]):
                continue
            words = WORDS[name] if name == "weight_error" else f"{WORDS[name]}, {mode}"
            drawn = study_figure(table, [name], mode=mode)
            caption = f"A point for each variant, its kind by colour; {words}."
            title = f"{TARGETS['loss_change'].capitalize()} against {words}"
            figures.append(pieces.plot(drawn, f"{key}-{mode}-{name}", title, caption, switched=False, legend=True))
    return [
        f"<p>{pieces.text(STUDY_WORDS)}</p>",
        f'<div class="figures">{"".join(figures)}</div>',
        pieces.grid(
            "Every variant: nats per token, errors local where they were measured, mean over layers and sites.",
            [
                "variant",
                "kind",
                "bits per weight",
                "change of loss",
                "KL",
                WORDS["perpendicular_error"],
                WORDS["error"],
            ],
            _variants(whole, modes),
        ),
    ]


def _variants(whole: pd.DataFrame, modes: list[str]) -> Iterator[list[str]]:
    for variant, rows in whole.groupby("variant", sort=False):
        first = rows.iloc[0]
        if first["status"] == "failed" or not len(modes):
            yield [str(variant), str(first["family"]), "", f"{STATUSES['failed']}\n{first['reason']}", "", "", ""]
            continue
        pooled = rows[(rows["mode"] == modes[0]) & (rows["site"] == "pooled")].set_index("predictor")["value"]
        change = interval(*(float(first[f"loss_change{end}"]) for end in ("", "_low", "_high")), signed=True)
        mark = STATUSES.get(str(first["status"]), "")
        yield [
            str(variant),
            str(first["family"]),
            number(first["bits_per_weight"], digits=3) if np.isfinite(first["bits_per_weight"]) else "not known",
            change.replace(" [", "\n[") if not mark else f"{change}\n{mark}",
            number(first["kl"]),
            *(number(pooled[name]) if name in pooled else "" for name in ("perpendicular_error", "error")),
        ]


def study_warnings(table: pd.DataFrame) -> list[str]:
    """How many variants are no points, and why."""
    by_variant = table.drop_duplicates("variant")
    found = []
    for status, words in (("failed", "failed"), ("nonfinite", "have losses or activations that are not finite")):
        rows = by_variant[by_variant["status"] == status]
        if len(rows):
            named = ", ".join(map(str, rows["variant"]))
            found.append(f"{len(rows)} of {len(by_variant)} variants {words}: {named}.")
    return found


def prediction_section(table: pd.DataFrame, key: str) -> list[str]:
    """The verdicts in words, the correlations in a figure for each damage, and as a table."""
    questions = list(dict.fromkeys(table["question"]))
    sentences = [
        sentence
        for question in questions
        for against in table["against"].unique()
        if (sentence := prediction_sentence(table, question, against))
    ]
    figures = [
        pieces.plot(
            prediction_figure(table, against),
            f"{key}-{against}",
            f"Rank correlation with the {TARGETS[against]}",
            "Filled: mean over sites; open: single sites. 95 % intervals over variants; grey: without one kind.",
            switched=False,
            legend=True,
        )
        for against in table["against"].unique()
    ]
    rows = []
    for row in table[(table["site"] == "pooled") & (table["against"] == "loss_change")].to_dict("records"):
        told = np.isfinite(row["value"])
        family = (row["family_low"], row["family_high"])
        ranged = (
            f"{number(family[0], signed=True)} to {number(family[1], signed=True)}" if np.isfinite(family).all() else ""
        )
        rows.append(
            [
                question_words(row["kind"], row["predictor"], row["given"]),
                f"{row['mode']}, {row['question']}",
                interval(row["value"], row["low"], row["high"], signed=True).replace(" [", "\n[")
                if told
                else "not told",
                ranged,
                str(row["n"]),
                VERDICTS[row["verdict"]] if row["verdict"] else "",
            ]
        )
    items = "".join(f"<li>{pieces.text(sentence)}</li>" for sentence in sentences)
    return [
        f"<p>{pieces.text(PREDICTION_WORDS)}</p>",
        f"<ul>{items}</ul>",
        f'<div class="figures">{"".join(figures)}</div>',
        pieces.grid(
            "Rank correlation with the change of loss, mean over sites.",
            ["of", "errors", "correlation", "without one kind", "variants", "verdict"],
            rows,
        ),
    ]
