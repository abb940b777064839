"""Suppression in a run of transformers.Trainer. Imports transformers at its top, hence is imported when asked for.

trainer = Trainer(model, args, train_dataset=..., callbacks=[lg.SuppressionCallback("value", parallel=0.0)])
trainer.train()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from lens_geometry.edits import Suppressed, suppress
from lens_geometry.edits.suppressing import ScheduleShape, SuppressedSite, Suppression
from lens_geometry.errors import ModelError
from lens_geometry.suppressed import read_suppression, write_suppression


class SuppressionCallback(TrainerCallback):
    """Trains a plain Hugging Face model under a suppression: `suppress` from the beginning of training on.

    The edit is on in every training step and in every evaluation since training began, on the model itself, hence also
    under DDP, FSDP, gradient checkpointing and mixed precision. It stays on afterwards, so that `trainer.evaluate()`
    and `trainer.predict()` run the model that was trained; `remove()` takes it off, and so does the end of training
    with `keep_on=False`. Each checkpoint gets a `geometry.json` beside its config.json, and so does `args.output_dir`,
    where `trainer.save_model()` writes by default; for other directories there is `save(directory)`.

    Args:
        site: "attn", "mlp", "value", "value_excl_self" (with eager attention), or "none" for plain training.
        parallel: the retained scale of the parallel part; 0 removes it.
        schedule, schedule_steps: "constant", or from 1 to `parallel` along a "linear" or "cosine" way over the first
            `schedule_steps` optimiser steps. An evaluation sees the scale of the last step.
        layers: the layers edited: numbers, or text such as "1-"; None is all.
        keep_on: whether the edit stays on the model when training has ended.

    Attributes:
        suppression: the settings, as they are saved.
        handle: the edit that is on, with `fired` and `changed` per layer; None before training and after `remove()`.

    Raises SiteError and GeometryError for settings that do not fit; when training begins, as `suppress` does, and
    ModelError when a checkpoint is gone on with that was trained under another suppression; HookError after the first
    step when the edit did not run in it, and at the end when it changed nothing.
    """

    def __init__(
        self,
        site: SuppressedSite,
        parallel: float = 0.0,
        *,
        schedule: ScheduleShape = "constant",
        schedule_steps: int = 0,
        layers: Any = None,
        keep_on: bool = True,
    ) -> None:
        self.suppression = Suppression(
            site=site, parallel=parallel, schedule=schedule, schedule_steps=schedule_steps, layers=layers
        )
        self.keep_on = keep_on
        self.handle: Suppressed | None = None
        self.parallel_now = self.suppression.parallel_at(0)
        self._has_run = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Put the edit on; one that is still on from before is replaced."""
        if state.global_step:
            self._same_as_before(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self.remove()
        self._has_run = False
        self.parallel_now = self.suppression.parallel_at(state.global_step)
        if self.suppression.site != "none":
            self.handle = suppress(
                model, self.suppression.site, parallel=self.parallel_now, layers=self.suppression.layers
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Follow the schedule."""
        self._set(self.suppression.parallel_at(state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the first step, make sure that the edit ran: hours later would be late."""
        if self.handle is not None and not self._has_run:
            self.handle.check(changed=False)
            self._has_run = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the setting into the checkpoint that has just been saved."""
        if args.should_save:
            output, name = Path(args.output_dir), f"checkpoint-{state.global_step}"
            found = [path for path in (output / name, *output.glob(f"*/{name}")) if path.is_dir()]
            if not found:
                raise ModelError(
                    "the checkpoint that has just been saved is not there, and its suppression cannot be written",
                    where=str(output / name),
                    cure="keep args.output_dir as it is during training",
                )
            self.save(max(found, key=lambda path: path.stat().st_mtime))  # searches have a directory for each trial

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the setting where `trainer.save_model()` writes, and make sure that the edit changed something."""
        if args.load_best_model_at_end and state.best_global_step:
            self._set(self.suppression.parallel_at(state.best_global_step - 1))
        if args.should_save and Path(args.output_dir).is_dir():
            self.save(args.output_dir)
        if self.handle is not None:
            handle = self.handle
            if not self.keep_on:
                self.remove()
            handle.check()

    def save(self, directory: str | Path) -> None:
        """Write `geometry.json` into a directory: the setting, and the scale as it is now."""
        write_suppression(Path(directory), self.suppression, self.parallel_now)

    def remove(self) -> None:
        """Take the edit off the model, if it is on."""
        if self.handle is not None:
            self.handle.remove(check=False)
            self.handle = None

    def _set(self, parallel: float) -> None:
        if parallel != self.parallel_now:
            self.parallel_now = parallel
            if self.handle is not None:
                self.handle.set_parallel(parallel)

    def _same_as_before(self, checkpoint: Path) -> None:
        if not checkpoint.is_dir():
            return  # gone on from another place, which a callback is not told
        saved = read_suppression(checkpoint)
        before = (Suppression() if saved is None else saved.suppression).as_dict()
        now = self.suppression.as_dict()
        differing = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        if differing:
            raise ModelError(
                f"training goes on from a checkpoint of another suppression: it differs in {', '.join(differing)}",
                where=str(checkpoint),
                cure="give the callback the checkpoint's own settings, or begin a new run from its weights",
            )
