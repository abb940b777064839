"""lens_geometry: is it the direction or the size of an update that matters?

import lens_geometry as lg

model = lg.load_model("smollm2-135m")
lg.profile(model, lg.load_text("austen")).plot()
with lg.applied(model, lg.scale(model, "value_excl_self", parallel=0.0)):
    loss = model("It is a truth universally acknowledged", return_type="loss")
"""

from lens_geometry.data import Text, Tokens, load_text, tokenize
from lens_geometry.edits import Batch, applied, observe, scale
from lens_geometry.errors import LensGeometryError
from lens_geometry.evals import edited_lm
from lens_geometry.experiments import (
    EvaluationSettings,
    ProfileSettings,
    ScalingSettings,
    evaluate,
    profile,
    scaling_edits,
    scaling_sweep,
    site_table,
    validate,
)
from lens_geometry.geometry import decompose, measure, scale_components
from lens_geometry.models import describe, known_models, load_model
from lens_geometry.report import write_report
from lens_geometry.results import Result

__all__ = [
    "Batch",
    "EvaluationSettings",
    "LensGeometryError",
    "ProfileSettings",
    "Result",
    "ScalingSettings",
    "Text",
    "Tokens",
    "applied",
    "decompose",
    "describe",
    "edited_lm",
    "evaluate",
    "known_models",
    "load_model",
    "load_text",
    "measure",
    "observe",
    "profile",
    "scale",
    "scale_components",
    "scaling_edits",
    "scaling_sweep",
    "site_table",
    "tokenize",
    "validate",
    "write_report",
]
