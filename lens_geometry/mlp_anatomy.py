"""Where a layer's MLP shows its input x, its carrier and its output: found on the live model, and checked.

Classes of model show them at different hooks. A `TransformerBridge` has x at `mlp.hook_in` or `mlp.in.hook_in`; a
`HookedTransformer` shows the norm before its weight and bias only, and x is made from that. Where a norm or a
multiplier follows W_out (Gemma, OLMo 2, Granite), `hook_mlp_out` is not what W_out gives, and `mlp.hook_out` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lens_geometry.errors import SiteError
from lens_geometry.geometry import sum_error
from lens_geometry.sites import Activations
from lens_geometry.weights import mlp_input, mlp_norm, mlp_output

INPUTS = ("mlp_in", "mlp_in_linear", "ln2_normalized", "resid_mid", "resid_pre")
OUTPUTS = ("mlp_out", "mlp_raw")
CARRIERS = ("mlp_carrier", "mlp_carrier_stream", "mlp_contribution")


@dataclass(frozen=True)
class MlpFacts:
    """What the MLP of one layer was seen to have.

    Attributes:
        input: short name of the hook that x is read from.
        output: short name of the hook that shows post @ W_out + b_out (where none does, the one that comes nearest).
        errors: the largest relative error of the identities of "mlp_carrier" and "mlp_contribution".
        refusals: why the layer has none of a site, in a sentence, where there is more to say than an error.
    """

    input: str = "mlp_in"
    output: str = "mlp_out"
    errors: Mapping[str, float] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)


@torch.no_grad()
def mlp_facts(model: Any, layer: int, acts: Activations) -> MlpFacts:
    """Find input and output of a layer's MLP among its activations, by what its weights make of them."""
    if getattr(model.cfg, "num_experts", None) and not _has(mlp_output, model, layer):
        return _refused(f"layer {layer} is a mixture of experts, which has no single carrier")
    if "mlp_post" not in acts:
        return MlpFacts()  # a missing hook is named by whoever asks for it
    try:
        w_out, b_out = mlp_output(model, layer)
    except SiteError:
        return _refused(f"in layer {layer}, W_out cannot be read, so what mlp.hook_post is cannot be checked")
    if acts["mlp_post"].shape[-1] != w_out.shape[0]:
        return _refused(f"in layer {layer}, mlp.hook_post is not what W_out is applied to (their widths differ)")
    outputs = {name: _linear_error(acts["mlp_post"], w_out, b_out, acts[name]) for name in OUTPUTS if name in acts}
    output = min(outputs, key=outputs.__getitem__, default="mlp_out")
    errors, refusals = {"mlp_contribution": outputs.get(output, float("nan"))}, {}
    found = "mlp_in"
    try:
        w_in, b_in = mlp_input(model, layer)
    except SiteError:
        refusals["mlp_carrier"] = f"in layer {layer}, W_in cannot be read, so what the MLP's input is cannot be checked"
    else:
        shown = {name: made_input(model, layer, name, acts[name]) for name in INPUTS if name in acts}
        inputs = {name: _linear_error(x, w_in, b_in, acts.get("mlp_pre")) for name, x in shown.items()}
        found = min(inputs, key=inputs.__getitem__, default=found)
        errors["mlp_carrier"] = inputs.get(found, float("nan"))
    return MlpFacts(found, output, errors, refusals)


def made_input(model: Any, layer: int, name: str, shown: Tensor) -> Tensor:
    """The MLP's input x from the activation of one of `INPUTS`, with the live weights of the norm where they lack."""
    if name != "ln2_normalized":
        return shown
    weight, bias = mlp_norm(model, layer)
    if weight is None:  # folded into W_in
        return shown
    scaled = shown.to(weight.dtype) * weight
    return scaled if bias is None else scaled + bias


def mlp_vectors(model: Any, layer: int, facts: MlpFacts, acts: Activations) -> dict[str, Tensor]:
    """What the MLP's sites need beyond activations, from the live model: its input "x", and "W_out"."""
    made: dict[str, Tensor] = {}
    if facts.input in acts:
        made["x"] = made_input(model, layer, facts.input, acts[facts.input])
    if "mlp_post" in acts:
        made["W_out"] = mlp_output(model, layer)[0]
    return made


def _linear_error(x: Tensor, weight: Tensor, bias: Tensor | None, expected: Tensor | None) -> float:
    """How far x @ weight + bias is from what it should be, relative to its size; inf when shapes do not allow it."""
    if expected is None or x.shape[-1] != weight.shape[0] or weight.shape[1] != expected.shape[-1]:
        return float("inf")
    made = x.to(weight.dtype) @ weight
    return sum_error([made if bias is None else made + bias], expected)


def _has(read: Any, model: Any, layer: int) -> bool:
    try:
        read(model, layer)
    except SiteError:
        return False
    return True


def _refused(reason: str) -> MlpFacts:
    return MlpFacts(refusals=dict.fromkeys(CARRIERS, reason))
