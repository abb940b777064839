"""Suppression: the one edit that a model is trained under, as settings that are saved with it.

    suppressor = Suppressor(model, Suppression("value", parallel=0.0))
    with applied(model, suppressor.hooks):
        model(ids, return_type="loss").backward()

It is `scale` (or `remove_diagonal`), in training and in evaluation alike; what is more is a schedule, a gate that is
learned, and the way to JSON and back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lens_geometry.anatomy import inspect
from lens_geometry.edits.hooks import Hooks
from lens_geometry.edits.noise import Batch
from lens_geometry.edits.removal import remove_diagonal
from lens_geometry.edits.scaling import Scale, scale
from lens_geometry.errors import GeometryError, SiteError
from lens_geometry.sites import choose_layers

SuppressedSite = Literal["none", "attn", "mlp", "value", "value_excl_self"]
ScheduleShape = Literal["constant", "linear", "cosine"]
SuppressionControl = Literal["none", "norm_matched", "diagonal"]


@dataclass(frozen=True)
class Suppression:
    """What a model is trained under.

    Attributes:
        site: the update whose parallel part is scaled; "none" is plain training, without a hook.
        parallel: the retained scale s_par of the parallel part; 0 removes it, 1 changes no bit.
        schedule: "constant", or s_par goes from 1 to `parallel` along a straight line ("linear") or half a cosine
            ("cosine") over the first `schedule_steps` steps.
        schedule_steps: steps until `parallel` is reached.
        gate: s_par = sigmoid(w . x) for each token, x the layer's input and w learned: a vector of d_model in each
            layer, without a bias. w starts at zero, hence s_par at 0.5. `parallel` has to be left at 0.
        control: in the edit's place, one that is as strong. "norm_matched" removes as much along a random direction at
            the reference's own angle to the update, and leaves it as long; "diagonal" lets no token attend to itself
            (site "value", `parallel` 0), but for token 0, which has nothing else.
        renormalise: whether the rest of the row sums to 1 again under "diagonal", as it does when the diagonal is
            masked before softmax.
        layers: the layers edited: numbers, or text such as "1-" or "4-11"; None is all.

    Raises SiteError for a site, control or layers that there are not, or that do not go together; GeometryError for
    numbers that do not fit.
    """

    site: SuppressedSite = "none"
    parallel: float = 0.0
    schedule: ScheduleShape = "constant"
    schedule_steps: int = 0
    gate: bool = False
    control: SuppressionControl = "none"
    renormalise: bool = True
    layers: tuple[int, ...] | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.layers, list | range):
            object.__setattr__(self, "layers", tuple(self.layers))
        for name, among in (
            ("site", get_args(SuppressedSite)),
            ("schedule", get_args(ScheduleShape)),
            ("control", get_args(SuppressionControl)),
        ):
            if getattr(self, name) not in among:
                problem = f"there is no suppression with {name} {getattr(self, name)!r}"
                raise SiteError(problem, cure=f"choose one of {', '.join(among)}")
        self._check_numbers()
        for wrong, why, cure in self._contradictions():
            if wrong:
                raise SiteError(why, where=f"suppression at {self.site!r}", cure=cure)

    def _check_numbers(self) -> None:
        parallel, steps, layers = self.parallel, self.schedule_steps, self.layers
        if isinstance(parallel, bool) or not isinstance(parallel, int | float) or not math.isfinite(parallel):
            raise GeometryError(f"a scale of {parallel!r} is no finite number", cure="give a number, such as 0.5")
        if type(steps) is not int or (steps < 1 if self.scheduled else steps != 0):
            cure = "give a whole number of 1 or more" if self.scheduled else 'leave it at 0, or choose "linear"'
            raise GeometryError(f"schedule_steps is {steps!r} under the schedule {self.schedule!r}", cure=cure)
        whole = isinstance(layers, tuple) and all(type(layer) is int for layer in layers)
        for flag in ("gate", "renormalise"):
            if not isinstance(getattr(self, flag), bool):
                raise SiteError(f"{flag} is {getattr(self, flag)!r}", cure="give True or False")
        if not (layers is None or isinstance(layers, str) or whole):
            raise SiteError(f"layers are {layers!r}", cure='give whole numbers, or text such as "1-"')

    def _contradictions(self) -> tuple[tuple[bool, str, str], ...]:
        """What does not go together: whether it is the case, why not, and the cure."""
        scaled = self.scheduled or self.gate or self.parallel != 0.0
        nothing = self.site == "none" and (scaled or self.control != "none" or self.layers is not None)
        diagonal = self.control == "diagonal"
        return (
            (nothing, "nothing is suppressed at site 'none'", "name a site, or leave everything else out"),
            (self.gate and self.parallel != 0.0, "a gate makes its own scale", "leave parallel at 0"),
            (self.gate and self.scheduled, "a gate follows no schedule", 'leave schedule at "constant"'),
            (diagonal and self.site != "value", "the diagonal is removed from the map of values", 'use site="value"'),
            (diagonal and scaled, "the diagonal is removed wholly", "leave parallel at 0, and gate and schedule out"),
            (not (diagonal or self.renormalise), "only the diagonal has rows to renormalise", "leave it at True"),
        )

    @property
    def scheduled(self) -> bool:
        return self.schedule != "constant"

    def words(self) -> str:
        """In a few words, for one line."""
        kept = "a learned gate" if self.gate else f"s_par = {self.parallel:g}"
        control = "" if self.control == "none" else f", control {self.control}"
        return f"suppression at {self.site} ({kept}{control}, layers {'all' if self.layers is None else self.layers})"

    def parallel_at(self, step: int) -> float:
        """s_par at a training step; step 0 is the first. A gate's is its own, and this is then 0."""
        if not self.scheduled:
            return float(self.parallel)
        done = min(step / self.schedule_steps, 1.0)
        if self.schedule == "cosine":
            done = (1.0 - math.cos(math.pi * done)) / 2.0
        return 1.0 + (self.parallel - 1.0) * done

    def as_dict(self) -> dict[str, Any]:
        """In JSON's own types; `from_dict` reads it."""
        found = asdict(self)
        return {**found, "layers": list(self.layers) if isinstance(self.layers, tuple) else self.layers}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Suppression:
        """The inverse of `as_dict`. Raises SiteError for fields that there are not, and as the class does."""
        known = [each.name for each in fields(cls)]
        if not isinstance(given, Mapping) or set(given) - set(known):
            raise SiteError(
                f"{json.dumps(given, default=str)[:200]} are no settings of a suppression",
                cure=f"its fields are {', '.join(known)}; a newer version of lens-geometry may have more",
            )
        return cls(**given)


@dataclass
class Ramp:
    """A scale that a schedule moves while the hooks stay on; called with a layer's input, as a gate is."""

    parallel: float

    def __call__(self, resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos"]:
        working = torch.promote_types(resid.dtype, torch.float32)
        return torch.full(resid.shape[:2], self.parallel, dtype=working, device=resid.device)


@dataclass(frozen=True)
class Gate:
    """The learned tokenwise scale of one layer: sigmoid(w . x), in the dtype of w, also under autocast."""

    weight: Float[nn.Parameter, " d_model"]

    def __call__(self, resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos"]:
        weight = self.weight.to(resid.device)
        with torch.autocast(resid.device.type, enabled=False):
            return torch.sigmoid(resid.to(weight.dtype) @ weight)


class Suppressor:
    """A suppression on a live model: the hooks of it, and what in them changes while they are on.

    Attributes:
        suppression: the settings.
        hooks: TransformerLens hooks, to be opened once around a whole training; none for site "none".
        parameters: the gates' vectors by name, to be trained without weight decay; empty without a gate.
        batch: whose `ids` seed the noise of "norm_matched": a function of (seed, layer, id, position). Whoever trains
            gives each sequence of each step an id of its own, and evaluation its own fixed ones.
        parallel_now: s_par as it is at present; with a gate it says nothing.

    The first call on a model runs one small forward pass to check the site; a model without suppression is left alone.
    Raises SiteError when the model does not have the site, or its attention map cannot be edited.
    """

    def __init__(self, model: Any, suppression: Suppression, *, seed: int = 0, batch: Batch | None = None) -> None:
        self.suppression, self.batch = suppression, Batch() if batch is None else batch
        self.parameters: dict[str, nn.Parameter] = {}
        self._ramp = Ramp(suppression.parallel_at(0))
        self.hooks: Hooks = [] if suppression.site == "none" else self._made(model, seed)

    @property
    def parallel_now(self) -> float:
        return self._ramp.parallel

    def at_step(self, step: int) -> None:
        """Set the schedule's scale for a step (0 is the first); hooks that are on follow."""
        self._ramp.parallel = self.suppression.parallel_at(step)

    def state(self) -> dict[str, Tensor]:
        """What has to be saved with the weights: the gates' vectors, and s_par as it is, as copies on the CPU."""
        gates = {name: weight.detach().cpu().clone() for name, weight in self.parameters.items()}
        return {**gates, "parallel_now": torch.tensor(self.parallel_now, dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`. Raises SiteError for gates that are missing, too many, or of another width."""
        wanted = {name: tuple(weight.shape) for name, weight in self.parameters.items()}
        given = {name: tuple(tensor.shape) for name, tensor in state.items() if name != "parallel_now"}
        if wanted != given:
            differing = sorted(name for name in {*wanted, *given} if wanted.get(name) != given.get(name))
            raise SiteError(
                f"the saved gates are not this model's: {differing[0]} is {given.get(differing[0], 'missing')} where "
                f"{wanted.get(differing[0], 'none')} is needed",
                where=f"suppression at {self.suppression.site!r}",
                cure="load them into the model and the suppression that they were saved with",
            )
        with torch.no_grad():
            for name, weight in self.parameters.items():
                weight.copy_(state[name])
        if "parallel_now" in state:
            self._ramp.parallel = float(state["parallel_now"])

    def _made(self, model: Any, seed: int) -> Hooks:
        given, anatomy = self.suppression, inspect(model)
        layers = choose_layers(given.layers, anatomy.n_layers)
        if given.control == "diagonal":
            return remove_diagonal(model, layers=layers, renormalise=given.renormalise)
        hooks: Hooks = []
        device = next(model.parameters()).device
        working = torch.promote_types(anatomy.dtype, torch.float32)
        for layer in layers:
            parallel: Scale = self._ramp if given.scheduled else float(given.parallel)
            if given.gate:
                name = f"gate.{layer}"
                self.parameters[name] = nn.Parameter(torch.zeros(anatomy.d_model, dtype=working, device=device))
                parallel = Gate(self.parameters[name])
            hooks += scale(
                model,
                given.site,
                parallel=parallel,
                layers=layer,
                control="matched_random_reference" if given.control == "norm_matched" else "none",
                seed=seed,
                batch=self.batch,
            )
        return hooks
