"""WHY: one file per question. Each is a function of (model, data, settings) that returns a Result."""

from lens_geometry.experiments.evaluate import EvaluationSettings, evaluate, scaling_edits
from lens_geometry.experiments.profile import ProfileSettings, profile
from lens_geometry.experiments.scaling import ScalingSettings, scaling_sweep
from lens_geometry.experiments.validate import site_table, validate

__all__ = [
    "EvaluationSettings",
    "ProfileSettings",
    "ScalingSettings",
    "evaluate",
    "profile",
    "scaling_edits",
    "scaling_sweep",
    "site_table",
    "validate",
]
