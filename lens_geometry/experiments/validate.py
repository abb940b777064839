"""Does everything that the package relies on hold on *this* model? Run before trusting numbers of a new one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from lens_geometry import models
from lens_geometry.anatomy import Anatomy, at_rest, attached, inspect, probe_tokens
from lens_geometry.edits import applied, observe, scale
from lens_geometry.geometry import decompose, lengths
from lens_geometry.results import Result, versions
from lens_geometry.runner import bar
from lens_geometry.sites import HOOKS, SITES, Site


class Check(NamedTuple):
    """One identity: the worst number found, where, and how large it may be. `tolerance` 0 means bit-equal."""

    check: str
    site: str
    where: str
    value: float
    tolerance: float
    status: str
    note: str = ""


def site_table(model: Any) -> pd.DataFrame:
    """For each site: its hooks on this model, their shapes, the sum check and whether it can be used.

    Shapes are those of two sequences of six tokens. `usable` is "yes", "to measure" or "no", over all layers;
    `reason` says why not.
    """
    models.require_model(model)
    anatomy = inspect(model)
    return pd.DataFrame([_site_row(anatomy, site) for site in SITES.values()])


def validate(model: Any, ids: Int[Tensor, "batch pos"] | None = None) -> Result:
    """Check the identities of the geometry on a live model.

    Args:
        model: any TransformerLens model.
        ids: tokens to check on, [batch, pos]; a few fixed ones of the vocabulary by default.

    Returns:
        A Result with one row per check: the worst value over layers, its tolerance (0: bit-equal) and a
        status: "pass", "fail", or "refused" for a site that this model does not have, with the reason.

    Raises:
        ModelError for an object that is no TransformerLens model, or whose forward pass fails.
    """
    started = time.monotonic()
    models.require_model(model)
    anatomy = inspect(model, fresh=True)
    ids = probe_tokens(model, 2, 16) if ids is None else ids.to(next(model.parameters()).device)
    with at_rest(model), bar(0, "checks", progress=True) as done:
        checks = []
        for check in _checks(model, anatomy, ids):
            checks.append(check)
            done.update()
    table = pd.DataFrame(checks)
    meta = {
        "model": models.describe(model),
        "versions": versions(),
        "seconds": round(time.monotonic() - started, 2),
        "warnings": models.processing_warnings(model),
        "counts": table["status"].value_counts().to_dict(),
    }
    return Result("validate", table, meta)


def _site_row(anatomy: Anatomy, site: Site) -> dict[str, Any]:
    layers = range(anatomy.n_layers)
    unread = [reason for layer in layers if (reason := anatomy.refusal(site, layer))]
    unedited = [reason for layer in layers if (reason := anatomy.refusal(site, layer, editing=True))]
    names = (anatomy.target(site, 0), *anatomy.reads(site, 0))
    shapes = anatomy.layers[0].shapes
    return {
        "site": site.name,
        "edits": HOOKS[names[0]].format("L"),
        "reads": " ".join(HOOKS[name].format("L") for name in anatomy.reads(site, 0)),
        "shapes": " ".join(f"{name} {list(shapes[name])}" if name in shapes else f"{name} -" for name in names),
        "identity": anatomy.identity(site),
        "error": max(anatomy.error(site, layer) for layer in layers),
        "usable": "no" if unread else "to measure" if unedited else "yes",
        "reason": next(iter(unread or unedited), ""),
    }


def _checks(model: Any, anatomy: Anatomy, ids: Tensor) -> Iterator[Check]:
    base = model(ids, return_type="logits")
    yield _check(
        "a second forward pass is bit-equal",
        "model",
        "logits",
        _gap(model(ids, return_type="logits"), base),
        0,
    )
    readable = [site for site in SITES.values() if not _refused(anatomy, site)]
    for site in SITES.values():
        reason = _refused(anatomy, site)
        if reason:
            yield Check(f"{anatomy.identity(site)}", site.name, "", float("nan"), anatomy.tolerance, "refused", reason)
            continue
        errors = [anatomy.error(site, layer) for layer in range(anatomy.n_layers)]
        layer = errors.index(max(errors))
        yield _check(anatomy.identity(site), site.name, f"layer {layer}", anatomy.error(site, layer), anatomy.tolerance)
    yield from _decomposition_checks(model, anatomy, ids, [site for site in readable if site.name != "resid"])
    for site in readable:
        reason = _refused(anatomy, site, editing=True)
        if reason:
            yield Check("the site can be edited", site.name, "", float("nan"), 0, "refused", reason)
        else:
            yield from _edit_checks(model, anatomy, ids, site, base)
    yield from _cache_check(model, ids)


def _decomposition_checks(model: Any, anatomy: Anatomy, ids: Tensor, sites: list[Site]) -> Iterator[Check]:
    """The parts add up; the perpendicular part is orthogonal to the reference."""
    worst: dict[tuple[str, str], tuple[float, int]] = {}

    def visit(site: Site, layer: int, update: Tensor, reference: Tensor) -> None:
        update, reference = update.float(), reference.float()
        _, parallel, perpendicular = decompose(update, reference)
        size = update.norm(dim=-1).clamp_min(1e-30)
        rest = lengths(perpendicular, reference)
        for what, value in (
            (
                "parallel + perpendicular = update",
                ((parallel + perpendicular - update).norm(dim=-1) / size).max(),
            ),
            ("the perpendicular part is orthogonal", (rest.parallel / size).max()),
        ):
            if float(value) >= worst.get((what, site.name), (-1.0, 0))[0]:
                worst[what, site.name] = float(value), layer

    with applied(model, observe(model, [site.name for site in sites], visit)):
        model(ids, return_type="logits")
    for (what, name), (value, layer) in worst.items():
        yield _check(what, name, f"layer {layer}", value, 2e-5)


def _edit_checks(model: Any, anatomy: Anatomy, ids: Tensor, site: Site, base: Tensor) -> Iterator[Check]:
    middle = anatomy.n_layers // 2
    with applied(model, scale(model, site.name)):
        yield _check("the no-op is bit-equal", site.name, "all layers", _gap(model(ids, return_type="logits"), base), 0)
    ones = torch.ones(anatomy.n_layers)
    with attached(model, scale(model, site.name, parallel=ones)):
        gap = _gap(model(ids, return_type="logits"), base)
        yield _check("a no-op by tensors is bit-equal", site.name, "all layers", gap, 0)
    streams: list[Tensor] = []
    before = [(f"blocks.{middle}.hook_resid_pre", lambda tensor, hook: streams.append(tensor.clone()))]
    with attached(model, before):
        model(ids, return_type="logits")
    # the stream is read before the edit changes it, so the reader stands first
    with attached(model, [*before, *scale(model, site.name, parallel=0.5, layers=middle)]):
        edited = model(ids, return_type="logits")
    yield _check("layers before the edit are bit-equal", site.name, f"layer {middle}", _gap(streams[1], streams[0]), 0)
    change = _gap(edited, base)
    where = anatomy.where(site, middle)
    note = "" if change else "the hook is shown, not used: edits of it do nothing"
    yield Check("the edit reaches the logits", site.name, where, change, 0, "pass" if change > 0 else "fail", note)


def _cache_check(model: Any, ids: Tensor) -> Iterator[Check]:
    """Greedy continuations with and without the KV cache: a wrong cache makes every generation wrong."""
    what, prompt = "cached generation equals uncached", ids[:1]
    try:
        texts = [
            model.generate(
                prompt, max_new_tokens=6, do_sample=False, use_past_kv_cache=cached, verbose=False,
                stop_at_eos=False, return_type="tokens",
            )
            for cached in (True, False)
        ]  # fmt: skip
    except Exception as error:  # whatever a model's generate cannot do is reported, not raised
        yield Check(what, "model", "generate", float("nan"), 0, "refused", f"{type(error).__name__}: {error}")
        return
    different = float((texts[0] != texts[1]).sum())
    yield _check(what, "model", "generate", different, 0, note="tokens that differ")


def _refused(anatomy: Anatomy, site: Site, *, editing: bool = False) -> str:
    reasons = (anatomy.refusal(site, layer, editing=editing) for layer in range(anatomy.n_layers))
    return next(filter(None, reasons), "")


def _check(check: str, site: str, where: str, value: float, tolerance: float, note: str = "") -> Check:
    passed = value <= tolerance
    return Check(check, site, where, value, tolerance, "pass" if passed else "fail", "" if passed else note)


def _gap(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference; 0 only when every bit is equal, NaN when something is not finite."""
    return 0.0 if torch.equal(one, other) else float((one - other).abs().max())
