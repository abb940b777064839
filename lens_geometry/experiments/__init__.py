"""WHY: one file per question. Each is a function of (model, data, settings) that returns a Result."""

from lens_geometry.experiments.attention import AttentionSettings, attention_maps, diagonal_numbers
from lens_geometry.experiments.profile import ProfileSettings, profile
from lens_geometry.experiments.scaling import ScalingSettings, scaling_sweep
from lens_geometry.experiments.validate import site_table, validate

__all__ = [
    "AttentionSettings",
    "ProfileSettings",
    "ScalingSettings",
    "attention_maps",
    "diagonal_numbers",
    "profile",
    "scaling_sweep",
    "site_table",
    "validate",
]
