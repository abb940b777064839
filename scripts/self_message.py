"""The table of docs/results/self_message.md, from what the command named there wrote.

python scripts/self_message.py results/self-message        # prints markdown
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lens_geometry.stats import bootstrap_interval

SITES = {"value_excl_self": "self message kept", "value": "self message scaled too"}
ROWS = {
    "the edit": "{site} all none parallel {scale}",
    "random direction of equal strength": "{site} all matched_random_reference parallel {scale}",
    "isotropic change of the same size": "{site} all isotropic parallel {scale}",
    "along an earlier token's value": "{site} all shuffled_reference parallel {scale}",
    "along a random direction": "{site} all random_reference parallel {scale}",
    "the whole update scaled": "{site} all gain parallel {scale}",
}
REMOVALS = {"A_tt = 0": "all diagonal_removal", "A_tt = 0, row renormalised": "all diagonal_removal_renormalised"}
SCALES = (0.0, 0.5, 0.75)


def main(directory: Path) -> None:
    lines = [json.loads(line) for line in (directory / "journal.jsonl").read_text().splitlines()[1:]]
    sums = {line["key"]: np.array(line["sums"]) for line in lines}
    counts = np.array(lines[0]["counts"], dtype=float)
    assert not any(any(line["nonfinite"]) for line in lines)
    base = sums["base"]
    print(f"base loss {base.sum() / counts.sum():.3f}, {len(base)} sequences, {int(counts.sum())} predicted tokens\n")
    print("| | " + " | ".join(f"s_par = {scale:g} | edit minus this" for scale in SCALES) + " |")
    print("|---|" + "---|" * (2 * len(SCALES)))
    for site, words in SITES.items():
        print(f"| **`{site}`, {words}** | " + " | " * (2 * len(SCALES) - 1) + "|")
        for name, key in ROWS.items():
            keys = [key.format(site=site, scale=scale) for scale in SCALES]
            edits = [ROWS["the edit"].format(site=site, scale=scale) for scale in SCALES]
            if keys[0] not in sums:
                continue
            cells = [
                [difference(sums[k], base, counts), "" if k == e else difference(sums[e], sums[k], counts)]
                for k, e in zip(keys, edits, strict=True)
            ]
            print(f"| {name} | " + " | ".join(cell for pair in cells for cell in pair) + " |")
        for name, key in REMOVALS.items():
            edit = sums[ROWS["the edit"].format(site=site, scale=0.0)]
            cells = [difference(sums[key], base, counts), difference(edit, sums[key], counts), *[""] * 4]
            print(f"| {name} | " + " | ".join(cells) + " |")
    print("\n| `value` minus `value_excl_self` | " + " | ".join(f"s_par = {scale:g}" for scale in SCALES) + " |")
    print("|---|" + "---|" * len(SCALES))
    for name in ("the edit", "random direction of equal strength"):
        pairs = [[sums[ROWS[name].format(site=site, scale=scale)] for site in SITES] for scale in SCALES]
        print(f"| {name} | " + " | ".join(difference(full, kept, counts) for kept, full in pairs) + " |")


def difference(one: Any, other: Any, counts: Any) -> str:
    """Mean difference in nats per token, with its 95 % interval by paired bootstrap over sequences."""

    def change(a: Any, b: Any, n: Any, axis: int) -> Any:
        return (a.sum(axis) - b.sum(axis)) / n.sum(axis)

    low, high = bootstrap_interval([one, other, counts], change)
    return f"{float(change(one, other, counts, 0)):+.3f} ({low:+.3f} to {high:+.3f})"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
