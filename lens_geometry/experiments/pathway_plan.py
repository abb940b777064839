"""What `pathway_repair` runs: its settings, and what of them a model has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lens_geometry.anatomy import inspect
from lens_geometry.edits import KINDS, PATHWAYS, Kind, Unit, needed_hooks
from lens_geometry.errors import DataError, HookError, LensGeometryError, SiteError
from lens_geometry.experiments.variants import check_variants
from lens_geometry.runner import RunSettings, at_least, check_effect
from lens_geometry.sites import HOOKS, choose_layers

NOTHING, EVERYTHING = "nothing", "everything"
ALONE = ("attention_pattern", "attention_output", "layernorm_output", "layernorm_scale", "mlp_output")
TOGETHER = (
    "attention_pattern+layernorm_scale",
    "attention_pattern+layernorm_output",
    "attention_output+mlp_output",
)
HOOK_OF = {"attention_pattern": "pattern", "head_output": "z", "attention_output": "attn_out", "mlp_output": "mlp_out"}


@dataclass(frozen=True)
class PathwaySettings(RunSettings):
    """Settings of `pathway_repair`.

    Attributes:
        layers: which layers' input is perturbed, all at once: "middle" (the middle third), "8-15", "10".
        repaired_layers: where pathways are repaired: "onwards" (every layer from the first perturbed one on),
            "perturbed" (the same layers), or text as above.
        kinds: "angular", "magnitude", or both.
        displacements: how far every token is moved.
        unit: of the displacements: "relative" to each token's norm, or "absolute".
        variant: how the perturbation is made: "default", "as_run", "shared_noise", "fixed_signs" or another of
            `variants.VARIANTS`, but "principal".
        seeds: how many draws of the noise; they are numbered from `seed` on.
        pathways: what is repaired: names of `edits.PATHWAYS`, or several joined with "+". Each part of a joint repair
            is run alone too, to see whether they add up. They can't where one contains the other: a layer's
            norm outputs decide its attention pattern and what both of its branches write.
        single_heads: also repair the output of one head at a time.
        head_layers: in which layers; None takes all repaired ones.
    """

    layers: str = "middle"
    repaired_layers: str = "onwards"
    kinds: tuple[Kind, ...] = KINDS
    displacements: tuple[float, ...] = (0.1, 0.2)
    unit: Unit = "relative"
    variant: str = "default"
    seeds: int = 5
    pathways: tuple[str, ...] = (*ALONE, *TOGETHER)
    single_heads: bool = False
    head_layers: str | None = None

    @property
    def seed_numbers(self) -> range:
        return range(self.seed, self.seed + self.seeds)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, seeds=1)
        if "principal" in check_variants((self.variant,)):
            raise DataError("principal directions are not made here", cure="use another variant, or `dissociation`")
        for name, what in (("kinds", str), ("displacements", (int, float)), ("pathways", str)):
            values = getattr(self, name)
            if not isinstance(values, tuple | list) or not values or not all(isinstance(v, what) for v in values):
                raise DataError(
                    f"{name} is {values!r}", cure=f"give a tuple, such as {name}={PathwaySettings.__dict__[name]!r}"
                )
            if len(set(values)) < len(values):
                raise DataError(f"{name} {values!r} has one twice", cure="name each once")
        for name in ("layers", "repaired_layers", "head_layers"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "head_layers" and value is None):
                raise DataError(f"{name} is {value!r}", cure='write it as text: "middle", "4", "8-15" or "0,3"')
        for joint in self.pathways:
            unknown = sorted({*joint.split("+")} - {*PATHWAYS})
            if unknown or len({*joint.split("+")}) < joint.count("+") + 1:
                raise SiteError(
                    f"there is no pathway {joint!r}", cure=f'choose among {", ".join(PATHWAYS)}, or join some with "+"'
                )


@dataclass(frozen=True)
class Plan:
    """What is run: layers, and pathways in the order of the table, parts of joint ones among them."""

    layers: tuple[int, ...]
    repaired: tuple[int, ...]
    heads: tuple[tuple[int, int], ...] = ()
    pathways: tuple[str, ...] = ()
    everything: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def key(self, kind: str, displacement: float, seed: int, what: str) -> str:
        """Name of a condition in the journal."""
        return f"{kind} {displacement!r} seed {seed} {what}"

    def needed(self, model: Any) -> tuple[str, ...]:
        """The hooks that the clean run keeps."""
        wanted = {part for joint in self.pathways for part in joint.split("+")} | {*self.everything}
        wanted |= {"head_output"} if self.heads else set()
        return needed_hooks(model, sorted(wanted), self.repaired)


def planned(model: Any, settings: PathwaySettings) -> Plan:
    """The layers and pathways that this model has. Raises when it has none, or when repairs come before the damage."""
    n_layers = inspect(model).n_layers
    layers = choose_layers(settings.layers, n_layers)
    named = {"onwards": range(layers[0], n_layers), "perturbed": layers}
    repaired = choose_layers(named.get(settings.repaired_layers, settings.repaired_layers), n_layers)
    early = [layer for layer in repaired if layer < layers[0]]
    if early:
        raise SiteError(
            f"layer {early[0]} is repaired, and nothing is perturbed before layer {layers[0]}",
            where="repaired_layers",
            cure=f"repair layers {layers[0]} to {n_layers - 1}: an earlier one is clean already",
        )
    wanted = {part: None for joint in settings.pathways for part in joint.split("+")}
    missing: dict[str, LensGeometryError] = {}
    for pathway in dict.fromkeys((*wanted, *PATHWAYS)):
        try:
            needed_hooks(model, pathway, repaired)
            if pathway in wanted and pathway in HOOK_OF:
                check_effect(model, HOOKS[HOOK_OF[pathway]].format(repaired[0]))
        except (SiteError, HookError) as error:
            missing[pathway] = error
    kept = tuple(
        joint for joint in dict.fromkeys((*wanted, *settings.pathways)) if not {*joint.split("+")} & {*missing}
    )
    lost = [pathway for pathway in wanted if pathway in missing]
    if not kept:
        raise missing[lost[0]]
    notes = [f"{pathway} was left out: {missing[pathway].problem}" for pathway in lost]
    heads: list[tuple[int, int]] = []
    if settings.single_heads:
        if "head_output" in missing:
            raise missing["head_output"]
        in_layers = repaired if settings.head_layers is None else choose_layers(settings.head_layers, n_layers)
        outside = sorted({*in_layers} - {*repaired})
        if outside:
            raise SiteError(
                f"heads of layer {outside[0]} cannot be repaired",
                where="head_layers",
                cure=f"choose among the repaired layers: {', '.join(map(str, repaired))}",
            )
        heads = [(layer, head) for layer in in_layers for head in range(inspect(model).layers[layer].n_heads)]
    everything = () if "final_norm" in missing else tuple(name for name in PATHWAYS if name not in missing)
    if not everything:
        notes.append(f"repairing everything was not checked: {missing['final_norm'].problem}")
    if inspect(model).parallel and {"layernorm_output", "layernorm_scale"} & {*wanted} - {*missing}:
        notes.append("attention and MLP are parallel here: repairing both norms resets the inputs of both branches")
    names = (NOTHING, *kept, *([EVERYTHING] if everything else []))
    return Plan(layers, repaired, tuple(heads), kept, everything, names, tuple(notes))
