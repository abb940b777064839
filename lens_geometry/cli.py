"""The command line: one command per experiment, its options made from the settings dataclasses.

Exit codes: 0 done, 1 a check that failed, 2 bad input (one line on stderr), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import tyro

from lens_geometry import models
from lens_geometry.data import load_text
from lens_geometry.errors import LensGeometryError
from lens_geometry.experiments import (
    EvaluationSettings,
    ProfileSettings,
    ScalingSettings,
    evaluate,
    profile,
    scaling_edits,
    scaling_sweep,
    site_table,
    validate,
)
from lens_geometry.report import findings, write_report
from lens_geometry.results import Result

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_TEXT = "austen"


@dataclass(frozen=True)
class Loading:
    """Which model, and how it is loaded.

    Attributes:
        model: a name of `lens-geometry models`, a Hugging Face name, a local directory or a .gguf file.
        backend: "bridge" (TransformerBridge) or "hooked" (HookedTransformer, TransformerLens 3 only).
        dtype: of the weights: float32, bfloat16, float16 or float64.
        device: such as cpu, cuda, mps; chosen when left out.
        revision: branch, tag or commit of a Hugging Face model.
        trust_remote_code: run code that comes with a Hugging Face model.
    """

    model: str = DEFAULT_MODEL
    backend: Literal["bridge", "hooked"] = "bridge"
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    device: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def load(self) -> Any:
        return models.load_model(
            self.model,
            backend=self.backend,
            dtype=self.dtype,
            device=self.device,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
        )


LOADING, PROFILE, SCALING = Loading(), ProfileSettings(), ScalingSettings()
EVALUATION = EvaluationSettings()


def models_command() -> int:
    """List the models that can be loaded, and whether they are here already.

    Example: lens-geometry models
    """
    print(models.known_models().to_string(index=False))
    return 0


def sites_command(loading: Loading = LOADING, out: Path | None = None) -> int:
    """Print each site's hook points on this model, their shapes, and whether its sum check holds.

    Example: lens-geometry sites --model tiny-random-neox

    Args:
        loading: which model.
        out: also save the table in this directory.
    """
    model = loading.load()
    table = site_table(model)
    print(table.drop(columns="reason").to_string(index=False, float_format="{:.1e}".format))
    for row in table[table["reason"] != ""].itertuples():
        print(f"{row.site}: {row.reason}")
    if out is not None:
        _saved(Result("sites", table, {"model": models.describe(model)}), out)
    return 0


def validate_command(loading: Loading = LOADING, out: Path | None = None) -> int:
    """Check every identity of the geometry on this model. Exit code 1 when one fails.

    Example: lens-geometry validate --model path/to/model

    Args:
        loading: which model.
        out: also save the table in this directory.
    """
    result = validate(loading.load())
    table = result.table
    shown = table.drop(columns="note").to_string(index=False, float_format="{:.1e}".format, na_rep="-")
    print(shown)
    for row in table[table["note"] != ""].itertuples():
        print(f"{row.site}, {row.check}: {row.note}")
    counts = table["status"].value_counts()
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    if out is not None:
        _saved(result, out)
    return int("fail" in counts)


def profile_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    out: Path = Path("results/profile"),
    settings: ProfileSettings = PROFILE,
) -> int:
    """Measure how much of every update is parallel to its reference, by site, layer and head.

    Example: lens-geometry profile --model smollm2-135m --text austen --max-sequences 8

    Args:
        loading: which model.
        text: "austen", "moby-dick", a .txt file, a directory of them, or hf:... for a Hugging Face data set.
        out: directory for table.parquet, table.csv, meta.json and figure.html.
        settings: what is measured.
    """
    result = profile(loading.load(), load_text(text), settings)
    print(_profile_summary(result.table))
    return _saved(result, out)


def scale_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    out: Path = Path("results/scale"),
    settings: ScalingSettings = SCALING,
) -> int:
    """Sweep how much of the parallel and of the perpendicular part is kept, and see what the loss does.

    Stopped at any point, the same command goes on where it was.
    Example: lens-geometry scale --sites attn mlp --layers all 1- --parallel 0 0.5 --perpendicular 0

    Args:
        loading: which model.
        text: "austen", "moby-dick", a .txt file, a directory of them, or hf:... for a Hugging Face data set.
        out: directory for the journal, table.parquet, table.csv, meta.json and figure.html.
        settings: what is edited, and by how much.
    """
    result = scaling_sweep(loading.load(), load_text(text), settings, out=out)
    print(_scaling_summary(result.table))
    return _saved(result, out)


def report_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    out: Path = Path("results/report"),
    profile_sequences: int = 16,
    sweep_sequences: int = 6,
    sequence_length: int = 128,
    seed: int = 0,
) -> int:
    """Profile and scaling sweep of one model on one text, in one self-contained report.html.

    Example: lens-geometry report --model smollm2-135m --text moby-dick --out my-report

    Args:
        loading: which model.
        text: "austen", "moby-dick", a .txt file, a directory of them, or hf:... for a Hugging Face data set.
        out: directory for report.html and for each experiment's own files.
        profile_sequences: sequences that are profiled.
        sweep_sequences: sequences in the sweep, which runs about a hundred conditions over them.
        sequence_length: tokens per sequence.
        seed: of noise and bootstrap.
    """
    model, data = loading.load(), load_text(text)
    shared: dict[str, Any] = {"sequence_length": sequence_length, "seed": seed}
    results = [
        profile(model, data, ProfileSettings(max_sequences=profile_sequences, **shared)),
        scaling_sweep(model, data, ScalingSettings(max_sequences=sweep_sequences, **shared), out=out / "scale"),
    ]
    for result, name in zip(results, ("profile", "scale"), strict=True):
        _saved(result, out / name)
    path = write_report(results, out / "report.html")
    print("\n".join(findings(results)))
    print(f"report: {path}")
    return 0


def evaluate_command(
    tasks: tuple[str, ...],
    loading: Loading = LOADING,
    sites: tuple[str, ...] = ("attn", "mlp", "value_excl_self"),
    layers: str = "all",
    parallel: tuple[float, ...] = (0.0,),
    perpendicular: tuple[float, ...] = (),
    controls: tuple[str, ...] = (),
    out: Path = Path("results/evaluate"),
    settings: EvaluationSettings = EVALUATION,
) -> int:
    """Score downstream tasks with lm-evaluation-harness, unedited and under component scaling.

    Needs the extra: pip install "lens-geometry[evals]".
    Example: lens-geometry evaluate --tasks arc_easy --limit 100 --sites attn mlp --parallel 0 0.5

    Args:
        tasks: names of lm_eval tasks or groups, your own (see --include-path), or YAML files.
        loading: which model.
        sites: which updates are edited.
        layers: which layers, all at once: "all", "4", "1-", "4-11", "0,3,6".
        parallel: retained scales of the parallel part, the perpendicular part kept.
        perpendicular: retained scales of the perpendicular part, the parallel part kept.
        controls: run beside each edit ("gain", "isotropic", "random_reference", "shuffled_reference").
        out: directory for table.parquet, table.csv, meta.json and figure.html.
        settings: how the tasks are run.
    """
    model = loading.load()
    edits = scaling_edits(
        model,
        sites,
        layers=layers,
        parallel=parallel,
        perpendicular=perpendicular,
        controls=controls,
        seed=settings.seed,
    )
    result = evaluate(model, tasks, edits, settings)
    print(_evaluation_summary(result.table))
    return _saved(result, out)


COMMANDS: dict[str, Callable[..., int]] = {
    "models": models_command,
    "sites": sites_command,
    "validate": validate_command,
    "profile": profile_command,
    "scale": scale_command,
    "report": report_command,
    "evaluate": evaluate_command,
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    _quiet()
    try:
        return tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            args=arguments,
            prog="lens-geometry",
            description="Is it the direction or the size of an update that matters? Measure and edit the "
            "geometry of a transformer.",
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except LensGeometryError as error:
        print(f"lens-geometry: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lens-geometry: stopped; what was written is kept", file=sys.stderr)
        return 130


def _saved(result: Result, out: Path) -> int:
    print(f"saved: {result.save(out)}")
    return 0


def _profile_summary(table: pd.DataFrame) -> str:
    """Mean over layers of the main numbers, a row for each site."""
    whole = table[table["head"].isna() & table["metric"].isin(("alpha", "parallel_fraction", "update_over_reference"))]
    shown = whole.pivot_table(index="site", columns="metric", values="mean", sort=False)
    parallel = whole[whole["metric"] == "parallel_fraction"].set_index("layer").groupby("site")["mean"]
    shown["most parallel layer"] = parallel.idxmax()
    return "mean over layers of the mean over tokens\n" + shown.to_string(float_format="{:.3f}".format)


def _scaling_summary(table: pd.DataFrame) -> str:
    """Change of loss, a row for each site and kind, a column for each scale."""
    shown = table.pivot_table(
        index=["layers", "site", "control", "component"], columns="scale", values="loss_change", sort=False
    )
    shown = shown[sorted(shown.columns)]
    return "change of loss (nats) by retained scale\n" + shown.to_string(float_format="{:+.3f}".format, na_rep="")


def _evaluation_summary(table: pd.DataFrame) -> str:
    """Score and its change with interval, a row for each task, metric and edit."""
    shown = table[["task", "metric", "edit", "value", "change", "change_low", "change_high", "n_documents", "status"]]
    return shown.to_string(index=False, float_format="{:.4g}".format, na_rep="-")


def _quiet() -> None:
    """Warnings in one line each; no chatter of the libraries underneath."""
    for name, value in (("TOKENIZERS_PARALLELISM", "false"), ("TRANSFORMERS_VERBOSITY", "error")):
        os.environ.setdefault(name, value)
    warnings.showwarning = lambda message, category, *_, **__: (
        print(f"warning: {message}", file=sys.stderr) if category is UserWarning else None
    )


if __name__ == "__main__":
    sys.exit(main())
