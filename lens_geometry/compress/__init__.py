"""Compression: a model with fewer bits, weights, ranks or layers, as an ordinary dense model to look into.

from lens_geometry import compress

small = compress.round_to_nearest(model, bits=4, group_size=64)
sparse = compress.compress(model, "magnitude:pattern=2:4")
describe(small)["compression"]["size_bytes"]

Every method takes a TransformerLens model (or a Hugging Face one), leaves it as it is, and returns a new one of the
same class, so that every site can be read.
"""

from lens_geometry.compress.calibrating import calibration_overlap, calibration_tokens
from lens_geometry.compress.depth import blank_layers, drop_layers
from lens_geometry.compress.factors import low_rank
from lens_geometry.compress.library import awq, gptq, sparse_gpt
from lens_geometry.compress.pruning import magnitude, wanda
from lens_geometry.compress.rounding import round_to_nearest
from lens_geometry.compress.saving import save_compressed
from lens_geometry.compress.variants import METHODS, Variant, compress, parse_variant

__all__ = [
    "METHODS",
    "Variant",
    "awq",
    "blank_layers",
    "calibration_overlap",
    "calibration_tokens",
    "compress",
    "drop_layers",
    "gptq",
    "low_rank",
    "magnitude",
    "parse_variant",
    "round_to_nearest",
    "save_compressed",
    "sparse_gpt",
    "wanda",
]
