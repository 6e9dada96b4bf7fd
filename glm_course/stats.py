"""Small-sample statistics: was it luck, and how far would the number move?

Each function names one method and hands the arithmetic to scipy or statsmodels; written out here
are the two whose exact form is shorter than a call. Left out: anything that needs large samples.
Bad input raises ValueError with one sentence saying what was wrong.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats
from statsmodels.stats.multitest import multipletests

BATCH_ELEMENTS = 1_000_000  # values resampled at once: 8 MB of indices and 8 MB of values
SIGN_FLIP_LIMIT = 20  # 2^19 sums, 4 MB; each further difference doubles them


class PairedTest(NamedTuple):
    """Outcome of a paired comparison: tasks gained, tasks lost, two-sided p."""

    gains: int
    losses: int
    p: float


class Interval(NamedTuple):
    """An interval, both ends included, in the unit of the values it was made from."""

    low: float
    high: float


def _numbers(values: ArrayLike, name: str, at_least: int = 1) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    if array.ndim != 1 or len(array) < at_least:
        raise ValueError(f"{name} must be a list of at least {at_least}, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite numbers, got NaN or infinity among them")
    return array


def _outcomes(values: ArrayLike, name: str) -> np.ndarray:
    array = _numbers(values, name)
    if not np.isin(array, (0, 1)).all():
        raise ValueError(f"{name} must hold only True and False")
    return array.astype(bool)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, both excluded, got {level}")


def mcnemar_exact(before: ArrayLike, after: ArrayLike) -> PairedTest:
    """Did the same tasks, solved or not before and after, change more than a fair coin explains?

    `before` and `after`: bool [n], in the same order of tasks. Only tasks whose outcome changed
    count: under the null hypothesis each is a gain or a loss with probability 1/2, so p is the
    two-sided exact binomial tail; it is 1 when nothing changed. The tasks are taken as independent.
    Raises ValueError for empty input, unequal lengths and values other than True and False.
    Source: McNemar, Psychometrika 12 (1947) 153, with the binomial in place of its chi-square.
    """
    before, after = _outcomes(before, "before"), _outcomes(after, "after")
    if len(before) != len(after):
        raise ValueError(f"before has {len(before)} outcomes and after has {len(after)}")
    gains, losses = int((after & ~before).sum()), int((before & ~after).sum())
    changed = gains + losses
    p = float(stats.binomtest(gains, changed, 0.5).pvalue) if changed else 1.0
    return PairedTest(gains, losses, p)


def holm(p_values: ArrayLike) -> np.ndarray:
    """Adjust p values [m] for having made m comparisons; float64 [m] in the same order.

    Rejecting where the adjusted p is at most a keeps the chance of any false rejection within a,
    whatever the dependence between the comparisons. Raises ValueError for empty input and for
    values outside 0 to 1. Source: Holm, Scandinavian Journal of Statistics 6 (1979) 65.
    """
    p = _numbers(p_values, "p_values")
    if ((p < 0) | (p > 1)).any():
        raise ValueError("p_values must lie between 0 and 1")
    return multipletests(p, method="holm")[1]


def sign_flip(differences: ArrayLike) -> float:
    """Two-sided p of the mean of paired differences [n], exact over all 2^n choices of sign.

    Under the null hypothesis a difference is as likely to be -d as d; p is the share of sign
    choices whose mean is at least as far from 0 as the one observed, so never below 2 / 2^n. Sums
    equal in real arithmetic may differ in their last bits: they count as ties, up to 1e-12 of the
    sum of all |d|. Rounded differences are another matter: rounding breaks ties for good, so give
    counts where there are counts. Raises ValueError for empty or non-finite input and for more than
    20 values. Source: Fisher, The Design of Experiments (1935), section 21.
    """
    d = _numbers(differences, "differences")
    if len(d) > SIGN_FLIP_LIMIT:
        raise ValueError(
            f"{len(d)} differences are too many to enumerate: the limit is {SIGN_FLIP_LIMIT}"
        )
    sums = d[:1]  # its sign stays fixed: flipping all n signs changes no |sum|
    for size in d[1:]:
        sums = np.concatenate([sums + size, sums - size])  # ends as [2^(n-1)]
    slack = 1e-12 * np.abs(d).sum()
    return float(np.mean(np.abs(sums) >= abs(d.sum()) - slack))


def bootstrap_mean(
    values: ArrayLike, resamples: int = 50_000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Percentile bootstrap interval of the mean of values [n], one value a task.

    Tasks are drawn with replacement, n at a time, so it answers: what if the tasks had been others
    of the same kind? It says nothing of other training runs. With few tasks it is too narrow. Same
    seed, same interval; memory does not grow with resamples x n. Raises ValueError for fewer than
    two values, NaN, fewer than two resamples, and a level outside 0 to 1.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    v = _numbers(values, "values", at_least=2)
    return cluster_bootstrap(v, range(len(v)), resamples, seed, level)


def cluster_bootstrap(
    values: ArrayLike,
    clusters: Sequence[Hashable],
    resamples: int = 50_000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Percentile bootstrap interval of the mean of values [n], drawing whole clusters.

    `clusters` [n] labels each value, say by (family, description). Tasks of one cluster succeed and
    fail together; drawing them singly counts one fact many times and makes the interval too narrow.
    A resample's mean is over its values, so a larger cluster weighs more. Raises ValueError as
    `bootstrap_mean`, for unequal lengths and for fewer than two clusters.
    Source: Davison and Hinkley, Bootstrap Methods and their Application (1997), section 3.8.
    """
    v = _numbers(values, "values")
    if len(clusters) != len(v):
        raise ValueError(f"there are {len(v)} values and {len(clusters)} cluster labels")
    if resamples < 2:
        raise ValueError(f"resamples must be at least 2, got {resamples}")
    _check_level(level)
    number = {label: i for i, label in enumerate(dict.fromkeys(clusters))}
    if len(number) < 2:
        raise ValueError("one cluster alone says nothing of how clusters differ")
    index = [number[label] for label in clusters]  # [n]
    totals, sizes = np.bincount(index, weights=v), np.bincount(index)  # [clusters] each
    result = stats.bootstrap(
        (totals, sizes),
        lambda total, size, axis: total.sum(axis) / size.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, BATCH_ELEMENTS // len(number)),
        confidence_level=level,
        method="percentile",
        rng=seed,
    )
    return Interval(*map(float, result.confidence_interval))


def wilson(successes: int, trials: int, level: float = 0.95) -> Interval:
    """Interval for a rate after `successes` in `trials` independent tries; stays within 0 to 1.

    Unlike the estimate plus or minus two standard errors it has a sensible width at 0 and at n of
    n. Raises ValueError unless 0 <= successes <= trials and trials >= 1, and for a level outside 0
    to 1. Source: Wilson, Journal of the American Statistical Association 22 (1927) 209.
    """
    if not (trials >= 1 and 0 <= successes <= trials):
        raise ValueError(f"{successes} successes in {trials} trials cannot be")
    _check_level(level)
    found = stats.binomtest(successes, trials).proportion_ci(level, method="wilson")
    return Interval(float(found.low), float(found.high))


def prediction_interval(
    values: ArrayLike, level: float = 0.95, low: float = -math.inf, high: float = math.inf
) -> Interval:
    """Where ONE more run should fall, given values [n] of n earlier runs.

    mean ± t s sqrt(1 + 1/n), with s the sample standard deviation and t the (1 + level) / 2
    quantile of Student's t with n - 1 degrees of freedom; clipped to `low` and `high`, the bounds a
    count or a rate cannot leave. It assumes that all runs, the next one too, are independent draws
    from one normal distribution; counts near a bound and runs sharing a seed are not. Equal values
    give an interval of width 0: then find a reason for a range elsewhere. Raises ValueError for
    fewer than two values, NaN, a level outside 0 to 1, and values beyond the bounds.
    Source: Hahn and Meeker, Statistical Intervals (1991), chapter 4.
    """
    v = _numbers(values, "values", at_least=2)
    _check_level(level)
    if not (low <= v.min() and v.max() <= high):
        raise ValueError(f"values must lie within the bounds {low} and {high}")
    t = stats.t.ppf((1 + level) / 2, len(v) - 1)
    half = t * v.std(ddof=1) * math.sqrt(1 + 1 / len(v))
    return Interval(float(max(v.mean() - half, low)), float(min(v.mean() + half, high)))


def count_interval(values: ArrayLike, of: int, level: float = 0.95) -> Interval:
    """Where the count of ONE more run should fall, given counts [n] out of `of` in n earlier runs.

    `prediction_interval` on the scale arcsin sqrt((k + 3/8) / (of + 3/4)), on which a binomial
    count scatters alike near its bounds and in the middle, by 1 / (2 sqrt(of + 1/2)); the runs'
    scatter is taken to be no less than that. The result is rounded outwards to whole counts.
    Raises ValueError for fewer than two values, counts outside 0 to `of`, or a level outside 0 to
    1. Source: Anscombe, Biometrika 35 (1948) 246.
    """
    v = _numbers(values, "values", at_least=2)
    _check_level(level)
    if v.min() < 0 or v.max() > of:
        raise ValueError(f"counts must lie from 0 to {of}")
    angle = np.arcsin(np.sqrt((v + 3 / 8) / (of + 3 / 4)))
    scatter = max(angle.std(ddof=1), 1 / (2 * math.sqrt(of + 1 / 2)))
    t = stats.t.ppf((1 + level) / 2, len(v) - 1)
    half = t * scatter * math.sqrt(1 + 1 / len(v))
    ends = np.clip([angle.mean() - half, angle.mean() + half], 0, math.pi / 2)
    low, high = np.sin(ends) ** 2 * (of + 3 / 4) - 3 / 8
    return Interval(float(max(math.floor(low), 0)), float(min(math.ceil(high), of)))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k samples passes, unbiased from c passes among n samples.

    1 - C(n-c, k) / C(n, k), in whole numbers up to the one division, so nothing cancels. Raises
    ValueError unless 0 <= c <= n and 1 <= k <= n.
    Source: Chen et al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374), eq. 1.
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} passes among {n} samples cannot be")
    if not 1 <= k <= n:
        raise ValueError(f"k must lie between 1 and the {n} samples there are, got {k}")
    draws = math.comb(n, k)
    return (draws - math.comb(n - c, k)) / draws
