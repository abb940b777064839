"""Tests of paired samples, the size of their difference, and corrections for having made several tests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from lens_geometry.stats import Floats

RESOLUTION = 1e-12  # differences whose spread is under this share of their size are all the same number


class PairedTest(NamedTuple):
    """How one sample differs from another that is paired with it; NaN for what cannot be told.

    `difference` is the mean of one - other over the `n` pairs of which both are finite, `t` and `p` are Student's
    (two-sided), `cohens_d` is the mean difference in units of the differences' own standard deviation (d_z), and
    `p_wilcoxon` is that of the signed-rank test, which ranks the differences and asks for no shape but symmetry.
    """

    n: int
    difference: float
    t: float
    p: float
    cohens_d: float
    p_wilcoxon: float


def paired_test(one: ArrayLike, other: ArrayLike) -> PairedTest:
    """Compare two samples of the same things (seeds, sequences, pairs), in the same order.

    Fewer than two pairs say nothing of how much differences vary, and differences that are all the same number say
    that they do not vary at all: t, p and d are NaN in both cases, never 0 or infinite. The signed-rank test knows
    nothing only with fewer than two pairs or where every difference is 0.

    >>> paired_test([3.0, 4.0, 5.0], [1.0, 3.0, 2.0]).difference
    2.0
    """
    differences = np.asarray(one, dtype=float) - np.asarray(other, dtype=float)
    differences = differences[np.isfinite(differences)]
    n, nan = len(differences), float("nan")
    mean = float(differences.mean()) if n else nan
    if n < 2:
        return PairedTest(n, mean, nan, nan, nan, nan)
    p_wilcoxon = float(stats.wilcoxon(differences).pvalue) if differences.any() else nan
    spread = float(differences.std(ddof=1))
    if spread <= RESOLUTION * np.abs(differences).max():
        return PairedTest(n, mean, nan, nan, nan, p_wilcoxon)
    found = stats.ttest_1samp(differences, 0.0)
    return PairedTest(n, mean, float(found.statistic), float(found.pvalue), mean / spread, p_wilcoxon)


def bonferroni(p: ArrayLike) -> Floats:
    """p values times the number of tests, at most 1. A NaN is no test: it stays NaN and is not counted.

    >>> bonferroni([0.01, 0.6]).tolist()
    [0.02, 1.0]
    """
    p = np.asarray(p, dtype=float)
    return np.minimum(p * np.isfinite(p).sum(), 1.0)


def holm(p: ArrayLike) -> Floats:
    """p values by Holm's step-down method: never above Bonferroni's, under the same guarantee. NaN stays NaN.

    >>> holm([0.01, 0.04, 0.03]).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p, dtype=float)
    order = np.argsort(p)[: np.isfinite(p).sum()]  # NaN goes last
    found = np.full_like(p, np.nan)
    found[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0)
    return found
