"""Training small models with and without suppression: a trainer that one reads in one sitting."""

from lens_geometry.training.config import Shape, TrainingConfig
from lens_geometry.training.data import open_tokens, prepare_tokens
from lens_geometry.training.presets import PRESETS, preset_config
from lens_geometry.training.suppression import ARMS, Suppression, arm
from lens_geometry.training.trainer import train

__all__ = [
    "ARMS",
    "PRESETS",
    "Shape",
    "Suppression",
    "TrainingConfig",
    "arm",
    "open_tokens",
    "prepare_tokens",
    "preset_config",
    "train",
]
