"""lens_geometry: is it the direction or the size of an update that matters?

import lens_geometry as lg

model = lg.load_model("smollm2-135m")
lg.profile(model, lg.load_text("austen")).plot()
with lg.applied(model, lg.scale(model, "value_excl_self", parallel=0.0)):
    loss = model("It is a truth universally acknowledged", return_type="loss")
"""

from typing import TYPE_CHECKING, Any

from lens_geometry import compress
from lens_geometry.attention_plots import attention_html
from lens_geometry.data import Text, Tokens, load_text, tokenize
from lens_geometry.edits import (
    PRESETS,
    Batch,
    Displacements,
    Perturbation,
    applied,
    clean_run,
    diagonal,
    observe,
    observe_diagonal,
    perturb,
    remove_diagonal,
    repair,
    scale,
    suppress,
)
from lens_geometry.errors import LensGeometryError
from lens_geometry.evals import edited_lm
from lens_geometry.experiments import (
    AttentionSettings,
    BasinSettings,
    CompressionSettings,
    DissociationSettings,
    EvaluationSettings,
    GenerationSettings,
    HeadSettings,
    LayerChoiceSettings,
    MediatorSettings,
    MlpSettings,
    PairSettings,
    PathwaySettings,
    ProfileSettings,
    ScalingSettings,
    ScheduleSettings,
    StrengthSettings,
    StudySettings,
    applied_strength,
    attention_maps,
    basin,
    compression_report,
    compression_study,
    continuations,
    diagonal_numbers,
    dissociation,
    error_prediction,
    evaluate,
    generation_profile,
    head_sweep,
    layer_choice,
    mediators,
    minimal_pairs,
    mlp_sweep,
    pathway_repair,
    principal_directions,
    profile,
    scaling_edits,
    scaling_sweep,
    schedule,
    side_by_side,
    site_table,
    validate,
)
from lens_geometry.geometry import decompose, measure, rescale_by, rotate_by, scale_components, smallest_operator
from lens_geometry.hooked_files import save_hooked
from lens_geometry.metrics import pair_accuracy, pair_margins
from lens_geometry.models import describe, known_models, load_model
from lens_geometry.pair_tokens import tokenize_pairs
from lens_geometry.pairs import Pair, Pairs, load_pairs
from lens_geometry.report import write_report
from lens_geometry.results import Result
from lens_geometry.sequence_files import load_tokens
from lens_geometry.suppressed import suppress_as_saved

if TYPE_CHECKING:
    from lens_geometry.trainer_callback import SuppressionCallback

__all__ = [
    "PRESETS",
    "AttentionSettings",
    "BasinSettings",
    "Batch",
    "CompressionSettings",
    "Displacements",
    "DissociationSettings",
    "EvaluationSettings",
    "GenerationSettings",
    "HeadSettings",
    "LayerChoiceSettings",
    "LensGeometryError",
    "MediatorSettings",
    "MlpSettings",
    "Pair",
    "PairSettings",
    "Pairs",
    "PathwaySettings",
    "Perturbation",
    "ProfileSettings",
    "Result",
    "ScalingSettings",
    "ScheduleSettings",
    "StrengthSettings",
    "StudySettings",
    "SuppressionCallback",
    "Text",
    "Tokens",
    "applied",
    "applied_strength",
    "attention_html",
    "attention_maps",
    "basin",
    "clean_run",
    "compress",
    "compression_report",
    "compression_study",
    "continuations",
    "decompose",
    "describe",
    "diagonal",
    "diagonal_numbers",
    "dissociation",
    "edited_lm",
    "error_prediction",
    "evaluate",
    "generation_profile",
    "head_sweep",
    "known_models",
    "layer_choice",
    "load_model",
    "load_pairs",
    "load_text",
    "load_tokens",
    "measure",
    "mediators",
    "minimal_pairs",
    "mlp_sweep",
    "observe",
    "observe_diagonal",
    "pair_accuracy",
    "pair_margins",
    "pathway_repair",
    "perturb",
    "principal_directions",
    "profile",
    "remove_diagonal",
    "repair",
    "rescale_by",
    "rotate_by",
    "save_hooked",
    "scale",
    "scale_components",
    "scaling_edits",
    "scaling_sweep",
    "schedule",
    "side_by_side",
    "site_table",
    "smallest_operator",
    "suppress",
    "suppress_as_saved",
    "tokenize",
    "tokenize_pairs",
    "validate",
    "write_report",
]


def __dir__() -> list[str]:
    """The public names only: the modules they come from are not the interface."""
    return __all__


def __getattr__(name: str) -> Any:
    """SuppressionCallback derives from a class of transformers, which is imported with it and not before."""
    if name == "SuppressionCallback":
        from lens_geometry.trainer_callback import SuppressionCallback

        return SuppressionCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
