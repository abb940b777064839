"""What does an edit look like on the attention map? The map of one short sequence before and after, entry by entry.

The edit is the diagonal form of component scaling (`edits.diagonal`): only A_tt changes where it acts. In later
layers everything may change, since they see what the earlier ones have done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lens_geometry.anatomy import at_rest, inspect
from lens_geometry.data import Tokens
from lens_geometry.edits import DiagonalSite, Hooks, applied, diagonal, observe_diagonal
from lens_geometry.errors import DataError
from lens_geometry.results import Result
from lens_geometry.runner import RunSettings, prepare, provenance
from lens_geometry.sites import HOOKS, Grouping, choose_layers


@dataclass(frozen=True)
class AttentionSettings(RunSettings):
    """Settings of `attention_maps`.

    Attributes:
        sequence_length: the most tokens that are shown; a longer text is refused, not cut.
        site: whose diagonal form is applied: "value", "value_excl_self", "attn" (one number per layer and
            token, for all heads) or "attn_per_head".
        parallel: the retained scale of the parallel part.
        layers: which are edited at once, and shown: "all", "4", "1-", "4-11", "0,3,6".
        grouping: value-space vectors by head ("each"), "kv_group" or "merged".
    """

    sequence_length: int = 48
    site: DiagonalSite = "value_excl_self"
    parallel: float = 0.0
    layers: str = "all"
    grouping: Grouping = "each"


def attention_maps(model: Any, data: Any, settings: AttentionSettings | None = None, **changes: Any) -> Result:
    """The attention maps of one short sequence, without and with an edit's diagonal form.

    Args:
        model: any TransformerLens model whose attention map can be edited.
        data: one text (a string, or a Text of one document) or token ids [1, pos].
        settings: see `AttentionSettings`; `changes` override single fields.

    Returns:
        A Result with one row per layer, head, query and key (keys up to the query): `before` from a pass without
        edits; `after` from one pass with the whole edit, so that a layer's map also holds what the edits of
        earlier layers did to it; `difference` between them; and `edit`, what the edit itself added to this
        entry, which is zero off the diagonal. Rows of `after` do not sum to 1. `diagonal_numbers` sums it up.

    Raises:
        ModelError, DataError for what cannot be used, a text that is too long among them; SiteError when the
        model's map cannot be edited; HookError where no finite change of A_tt does it.
    """
    settings, started = replace(settings or AttentionSettings(), **changes), time.monotonic()
    tokens = _one_sequence(model, data, settings)
    layers = choose_layers(settings.layers, inspect(model).n_layers)
    ids = tokens.ids.to(next(model.parameters()).device)
    edit: dict[str, Any] = {"parallel": settings.parallel, "layers": layers, "grouping": settings.grouping}
    hooks = diagonal(model, settings.site, **edit)
    before: dict[int, Tensor] = {}
    after: dict[int, Tensor] = {}
    added: dict[int, Tensor] = {}
    watching = observe_diagonal(model, settings.site, lambda layer, _, change: added.update({layer: change}), **edit)
    with at_rest(model):
        with applied(model, _keepers(layers, before)):
            model(ids, return_type="logits")
        with applied(model, [*watching, *hooks, *_keepers(layers, after)]):
            model(ids, return_type="logits")
    words = _token_words(model, ids[0].tolist())
    frames = [_layer_rows(layer, before[layer], after[layer], added[layer], words) for layer in layers]
    table = pd.concat(frames, ignore_index=True)
    counts = {"nonfinite_entries": int((~np.isfinite(table[["before", "after"]])).any(axis=1).sum())}
    meta = provenance(
        model,
        tokens,
        settings,
        started=started,
        token_mask="every position is edited and shown; summaries leave position 0 out",
        counts=counts,
        token_words=words,
    )
    return Result("attention_maps", table, meta)


def diagonal_numbers(table: pd.DataFrame) -> pd.DataFrame:
    """The diagonal of `attention_maps` in one row per layer, position 0 left out.

    `before`, `after`: A_tt, mean over heads and tokens. `edit`: what the edit added, its median, and the largest
    size as `edit_largest`; with `heads_agree` True it is one number per token for all heads, the layer-level number
    of "attn". `outside`: the share of A_tt that no attention could have (below 0 or above 1) after the edit.
    """
    own = table[(table["query"] == table["key"]) & (table["query"] > 0)]
    rows = []
    for layer, part in own.groupby("layer", sort=True):
        spread = part.groupby("query")["edit"].agg(["min", "max"])
        rows.append(
            {
                "layer": layer,
                "before": part["before"].mean(),
                "after": part["after"].mean(),
                "edit": part["edit"].median(),
                "edit_largest": part["edit"].abs().max(),
                "outside": ((part["after"] < 0) | (part["after"] > 1)).mean(),
                "heads_agree": bool((spread["min"] == spread["max"]).all()),
                "n_tokens": part["query"].nunique(),
            }
        )
    return pd.DataFrame(rows)


def _one_sequence(model: Any, data: Any, settings: AttentionSettings) -> Tokens:
    tokens = prepare(model, data, replace(settings, max_sequences=None))
    too_long = tokens.ids.shape[1] > settings.sequence_length or tokens.meta.get("tokens_dropped", 0)
    if len(tokens.ids) != 1 or too_long or not tokens.mask.all():
        raise DataError(
            f"attention maps are of one sequence of at most {settings.sequence_length} tokens",
            where=tokens.meta["text"],
            cure="pass one shorter text, or raise sequence_length",
        )
    return tokens


def _keepers(layers: tuple[int, ...], kept: dict[int, Tensor]) -> Hooks:
    def keeper(layer: int) -> Callable[..., None]:
        def keep(tensor: Tensor, hook: Any) -> None:
            kept[layer] = tensor.detach()

        return keep

    return [(HOOKS["pattern"].format(layer), keeper(layer)) for layer in layers]


def _token_words(model: Any, ids: list[int]) -> list[str]:
    tokenizer = getattr(model, "tokenizer", None)
    return [str(number) if tokenizer is None else str(tokenizer.decode([number])) for number in ids]


def _layer_rows(layer: int, before: Tensor, after: Tensor, added: Tensor, words: list[str]) -> pd.DataFrame:
    """One row per head, query and key; maps are [1, head, query, key], what was added [1, pos, head or 1]."""
    n_heads, length = before.shape[1:3]
    edit = torch.diag_embed(added[0].T.expand(n_heads, length))
    head, query, key = np.indices((n_heads, length, length)).reshape(3, -1)
    causal = key <= query
    maps = {
        name: x.double().cpu().numpy().reshape(-1)[causal]
        for name, x in (("before", before[0]), ("after", after[0]), ("edit", edit))
    }
    head, query, key = (x[causal] for x in (head, query, key))
    spelled = np.array(words, dtype=object)
    return pd.DataFrame(
        {
            "layer": layer,
            "head": head,
            "query": query,
            "key": key,
            "query_token": spelled[query],
            "key_token": spelled[key],
            "before": maps["before"],
            "after": maps["after"],
            "difference": maps["after"] - maps["before"],
            "edit": maps["edit"],
        }
    )
