"""Models that were trained under a suppression: the edit is saved beside the weights, and comes back with them.

A directory with `geometry.json` holds such a model:

    {"format": 1, "suppression": {"site": "value", "parallel": 0.0, ...}, "parallel_now": 0.0}

and `gate.safetensors` beside it the vectors of a learned gate, one for each layer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lens_geometry.anatomy import attach_for_good, own_hooks
from lens_geometry.edits.noise import SharedNoise
from lens_geometry.edits.plain_models import Suppressed, suppress
from lens_geometry.edits.suppressing import Suppression, Suppressor
from lens_geometry.errors import LensGeometryError, ModelError
from lens_geometry.provenance import SUPPRESSION
from lens_geometry.results import replace_file

GEOMETRY_FILE, GATE_FILE, FORMAT = "geometry.json", "gate.safetensors", 1
LEAVE_OUT = "without_suppression=True (--without-suppression) loads the bare weights, and results say so"


@dataclass(frozen=True)
class SavedSuppression:
    """What a checkpoint says it was trained under: settings, s_par when it was saved, and its gates' vectors."""

    suppression: Suppression
    parallel_now: float
    gates: Mapping[str, Tensor] = field(default_factory=dict)

    def state(self) -> dict[str, Tensor]:
        """What `Suppressor.load` takes."""
        return {**self.gates, "parallel_now": torch.tensor(self.parallel_now, dtype=torch.float64)}

    def about(self) -> dict[str, Any]:
        """For provenance: JSON's own types, the gates as a hash."""
        digest = hashlib.sha256()
        for name in sorted(self.gates):
            digest.update(name.encode() + self.gates[name].contiguous().double().numpy().tobytes())
        return {
            "settings": self.suppression.as_dict(),
            "parallel_now": self.parallel_now,
            "gates_sha256": digest.hexdigest() if self.gates else None,
        }


def save_suppression(directory: Path, suppressor: Suppressor) -> None:
    """Write `geometry.json`, and `gate.safetensors` where there is a gate, each in one step."""
    state = suppressor.state()
    parallel = float(state.pop("parallel_now"))
    if state:
        replace_file(directory / GATE_FILE, lambda path: safetensors.torch.save_file(state, path))
    else:
        (directory / GATE_FILE).unlink(missing_ok=True)
    write_suppression(directory, suppressor.suppression, parallel)


def write_suppression(directory: Path, suppression: Suppression, parallel_now: float) -> None:
    """Write `geometry.json` in one step."""
    saved = {"format": FORMAT, "suppression": suppression.as_dict(), "parallel_now": parallel_now}
    text = json.dumps(saved, indent=2) + "\n"
    replace_file(directory / GEOMETRY_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def read_suppression(directory: Path) -> SavedSuppression | None:
    """What the directory's model was trained under; None without `geometry.json`. Raises ModelError if unreadable."""
    path = directory / GEOMETRY_FILE
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        number = found["format"]
        if number != FORMAT:
            newer = isinstance(number, int) and number > FORMAT
            raise ModelError(
                f"the edit that this model was trained under is saved in format {number!r}, and only {FORMAT} is known",
                where=str(path),
                cure=f"{'install a newer lens-geometry' if newer else 'copy the checkpoint again'}; {LEAVE_OUT}",
            )
        suppression, parallel = Suppression.from_dict(found["suppression"]), float(found["parallel_now"])
        if not math.isfinite(parallel) or not (suppression.scheduled or parallel == suppression.parallel):
            raise ValueError(f"a scale of {parallel} contradicts the settings")
        gates = _read_gates(directory / GATE_FILE) if suppression.gate else {}
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, LensGeometryError, safetensors.SafetensorError) as error:
        why = error.problem if isinstance(error, LensGeometryError) else f"{type(error).__name__}: {error}"
        raise ModelError(
            f"the edit that this model was trained under cannot be read ({why})",
            where=str(path),
            cure=f"copy the checkpoint again, whole; {LEAVE_OUT}",
        ) from error
    return SavedSuppression(suppression, parallel, gates)


def _read_gates(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ModelError(
            "the vectors of this model's gate are missing",
            where=str(path),
            cure=f"copy the checkpoint again, whole; {LEAVE_OUT}",
        )
    return safetensors.torch.load_file(path)


def attach_suppression(model: Any, saved: SavedSuppression | None, where: str = "") -> None:
    """Put the edit, if there is one, on the model for good: every pass, whoever runs it, is the suppressed model's.

    Later hooks come after it. The noise of "norm_matched" is the same for every sequence. Raises ModelError where
    this model cannot be edited so.
    """
    if saved is None or saved.suppression.site == "none":
        return
    try:
        suppressor = Suppressor(model, saved.suppression, batch=SharedNoise())
        suppressor.load(saved.state())
    except LensGeometryError as error:
        raise ModelError(
            f"the edit that this model was trained under does not fit it ({error.problem})",
            where=where,
            cure=f"{error.cure}; {LEAVE_OUT}",
        ) from error
    for weight in suppressor.parameters.values():
        weight.requires_grad_(False)
    attach_for_good(model, suppressor.hooks)
    about, count = saved.about(), len(suppressor.hooks)

    def look(model: Any) -> dict[str, Any]:
        return {"status": "attached" if own_hooks(model) == count else "removed", **about}

    model.__dict__[SUPPRESSION] = look
    look.saved, look.where = saved, where  # type: ignore[attr-defined]


def save_carried(model: Any, directory: Path) -> None:
    """Write the edit that a loaded model has, or had before it was removed or left out, if there is one."""
    look = model.__dict__.get(SUPPRESSION)
    saved: SavedSuppression | None = getattr(look, "saved", None)
    if saved is None:
        return
    if saved.gates:
        gates = {name: gate.cpu().contiguous() for name, gate in saved.gates.items()}
        replace_file(directory / GATE_FILE, lambda path: safetensors.torch.save_file(gates, path))
    write_suppression(directory, saved.suppression, saved.parallel_now)


def carry_suppression(model: Any, copied: Any) -> None:
    """Give a copy of a model, made without its hooks, the edit that the model has, or the record that it lacks it."""
    look = model.__dict__.get(SUPPRESSION)
    if look is None:
        return
    if look(model)["status"] == "attached":
        attach_suppression(copied, look.saved, look.where)
    else:
        copied.__dict__[SUPPRESSION] = look


def leave_out(model: Any, directory: Path) -> None:
    """Keep the weights bare, and have `describe` say so, also of an edit that cannot be read."""
    try:
        saved = read_suppression(directory)
        about = None if saved is None or saved.suppression.site == "none" else saved.about()
    except ModelError as error:
        about = {"settings": None, "problem": error.problem}
    if about is not None:
        model.__dict__[SUPPRESSION] = lambda model: {"status": "left out", **about}


def suppress_as_saved(model: Any, directory: str | Path) -> Suppressed:
    """Put the edit that a checkpoint was trained under on its plain Hugging Face model.

        model = AutoModelForCausalLM.from_pretrained("run/checkpoint-1000")
        lg.suppress_as_saved(model, "run/checkpoint-1000")

    The scale is that of the moment when it was saved. Returns the handle that `suppress` returns.
    Raises ModelError when the directory has no `geometry.json`, or one that cannot be read or be done on a plain model;
    and as `suppress` does.
    """
    saved = read_suppression(Path(directory))
    if saved is None:
        raise ModelError(
            f"there is no {GEOMETRY_FILE}: nothing says that this model was trained under a suppression",
            where=str(directory),
            cure="give the checkpoint's directory, or use lg.suppress with settings of your own",
        )
    given = saved.suppression
    if given.site == "none":
        return Suppressed([], [])
    if given.gate or given.control == "diagonal":
        raise ModelError(
            f"a plain model has no edit for {'a learned gate' if given.gate else 'the removal of the diagonal'}",
            where=str(directory),
            cure="load the checkpoint with lg.load_model, which puts its edit on",
        )
    return suppress(
        model,
        given.site,
        parallel=saved.parallel_now,
        layers=given.layers,
        control="matched_random_reference" if given.control == "norm_matched" else "none",
        batch=SharedNoise(),
    )
