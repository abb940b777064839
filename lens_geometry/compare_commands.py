"""The command `compare`: compressed models against their base, and a gate for continuous integration."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from lens_geometry.compression_gate import Verdict, check_bounds, default_mode, judge
from lens_geometry.compression_json import write_json
from lens_geometry.compression_markdown import compressed_name, summary_markdown
from lens_geometry.compression_summaries import compression_summary, models_summary, verdict_summary
from lens_geometry.data import load_text
from lens_geometry.errors import DataError, ResultError
from lens_geometry.experiments import CompressionSettings, compression_report
from lens_geometry.loading_options import DEFAULT_TEXT, HowLoaded
from lens_geometry.models import OFFLINE_NAMES
from lens_geometry.results import RESULT_FILES, Result, replace_file
from lens_geometry.sequence_files import load_tokens

HOW, COMPRESSION = HowLoaded(), CompressionSettings()
SUMMARY = "GITHUB_STEP_SUMMARY"  # the file whose text GitHub shows with a run; several commands may add to it


def compare_command(
    base: tyro.conf.Positional[str],
    compressed: tyro.conf.Positional[tuple[str, ...]],
    how: HowLoaded = HOW,
    text: str | None = None,
    tokens: Path | None = None,
    out: Path = Path("results/compare"),
    max_perpendicular: float | None = None,
    max_loss_change: float | None = None,
    gate_mode: Literal["local", "propagated"] | None = None,
    json_path: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    markdown: tuple[Path, ...] = (),
    settings: CompressionSettings = COMPRESSION,
) -> int:
    """Split the error of a compressed model's updates into parts along and perpendicular to the dense model's.

    With a bound it is a gate: exit code 1, and the offending layers named, when a number is over it or not finite.
    All files are written before the gate answers. Exit code 2 is bad input, such as a bound that gates nothing.
    Example: lens-geometry compare twin-rmsnorm path/to/compressed --max-perpendicular 0.3 --max-loss-change 0.05

    Args:
        base: the dense model: a name of `lens-geometry models`, a Hugging Face name, a directory or a .gguf file.
        compressed: one or more compressed models of it, likewise.
        how: how all of them are loaded; a revision is that of the models that come from the hub.
        text: "austen" (when left out), "moby-dick", "python", a .txt file, a directory of them, or hf:... for a Hugging
            Face data set; not what the compressed model was calibrated on.
        tokens: token ids instead of text: a .npy [sequence, pos]; a .jsonl, .txt or .csv with a sequence of ids a line;
            a directory of `lens-geometry tokens` (its held-out documents). For models without a tokenizer too.
        out: directory for table.parquet, table.csv, meta.json and figure.html; of several models OUT/NAME for each.
        max_perpendicular: the most that |e_perp|/|u| may be in any layer, at any of the sites.
        max_loss_change: the most that the loss may rise, in nats per token.
        gate_mode: whose perpendicular errors are held against the bound; local when it is run.
        json_path: also write everything that a machine wants to know here.
        markdown: also write a summary for a pull request to these files; to the one that $GITHUB_STEP_SUMMARY names it
            is added.
        settings: what is compared, on how much text.
    """
    if not compressed:
        raise DataError("there is no compressed model to compare", cure="lens-geometry compare BASE COMPRESSED")
    mode = _gated_mode(settings, max_perpendicular, max_loss_change, gate_mode)
    _check_data(text, tokens, settings)
    _check_paths([*filter(None, [json_path]), *markdown], _places(out, compressed))
    loads = _loaders(how, base, compressed)
    model = loads[base].load(base)
    data = load_tokens(
        tokens, model=model, max_sequences=settings.max_sequences, sequence_length=settings.sequence_length
    ) if tokens else load_text(text or DEFAULT_TEXT)  # fmt: skip
    compared: list[tuple[Result, Verdict]] = []
    for name, place in zip(compressed, _places(out, compressed), strict=True):
        other = loads[name].load(name)
        if tokens is None and model.tokenizer is None and other.tokenizer is None:
            raise DataError("the models have no tokenizer", where=name, cure="give token ids: --tokens FILE")
        result = compression_report(model, other, data, settings)
        del other
        saved = result.save(place)
        if len(compressed) > 1:
            print(f"{name}:")
        print(compression_summary(result.table))
        for line in result.meta["warnings"]:
            print(f"take note: {line}")
        print(f"saved: {saved}")
        compared.append((result, judge(result.table, max_perpendicular, max_loss_change, mode)))
    if len(compared) > 1:
        print(models_summary(compared))
    _write(compared, json_path, markdown)
    for result, verdict in compared:
        if words := verdict_summary(verdict, compressed_name(result) if len(compared) > 1 else ""):
            print(words)
    return int(any(not verdict.passed for _, verdict in compared))


def _gated_mode(
    settings: CompressionSettings, perpendicular: float | None, loss: float | None, wanted: Any
) -> Literal["local", "propagated"]:
    """The mode that is gated. Raises DataError, before anything is run, for a bound or mode that would gate nothing."""
    check_bounds(perpendicular, loss)
    if wanted is not None and perpendicular is None:
        raise DataError("--gate-mode says whose perpendicular error is gated, and no bound is given on it",
                        cure="give --max-perpendicular too, or leave --gate-mode out")  # fmt: skip
    mode = wanted or default_mode(settings.modes)
    if perpendicular is not None and mode not in settings.modes:
        raise DataError(
            f"the bound on the perpendicular error would gate nothing: the mode {mode} is not run",
            cure=f"--modes {' '.join(settings.modes)} {mode}, or --gate-mode {settings.modes[0]}",
        )
    if perpendicular is not None and not settings.sites:
        raise DataError("the bound on the perpendicular error would gate nothing: no site is compared", cure="--sites")
    return mode


def _check_data(text: str | None, tokens: Path | None, settings: CompressionSettings) -> None:
    if tokens is not None and text is not None:
        raise DataError("both --text and --tokens are given", cure="leave one of them out")
    if tokens is not None and settings.prepend_bos:
        raise DataError("token ids are taken as they are, without a BOS", cure="put it into the file yourself")


def _loaders(how: HowLoaded, base: str, compressed: Sequence[str]) -> dict[str, HowLoaded]:
    """How each is loaded: a revision is not that of local files, unless all are local (and load_model says so)."""
    names = [base, *compressed]
    local = {name for name in names if name in OFFLINE_NAMES or Path(name).expanduser().exists()}
    bare = replace(how, revision=None)
    return {name: bare if name in local and len(local) < len(set(names)) else how for name in names}


def _places(out: Path, names: Sequence[str]) -> list[Path]:
    """A directory for each model's result: OUT itself for one, else OUT/NAME, numbered where names are alike."""
    if len(names) == 1:
        return [out]
    found: list[Path] = []
    for name in names:
        plain = re.sub(r"[^\w.-]+", "-", Path(name).name).strip(".-") or "model"
        again = [plain, *(f"{plain}-{number}" for number in range(2, len(names) + 2))]
        found.append(next(out / each for each in again if out / each not in found))
    return found


def _check_paths(paths: Sequence[Path], results: Sequence[Path]) -> None:
    """Raise for a summary that cannot be written, or would be written over another or over a result's own file."""
    taken = {(place / file).absolute() for place in results for file in RESULT_FILES}
    for path in paths:
        if path.absolute() in taken:
            raise DataError("two files would be written to one path", where=str(path), cure="give each its own path")
        taken.add(path.absolute())
        _require_writable(path)


def _require_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a directory")
    except OSError as error:
        problem = f"the file cannot be written ({error.strerror or error})"
        raise ResultError(problem, where=str(path), cure="choose another path") from error


def _write(compared: Sequence[tuple[Result, Verdict]], json_path: Path | None, markdown: Sequence[Path]) -> None:
    """The files for machines and for people."""
    try:
        if json_path is not None:
            write_json(compared, json_path)
            print(f"saved: {json_path}")
        words = summary_markdown(compared) if markdown else ""
        for path in markdown:
            if os.environ.get(SUMMARY) == str(path):
                with path.open("a", encoding="utf-8") as file:
                    file.write(words)
            else:
                replace_file(path, lambda temporary: temporary.write_text(words, encoding="utf-8"))
            print(f"saved: {path}")
    except OSError as error:
        problem = f"the summary could not be written ({error.strerror or error})"
        raise ResultError(problem, where=str(error.filename or ""), cure="free space, or another path") from error
