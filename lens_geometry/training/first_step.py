"""Why arms that start from the same weights have different first losses: the weights are equal, the edit is not.

Suppression acts from the first step, so an arm's first loss is that of the edited model. Without the edit every arm
must have the baseline's, to the last bit; what is left of the difference is the edit's alone.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from lens_geometry.anatomy import at_rest, attached
from lens_geometry.training.suppression import Suppressor
from lens_geometry.training.trainer import token_losses


def first_losses(
    model: Any, suppressor: Suppressor, ids: Int[Tensor, "batch pos+1"], scored: Bool[Tensor, "batch pos"]
) -> dict[str, float]:
    """The mean loss of a batch with the edit ("edited") and without it ("bare"), in nats per scored token.

    Call it before the first step, outside the suppressor's hooks. Nothing of the model is changed.
    """
    device = next(model.parameters()).device
    inputs, targets, counted = ids[:, :-1].to(device), ids[:, 1:].to(device), scored.to(device)
    found = {}
    for name, hooks in (("edited", suppressor.hooks), ("bare", [])):
        with at_rest(model), attached(model, hooks):
            losses = token_losses(model(inputs, return_type="logits"), targets, counted)
        found[name] = float(losses.double().sum() / counted.sum())
    return found
