"""Where inside the MLP does direction matter? The carrier and the contributions of its slices, beside the whole output.

A scaling sweep at the MLP's own sites: its output against the stream, its carrier (after the gate, before W_out) slice
by slice against the input x, and what each slice writes to the stream against the slice itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lens_geometry.anatomy import Anatomy, inspect
from lens_geometry.errors import SiteError
from lens_geometry.experiments.profile import available_sites
from lens_geometry.experiments.scaling import ScalingSettings, scaling_sweep
from lens_geometry.models import require_model
from lens_geometry.results import Result, jsonable
from lens_geometry.runner import RunSettings

CARRIERS = {"normalised": "mlp_carrier", "stream": "mlp_carrier_stream"}
REFERENCES = {  # of each site, in words
    "mlp": "stream",
    "mlp_carrier": "normalised input",
    "mlp_carrier_stream": "stream",
    "mlp_contribution": "slice of the carrier",
}


@dataclass(frozen=True)
class MlpSettings(RunSettings):
    """Settings of `mlp_sweep`.

    Attributes:
        references: what the carrier is decomposed against: "normalised", the input that W_in sees, "stream", what
            that input is normalised from, or both.
        layers: layer sets, each edited at once: "all", "4", "1-" (all but the first), "4-11", "0,3,6".
        parallel: retained scales of the parallel part, the perpendicular part kept.
        perpendicular: retained scales of the perpendicular part, the parallel part kept.
        controls: run beside the edit ("gain", "isotropic", "random_reference", "shuffled_reference").
        control_scales: the scales at which the controls are run.
        skip_position_0: leave position 0 unedited.
    """

    references: tuple[Literal["normalised", "stream"], ...] = ("normalised",)
    layers: tuple[str, ...] = ("all",)
    parallel: tuple[float, ...] = (0.0, 0.5)
    perpendicular: tuple[float, ...] = (0.0, 0.5)
    controls: tuple[str, ...] = ("random_reference", "isotropic", "gain")
    control_scales: tuple[float, ...] = (0.0,)
    skip_position_0: bool = False

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites inside the MLP. Raises SiteError for a reference that is not offered, and for none."""
        if not self.references or not set(self.references) <= set(CARRIERS):
            raise SiteError(f"{self.references!r} names no references", cure=f"choose among {', '.join(CARRIERS)}")
        return (*(CARRIERS[name] for name in dict.fromkeys(self.references)), "mlp_contribution")


def mlp_sweep(
    model: Any,
    data: Any,
    settings: MlpSettings | None = None,
    *,
    out: Path | str | None = None,
    **changes: Any,
) -> Result:
    """Scale the parallel and the perpendicular part of an MLP's carrier, contributions and output.

    The carrier h = `mlp.hook_post` is taken in slices h_g of width d_model, the last one padded with zeros; what an
    edit puts into the padding is dropped, for no row of W_out reads it. The contribution of a slice is
    y_g = W_out[:, I_g] h_g, decomposed against h_g; b_out belongs to no slice and is never scaled.

    Args:
        model: any TransformerLens model whose MLP has one carrier.
        data: a Text, a string, a list of strings, or token ids [sequence, pos].
        settings: see `MlpSettings`; `changes` override single fields.
        out: a directory for the journal, as of `scaling_sweep`.

    Returns:
        A Result with the rows of `scaling_sweep` (loss, perplexity and their changes in nats per token, with 95 %
        intervals) and the `reference` of each site in words; `meta["slices"]` says how the carriers were cut.

    Raises:
        SiteError where the model has no site inside its MLP (a mixture of experts has none); and whatever
        `scaling_sweep` raises.
    """
    settings = replace(settings or MlpSettings(), **changes)
    require_model(model)
    available_sites(model, settings.sites, editing=True)  # none of them is an error, not a sweep of `mlp` alone
    shared = {name: value for name, value in vars(settings).items() if name != "references"}
    swept = scaling_sweep(model, data, ScalingSettings(sites=("mlp", *settings.sites), **shared), out=out)
    table = swept.table.copy()
    table.insert(1, "reference", table["site"].map(REFERENCES))
    kept = {key: jsonable(value) for key, value in asdict(settings).items() if key != "progress"}
    return Result("mlp_sweep", table, {**swept.meta, "settings": kept, "slices": _slices(inspect(model))})


def _slices(anatomy: Anatomy) -> dict[str, int]:
    """How the carrier of the first layer was cut; the last slice's own width is without its padding."""
    d_mlp, count = anatomy.layers[0].shapes["mlp_post"][-1], anatomy.layers[0].n_slices
    width = anatomy.d_model
    return {"d_mlp": d_mlp, "width": width, "count": count, "last_width": d_mlp - (count - 1) * width}
