"""The report's section for attention maps before and after an edit."""

from __future__ import annotations

import pandas as pd

from lens_geometry import html_pieces as pieces
from lens_geometry.attention_plots import MAPS, map_figure, numbers_in_words
from lens_geometry.experiments.attention import diagonal_numbers

ATTENTION_WORDS = (
    "The edit is written on the attention map: only the weight of a token's own message, A_tt, is changed, and rows "
    "are not scaled back to sum to 1. Before is a pass without edits; after is one pass with the edit in all layers "
    "shown, so that a layer's map also holds what the edits of earlier layers did to it."
)


def attention_section(table: pd.DataFrame, key: str) -> list[str]:
    """The maps of the layer where the edit did most, mean over heads, and the diagonal of every layer."""
    layer = int(table["edit"].abs().groupby(table["layer"]).sum().idxmax())
    shown = [
        pieces.plot(
            map_figure(table, layer, which),
            f"{key}-{which}",
            f"Layer {layer}, mean over heads: {words}",
            "Rows attend to columns; the layer is the one where the edit changed most.",
            switched=False,
        )
        for which, words in MAPS.items()
    ]
    summary = diagonal_numbers(table)
    columns = ["layer", "A_tt before", "A_tt after", "median edit", "largest edit", "outside 0 to 1"]
    kind = " It is one number per token for all heads." if summary["heads_agree"].all() else ""
    caption = (
        f"The diagonal: means over heads and tokens, position 0 left out; the edit is what it added to A_tt.{kind}"
    )
    return [
        f"<p>{pieces.text(ATTENTION_WORDS)}</p>",
        f'<div class="figures">{"".join(shown)}</div>',
        pieces.grid(caption, columns, [numbers_in_words(row) for row in summary.itertuples()]),
    ]
