"""The commands `compression-study` and `layer-choice`: many compressed variants, and which layers to compress."""

from __future__ import annotations

from pathlib import Path

from lens_geometry.data import load_text
from lens_geometry.errors import DataError
from lens_geometry.experiments import (
    LayerChoiceSettings,
    StudySettings,
    compression_study,
    error_prediction,
    layer_choice,
)
from lens_geometry.loading_options import DEFAULT_TEXT, Loading
from lens_geometry.study_summaries import choice_summary, prediction_summary, study_summary

CALIBRATIONS = ("moby-dick", "austen")  # the first that is not evaluated
LOADING, STUDY, CHOICE = Loading(), StudySettings(), LayerChoiceSettings()


def study_command(
    loading: Loading = LOADING,
    variants: tuple[str, ...] = (),
    text: str = DEFAULT_TEXT,
    calibration: str | None = None,
    out: Path = Path("results/compression-study"),
    settings: StudySettings = STUDY,
) -> int:
    """Compress a model in many ways, and see which error of its updates predicts the damage.

    Stopped at any point, the same command goes on where it was.
    Example: lens-geometry compression-study --variants rtn:bits=4 rtn:bits=3 magnitude:pattern=2:4 blank:layers=3

    Args:
        loading: which dense model.
        variants: such as rtn:bits=4,group_size=64; about thirty of every method when left out.
        text: "austen", "moby-dick", "python", a .txt file, a directory of them, or hf:... for a Hugging Face data set.
        calibration: likewise, for the methods that are calibrated; another text than the one that is evaluated
            (moby-dick when left out, or austen where that is evaluated).
        out: directory of the study's table and figure, of a report for each variant, and, in PREDICTION, of what
            predicts the damage.
        settings: what is compared, on how much text.
    """
    _check_texts(text, calibration)
    calibration = calibration or next(name for name in CALIBRATIONS if name != text)
    model = loading.load()
    study = compression_study(
        model, variants or None, load_text(text), settings, calibration=load_text(calibration), out=out
    )
    print(study_summary(study.table))
    print(f"saved: {study.save(out)}")
    prediction = error_prediction(study, seed=settings.seed)
    print(prediction_summary(prediction.table))
    for sentence in prediction.meta["verdicts"]:
        print(sentence)
    print(f"saved: {prediction.save(out / 'prediction')}")
    return 0


def choice_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    calibration: str | None = None,
    out: Path = Path("results/layer-choice"),
    settings: LayerChoiceSettings = CHOICE,
) -> int:
    """Give layers widths under a budget of size, and leave layers out, by several rules; see what each rule costs.

    Stopped at any point, the same command goes on where it was.
    Example: lens-geometry layer-choice --mean-bits 3.5 --bits 8 4 3 2 --max-blanked 4

    Args:
        loading: which dense model.
        text: "austen", "moby-dick", "python", a .txt file, a directory of them, or hf:... for a Hugging Face data set.
        calibration: likewise, another text, on which the choices are made; every other sequence of the text when left
            out. What the choices cost is measured on the rest.
        out: directory for what was measured, table.parquet, table.csv, meta.json and figure.html.
        settings: widths, budget, and how many layers are left out.
    """
    _check_texts(text, calibration)
    model = loading.load()
    other = None if calibration is None else load_text(calibration)
    result = layer_choice(model, load_text(text), settings, calibration=other, out=out)
    print(choice_summary(result.table))
    print(f"saved: {result.save(out)}")
    return 0


def _check_texts(text: str, calibration: str | None) -> None:
    """Raise DataError, before anything is loaded, where one text is given for both."""
    if text == calibration:
        raise DataError(f"--text and --calibration are both {text!r}", cure="calibrate on another text")
