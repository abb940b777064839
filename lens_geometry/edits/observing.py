"""Hooks that look at sites and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from lens_geometry.anatomy import inspect, require
from lens_geometry.edits.hooks import Collector, HookFn, Hooks, tag
from lens_geometry.sites import Site, choose_layers

Visit = Callable[[Site, int, Tensor, Tensor], None]


def observe(
    model: Any, sites: Sequence[str], visit: Visit, *, layers: int | str | slice | Iterable[int] | None = None
) -> Hooks:
    """Hooks that call `visit(site, layer, update, reference)` as soon as a site's vectors exist.

    Vectors are [batch, pos, d] at residual sites, [batch, pos, head, d_head] in value space and
    [batch, pos, slice, d_model] inside the MLP, in the model's dtype (float32 at least where they are differences or
    products). Activations are shared between sites and
    let go within their layer, so memory does not grow with the number of layers.
    Raises SiteError when the model does not have one of the sites.
    """
    chosen = choose_layers(layers, inspect(model).n_layers)
    found = [require(model, site, chosen) for site in dict.fromkeys(sites)]
    hooks: Hooks = []
    for layer in chosen:
        anatomy = found[0][0]
        facts = anatomy.layers[layer]
        needs = {site: {*anatomy.reads(site, layer), anatomy.target(site, layer)} for _, site, _ in found}
        order = [name for name in facts.shapes if any(name in names for names in needs.values())]
        collector = Collector(layer, order, facts, model)
        for place, (name, reader) in enumerate(collector.readers()):
            complete = [site for site, names in needs.items() if names <= {*order[: place + 1]}]
            ready = [site for site in complete if order[place] in needs[site]]
            waiting = [names for site, names in needs.items() if site not in complete]
            hooks.append((name, _visitor(collector, reader, ready, set().union(*waiting), visit)))
    return hooks


def _visitor(collector: Collector, reader: HookFn, ready: list[Site], needed: set[str], visit: Visit) -> HookFn:
    def look(tensor: Tensor, hook: Any) -> None:
        reader(tensor, hook=hook)
        acts = collector.completed(collector.seen) if ready else {}
        for site in ready:
            update, reference = site.vectors(acts)
            visit(site, collector.layer, update, reference)
        for name in collector.seen.keys() - needed:
            del collector.seen[name]

    return tag(look, collector)
