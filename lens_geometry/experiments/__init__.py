"""WHY: one file per question. Each is a function of (model, data, settings) that returns a Result."""

from lens_geometry.experiments.attention import AttentionSettings, attention_maps, diagonal_numbers
from lens_geometry.experiments.basin import BasinSettings, basin
from lens_geometry.experiments.calibration import principal_directions
from lens_geometry.experiments.compression import CompressionSettings, compression_report
from lens_geometry.experiments.compression_study import StudySettings, compression_study
from lens_geometry.experiments.dissociation import dissociation, side_by_side
from lens_geometry.experiments.dissociation_plan import DissociationSettings
from lens_geometry.experiments.error_prediction import error_prediction
from lens_geometry.experiments.evaluate import EvaluationSettings, evaluate, scaling_edits
from lens_geometry.experiments.generation import GenerationSettings, continuations
from lens_geometry.experiments.generation_profile import generation_profile
from lens_geometry.experiments.heads import HeadSettings, head_sweep
from lens_geometry.experiments.layer_choice import LayerChoiceSettings, layer_choice
from lens_geometry.experiments.mediators import MediatorSettings, mediators
from lens_geometry.experiments.mlp import MlpSettings, mlp_sweep
from lens_geometry.experiments.pair_accuracy import PairSettings, minimal_pairs
from lens_geometry.experiments.pathway_plan import PathwaySettings
from lens_geometry.experiments.pathways import pathway_repair
from lens_geometry.experiments.profile import ProfileSettings, profile
from lens_geometry.experiments.scaling import ScalingSettings, scaling_sweep
from lens_geometry.experiments.schedule import ScheduleSettings, schedule
from lens_geometry.experiments.strength import StrengthSettings, applied_strength
from lens_geometry.experiments.validate import site_table, validate
from lens_geometry.experiments.variants import VARIANTS

__all__ = [
    "VARIANTS",
    "AttentionSettings",
    "BasinSettings",
    "CompressionSettings",
    "DissociationSettings",
    "EvaluationSettings",
    "GenerationSettings",
    "HeadSettings",
    "LayerChoiceSettings",
    "MediatorSettings",
    "MlpSettings",
    "PairSettings",
    "PathwaySettings",
    "ProfileSettings",
    "ScalingSettings",
    "ScheduleSettings",
    "StrengthSettings",
    "StudySettings",
    "applied_strength",
    "attention_maps",
    "basin",
    "compression_report",
    "compression_study",
    "continuations",
    "diagonal_numbers",
    "dissociation",
    "error_prediction",
    "evaluate",
    "generation_profile",
    "head_sweep",
    "layer_choice",
    "mediators",
    "minimal_pairs",
    "mlp_sweep",
    "pathway_repair",
    "principal_directions",
    "profile",
    "scaling_edits",
    "scaling_sweep",
    "schedule",
    "side_by_side",
    "site_table",
    "validate",
]
