"""WHY: one file per question. Each is a function of (model, data, settings) that returns a Result."""

from lens_geometry.experiments.mlp import MlpSettings, mlp_sweep
from lens_geometry.experiments.profile import ProfileSettings, profile
from lens_geometry.experiments.scaling import ScalingSettings, scaling_sweep
from lens_geometry.experiments.validate import site_table, validate

__all__ = [
    "MlpSettings",
    "ProfileSettings",
    "ScalingSettings",
    "mlp_sweep",
    "profile",
    "scaling_sweep",
    "site_table",
    "validate",
]
