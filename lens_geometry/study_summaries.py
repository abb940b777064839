"""What `compression-study` and `layer-choice` print."""

from __future__ import annotations

import pandas as pd

from lens_geometry.choice_plots import change_words, choice_words, difference_words
from lens_geometry.study_plots import WORDS, question_words


def study_summary(table: pd.DataFrame) -> str:
    """A row for each variant: bits, change of loss, KL, and the errors, mean over layers and sites."""
    whole = table[table["layer"].isna()]
    modes = [name for name in whole["mode"].unique() if name not in ("", "weights")]
    rows = []
    for variant, found in whole.groupby("variant", sort=False):
        first = found.iloc[0]
        pooled = found[(found["mode"] == modes[0]) & (found["site"] == "pooled")].set_index("predictor")["value"]
        rows.append(
            {
                "variant": variant,
                "bits": first["bits_per_weight"],
                "change of loss": first["loss_change"],
                "KL": first["kl"],
                **{WORDS[name]: pooled.get(name) for name in ("perpendicular_error", "parallel_error", "error")},
                "status": first["status"] if first["status"] != "failed" else f"failed: {first['reason']}",
            }
        )
    shown = pd.DataFrame(rows).to_string(index=False, float_format="{:.4f}".format, na_rep="-")
    return f"change of loss and KL in nats per token; {modes[0]} errors, mean over layers and sites\n{shown}"


def prediction_summary(table: pd.DataFrame) -> str:
    """Rank correlations with the change of loss, mean over sites, with intervals and the range without each family."""
    rows = table[(table["site"] == "pooled") & (table["against"] == "loss_change")]
    shown = pd.DataFrame(
        {
            "of": [question_words(*one) for one in zip(rows["kind"], rows["predictor"], rows["given"], strict=True)],
            "errors": rows["mode"].to_numpy() + " (" + rows["question"].to_numpy() + ")",
            **{name.replace("_", " "): rows[name].to_numpy() for name in ("value", "low", "high")},
            "without one family": [
                f"{row.family_low:+.3f} to {row.family_high:+.3f}" if row.family_low == row.family_low else "-"
                for row in rows.itertuples()
            ],
        }
    )
    text = shown.to_string(index=False, float_format="{:+.3f}".format, na_rep="cannot be told")
    return f"rank correlation with the change of loss, mean over sites\n{text}"


def choice_summary(table: pd.DataFrame) -> str:
    """What each choice of widths costs, and what each order of blanked layers."""
    parts = []
    compared = table[table["kind"] == "comparison"]
    if len(compared):
        allocated = table[table["kind"] == "allocation"].groupby("choice", sort=False)["bits"]
        widths = {name: " ".join(map(str, bits)) for name, bits in allocated}
        shown = pd.DataFrame(
            [
                {
                    "chosen by": choice_words(row["choice"], "bits"),
                    "bits": f"{row['mean_bits']:.3f}",
                    "bytes": f"{row['size_bytes']:,.0f}",
                    "change of loss": change_words(row),
                    "against uniform": difference_words(row),
                    "of each layer": widths[row["choice"]],
                }
                for row in compared.to_dict("records")
            ]
        )
        parts.append("widths under one budget; change of loss (nats) on held-out text\n" + shown.to_string(index=False))
    curves = table[table["kind"] == "curve"]
    if len(curves):
        shown = curves.pivot_table(index="choice", columns="n_blanked", values="loss_change", sort=False)
        shown.insert(0, "layers", curves.groupby("choice", sort=False)["layer"].agg(lambda x: " ".join(map(str, x))))
        shown.index = [choice_words(str(name), "drop") for name in shown.index]
        text = shown.to_string(float_format="{:+.4f}".format)
        parts.append(f"change of loss (nats) on held-out text by number of blanked layers\n{text}")
    return "\n".join(parts)
