"""Checkpoints that a kill or a full disk cannot spoil, and the curve of a run, which goes on where they were.

A checkpoint is a Hugging Face directory with the edit (`geometry.json`), the optimiser's state and the step beside it.
It is filled under another name and gets its own in one step; older ones are removed afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lens_geometry import cache
from lens_geometry.errors import TrainingError
from lens_geometry.results import replace_file
from lens_geometry.suppressed import save_suppression
from lens_geometry.training.config import MAY_CHANGE, Shape
from lens_geometry.training.model import save_model
from lens_geometry.training.processes import shared_like, whole
from lens_geometry.training.suppression import Suppressor

STATE, OPTIMIZER, CURVE, CONFIG = "trainer.json", "optimizer.safetensors", "curve.jsonl", "config.json"
BEFORE = "remove its directory; the run goes on from the one before"
RETRY = "free space, and run the same command again: it goes on from the last checkpoint"


def save_checkpoint(
    run: Path,
    state: dict[str, Any],
    model: Any,
    shape: Shape,
    suppressor: Suppressor,
    moments: dict[str, torch.Tensor],
    tokenizer: Any,
) -> Path:
    """Write `checkpoints/step-N`, N from `state["step"]`, and return it.

    Raises:
        TrainingError: it could not be written; the one before is untouched.
    """
    target = run / "checkpoints" / f"step-{state['step']:08d}"
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_model(model, shape, unfinished, tokenizer)
        save_suppression(unfinished, suppressor)
        save_file(moments, unfinished / OPTIMIZER)
        (unfinished / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        marker = {
            "source": f"lens_geometry training, step {state['step']}",
            "default_prepend_bos": state["config"]["packing"] == "stream",  # else no input ever began with it
        }
        cache.write_marker(unfinished, marker)
        for file in unfinished.iterdir():
            _sync(file)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(unfinished, target)
        _sync(target.parent)
    except Exception as error:  # safetensors wraps the system's errors in its own
        shutil.rmtree(unfinished, ignore_errors=True)
        if not isinstance(error, OSError) and not cache.is_full(error):
            raise
        raise TrainingError(
            f"the checkpoint of step {state['step']} could not be written ({error}); the one before is untouched",
            where=str(target),
            cure=RETRY,
        ) from error
    return target


def newest_checkpoint(run: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    found = sorted((run / "checkpoints").glob("step-*"), reverse=True)
    return next((directory for directory in found if cache.read_marker(directory) is not None), None)


def remove_old(run: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints, and what a kill has left unfinished."""
    place = run / "checkpoints"
    for directory in [*sorted(place.glob("step-*"))[:-keep], *place.glob(".step-*.unfinished")]:
        shutil.rmtree(directory, ignore_errors=True)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What the trainer wrote beside the weights: the step, seconds so far, config and tokens.

    Raises:
        TrainingError: it is no checkpoint of the trainer.
    """
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"this checkpoint cannot be read ({error})",
            where=str(checkpoint),
            cure=BEFORE,
        ) from error
    return state


def optimizer_tensors(optimizer: torch.optim.Optimizer, *, kept: bool = True) -> dict[str, torch.Tensor]:
    """AdamW's running means and step counts by the parameters' names; under FSDP every process has to take part."""
    tensors = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            for key, value in optimizer.state[parameter].items():
                together = whole(torch.as_tensor(value).detach())
                if kept:
                    tensors[f"{key}.{name}"] = together.cpu().contiguous()
    return tensors


def load_optimizer(optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Put back what `optimizer_tensors` took.

    Raises:
        TrainingError: the file is damaged, or of another class of model (`backend`).
    """
    try:
        tensors = load_file(checkpoint / OPTIMIZER)
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"the optimiser's state cannot be read ({error})", where=str(checkpoint), cure=BEFORE
        ) from error
    names = {name for group in optimizer.param_groups for name in group["names"]}
    if {f"step.{name}" for name in names} - set(tensors):
        raise TrainingError(
            "the optimiser's state is that of another class of model, HookedTransformer or TransformerBridge",
            where=str(checkpoint),
            cure="go on under the TransformerLens that the run was begun with, or begin anew in another --out",
        )
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            moments = {key: shared_like(tensors[f"{key}.{name}"], parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": tensors[f"step.{name}"], **moments}


def same_run(now: dict[str, Any], before: dict[str, Any], where: Path) -> None:
    """Raise TrainingError, naming what differs, when a run is to go on under other settings."""
    new, old = flat(now), flat(before)
    different = [
        f"{key} ({old.get(key)} there, {new.get(key)} here)"
        for key in sorted({*new, *old})
        if key.split(".")[0] not in MAY_CHANGE and new.get(key) != old.get(key)
    ]
    if different:
        raise TrainingError(
            f"a run with other settings is here; it differs in {', '.join(different)}",
            where=str(where),
            cure="choose another --out, or give the settings of its config.json to go on with it (a run cannot be made "
            "longer: its learning rate has come down)",
        )


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Nested settings under names such as shape.d_model."""
    found = {}
    for key, value in settings.items():
        inner = flat(value) if isinstance(value, dict) else {}
        found.update({f"{key}.{name}": each for name, each in inner.items()} or {key: value})
    return found


def read_curve(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's curve; a last one that a kill has cut is left out."""
    path = run / CURVE
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


class Curve:
    """The run's `curve.jsonl`: a line for every training step and every evaluation, on disk as it goes."""

    def __init__(self, path: Path, step: int, *, write: bool = True) -> None:
        """Keep what was before `step`: its training lines, and evaluations up to it; a run goes on from there.

        Of several processes one writes; the others know the same lines. Raises TrainingError when lines are missing.
        """
        self.path, self.writes = path, write
        self.lines = [
            line
            for line in read_curve(path.parent)
            if line["step"] < step or (line["step"] == step and "loss" not in line and step > 0)
        ]
        trained = [line["step"] for line in self.lines if "loss" in line]
        if trained != list(range(step)) or (step and not any("bare_held_out_loss" in line for line in self.lines)):
            raise TrainingError(
                f"the curve lacks steps before step {step}, where the checkpoint is",
                where=str(path),
                cure="put the file back, or begin anew in another --out",
            )
        if self.writes:  # in one step, so that a kill or a full disk leaves the lines that are there
            text = "".join(json.dumps(line) + "\n" for line in self.lines)
            self._written(lambda: replace_file(path, lambda file: file.write_text(text, encoding="utf-8")))

    def add(self, line: dict[str, Any]) -> None:
        """One more line."""
        self.lines.append(line)
        if self.writes:
            self._written(lambda: self._append(json.dumps(line) + "\n"))

    def sync(self) -> None:
        """Have it all on the disk."""
        if self.writes:
            self._written(lambda: _sync(self.path))

    def evaluated(self, step: int) -> bool:
        """Whether the model was evaluated before this step already."""
        return any(line["step"] == step and "held_out_loss" in line for line in self.lines)

    def _append(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)

    def _written(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except OSError as error:
            raise TrainingError(
                f"the curve could not be written ({error.strerror or error})", where=str(self.path), cure=RETRY
            ) from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
