"""WHAT is done to an update: functions that return TransformerLens' own `[(hook_name, hook_fn), ...]`.

The lists compose with `+`, with `run_with_hooks`, with `model.hooks(...)` and with anyone's notebook:

    hooks = lg.scale(model, "value_excl_self", parallel=0.0, layers=range(4, 12))
    loss = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks)
    with lg.applied(model, hooks) as fired:      # raises on exit if one of them never fired
        model(tokens)

Hooks run in list order, so an edit sees what earlier edits in the list have done.
"""

from lens_geometry.edits.applied import applied
from lens_geometry.edits.diagonal import DIAGONAL_SITES, DiagonalSite, diagonal, observe_diagonal
from lens_geometry.edits.displacements import Displacements
from lens_geometry.edits.hooks import HookFn, Hooks
from lens_geometry.edits.noise import WHEN, Batch, When
from lens_geometry.edits.observing import observe
from lens_geometry.edits.pathways import PATHWAYS, Pathway, needed_hooks
from lens_geometry.edits.perturbing import KINDS, PRESETS, Kind, Perturbation, Unit, perturb
from lens_geometry.edits.plain_models import PLAIN_SITES, Suppressed, suppress
from lens_geometry.edits.removal import remove_diagonal
from lens_geometry.edits.repairing import clean_run, keep_activations, repair
from lens_geometry.edits.scaling import CONTROLS, Control, Scale, scale

__all__ = [
    "CONTROLS",
    "DIAGONAL_SITES",
    "KINDS",
    "PATHWAYS",
    "PLAIN_SITES",
    "PRESETS",
    "WHEN",
    "Batch",
    "Control",
    "DiagonalSite",
    "Displacements",
    "HookFn",
    "Hooks",
    "Kind",
    "Pathway",
    "Perturbation",
    "Scale",
    "Suppressed",
    "Unit",
    "When",
    "applied",
    "clean_run",
    "diagonal",
    "keep_activations",
    "needed_hooks",
    "observe",
    "observe_diagonal",
    "perturb",
    "remove_diagonal",
    "repair",
    "scale",
    "suppress",
]
