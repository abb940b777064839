"""What a live model is seen to have: one small forward pass, and every site checked before it is trusted.

`inspect` records, layer by layer, the real shapes and whether each site's identity holds; `require` refuses a
site that is not what its name says, with the reason.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor

from lens_geometry.errors import HookError, ModelError, SiteError
from lens_geometry.geometry import sum_error
from lens_geometry.mlp_anatomy import MlpFacts, mlp_facts
from lens_geometry.sites import (
    GROUPINGS,
    HOOKS,
    SITES,
    Activations,
    Grouping,
    Site,
    causal_pattern,
    choose_layers,
    expand_kv,
)
from lens_geometry.slices import count_slices

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far an identity may be off on a live model, relative to the vectors in it, per dtype."""


PARALLEL_IDENTITY = "resid_pre + attn_out + mlp_out = resid_post"


@dataclass(frozen=True)
class LayerFacts:
    """What one layer of a live model was seen to have.

    `shapes` maps the short names of the hooks that fired, in the order in which they fired, to their shapes
    (batch and pos included); `errors` maps "attn", "mlp", "block", "value" and the sites inside the MLP to the largest
    relative error of that identity. Where the pattern is shown only after z, `score_scale` is the factor with which
    softmax(factor q k^T) was found to be that pattern, if any was. `mlp` says where the MLP shows its input and output.
    """

    shapes: Mapping[str, tuple[int, ...]]
    errors: Mapping[str, float]
    score_scale: float | None = None
    mlp: MlpFacts = field(default_factory=MlpFacts)

    @property
    def n_heads(self) -> int:
        return self.shapes["z"][2] if "z" in self.shapes else 0

    @property
    def n_kv_heads(self) -> int:
        return self.shapes["v"][2] if "v" in self.shapes else 0

    @property
    def n_slices(self) -> int:
        """How many slices of the stream's width the MLP's carrier has."""
        if "mlp_post" not in self.shapes:
            return 0
        return count_slices(self.shapes["mlp_post"][-1], self.shapes["resid_pre"][-1])


@dataclass(frozen=True)
class Anatomy:
    """What `inspect` saw: one LayerFacts per layer, and what all layers share."""

    d_model: int
    dtype: torch.dtype
    parallel: bool
    layers: tuple[LayerFacts, ...]

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def tolerance(self) -> float:
        return TOLERANCE.get(self.dtype, 1e-5)

    def reads(self, site: Site, layer: int, *, editing: bool = False) -> tuple[str, ...]:
        """The hooks that this model's site reads; for editing, before its target fires."""
        if site.reads == ("resid_mid",) and self.parallel:
            return ("resid_pre",)
        if site.reads == ("mlp_in",):
            return (self.layers[layer].mlp.input,)
        if editing and "pattern" in site.reads and self.layers[layer].score_scale is not None:
            return ("v", "q", "k")  # the pattern is made from them in time
        return site.reads

    def target(self, site: Site, layer: int) -> str:
        """Short name of the hook that an edit of the site changes in this model."""
        return self.layers[layer].mlp.output if site.name == "mlp_contribution" else site.target

    def where(self, site: Site, layer: int) -> str:
        """The full name of that hook."""
        return HOOKS[self.target(site, layer)].format(layer)

    def identity(self, site: Site) -> str:
        """The sum that must hold for the site, in words."""
        if site.name == "mlp_contribution" and self.target(site, 0) == "mlp_raw":
            return site.identity.replace("mlp_out", "mlp.hook_out")
        parallel = self.parallel and site.name in ("attn", "mlp", "mlp_carrier_stream")
        return PARALLEL_IDENTITY if parallel else site.identity

    def error(self, site: Site, layer: int) -> float:
        """The largest relative error of the site's identity in a layer; NaN where it was not measured."""
        key = "value" if site.has_heads else site.name
        return self.layers[layer].errors.get(key, 0.0 if site.name == "resid" else float("nan"))

    def refusal(self, site: Site, layer: int, *, editing: bool = False) -> str:
        """Why this layer does not have the site (or has it only to read), in a sentence; empty when it has it."""
        facts = self.layers[layer]
        if site.name in facts.mlp.refusals:
            return facts.mlp.refusals[site.name]
        fired, target = list(facts.shapes), self.target(site, layer)
        missing = [name for name in (*self.reads(site, layer), target) if name not in fired]
        if missing:
            names = ", ".join(HOOKS[name].format(layer) for name in missing)
            return f"layer {layer} never fired {names}"
        error = self.error(site, layer)
        if not error <= self.tolerance:
            wrong = f"{self.where(site, layer)} is not the update"
            if site.name == "mlp_carrier":
                wrong = f"no hook shows the MLP's input (nearest: {HOOKS[facts.mlp.input].format(layer)})"
            elif site.name == "mlp_carrier_stream":
                wrong = f"{HOOKS[self.reads(site, layer)[0]].format(layer)} is not the stream that the MLP works on"
            elif site.name == "mlp_contribution":
                wrong = f"no hook shows what W_out gives ({self.where(site, layer)} is after a norm or a multiplier)"
            return (
                f"in layer {layer}, {self.identity(site)} does not hold (off by {error:.2g}, "
                f"tolerance {self.tolerance:g}), so {wrong}"
            )
        late = [name for name in self.reads(site, layer, editing=editing) if fired.index(name) > fired.index(target)]
        if editing and late:
            return (
                f"in layer {layer}, {HOOKS[late[0]].format(layer)} fires after {self.where(site, layer)} "
                "(its attention is computed elsewhere), so the site can be measured but not edited"
            )
        return ""


_anatomies: weakref.WeakKeyDictionary[Any, Anatomy] = weakref.WeakKeyDictionary()


def inspect(model: Any, *, fresh: bool = False) -> Anatomy:
    """Look at a live TransformerLens model with one forward pass over 2 x 6 tokens.

    Remembered per model object and dtype (`fresh=True` looks again). Weights, mode and random state are left
    as they were. Raises ModelError when the object has no TransformerLens hooks or its pass fails.
    """
    known = _anatomies.get(model)
    if known is not None and not fresh and known.dtype == next(model.parameters()).dtype:
        return known
    points, n_layers = hook_points(model), int(model.cfg.n_layers)
    seen: list[dict[str, Tensor]] = [{} for _ in range(n_layers)]

    def keeper(layer: int, name: str) -> Callable[..., None]:
        def keep(tensor: Tensor, hook: Any) -> None:
            seen[layer][name] = tensor.detach().clone()

        return keep

    wanted = [
        (HOOKS[name].format(layer), keeper(layer, name))
        for layer in range(n_layers)
        for name in HOOKS
        if HOOKS[name].format(layer) in points and (name != "ln2_normalized" or _shows_no_mlp_input(points, layer))
    ]
    device = next(model.parameters()).device.type
    with at_rest(model), alone(points), attached(model, wanted), torch.autocast(device, enabled=False):
        model(probe_tokens(model), return_type="logits")
    if not seen or "resid_pre" not in seen[0]:
        raise ModelError(
            "the model's blocks fired no hook_resid_pre",
            where="blocks.0.hook_resid_pre",
            cure="pass a decoder model of TransformerLens (HookedTransformer or TransformerBridge)",
        )
    parallel = all("resid_mid" not in acts for acts in seen)
    first = seen[0]["resid_pre"]
    following: list[dict[str, Tensor]] = [*seen[1:], {}]
    anatomy = Anatomy(
        d_model=first.shape[-1],
        dtype=first.dtype,
        parallel=parallel,
        layers=tuple(
            _layer_facts(acts, after, mlp_facts(model, layer, acts))
            for layer, (acts, after) in enumerate(zip(seen, following, strict=True))
        ),
    )
    _anatomies[model] = anatomy
    return anatomy


def require(
    model: Any, site: str, layers: Any = None, *, editing: bool = False
) -> tuple[Anatomy, Site, tuple[int, ...]]:
    """The model's anatomy, the site and its layers, or a SiteError with the reason and the cure."""
    if site not in SITES:
        raise SiteError(f"there is no site {site!r}", cure=f"choose one of {', '.join(SITES)}")
    anatomy, found = inspect(model), SITES[site]
    chosen = choose_layers(layers, anatomy.n_layers)
    if any(anatomy.refusal(found, layer, editing=editing) for layer in chosen):
        anatomy = inspect(model, fresh=True)  # the weights may have changed; a refusal is never from memory
    for layer in chosen:
        reason = anatomy.refusal(found, layer, editing=editing)
        if reason:
            raise SiteError(
                f"this model has no site {site!r}: {reason}",
                where=anatomy.where(found, layer),
                cure="see `lens-geometry sites` for the sites it has, select other layers, or load the model as "
                "another class (backend='hooked')",
            )
    return anatomy, found, chosen


def n_vectors(site: Site, facts: LayerFacts, grouping: Grouping) -> int:
    """How many vectors a token has at a site of this layer: head groups, slices, or 1. Raises as `n_groups` does."""
    return {"head": n_groups(facts, grouping), "slice": facts.n_slices, "": 1}[site.axis]


def n_groups(facts: LayerFacts, grouping: Grouping) -> int:
    """How many vectors per token a grouping makes in this layer. Raises SiteError for an unknown grouping."""
    if grouping not in GROUPINGS:
        raise SiteError(f"there is no head grouping {grouping!r}", cure=f"choose one of {', '.join(GROUPINGS)}")
    return {"each": facts.n_heads, "kv_group": facts.n_kv_heads, "merged": 1}[grouping]


def hook_points(model: Any) -> Mapping[str, Any]:
    """A model's hook points by name. Raises ModelError for an object that has none."""
    points = getattr(model, "hook_dict", None)
    if not points or not hasattr(model, "cfg"):
        raise ModelError(
            f"a {type(model).__name__} has no TransformerLens hooks",
            cure="load it with lens_geometry.load_model, or wrap a Hugging Face model with "
            "TransformerBridge.boot_transformers(name, hf_model=model); lg.suppress edits a plain one as it is",
        )
    return dict(points)


def carried_hooks(model: Any, *, permanent: bool = True) -> list[str]:
    """Names of the hook points that somebody left hooks on, or those that did not make them permanent.

    TransformerLens itself has permanent ones: on a bridge of 4.x, for an OPT model, they show the MLP's input.
    Hooks of `attach_for_good` belong to the model and are not among them.
    """
    points = {id(point): point for point in hook_points(model).values()}
    return sorted(
        str(point.name)
        for point in points.values()
        if any((permanent or not handle.is_permanent) and not _belongs(handle) for handle in point.fwd_hooks)
    )


def attach_for_good(model: Any, hooks: Iterable[tuple[str, Callable[..., Any]]]) -> None:
    """Make hooks part of a model: permanent, before all later ones, and nobody's leftovers.

    `reset_hooks()` leaves them; `alone` does where it is asked to. Raises HookError as `attached` does.
    """
    points = hook_points(model)
    for name, fn in hooks:
        fn.of_the_model = True  # type: ignore[attr-defined]
        _point(points, name).add_hook(fn, dir="fwd", is_permanent=True)


def own_hooks(model: Any) -> int:
    """How many hooks of `attach_for_good` are on the model."""
    points = {id(point): point for point in hook_points(model).values()}
    return sum(_belongs(handle) for point in points.values() for handle in point.fwd_hooks)


def _belongs(handle: Any) -> bool:
    return getattr(handle.user_hook, "of_the_model", False)


def _point(points: Mapping[str, Any], name: str) -> Any:
    if name in points:
        return points[name]
    near = difflib.get_close_matches(name, points, n=1)
    cure = f"did you mean {near[0]}?" if near else "see model.hook_dict for the names it has"
    raise HookError("this model has no such hook", where=name, cure=cure)


def probe_tokens(model: Any, batch: int = 2, length: int = 6) -> Int[Tensor, "batch pos"]:
    """A few fixed token ids that every vocabulary has, on the model's device."""
    device = next(model.parameters()).device
    ids = torch.arange(batch * length, device=device) * 7919 % int(model.cfg.d_vocab)
    return rearrange(ids, "(batch pos) -> batch pos", batch=batch)


@contextmanager
def attached(model: Any, hooks: Iterable[tuple[str, Callable[..., Any]]]) -> Iterator[None]:
    """`model.hooks(fwd_hooks=...)`, with the hook points looked up once and each handle removed by itself.

    TransformerBridge 3.9 rebuilds its dictionary of hooks for every hook it adds: a quarter of a second each on a
    model of 30 layers, which is more than the forward pass. Raises HookError for a name the model does not have.
    """
    points = hook_points(model)
    handles: list[tuple[Any, Any]] = []
    try:
        for name, fn in hooks:
            point = _point(points, name)
            point.add_hook(fn, dir="fwd")
            handles.append((point, point.fwd_hooks[-1]))
        yield
    finally:
        for point, handle in handles:
            handle.hook.remove()
            point.fwd_hooks[:] = [other for other in point.fwd_hooks if other is not handle]


@contextmanager
def alone(points: Mapping[str, Any], *, bare: bool = True) -> Iterator[None]:
    """Without anybody else's hooks: they would be measured as the model, and see a pass that is not theirs.

    The model's own (`attach_for_good`) are off too, unless it is not to be `bare`.
    """
    others = {id(point): (point, point._forward_hooks) for point in points.values() if point._forward_hooks}
    try:
        for point, hooks in others.values():
            own = set() if bare else {handle.hook.id for handle in point.fwd_hooks if _belongs(handle)}
            point._forward_hooks = type(hooks)((key, hook) for key, hook in hooks.items() if key in own)
        yield
    finally:
        for point, hooks in others.values():
            point._forward_hooks = hooks


@contextmanager
def at_rest(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients, the model's mode and the random state restored afterwards.

    HookedTransformer takes a first token that is its padding token for padding when its tokenizer pads on the left; the
    tokenizer pads on the right meanwhile.
    """
    tokenizer: Any = getattr(model, "tokenizer", None)
    side = getattr(tokenizer, "padding_side", None)
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        model.eval()
        try:
            if side is not None:
                tokenizer.padding_side = "right"
            yield
        finally:
            if side is not None:
                tokenizer.padding_side = side
            for module, training in modes:
                module.training = training


def _shows_no_mlp_input(points: Mapping[str, Any], layer: int) -> bool:
    """Whether the norm must be looked at for the MLP's input; not otherwise, since hooks may change how it computes."""
    return not any(HOOKS[name].format(layer) in points for name in ("mlp_in", "mlp_in_linear"))


def _layer_facts(acts: Activations, after: Activations, mlp: MlpFacts) -> LayerFacts:
    shapes = {name: tuple(act.shape) for name, act in acts.items()}
    return LayerFacts(shapes, {**_errors(acts, after), **mlp.errors}, _score_scale(acts), mlp)


def _errors(acts: Activations, after: Activations) -> dict[str, float]:
    """The largest error per token of each identity that this layer's activations allow to check."""
    errors: dict[str, float] = {}
    has = acts.keys() >= {"resid_pre"}
    if has and "resid_mid" in acts:
        if "attn_out" in acts:
            errors["attn"] = sum_error([acts["resid_pre"], acts["attn_out"]], acts["resid_mid"])
        if acts.keys() >= {"mlp_out", "resid_post"}:
            errors["mlp"] = sum_error([acts["resid_mid"], acts["mlp_out"]], acts["resid_post"])
    elif has and acts.keys() >= {"attn_out", "mlp_out", "resid_post"}:
        parts = [acts["resid_pre"], acts["attn_out"], acts["mlp_out"]]
        errors["attn"] = errors["mlp"] = sum_error(parts, acts["resid_post"])
    if "mlp" in errors:
        errors["mlp_carrier_stream"] = errors["mlp"]
    if "resid_post" in acts:
        errors["block"] = sum_error([after["resid_pre"]], acts["resid_post"]) if "resid_pre" in after else 0.0
    if acts.keys() >= {"v", "pattern", "z"}:
        errors["value"] = attention_error(acts["pattern"], acts["v"], acts["z"])
    return errors


def _score_scale(acts: Activations) -> float | None:
    """The factor with which q and k give the pattern, for layers that show their pattern only after z."""
    fired = list(acts)
    if not acts.keys() >= {"q", "k", "v", "z", "pattern"} or fired.index("pattern") < fired.index("z"):
        return None
    for factor in (acts["q"].shape[-1] ** -0.5, 1.0):
        if attention_error(causal_pattern(acts["q"], acts["k"], factor), acts["v"], acts["z"]) < 1e-5:
            return factor
    return None


def attention_error(pattern: Tensor, v: Tensor, z: Tensor) -> float:
    """How far z is from pattern @ v, relative to its size; inf when the shapes do not allow it."""
    values = expand_kv(v, z.shape[2]).cpu().double()
    if pattern.shape[-1] != values.shape[1]:
        return float("inf")
    return sum_error([torch.einsum("bhqk,bkhd->bqhd", pattern.cpu().double(), values)], z)
