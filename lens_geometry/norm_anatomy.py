"""Where a live model shows the norms that attention and MLP read, so that changing them changes what they do.

Found by looking, over thirteen kinds of model, both classes and both majors of TransformerLens:

- A `TransformerBridge` shows a norm at `hook_out`, with weight and bias: what its branch reads, to the last bit. A
  `HookedTransformer` has `hook_normalized` instead, before weight and bias; for ln1 it fires three times in a pass (for
  q, k and v), each time with the same tensor, and setting it each time decides all three.
- `hook_scale` is the norm's denominator. Set on a `HookedTransformer` it acts as its name says. On a bridge, setting it
  swaps the model's own norm for a rebuilt one, with other rounding; there the output is rescaled by the ratio of the
  two scales instead, which leaves an equal scale's output as it was to the last bit.
- A name proves nothing: "ln1" and "ln2" of OLMo 2 under TransformerLens 3 are norms *after* the branches, and so are
  OPT's in its post-norm form. What is taken here was seen to read the stream, and to decide the branch's output alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lens_geometry.anatomy import Anatomy, alone, at_rest, attached, hook_points, inspect, probe_tokens
from lens_geometry.errors import SiteError
from lens_geometry.geometry import sum_error
from lens_geometry.sites import HOOKS, choose_layers
from lens_geometry.weights import norm_bias

FINAL = "ln_final"
BRANCHES = {"ln1": "attn_out", "ln2": "mlp_out"}
ALIKE = 0.05  # a norm's output is so far from its input over its root mean square, at most: the norm adds its epsilon
SINGLE = 1e-5  # many classes compute norms in float32 whatever the dtype
Looking = list[tuple[str, Callable[..., Any]]]


@dataclass(frozen=True)
class NormFacts:
    """What one norm of a live model was seen to have.

    Attributes:
        name: such as "blocks.3.ln1", or "ln_final".
        output: the full name of the hook that shows what the norm gives, and decides what its readers do.
        scale: that of its denominator; it is set there (`scale_is_set`), or the output is rescaled.
        flat: whether the scale is shown with batch and position as one axis.
        refusal, scale_refusal: why there is no such hook, in a sentence; empty where there is one.
    """

    name: str
    output: str = ""
    scale: str = ""
    scale_is_set: bool = False
    flat: bool = False
    refusal: str = ""
    scale_refusal: str = ""


_facts: weakref.WeakKeyDictionary[Any, tuple[torch.dtype, Mapping[str, NormFacts]]] = weakref.WeakKeyDictionary()


def require_norms(model: Any, layers: Any = None, *, scale: bool = False) -> dict[int, tuple[NormFacts, ...]]:
    """The norms that attention and MLP read, in the chosen layers; with `scale`, their denominators too.

    One where both branches read the same one. Raises SiteError with the reason for a layer that has none.
    """
    anatomy = inspect(model)
    chosen = choose_layers(layers, anatomy.n_layers)
    names = {layer: (f"blocks.{layer}.ln1", f"blocks.{layer}.ln2") for layer in chosen}
    facts = _checked(model, anatomy, [name for pair in names.values() for name in pair], scale)
    return {layer: tuple(facts[name] for name in pair if facts[name].output) for layer, pair in names.items()}


def require_final_norm(model: Any) -> NormFacts:
    """The norm before the unembedding. Raises SiteError with the reason for a model that has none."""
    return _checked(model, inspect(model), [FINAL], scale=False)[FINAL]


def _checked(model: Any, anatomy: Anatomy, names: list[str], scale: bool) -> Mapping[str, NormFacts]:
    known = _facts.get(model)
    if known is None or known[0] != anatomy.dtype or any(_refused(known[1][name], scale) for name in names):
        known = _facts[model] = anatomy.dtype, _look(model, anatomy)  # a refusal is never from memory
    for name in names:
        reason = _refused(known[1][name], scale)
        if reason:
            raise SiteError(
                f"this model has no {'scale' if scale else 'output'} of {name} to repair: {reason}",
                where=name,
                cure="choose another pathway, such as 'attention_output' and 'mlp_output'",
            )
    return known[1]


def _refused(facts: NormFacts, scale: bool) -> str:
    return facts.refusal or (facts.scale_refusal if scale else "")


class _Looks:
    """The norms' hooks and what is around them, in one clean pass and in one with pushed streams and clean norms."""

    def __init__(self, model: Any, anatomy: Anatomy) -> None:
        self.model, self.anatomy, self.points = model, anatomy, hook_points(model)
        self.clean: dict[str, Tensor] = {}
        self.pushed: dict[str, Tensor] = {}
        layers = range(anatomy.n_layers)
        around = [HOOKS[name].format(i) for i in layers for name in ("resid_pre", "resid_mid", "attn_out", "mlp_out")]
        self.around = [name for name in (*around, self.last_stream) if name in self.points]
        self.norms = [f"blocks.{i}.{name}" for i in layers for name in BRANCHES] + [FINAL]

    @property
    def last_stream(self) -> str:
        return HOOKS["resid_post"].format(self.anatomy.n_layers - 1)

    def output(self, norm: str) -> str:
        """The hook that shows the norm's output; empty where there is none."""
        names = (f"{norm}.hook_out", f"{norm}.hook_normalized")
        return next((name for name in names if name in self.points), "")

    def stream(self, norm: str) -> str:
        """What the norm has to read."""
        if norm == FINAL:
            return self.last_stream
        layer = int(norm.split(".")[1])
        return HOOKS["resid_mid" if norm.endswith("ln2") and not self.anatomy.parallel else "resid_pre"].format(layer)

    def run(self) -> None:
        shown = [name for norm in self.norms for name in (self.output(norm), f"{norm}.hook_scale")]
        wanted = [name for name in dict.fromkeys([*self.around, *shown]) if name in self.points]
        self.clean = self._pass([(name, _keep) for name in wanted])
        hooks: Looking = [(HOOKS["resid_pre"].format(layer), _push) for layer in range(self.anatomy.n_layers)]
        hooks += [(name, _keep) for name in self.around]
        for norm in self.norms:  # those that turn out to be something else would only spoil the pass
            if not self.doubts(norm):
                scale, output = f"{norm}.hook_scale", self.output(norm)
                hooks += [(scale, self._set)] if scale in self.clean and output.endswith("hook_normalized") else []
                hooks += [(output, _keep), (output, self._set)]
        self.pushed = self._pass(hooks)

    def doubts(self, norm: str) -> str:
        """Why what is shown is not a norm of what its readers read, in a sentence; empty where it is."""
        output, stream = self.output(norm), self.stream(norm)
        if output not in self.clean:
            return f"no hook {norm}.hook_out or {norm}.hook_normalized fires"
        fired, reader = list(self.clean), self.reader(norm)
        if reader in fired and fired.index(reader) < fired.index(output):
            return f"{output} fires after {reader}: a norm after the branch, which reads the stream itself"
        if stream not in self.clean or self.clean[stream].shape != self.clean[output].shape:
            return f"{output} and {stream} do not go together"
        error = fit_error(self.clean[stream], self.clean[output], bias_of(self.model, norm, output))
        if error <= ALIKE:
            return ""
        return f"{output} is not a norm of {stream} (off by {error:.2g}); a norm after the branch is another thing"

    def reader(self, norm: str) -> str:
        """The hook that shows what the norm's reader makes of it."""
        if norm == FINAL:
            return "logits"
        layer, name = norm.split(".")[1:]
        return HOOKS[BRANCHES[name]].format(layer)

    def decided(self, norm: str) -> bool:
        """Whether the reader did as in the clean pass once the norm's output was the clean one."""
        clean, now = (kept.get(self.reader(norm)) for kept in (self.clean, self.pushed))
        return clean is not None and now is not None and sum_error([now], clean) <= self.anatomy.tolerance

    def _set(self, tensor: Tensor, name: str, kept: dict[str, Tensor]) -> Tensor:
        return self.clean[name].clone()

    def _pass(self, hooks: Looking) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}

        def bound(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
            return lambda tensor, hook: do(tensor, name, kept)

        model, device = self.model, next(self.model.parameters()).device.type
        named = [(name, bound(name, do)) for name, do in hooks]
        with at_rest(model), alone(self.points), attached(model, named), torch.autocast(device, enabled=False):
            kept["logits"] = model(probe_tokens(model), return_type="logits")
        return kept


def _keep(tensor: Tensor, name: str, kept: dict[str, Tensor]) -> None:
    kept[name] = tensor.detach().clone()


def _push(tensor: Tensor, name: str, kept: dict[str, Tensor]) -> Tensor:
    slope = torch.linspace(-1.0, 1.0, tensor.shape[-1], device=tensor.device)
    return tensor + (tensor.float().abs().mean() * slope).to(tensor.dtype)


def _look(model: Any, anatomy: Anatomy) -> dict[str, NormFacts]:
    looks = _Looks(model, anatomy)
    looks.run()
    return {norm: _norm_facts(model, looks, norm) for norm in looks.norms}


def _norm_facts(model: Any, looks: _Looks, norm: str) -> NormFacts:
    output, reader = looks.output(norm), looks.reader(norm)
    if output not in looks.clean and norm.endswith("ln2") and looks.anatomy.parallel and looks.decided(norm):
        return NormFacts(norm)  # both branches read ln1
    doubts = looks.doubts(norm)
    if not doubts and not looks.decided(norm):
        doubts = f"{output} does not decide {reader}: it is shown, not used"
    return NormFacts(norm, refusal=doubts) if doubts else _with_scale(model, looks, norm)


def _with_scale(model: Any, looks: _Looks, norm: str) -> NormFacts:
    """The facts with what is to be known of the norm's denominator."""
    output, scale = looks.output(norm), f"{norm}.hook_scale"
    made, shown = looks.clean[output], looks.clean.get(scale)
    if shown is None or shown.numel() != made[..., 0].numel():
        return NormFacts(norm, output, scale_refusal=f"no hook {scale} fires with one number per token")
    is_set, per_token = output.endswith("hook_normalized"), shown.reshape(*made.shape[:-1], 1)
    error = fit_error(looks.clean[looks.stream(norm)], made, bias_of(model, norm, output), per_token)
    if is_set:  # what came of the pushed stream under the scale that was set
        error = max(error, fit_error(looks.pushed[looks.stream(norm)], looks.pushed[output], None, per_token))
    fits = error <= max(looks.anatomy.tolerance, SINGLE)
    wrong = f"{scale} is not what the norm divides by (off by {error:.2g})"
    return NormFacts(
        norm,
        output,
        scale,
        is_set,
        shown.ndim != made.ndim,
        scale_refusal="" if fits else wrong,
    )


def bias_of(model: Any, norm: str, output: str) -> Tensor | None:
    """The live bias in a norm's output; None where there is none, or where the hook shows the norm before it."""
    return norm_bias(model, norm) if output.endswith("hook_out") else None


def fit_error(stream: Tensor, output: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> float:
    """How far output is from weight * stream / scale + bias, for the weight per channel that fits best.

    The stream with or without its mean, as fits better; the scale is its own root mean square where none is given.
    No weight of the model is needed, and what a class stores (1 + w, folded, ...) does not matter.
    """
    whole, made = stream.cpu().double(), output.cpu().double()
    wanted = made if bias is None else made - bias.detach().cpu().double()
    errors = []
    for x in (whole, whole - whole.mean(-1, keepdim=True)):
        normed = x / (x.square().mean(-1, keepdim=True).sqrt() if scale is None else scale.cpu().double())
        weight = (normed * wanted).sum((0, 1)) / normed.square().sum((0, 1))
        errors.append(sum_error([normed * weight], wanted))
    return min(errors)
