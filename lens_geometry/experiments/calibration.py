"""What the unedited model's vectors are like at a site, for perturbations that are made to measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_geometry.anatomy import at_rest, inspect
from lens_geometry.data import Tokens
from lens_geometry.edits import applied, observe
from lens_geometry.edits.layer_edit import Layers
from lens_geometry.errors import DataError, GeometryError
from lens_geometry.runner import RunSettings, bar, batches
from lens_geometry.sites import Site, token_mask


def principal_directions(
    model: Any,
    tokens: Tokens,
    components: int = 10,
    *,
    site: str = "resid",
    layers: Layers = None,
    settings: RunSettings | None = None,
) -> Float[Tensor, "layer k d"]:
    """Orthonormal directions of largest variance of a site's vectors, the largest first, for every layer.

    Over the text's real tokens (see `tokenize`), position 0 left out, around their mean; heads are pooled. Layers
    that were not chosen hold zeros. From d x d covariances in float64, one for each chosen layer; float32.
    Raises GeometryError for more components than the vectors have, or than there are vectors; DataError without
    tokens beside position 0.
    """
    count, sums, products = dict[int, int](), dict[int, Tensor](), dict[int, Tensor]()

    def add(layer: int, vectors: Tensor) -> None:
        x = vectors.double()
        count[layer] = count.get(layer, 0) + len(x)
        sums[layer] = sums.get(layer, torch.zeros(())) + x.sum(0)
        products[layer] = products.get(layer, torch.zeros(())) + x.T @ x

    _visit_vectors(model, tokens, site, layers, settings or RunSettings(), add)
    found: dict[int, Tensor] = {}
    for layer, n in count.items():
        width = len(sums[layer])
        if not 0 < components <= min(width, n - 1):
            raise GeometryError(
                f"there are no {components} principal directions of {n} vectors of {width} components",
                where=f"site {site}, layer {layer}",
                cure="ask for fewer components, or give more text",
            )
        mean = sums[layer] / n
        covariance = products[layer] / n - torch.outer(mean, mean)
        found[layer] = torch.linalg.eigh(covariance).eigenvectors.T.flip(0)[:components].float()
    none = torch.zeros_like(next(iter(found.values())))
    return torch.stack([found.get(layer, none) for layer in range(inspect(model).n_layers)])


def median_norms(
    model: Any, tokens: Tokens, *, site: str = "resid", layers: Layers = None, settings: RunSettings | None = None
) -> Float[Tensor, " layer"]:
    """The median norm of a site's vectors, for every layer; position 0 left out, 0 for layers that were not chosen.

    Raises DataError without tokens beside position 0.
    """
    norms: dict[int, list[Tensor]] = {}

    def add(layer: int, vectors: Tensor) -> None:
        norms.setdefault(layer, []).append(torch.linalg.vector_norm(vectors.float(), dim=-1))

    _visit_vectors(model, tokens, site, layers, settings or RunSettings(), add)
    medians = {layer: torch.cat(found).median() for layer, found in norms.items()}
    return torch.stack([medians.get(layer, torch.zeros(())) for layer in range(inspect(model).n_layers)])


def _visit_vectors(
    model: Any, tokens: Tokens, site: str, layers: Layers, settings: RunSettings, add: Callable[[int, Tensor], None]
) -> None:
    """Run the unedited model over the text, and `add(layer, vectors [n, d])` of each batch, on the CPU."""
    keep, now = token_mask(tokens.mask), slice(0, 0)
    if not keep.any():
        raise DataError("no token is left beside position 0", cure="use longer sequences")

    def visit(found: Site, layer: int, update: Tensor, reference: Tensor) -> None:
        add(layer, update[keep[now].to(update.device)].flatten(0, -2).cpu())

    with (
        at_rest(model),
        bar(len(tokens.ids), "calibration", settings.progress) as progress,
        applied(model, observe(model, (site,), visit, layers=layers)),
    ):
        for rows, ids, _ in batches(model, tokens, settings.batch_size):
            now = slice(rows.start, rows.stop)
            model(ids, stop_at_layer=inspect(model).n_layers)
            progress.update(len(rows))
