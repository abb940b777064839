"""Does the perpendicular error of a compressed model predict its damage, better than the whole error does?

The perpendicular part orders methods of compression; but it is nearly the whole error, so that its independent value
has to be tested: rank correlations with the damage over many variants of one model, partial ones given the whole error,
and the paired difference between the two.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lens_geometry.axes import require
from lens_geometry.errors import DataError
from lens_geometry.experiments.study_rows import OUTPUTS, PREDICTORS, WEIGHTS, label_of, study_rows, study_table
from lens_geometry.prediction_verdict import COLUMNS, prediction_sentence, verdict
from lens_geometry.rank_correlation import LEAST, Correlation, Estimate, correlate_all, correlate_within
from lens_geometry.results import Result, versions

STUDY = "variant family status mode site layer predictor value loss_change kl reason"
ASKED = (  # kind, predictor, given
    *(("spearman", name, "") for name in (*PREDICTORS, WEIGHTS)),
    ("partial", "perpendicular_error", "error"),
    ("partial", "error", "perpendicular_error"),
    ("partial", "parallel_error", "error"),
    ("difference", "perpendicular_error", "error"),
)


def error_prediction(
    study: Result | Mapping[str, Result] | Sequence[Result], *, seed: int = 0, resamples: int = 2000
) -> Result:
    """Rank correlations of the damage with each predictor, over the variants of a study.

    Args:
        study: what `compression_study` returned, or reports of `compression_report` on the same text, by label or not.
        seed: of the resamples.
        resamples: how often the variants are drawn anew.

    Returns:
        A Result with one row per question, mode, site ("pooled": the mean over sites), damage (`against`: "loss_change"
        or "kl"), kind and predictor. `kind` "spearman" is the rank correlation of the damage with the predictor (its
        mean over layers), "partial" that of the two given another predictor (all ranked), "difference" the predictor's
        correlation less that of the one in `given`. `low` to `high` is the 95 % interval over variants drawn with
        replacement, paired in differences; `family_low` to `family_high` the range when each family is left out, since
        variants of one method are not independent. `question` "variants" compares whole variants; "layers" the order of
        layers within a variant (errors of single layers against the loss with that layer alone compressed), pooled over
        variants, which are what is drawn; layers that a variant leaves as they are do not count. `verdict`, of
        differences, is a key of `prediction_verdict.VERDICTS`. What cannot be told is NaN: fewer than four variants, or
        no variation left.

        Variants that failed, or whose losses are not all finite, are left out and counted in `meta["counts"]`.

    Raises DataError for fewer than four variants that can be used; ResultError for tables that lack a column.
    """
    started = time.monotonic()
    table, meta = _table_of(study)
    require(table, STUDY, "compression_study")
    by_variant = table.drop_duplicates("variant")
    used = table[table["status"].isin(("ok", "no_effect"))]
    n_used = used["variant"].nunique()
    if n_used < LEAST:
        raise DataError(
            f"{n_used} of {len(by_variant)} variants have a loss, and fewer than {LEAST} say nothing of a rank order",
            cure="compare more variants; why they were lost is in the column `reason`",
        )
    rows = [*_of_variants(used, seed, resamples), *_of_layers(used, seed, resamples)]
    found = pd.DataFrame(rows)
    lost = by_variant[~by_variant["status"].isin(("ok", "no_effect"))]
    remarks = []
    if len(lost):
        names = ", ".join(f"{row.variant} ({row.reason or row.status})" for row in lost.itertuples())
        remarks.append(f"{len(lost)} of {len(by_variant)} variants are left out: {names}")
    if by_variant.loc[by_variant["status"] == "ok", "family"].nunique() < 2:
        remarks.append("all variants are of one family: nothing here can be said of compression in general")
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    sentences = [prediction_sentence(found, question) for question in found["question"].unique()]
    return Result(
        "error_prediction",
        found,
        {
            **meta,
            "settings": {"seed": seed, "resamples": resamples},
            "seed": seed,
            "versions": versions(),
            "seconds": round(time.monotonic() - started, 2),
            "counts": {"variants": len(by_variant), "variants_used": int(n_used), "variants_lost": len(lost)},
            "verdicts": [sentence for sentence in sentences if sentence],
            "warnings": remarks,
        },
    )


def _table_of(study: Any) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The study's table, and what of its meta stays true. Raises DataError for something else."""
    if isinstance(study, Result) and study.experiment == "compression_study":
        return study.table, {key: study.meta[key] for key in ("model", "data", "token_mask") if key in study.meta}
    if isinstance(study, Result) or not isinstance(study, Mapping | Sequence) or not study:
        raise DataError(
            f"{study!r} is no study of several variants", cure="pass what compression_study returned, or many reports"
        )
    labelled = isinstance(study, Mapping)
    reports = list(study.values()) if isinstance(study, Mapping) else list(study)
    names = [label_of(report) for report in reports]
    if isinstance(study, Mapping):
        names = [(label, label.split(":")[0]) for label in study]
    if len({name for name, _ in names}) < len(names):
        raise DataError("some reports have the same label", cure="pass a mapping of labels to reports")
    texts = {str((report.meta.get("data") or {}).get("tokens_sha256")) for report in reports}
    bases = {str((report.meta.get("model") or {}).get("fingerprint")) for report in reports}
    if len(texts) > 1 or len(bases) > 1:
        raise DataError(
            "the reports are of different texts or dense models, so that their losses cannot be compared",
            where=", ".join(map(str, study)) if labelled else "",
            cure="make all of them on the same data, against the same model",
        )
    rows = [row for name, report in zip(names, reports, strict=True) for row in study_rows(*name, report)]
    meta = {"model": reports[0].meta.get("model"), "data": reports[0].meta.get("data")}
    return study_table(rows), {**meta, "token_mask": reports[0].meta.get("token_mask")}


def _of_variants(table: pd.DataFrame, seed: int, resamples: int) -> Iterator[dict[str, Any]]:
    whole = table[table["layer"].isna()]
    by_variant = whole.drop_duplicates("variant").set_index("variant")
    weights = whole[whole["mode"] == "weights"].set_index("variant")["value"]
    families = by_variant["family"].tolist()
    for (mode, site), part in whole[~whole["mode"].isin(("weights", ""))].groupby(["mode", "site"], sort=False):
        columns = _columns(part.set_index("variant"), by_variant, weights)
        for against in OUTPUTS:
            wanted = [_wanted(asked, against) for asked in ASKED]
            found = correlate_all(columns, wanted, families=families, seed=seed, resamples=resamples)
            for asked, estimate in zip(ASKED, found, strict=True):
                yield _row("variants", mode, site, against, asked, estimate)


def _of_layers(table: pd.DataFrame, seed: int, resamples: int) -> Iterator[dict[str, Any]]:
    single = table[table["layer"].notna()]
    place = ["variant", "layer"]
    weights = single[single["mode"] == "weights"].set_index(place)["value"]
    errors = single[single["mode"] == "local"]
    outputs = errors.drop_duplicates(place).set_index(place)
    means = errors.groupby([*place, "predictor"], sort=False)["value"].mean().reset_index()
    for site, part in [*errors.groupby("site", sort=False), *([("pooled", means)] if len(errors) else [])]:
        columns = _columns(part.set_index(place), outputs, weights)
        touched = columns["error"] > 0
        of_variant = outputs.index.get_level_values("variant")
        variants = list(dict.fromkeys(of_variant))
        blocks = [{name: x[touched & (of_variant == one)] for name, x in columns.items()} for one in variants]
        families = [str(outputs.loc[one, "family"].iloc[0]) for one in variants]
        for against in OUTPUTS:
            wanted = [_wanted(asked, against) for asked in ASKED]
            found = correlate_within(blocks, wanted, families=families, seed=seed, resamples=resamples)
            for asked, estimate in zip(ASKED, found, strict=True):
                yield _row("layers", "local", site, against, asked, estimate)


def _columns(part: pd.DataFrame, outputs: pd.DataFrame, weights: pd.Series) -> dict[str, np.ndarray[Any, Any]]:
    """Every quantity, one number for each case; all three are indexed by what the cases are."""
    found = {
        name: part.loc[part["predictor"] == name, "value"].reindex(outputs.index).to_numpy(dtype=float)
        for name in PREDICTORS
    }
    found[WEIGHTS] = weights.reindex(outputs.index).to_numpy(dtype=float)
    return found | {name: outputs[name].to_numpy(dtype=float) for name in OUTPUTS}


def _wanted(asked: tuple[str, str, str], against: str) -> Correlation:
    kind, predictor, given = asked
    if kind == "difference":
        return Correlation(against, predictor, minus=(against, given))
    return Correlation(against, predictor, given=(given,) if given else ())


def _row(
    question: str, mode: Any, site: Any, against: str, asked: tuple[str, str, str], estimate: Estimate
) -> dict[str, Any]:
    kind, predictor, given = asked
    at = {"question": question, "mode": mode, "site": site, "against": against}
    row = {**at, "kind": kind, "predictor": predictor, "given": given, **estimate._asdict()}
    row["verdict"] = verdict(row) if kind == "difference" else ""
    assert {*COLUMNS.split()} <= {*row}
    return {**row, "undefined": 0.0 if math.isnan(estimate.undefined) else estimate.undefined}
