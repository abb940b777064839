"""The arms of the ablation: what a model may be trained under, by name.

    suppressor = Suppressor(model, arm("value:0.5"))

`edits/suppressing.py` has the settings and the hooks themselves.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from lens_geometry.edits.suppressing import Suppression, Suppressor
from lens_geometry.errors import SiteError

__all__ = ["ARMS", "Suppression", "Suppressor", "arm"]

ARMS: Mapping[str, Suppression] = MappingProxyType(
    {
        "baseline": Suppression(),
        "attn": Suppression("attn"),
        "value": Suppression("value"),
        "value_excl_self": Suppression("value_excl_self"),
        "mlp": Suppression("mlp"),
        "gate": Suppression("value", gate=True),
        "gate_attn": Suppression("attn", gate=True),
        "diagonal": Suppression("value", control="diagonal"),
        "norm_matched": Suppression("value", control="norm_matched"),
        "norm_matched_attn": Suppression("attn", control="norm_matched"),
        "diagonal_shrinking": Suppression("value", control="diagonal", renormalise=False),
    }
)
"""Arms by name. Their scale is 0 or learned; `arm` sets another."""


def arm(name: str) -> Suppression:
    """An arm by name, with its scale after a colon where it is not 0: "value", "value:0.5", "norm_matched_attn:0.25".

    Raises SiteError for a name that there is not, or one with a scale that it does not take; GeometryError for a
    scale that is no finite number.

    >>> arm("value:0.5").parallel
    0.5
    """
    known, _, number = name.partition(":")
    if known not in ARMS:
        near = difflib.get_close_matches(known, ARMS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        cure = f"{hint}choose one of {', '.join(ARMS)}; with a scale as in value:0.5"
        raise SiteError(f"there is no arm {name!r}", cure=cure)
    if ":" not in name:
        return ARMS[known]
    try:
        parallel = float(number)
    except ValueError:
        raise SiteError(f"the scale of the arm {name!r} is no number", cure=f"write {known}:0.5") from None
    return replace(ARMS[known], parallel=parallel)
