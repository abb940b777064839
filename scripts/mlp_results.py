"""The table of docs/results/mlp_inside.md, from what `lens-geometry mlp` wrote.

python scripts/mlp_results.py results/mlp        # prints the table
"""

from __future__ import annotations

import sys
from pathlib import Path

from readme_results import cell

from lens_geometry.results import Result

ROWS = {
    "parallel part removed": ("none", "parallel", 0.0),
    "parallel part halved": ("none", "parallel", 0.5),
    "control: isotropic change as large as removing the parallel part": ("isotropic", "parallel", 0.0),
    "control: removed along a random reference": ("random_reference", "parallel", 0.0),
    "control: removed along an earlier token's reference": ("shuffled_reference", "parallel", 0.0),
    "perpendicular part removed": ("none", "perpendicular", 0.0),
    "perpendicular part halved": ("none", "perpendicular", 0.5),
    "control: isotropic change as large as removing the perpendicular part": ("isotropic", "perpendicular", 0.0),
    "control: isotropic change as large as halving the perpendicular part": ("isotropic", "perpendicular", 0.5),
    "control: the whole removed": ("gain", "parallel", 0.0),
    "control: the whole halved": ("gain", "parallel", 0.5),
}


def main(directory: Path) -> None:
    result = Result.load(directory)
    table = result.table.set_index(["control", "component", "scale", "site"])
    first, slices = result.table.iloc[0], result.meta["slices"]
    sites = dict(zip(result.table["site"], result.table["reference"], strict=True))
    print(
        f"{result.meta['model']['name']}, base loss {first['base_loss']:.3f}, {first['n_sequences']} sequences, "
        f"{first['n_tokens']} predicted tokens; carrier of {slices['d_mlp']} in {slices['count']} slices of "
        f"{slices['width']}, the last {slices['last_width']} wide before padding\n"
    )
    print("| | " + " | ".join(f"`{site}`, against the {words}" for site, words in sites.items()) + " |")
    print("|---|" + "---|" * len(sites))
    for name, key in ROWS.items():
        found = [cell(table.loc[(*key, site)], 3) if (*key, site) in table.index else "" for site in sites]
        if any(found):
            print(f"| {name} | " + " | ".join(found) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
