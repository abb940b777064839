"""The command line: one command per experiment, its options made from the settings dataclasses.

Exit codes: 0 done, 1 a check that failed, 2 bad input (one line on stderr), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import tyro

from lens_geometry import models, summaries
from lens_geometry.attention_plots import attention_html
from lens_geometry.compare_commands import compare_command
from lens_geometry.compress_commands import compress_command
from lens_geometry.compression_commands import choice_command, study_command
from lens_geometry.data import load_text
from lens_geometry.errors import LensGeometryError
from lens_geometry.experiments import (
    AttentionSettings,
    BasinSettings,
    DissociationSettings,
    EvaluationSettings,
    GenerationSettings,
    HeadSettings,
    MediatorSettings,
    MlpSettings,
    PairSettings,
    PathwaySettings,
    ProfileSettings,
    ScalingSettings,
    ScheduleSettings,
    StrengthSettings,
    applied_strength,
    attention_maps,
    basin,
    continuations,
    dissociation,
    evaluate,
    generation_profile,
    head_sweep,
    mediators,
    minimal_pairs,
    mlp_sweep,
    pathway_repair,
    profile,
    scaling_edits,
    scaling_sweep,
    schedule,
    side_by_side,
    site_table,
    validate,
)
from lens_geometry.loading_options import DEFAULT_TEXT, Loading
from lens_geometry.pairs import PAIR_SETS, load_pairs
from lens_geometry.report import findings, write_report
from lens_geometry.results import Result, replace_file
from lens_geometry.runner import RunSettings
from lens_geometry.training_commands import cost_command, tokens_command, train_command

DEFAULT_PROMPT = "It is a truth universally acknowledged"


LOADING, PROFILE, SCALING = Loading(), ProfileSettings(), ScalingSettings()
HEADS, STRENGTH = HeadSettings(), StrengthSettings()
BASIN, SCHEDULE = BasinSettings(), ScheduleSettings()
MLP = MlpSettings()
ATTENTION = AttentionSettings()
GENERATION = GenerationSettings()
EVALUATION = EvaluationSettings()
PAIRS = PairSettings()
DISSOCIATION = DissociationSettings()
REPAIR = PathwaySettings()
MEDIATORS = MediatorSettings()


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
        text: "austen", "moby-dick", "python", a .txt file, a directory of them, or hf:... for a Hugging Face data set;
            "shuffled:austen" for its tokens in random order; "repeated-random" for random tokens said twice.
        out: directory for table.parquet, table.csv, meta.json and figure.html.
        settings: what is measured.
    """
    result = profile(loading.load(), load_text(text), settings)
    print(summaries.profile_summary(result.table))
    return _saved(result, out)


def scale_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    out: Path = Path("results/scale"),
    settings: ScalingSettings = SCALING,
    basin_bound: Annotated[float | None, tyro.conf.arg(name="basin")] = None,
    schedule_budget: Annotated[float | None, tyro.conf.arg(name="schedule")] = None,
) -> int:
    """Sweep how much of the parallel and of the perpendicular part is kept, and see what the loss does.

    Stopped at any point, the same command goes on where it was.
    Example: lens-geometry scale --sites attn mlp --layers all 1- --parallel 0 0.5 --perpendicular 0

    Args:
        loading: which model.
        text: "austen", "moby-dick", "python", a .txt file, a directory of them, or hf:... for a Hugging Face data set;
            "shuffled:austen" for its tokens in random order; "repeated-random" for random tokens said twice.
        out: directory for the journal, table.parquet, table.csv, meta.json and figure.html.
        settings: what is edited, and by how much.
        basin_bound: also find the basin of each site and layer set under this change of loss (nats), into OUT/basin.
        schedule_budget: also find scales for each layer of the first layer set under this joint change of loss (nats),
            into OUT/schedule.
    """
    shared = {field.name: getattr(settings, field.name) for field in fields(RunSettings)}
    shared |= {name: getattr(settings, name) for name in ("sites", "grouping", "skip_position_0")}
    searches: list[tuple[str, Callable[..., Result], Any, Callable[[pd.DataFrame], str]]] = []
    if basin_bound is not None:  # settings that make no sense are refused before the sweep is run
        basins = BasinSettings(**shared, layers=settings.layers, bound=basin_bound)
        searches.append(("basin", basin, basins, summaries.basin_summary))
    if schedule_budget is not None:
        schedules = ScheduleSettings(**shared, layers=settings.layers[0], budget=schedule_budget)
        searches.append(("schedule", schedule, schedules, summaries.schedule_summary))
    model, data = loading.load(), load_text(text)
    result = scaling_sweep(model, data, settings, out=out)
    print(summaries.scaling_summary(result.table))
    _saved(result, out)
    for name, find, chosen, summary in searches:
        result = find(model, data, chosen, out=out / name)
        print(summary(result.table))
        _saved(result, out / name)
    return 0


def basin_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    out: Path = Path("results/basin"),
    settings: BasinSettings = BASIN,
) -> int:
    """Find the scales around 1 with a change of loss under a bound, for each site, layer set or head.

    Stopped at any point, the same command goes on where it was.
    Example: lens-geometry basin --sites attn value --layers all each --bound 0.05

    Args:
        loading: which model.
        text: "austen", "moby-dick", a .txt file, a directory of them, or hf:... for a Hugging Face data set.
        out: directory for the journal, table.parquet, table.csv, meta.json and figure.html.
        settings: what is edited, under which bound, and how the search goes.
    """
    result = basin(loading.load(), load_text(text), settings, out=out)
    print(summaries.basin_summary(result.table))
    return _saved(result, out)


def schedule_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    out: Path = Path("results/schedule"),
    settings: ScheduleSettings = SCHEDULE,
) -> int:
    """Find per-layer scales whose joint change of loss stays under one budget, beside a uniform scale.

    Stopped at any point, the same command goes on where it was.
    Example: lens-geometry schedule --sites value_excl_self --budget 0.1

    Args:
        loading: which model.
        text: "austen", "moby-dick", a .txt file, a directory of them, or hf:... for a Hugging Face data set.
        out: directory for the journals, table.parquet, table.csv, meta.json and figure.html.
        settings: which site and layers, under which budget.
    """
    result = schedule(loading.load(), load_text(text), settings, out=out)
    print(summaries.schedule_summary(result.table))
    return _saved(result, out)


def heads_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    out: Path = Path("results/heads"),
    settings: HeadSettings = HEADS,
) -> int:
    """Edit one head at a time: every head's cost beside all heads of its layer at once and the sum of singles.

    Exactly (a run per head, begun at the layer's stored stream), to first order (one backward pass for all), or both.
    Stopped at any point, the same command goes on where it was.
    Example: lens-geometry heads --sites value_excl_self --groupings each kv_group --max-sequences 6

    Args:
        loading: which model.
        text: "austen", "moby-dick", a .txt file, a directory of them, or hf:... for a Hugging Face data set.
        out: directory for the journal, table.parquet, table.csv, meta.json and figure.html.
        settings: which heads are edited, and by how much.
    """
    result = head_sweep(loading.load(), load_text(text), settings, out=out)
    print(summaries.heads_summary(result))
    return _saved(result, out)


def strength_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    out: Path = Path("results/strength"),
    settings: StrengthSettings = STRENGTH,
) -> int:
    """Measure how much an edit changes the branch it acts in, layer by layer, beside its cost: robust, or weak?

    Stopped at any point, the same command goes on where it was.
    Example: lens-geometry strength --sites attn value_excl_self --parallel 0 --max-sequences 6

    Args:
        loading: which model.
        text: "austen", "moby-dick", a .txt file, a directory of them, or hf:... for a Hugging Face data set.
        out: directory for the journal, table.parquet, table.csv, meta.json and figure.html.
        settings: what is edited, and by how much.
    """
    result = applied_strength(loading.load(), load_text(text), settings, out=out)
    print(summaries.strength_summary(result.table))
    return _saved(result, out)


def mlp_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    out: Path = Path("results/mlp"),
    settings: MlpSettings = MLP,
) -> int:
    """Scale the parts of what happens inside the MLP: its carrier, its slices' contributions, its output.

    Stopped at any point, the same command goes on where it was.
    Example: lens-geometry mlp --references normalised stream --layers all 1-

    Args:
        loading: which model.
        text: "austen", "moby-dick", a .txt file, a directory of them, or hf:... for a Hugging Face data set.
        out: directory for the journal, table.parquet, table.csv, meta.json and figure.html.
        settings: what is edited, and by how much.
    """
    result = mlp_sweep(loading.load(), load_text(text), settings, out=out)
    print(summaries.scaling_summary(result.table))
    return _saved(result, out)


def generate_command(
    loading: Loading = LOADING,
    prompts: tuple[str, ...] = (),
    out: Path = Path("results/generate"),
    settings: GenerationSettings = GENERATION,
) -> int:
    """Let the model continue prompts, unedited and under edits, and measure its updates token by token.

    Example: lens-geometry generate --prompts "Call me" --sites attn --parallel 0 --when always new --max-new-tokens 20

    Args:
        loading: which model.
        prompts: texts to continue; a few bundled ones when left out.
        out: directory for the continuations' files; those of the profile over steps go to its subdirectory profile.
        settings: what is edited, by how much, and how many tokens are made.
    """
    model, texts = loading.load(), list(prompts) or None
    edited = continuations(model, texts, settings)
    print(summaries.side_by_side(edited.table))
    measured = generation_profile(model, texts, settings)
    _saved(edited, out)
    return _saved(measured, out / "profile")


def report_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    out: Path = Path("results/report"),
    profile_sequences: int = 16,
    sweep_sequences: int = 6,
    sequence_length: int = 128,
    seed: int = 0,
    generated_tokens: int = 24,
    include: tuple[Path, ...] = (),
) -> int:
    """Profile, scaling sweep and edited continuations of one model, in one self-contained report.html.

    Example: lens-geometry report --model smollm2-135m --text moby-dick --out my-report

    Args:
        loading: which model.
        text: "austen", "moby-dick", "python", a .txt file, a directory of them, or hf:... for a Hugging Face data set;
            "shuffled:austen" for its tokens in random order; "repeated-random" for random tokens said twice.
        out: directory for report.html and for each experiment's own files.
        profile_sequences: sequences that are profiled.
        sweep_sequences: sequences in the sweep, which runs about a hundred conditions over them.
        sequence_length: tokens per sequence.
        seed: of noise, bootstrap and random tokens.
        include: directories that other commands wrote (heads, strength, ...): their results join the report.
        generated_tokens: new tokens in the edited continuations of a few bundled prompts; 0 leaves them out.
    """
    others = [Result.load(directory) for directory in include]
    model, data = loading.load(), load_text(text)
    shared: dict[str, Any] = {"sequence_length": sequence_length, "seed": seed}
    results = [
        profile(model, data, ProfileSettings(max_sequences=profile_sequences, **shared)),
        scaling_sweep(model, data, ScalingSettings(max_sequences=sweep_sequences, **shared), out=out / "scale"),
    ]
    names = ["profile", "scale"]
    if generated_tokens:
        generation = GenerationSettings(parallel=(0.0,), max_new_tokens=generated_tokens, seed=seed)
        results += [continuations(model, None, generation), generation_profile(model, None, generation)]
        names += ["generate", "generate/profile"]
    for result, name in zip(results, names, strict=True):
        _saved(result, out / name)
    results += others
    path = write_report(results, out / "report.html")
    print("\n".join(findings(results)))
    print(f"report: {path}")
    return 0


def attention_command(
    loading: Loading = LOADING,
    prompt: str = DEFAULT_PROMPT,
    out: Path = Path("results/attention"),
    settings: AttentionSettings = ATTENTION,
) -> int:
    """Show an edit on the attention map of one prompt: before, after and their difference.

    Example: lens-geometry attention --prompt "It is a truth" --site value_excl_self --parallel 0 --layers 5

    Args:
        loading: which model.
        prompt: a short text.
        out: directory for table.parquet, table.csv, meta.json, figure.html, and attention.html (CircuitsVis, of
            the four layers where the edit did most).
        settings: what is edited, and by how much.
    """
    result = attention_maps(loading.load(), prompt, settings)
    print(summaries.attention_summary(result.table, settings.site))
    _saved(result, out)
    sizes = result.table["edit"].abs().groupby(result.table["layer"]).sum()
    shown = sorted(sizes.nlargest(4).index)  # a page of thirty layers is slow in every browser
    page = attention_html(result.table, shown)
    replace_file(out / "attention.html", lambda path: path.write_text(page, encoding="utf-8"))
    print(f"CircuitsVis, layers {', '.join(map(str, shown))}: {out / 'attention.html'}")
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
    print(summaries.evaluation_summary(result.table))
    return _saved(result, out)


def dissociate_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    pairs: tuple[str, ...] = ("agreement-simple",),
    beside: tuple[str, ...] = (),
    out: Path = Path("results/dissociate"),
    settings: DissociationSettings = DISSOCIATION,
) -> int:
    """Turn hidden states, or change their length, by the same distance: which breaks the loss, which agreement?

    Stopped at any point, the same command goes on where it was.
    Example: lens-geometry dissociate --layers 10-17 --displacements 0.1 0.2 --variants default as_run

    Args:
        loading: which model.
        text: "austen", "moby-dick", a .txt file, a directory of them, or hf:... for a Hugging Face data set.
        pairs: sets of minimal pairs, see `lens-geometry pairs`: names, .jsonl files as in BLiMP, SyntaxGym suites
            (.json); none for the loss alone.
        beside: more models, for which the same is done, in one table: say, one with LayerNorm beside one with RMSNorm.
        out: directory for the journals, table.parquet, table.csv, meta.json and figure.html.
        settings: which perturbations, by how much, in which layers.
    """
    data, found = load_text(text), []
    for number, name in enumerate((loading.model, *beside)):
        own = out / f"model{number}" if beside else out
        model = replace(loading, model=name).load()
        found.append(dissociation(model, data, pairs or None, settings, out=own))
    result = side_by_side(found) if beside else found[0]
    print(summaries.dissociation_summary(result.table))
    return _saved(result, out)


def pairs_command(
    loading: Loading = LOADING,
    sets: tuple[str, ...] = PAIR_SETS,
    conditions: tuple[str, str] | None = None,
    region: str | None = None,
    out: Path = Path("results/pairs"),
    settings: PairSettings = PAIRS,
) -> int:
    """Score minimal pairs: how often, and by how much, does the model prefer the grammatical sentence?

    Example: lens-geometry pairs --sets agreement-simple anaphor-gender --max-pairs 100

    Args:
        loading: which model.
        sets: generated sets (all by default; "agreement" is the four of agreement as one), .jsonl files as in BLiMP,
            SyntaxGym suites (.json), or hf:nyu-mll/blimp:CONFIG.
        conditions: of SyntaxGym suites: the good and the bad condition, where a suite does not say which.
        region: of SyntaxGym suites, with conditions: the number of the critical region.
        out: directory for table.parquet, table.csv, meta.json and figure.html.
        settings: how many pairs, and how they are scored.
    """
    found = [
        load_pairs(name, max_pairs=settings.max_pairs, seed=settings.seed, conditions=conditions, region=region)
        for name in sets
    ]
    result = minimal_pairs(loading.load(), found, settings)
    print(summaries.pairs_summary(result.table))
    return _saved(result, out)


def repair_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    out: Path = Path("results/repair"),
    settings: PathwaySettings = REPAIR,
) -> int:
    """Perturb some layers, repair one pathway at a time, and see how much of the loss comes back.

    Repairing everything must give the clean loss and repairing nothing the perturbed one: both are checked.
    Stopped at any point, the same command goes on where it was.
    Example: lens-geometry repair --layers 10-17 --kinds angular magnitude --displacements 0.1

    Args:
        loading: which model.
        text: "austen", "moby-dick", a .txt file, a directory of them, or hf:... for a Hugging Face data set.
        out: directory for the journal, table.parquet, table.csv, meta.json and figure.html.
        settings: what is perturbed, by how much, and what is repaired.
    """
    result = pathway_repair(loading.load(), load_text(text), settings, out=out)
    print(summaries.repair_summary(result.table))
    return _saved(result, out)


def mediators_command(
    loading: Loading = LOADING,
    text: str = DEFAULT_TEXT,
    out: Path = Path("results/mediators"),
    settings: MediatorSettings = MEDIATORS,
) -> int:
    """Perturb layers and measure what carries that to the loss: attention, angles, displacements layer by layer.

    Says whether the pushes of several layers add up or cancel like a random walk, and how much of the damage goes with
    each mediator. Stopped at any point, the same command goes on where it was.
    Example: lens-geometry mediators --layers 10-17 --variants default as_run --displacements 0.05 0.1 --seeds 5

    Args:
        loading: which model.
        text: "austen", "moby-dick", a .txt file, a directory of them, or hf:... for a Hugging Face data set.
        out: directory for the journal, table.parquet, table.csv, meta.json and figure.html.
        settings: what is perturbed, how, and how far.
    """
    result = mediators(loading.load(), load_text(text), settings, out=out)
    print(summaries.mediators_summary(result.table))
    return _saved(result, out)


COMMANDS: dict[str, Callable[..., int]] = {
    "models": models_command,
    "sites": sites_command,
    "validate": validate_command,
    "profile": profile_command,
    "scale": scale_command,
    "heads": heads_command,
    "strength": strength_command,
    "report": report_command,
    "basin": basin_command,
    "schedule": schedule_command,
    "mlp": mlp_command,
    "attention": attention_command,
    "generate": generate_command,
    "evaluate": evaluate_command,
    "pairs": pairs_command,
    "dissociate": dissociate_command,
    "repair": repair_command,
    "mediators": mediators_command,
    "train": train_command,
    "tokens": tokens_command,
    "cost": cost_command,
    "compare": compare_command,
    "compression-study": study_command,
    "layer-choice": choice_command,
    "compress": compress_command,
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


def _quiet() -> None:
    """Warnings in one line each; no chatter of the libraries underneath."""
    for name, value in (("TOKENIZERS_PARALLELISM", "false"), ("TRANSFORMERS_VERBOSITY", "error")):
        os.environ.setdefault(name, value)
    warnings.showwarning = lambda message, category, *_, **__: (
        print(f"warning: {message}", file=sys.stderr) if category is UserWarning else None
    )


if __name__ == "__main__":
    sys.exit(main())
