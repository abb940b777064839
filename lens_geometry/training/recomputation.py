"""Gradient checkpointing: a block keeps its input alone, and is run again in the backward pass.

Its hooks fire again then, in their order, and give the same: edits read their activations anew, and a control's noise
is a function of (seed, layer, id, position). So the backward pass has to run while the hooks are on and the batch is
the same, as it does in the trainer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint


def recompute_blocks(model: Any) -> None:
    """Let every block of a TransformerLens model run again in the backward pass instead of keeping activations.

    Without gradients nothing changes. Gradients are the same: there is no dropout whose state would have to be kept.
    """
    if hasattr(model, "original_model"):  # a second run would find the first one's keys in a cache
        model.original_model.config.use_cache = False
    for block in model.blocks:
        own = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        vars(block)["forward"] = own  # a plain assignment would reach through a bridge's block to the one it wraps
