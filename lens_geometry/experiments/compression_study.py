"""Many compressed variants of one model on one text: the error of each, beside what it costs.

Each variant is made, compared with the dense model, written down and let go before the next begins; a study that was
stopped goes on with the first that is not there.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lens_geometry.anatomy import inspect
from lens_geometry.compress.calibrating import WINDOW, window_hashes
from lens_geometry.data import Tokens, tokenize
from lens_geometry.errors import DataError, GeometryError, LensGeometryError, ModelError, ResultError
from lens_geometry.experiments.compression import CompressionSettings, compression_report
from lens_geometry.experiments.counterparts import loaded
from lens_geometry.experiments.study_rows import lost_row, record_of, study_rows, study_table
from lens_geometry.experiments.study_variants import StudyVariant, study_variants
from lens_geometry.provenance import fingerprint
from lens_geometry.results import Result, alone, jsonable, replace_file
from lens_geometry.runner import at_least, bar, identity_of_run, prepare, provenance

ABOUT = "study.json"  # what all variants in a directory have in common


@dataclass(frozen=True)
class StudySettings(CompressionSettings):
    """Settings of `compression_study`: those of every report, and how much text the methods are calibrated on.

    Attributes:
        calibration_sequences: sequences of the calibration text, as long as those that are evaluated.
    """

    calibration_sequences: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, calibration_sequences=1)


def compression_study(
    base: Any,
    variants: Any,
    data: Any,
    settings: StudySettings | None = None,
    *,
    calibration: Any = None,
    out: Path | str | None = None,
    **changes: Any,
) -> Result:
    """Compare many compressed variants of a model with it, on one text.

    Args:
        base: the dense model: a TransformerLens model, or a name that `load_model` takes.
        variants: texts such as "rtn:bits=4,group_size=64", pairs of a label and a model (or a name, or a function that
            makes the model of the dense one), or a mapping of labels; None for `default_variants`, about thirty.
        data: the text that errors and losses are of; see `data.tokenize`.
        settings: see `StudySettings`; `changes` override single fields.
        calibration: text for the methods that are calibrated, no part of `data`.
        out: a directory: each variant's report is saved in a directory of its own in it as soon as it is there, and the
            same call started again goes on where it was. It belongs to one model, text and settings.

    Returns:
        A Result with one row per variant, mode, site (also "pooled": the mean over sites) and predictor, with its
        `value` (mean over layers), the variant's `loss_change` and `kl`, each with a 95 % interval, and its `status`:
        "ok"; "no_effect"; "nonfinite" (losses or activations that are not finite); "failed", with the `reason`, one row
        without numbers. With `layer_losses` also a row for each layer, beside the losses of that layer alone.
        `error_prediction` tells what of it predicts the loss.

    Raises:
        ModelError, DataError, SiteError, CompressionError for what cannot be used at all, and ModelError when every
        variant failed; ResultError when `out` is of something else.
    """
    settings, started = replace(settings or StudySettings(), **changes), time.monotonic()
    base = loaded(base)
    chosen = study_variants(variants, inspect(base).n_layers)
    tokens = prepare(base, data, settings)
    calibrating = calibration_text(base, calibration, tokens, settings)
    if calibrating is None and any(one.calibrated for one in chosen):
        needy = ", ".join(one.label for one in chosen if one.calibrated)
        raise DataError(
            f"a calibration text is needed by {needy}", cure="pass calibration=, another text than the data"
        )
    about = identity_of_run(base, tokens, settings) | {
        "calibration_sha256": None if calibrating is None else calibrating.meta["tokens_sha256"]
    }
    rows: list[dict[str, Any]] = []
    made: list[dict[str, Any]] = []
    with _directory(out, about) as directory, bar(len(chosen), "variants", settings.progress) as progress:
        for variant in chosen:
            progress.set_postfix_str(variant.label, refresh=False)
            where = None if directory is None else directory / variant.directory
            report, lost = _report(base, variant, tokens, calibrating, settings, where)
            if report is None:
                rows.append(lost)
                warnings.warn(f"{variant.label} is left out: {lost['reason']}", stacklevel=2)
            else:
                rows += study_rows(variant.label, variant.family, report)
            last = rows[-1]
            made.append(
                {name: last[name] for name in ("variant", "family", "status", "reason")}
                | ({} if report is None else {"compression": dict(record_of(report))})
            )
            progress.update()
    table = study_table(rows)
    statuses = [one["status"] for one in made]
    if "ok" not in statuses:
        raise ModelError("no variant could be measured", where=made[0]["variant"], cure=f"see: {made[0]['reason']}")
    meta = provenance(
        base,
        tokens,
        settings,
        started=started,
        token_mask=f"real tokens, positions {list(settings.exclude_positions)} left out",
        counts={
            "variants": len(made),
            **{f"{name}_variants": statuses.count(name) for name in dict.fromkeys(statuses)},
        },
        calibration=None if calibrating is None else calibrating.meta,
        variants=made,
    )
    meta["warnings"] += [f"{one['variant']} is left out: {one['reason']}" for one in made if one["status"] == "failed"]
    lost_losses = [one["variant"] for one in made if one["status"] == "nonfinite"]
    if lost_losses:
        meta["warnings"].append(f"losses or activations are not finite: {', '.join(lost_losses)}")
    return Result("compression_study", table, meta)


def calibration_text(base: Any, calibration: Any, tokens: Tokens, settings: Any) -> Tokens | None:
    """The calibration text cut like the evaluation text. Raises DataError where the two have a passage in common."""
    if calibration is None:
        return None
    found = tokenize(
        base,
        calibration,
        sequence_length=settings.sequence_length,
        max_sequences=settings.calibration_sequences,
        prepend_bos=settings.prepend_bos,
        seed=settings.seed,
    )
    same_text = found.meta.get("text_sha256") is not None and found.meta["text_sha256"] == tokens.meta.get(
        "text_sha256"
    )
    width = min(WINDOW, found.ids.shape[1], tokens.ids.shape[1])
    ours, theirs = (
        window_hashes([row[real] for row, real in zip(one.ids, one.mask, strict=True)], width)
        for one in (found, tokens)
    )
    shared = int(np.isin(ours, theirs).sum())
    if same_text or shared:
        raise DataError(
            "the calibration text is the text that is evaluated"
            if same_text
            else f"{shared} passages of {width} tokens of the calibration text are in the text that is evaluated",
            where=str(found.meta.get("text", "")),
            cure="calibrate on another text",
        )
    return found


@contextlib.contextmanager
def _directory(out: Path | str | None, about: dict[str, Any]) -> Iterator[Path | None]:
    """The study's directory, held while it is used. Raises ResultError when it belongs to another study."""
    if out is None:
        yield None
        return
    directory = Path(out)
    with alone(directory, "running a study"):
        path, now = directory / ABOUT, jsonable(about)
        if path.exists():
            try:
                before = dict(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError) as error:
                raise _other_study(path, f"cannot be read ({error})") from error
            different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
            if different:
                raise _other_study(path, f"differs in: {', '.join(different)}")
        else:
            replace_file(path, lambda temporary: temporary.write_text(json.dumps(now, indent=2), encoding="utf-8"))
        yield directory


def _other_study(path: Path, how: str) -> ResultError:
    return ResultError(
        f"an earlier study left its variants here, and what it was made with {how}",
        where=str(path),
        cure="give another --out directory, or delete this one to start again",
    )


def _report(
    base: Any,
    variant: StudyVariant,
    tokens: Tokens,
    calibration: Tokens | None,
    settings: StudySettings,
    where: Path | None,
) -> tuple[Result | None, dict[str, Any]]:
    """A variant's report, from its directory where it is there; or why there is none, as a row."""
    shared = {field.name: getattr(settings, field.name) for field in fields(CompressionSettings)}
    try:
        compressed = None if variant.told else variant.make(base, calibration)  # to know it again by its weights
        known = None if compressed is None else fingerprint(compressed)
        before = None if where is None else _saved(where, variant, known)
        if before is not None:
            return before, {}
        compressed = variant.make(base, calibration) if compressed is None else compressed
        report = compression_report(base, compressed, tokens, CompressionSettings(**shared))
    except ResultError:
        raise
    except GeometryError as error:
        return None, lost_row(variant.label, variant.family, "nonfinite", str(error))
    except LensGeometryError as error:
        return None, lost_row(variant.label, variant.family, "failed", str(error))
    except (RuntimeError, ValueError, ImportError, ArithmeticError) as error:  # of the libraries underneath
        return None, lost_row(variant.label, variant.family, "failed", f"{type(error).__name__}: {error}")
    del compressed
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    report.meta["study"] = {"variant": variant.label, "family": variant.family, "fingerprint": known}
    if where is not None:
        report.save(where)
    return report, {}


def _saved(where: Path, variant: StudyVariant, known: str | None) -> Result | None:
    """What an earlier run left of this variant; None where it left nothing whole."""
    if not (where / "meta.json").exists() or not (where / "table.parquet").exists():
        return None
    try:
        found = Result.load(where)
    except ResultError as error:
        warnings.warn(f"{variant.label} is measured again: {error}", stacklevel=4)
        return None
    study = found.meta.get("study") or {}
    if study.get("variant") != variant.label or (known is not None and study.get("fingerprint") != known):
        raise ResultError(
            f"this is the report of another variant than {variant.label!r}, or of other weights",
            where=str(where),
            cure="give another label or another --out directory",
        )
    return found
