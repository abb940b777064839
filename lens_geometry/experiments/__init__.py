"""WHY: one file per question. Each is a function of (model, data, settings) that returns a Result."""

from lens_geometry.experiments.generation import GenerationSettings, continuations
from lens_geometry.experiments.generation_profile import generation_profile
from lens_geometry.experiments.profile import ProfileSettings, profile
from lens_geometry.experiments.scaling import ScalingSettings, scaling_sweep
from lens_geometry.experiments.validate import site_table, validate

__all__ = [
    "GenerationSettings",
    "ProfileSettings",
    "ScalingSettings",
    "continuations",
    "generation_profile",
    "profile",
    "scaling_sweep",
    "site_table",
    "validate",
]
