"""Small-sample statistics, against hand-computed values, enumeration and known distributions."""

import itertools
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, permutation_test
from scipy.stats import t as t_distribution

from glm_course.stats import (
    Interval,
    PairedTest,
    bootstrap_mean,
    cluster_bootstrap,
    count_interval,
    holm,
    mcnemar_exact,
    pass_at_k,
    prediction_interval,
    sign_flip,
    wilson,
)

NAN, INFINITY = float("nan"), float("inf")
# Held-out accuracy after 200 updates, ten paired seeds, as reported: k / 585 to four decimals.
ACCURACY = {
    "repeated_8": "0.5607 0.6205 0.5556 0.5932 0.5744 0.5590 0.5590 0.5402 0.5641 0.5692",
    "interleaved": "0.5812 0.5829 0.6017 0.6359 0.5863 0.5932 0.6137 0.6034 0.5915 0.6274",
    "curriculum": "0.5795 0.6085 0.5880 0.6325 0.5726 0.5709 0.6103 0.6017 0.5897 0.6034",
    "blocked": "0.4325 0.5453 0.5043 0.5145 0.4838 0.5179 0.5538 0.5060 0.4479 0.5453",
}
ACCURACY = {name: np.array(row.split(), dtype=float) for name, row in ACCURACY.items()}
CORRECT = {name: np.round(row * 585) for name, row in ACCURACY.items()}  # bytes right, of 585

finite = st.floats(-1e6, 1e6)
levels = st.floats(0.01, 0.99)


def outcomes(gains, losses, both=0, neither=0):
    before = [False] * gains + [True] * losses + [True] * both + [False] * neither
    after = [True] * gains + [False] * losses + [True] * both + [False] * neither
    return before, after


# McNemar


def test_sixteen_gains_and_no_loss_is_two_in_two_to_the_sixteen():
    test = mcnemar_exact(*outcomes(gains=16, losses=0, neither=8))
    assert test == PairedTest(gains=16, losses=0, p=3.0517578125e-05)
    assert test.p == 2 / 2**16


@pytest.mark.parametrize(
    "gains, losses, p",
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (1, 1, 1.0),
        (0, 3, 2 / 8),
        (5, 1, 2 * (1 + 6) / 64),
        (2, 8, 2 * (1 + 10 + 45) / 1024),
    ],
)
def test_mcnemar_by_hand(gains, losses, p):
    test = mcnemar_exact(*outcomes(gains, losses, both=3, neither=2))
    assert test[:2] == (gains, losses)
    assert test.p == pytest.approx(p, rel=1e-14)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 5), st.integers(1, 5))
def test_mcnemar_is_the_binomial_tail_of_the_tasks_that_changed(gains, losses, both, neither):
    changed = gains + losses
    tail = sum(math.comb(changed, i) for i in range(min(gains, losses) + 1))
    before, after = outcomes(gains, losses, both, neither)
    test = mcnemar_exact(before, after)
    assert test.p == pytest.approx(float(min(1, Fraction(2 * tail, 2**changed))), rel=1e-12, abs=0)
    assert mcnemar_exact(after, before) == PairedTest(losses, gains, test.p)


def test_mcnemar_takes_arrays_and_zeros_and_ones():
    assert mcnemar_exact(np.array([False, True]), [1, 1]) == PairedTest(1, 0, 1.0)


@pytest.mark.parametrize(
    "before, after, sentence",
    [
        ([], [], "before must be a list of at least 1"),
        ([True], [True, False], "before has 1 outcomes and after has 2"),
        ([True, 2], [True, False], "before must hold only True and False"),
        ([True, 0.5], [True, False], "before must hold only True and False"),
        ([True], [NAN], "after must be finite numbers"),
        ([True], [None], "after must be finite numbers"),
        ([[True]], [[True]], "before must be a list"),
    ],
)
def test_mcnemar_refuses_what_is_not_paired_outcomes(before, after, sentence):
    with pytest.raises(ValueError, match=sentence):
        mcnemar_exact(before, after)


# Holm


def test_holm_by_hand():
    # sorted: 0.01 x 4, 0.02 x 3, 0.03 x 2 but no less than the one before, 0.9 x 1
    assert holm([0.03, 0.9, 0.01, 0.02]) == pytest.approx([0.06, 0.9, 0.04, 0.06], rel=1e-14)


def test_holm_of_one_p_is_itself():
    assert holm([0.3]).tolist() == [0.3]


def test_seven_unremarkable_comparisons_all_come_out_at_one():
    assert holm([1.0, 1.0, 1.0, 0.5, 1.0, 0.375, 1.0]).tolist() == [1.0] * 7


@settings(max_examples=12, deadline=None)  # statsmodels collects garbage at every call: 0.15 s
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_the_step_down_rule(p_values):
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    expected, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, p_values[i] * (len(p_values) - rank)))
        expected[i] = running
    assert holm(p_values) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "p_values, sentence",
    [
        ([], "at least 1"),
        ([0.5, -0.1], "must lie between 0 and 1"),
        ([1.1], "must lie between 0 and 1"),
        ([0.5, NAN], "must be finite"),
        (0.5, "must be a list"),
    ],
)
def test_holm_refuses_what_is_no_list_of_p_values(p_values, sentence):
    with pytest.raises(ValueError, match=sentence):
        holm(p_values)


# Sign flips


def test_ten_seeds_that_agree_are_two_choices_of_1024():
    assert sign_flip(np.arange(1, 11)) == 2 / 1024 == 0.001953125
    assert sign_flip(-np.arange(1.0, 11)) == 2 / 1024


@pytest.mark.parametrize(
    "differences, p",
    [
        ([5.0], 1.0),
        ([0.0, 0.0], 1.0),
        ([1, 2], 2 / 4),
        ([1, -2], 1.0),
        ([3, 2, -1], 4 / 8),  # |sum| 4 or more: 3+2+1 and 3+2-1, and their opposites
        ([1, 1, 1, -1], 10 / 16),  # |sum| 2 or more: all choices but the 6 with two of each
    ],
)
def test_sign_flip_by_hand(differences, p):
    assert sign_flip(differences) == p


@pytest.mark.parametrize(
    "one, other, reported, of_1024",
    [
        ("interleaved", "repeated_8", 0.0137, 14),
        ("interleaved", "blocked", 0.00195, 2),
        ("curriculum", "interleaved", 0.2148, 220),
        ("curriculum", "repeated_8", 0.0117, 12),
    ],
)
def test_reported_p_values_of_the_pretraining_studies(one, other, reported, of_1024):
    p = sign_flip(CORRECT[one] - CORRECT[other])
    assert p == of_1024 / 1024
    assert round(p, len(str(reported)) - 2) == reported
    # accuracies, not counts: the same ties, now up to the last bits
    assert sign_flip(CORRECT[one] / 585 - CORRECT[other] / 585) == p


def test_reported_accuracies_are_whole_counts_and_rounding_them_breaks_ties():
    for name, row in ACCURACY.items():
        assert (np.round(CORRECT[name] / 585, 4) == row).all()
    assert sign_flip(ACCURACY["curriculum"] - ACCURACY["interleaved"]) == 200 / 1024


@given(st.lists(st.integers(-6, 6), min_size=1, max_size=9), st.sampled_from([1, 0.1, 1 / 585]))
def test_sign_flip_counts_ties_in_spite_of_rounding(numbers, unit):
    flips = itertools.product((1, -1), repeat=len(numbers))
    sums = [abs(sum(s * d for s, d in zip(signs, numbers, strict=True))) for signs in flips]
    expected = sum(total >= abs(sum(numbers)) for total in sums) / len(sums)
    assert sign_flip([d * unit for d in numbers]) == expected
    assert sign_flip([d * unit for d in reversed(numbers)]) == expected


@settings(max_examples=25)
@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=7))
def test_sign_flip_agrees_with_scipy(numbers):
    result = permutation_test(
        (np.array(numbers, dtype=float),),
        lambda x, axis: x.sum(axis),  # whole numbers: no rounding to disagree about
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
    )
    assert sign_flip(numbers) == pytest.approx(result.pvalue, rel=1e-14)


@pytest.mark.parametrize(
    "differences, sentence",
    [
        ([], "at least 1"),
        ([1.0, NAN], "must be finite"),
        ([1.0, INFINITY], "must be finite"),
        ([1.0] * 21, "21 differences are too many to enumerate"),
    ],
)
def test_sign_flip_refuses_what_it_cannot_enumerate(differences, sentence):
    with pytest.raises(ValueError, match=sentence):
        sign_flip(differences)


# Bootstrap


# at these levels no jump of the binomial is within 4 standard errors of a simulated quantile
@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_bootstrap_of_a_rate_has_the_quantiles_of_the_binomial(level):
    interval = bootstrap_mean([True] * 16 + [False] * 8, level=level)
    tails = [(1 - level) / 2, (1 + level) / 2]
    assert interval == pytest.approx(binom.ppf(tails, 24, 16 / 24) / 24, abs=1e-12)


def test_bootstrap_depends_on_the_seed_alone():
    values = np.random.default_rng(7).normal(size=15)
    first = bootstrap_mean(values, resamples=500)
    assert first == bootstrap_mean(values, resamples=500, seed=0)
    assert first != bootstrap_mean(values, resamples=500, seed=1)


@given(st.lists(finite, min_size=2, max_size=12), st.integers(2, 60), st.integers(0, 99), levels)
def test_bootstrap_stays_within_the_values(values, resamples, seed, level):
    low, high = bootstrap_mean(values, resamples, seed, level)
    slack = 1e-9 * max(map(abs, values))
    assert min(values) - slack <= low <= high <= max(values) + slack


def test_a_higher_level_is_a_wider_interval():
    values = np.arange(20.0)
    widths = [np.diff(bootstrap_mean(values, level=level))[0] for level in (0.5, 0.8, 0.95)]
    assert widths == sorted(widths)
    assert widths[0] < widths[2] / 2


def test_bootstrap_memory_is_bounded():
    values = np.arange(2000.0)
    tracemalloc.start()
    bootstrap_mean(values, resamples=10_000)  # 20 million draws: 160 MB at once
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6


def test_a_cluster_weighs_by_its_size():
    # resamples of {one value 1; three values 0}: mean 1, 1/4 or 0 with chance 1/4, 1/2, 1/4
    clusters = ["a", "b", "b", "b"]
    assert cluster_bootstrap([1, 0, 0, 0], clusters, level=0.4) == Interval(0.25, 0.25)
    assert cluster_bootstrap([1, 0, 0, 0], clusters, level=0.95) == Interval(0.0, 1.0)


def test_copies_of_a_task_do_not_narrow_the_interval_of_clusters():
    values = np.array([0, 0.25, 0.5, 1, 1, 0.75])
    copies = np.repeat(values, 4)
    clusters = [("family", i // 4) for i in range(24)]
    single = bootstrap_mean(values)
    assert cluster_bootstrap(copies, clusters) == pytest.approx(single, abs=1e-12)
    naive = bootstrap_mean(copies)
    assert naive.high - naive.low < 0.6 * (single.high - single.low)


def test_the_order_of_values_within_clusters_does_not_matter():
    values, clusters = [1, 0, 3, 2, 5, 9], ["a", "b", "a", "c", "b", "c"]
    moved = cluster_bootstrap([3, 0, 1, 9, 5, 2], clusters, resamples=300)
    assert cluster_bootstrap(values, clusters, resamples=300) == moved


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"values": []}, "at least 2"),
        ({"values": [1.0]}, "at least 2"),
        ({"values": [1.0, NAN]}, "must be finite"),
        ({"values": [[1.0, 2.0]]}, "must be a list"),
        ({"values": [1, 2], "resamples": 1}, "resamples must be at least 2"),
        ({"values": [1, 2], "level": 0}, "level must lie between 0 and 1"),
        ({"values": [1, 2], "level": 1}, "level must lie between 0 and 1"),
        ({"values": [1, 2], "level": 95}, "level must lie between 0 and 1"),
        ({"values": [1, 2], "level": NAN}, "level must lie between 0 and 1"),
    ],
)
def test_bootstrap_refuses_bad_input(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        bootstrap_mean(**arguments)


@pytest.mark.parametrize(
    "values, clusters, sentence",
    [
        ([], [], "at least 1"),
        ([1, 2], ["a"], "2 values and 1 cluster labels"),
        ([1, 2], ["a", "a"], "one cluster alone"),
        ([1, NAN], ["a", "b"], "must be finite"),
    ],
)
def test_cluster_bootstrap_refuses_bad_input(values, clusters, sentence):
    with pytest.raises(ValueError, match=sentence):
        cluster_bootstrap(values, clusters)


# Wilson


def test_wilson_solves_the_equation_it_comes_from():
    # the bounds are the rates r with |x/n - r| = z sqrt(r (1 - r) / n)
    z = 1.959963984540054
    for bound in wilson(16, 24):
        assert abs(16 / 24 - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / 24))


def test_wilson_at_the_ends():
    z2 = 1.959963984540054**2
    assert wilson(0, 24) == pytest.approx((0, z2 / (24 + z2)), abs=1e-12)
    assert wilson(24, 24) == pytest.approx((24 / (24 + z2), 1), abs=1e-12)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), levels)
def test_wilson_holds_the_rate_stays_a_rate_and_mirrors(counts, level):
    successes, trials = counts
    low, high = wilson(successes, trials, level)
    assert 0 <= low <= successes / trials <= high <= 1
    mirrored = wilson(trials - successes, trials, level)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((low, high), abs=1e-12)


@pytest.mark.parametrize(
    "successes, trials", [(0, 0), (-1, 5), (6, 5), (0, -1), (NAN, 5), (1, NAN)]
)
def test_wilson_refuses_impossible_counts(successes, trials):
    with pytest.raises(ValueError, match="cannot be"):
        wilson(successes, trials)


@pytest.mark.parametrize("level", [0, 1, -0.5, NAN])
def test_wilson_refuses_a_level_that_is_no_probability(level):
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        wilson(1, 2, level)


# Prediction interval


def test_prediction_interval_by_hand():
    # mean 2, s 1, t with 2 degrees of freedom at 0.975: 4.30265273
    half = 4.30265273 * math.sqrt(1 + 1 / 3)
    assert prediction_interval([1, 2, 3]) == pytest.approx((2 - half, 2 + half), rel=1e-8)


def test_prediction_interval_holds_the_next_run_as_often_as_it_says():
    runs = np.random.default_rng(3).normal(10, 4, size=(4000, 6))
    held = 0
    for *earlier, following in runs:
        low, high = prediction_interval(earlier, level=0.9)
        held += low <= following <= high
    assert held / 4000 == pytest.approx(0.9, abs=4 * math.sqrt(0.9 * 0.1 / 4000))


def test_prediction_interval_is_clipped_to_what_can_occur():
    wide = prediction_interval([15, 22, 8, 19, 23])
    assert wide.low < 0 and wide.high > 24
    assert prediction_interval([15, 22, 8, 19, 23], low=0, high=24) == Interval(0, 24)
    assert prediction_interval([15, 22, 8, 19, 23], low=0) == Interval(0, wide.high)


@given(st.lists(finite, min_size=2, max_size=10), levels, finite)
def test_prediction_interval_moves_with_the_values(values, level, shift):
    low, high = prediction_interval(values, level)
    assert low <= np.mean(values) <= high
    moved = prediction_interval([v + shift for v in values], level)
    assert moved == pytest.approx((low + shift, high + shift), rel=1e-6, abs=1e-3)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"values": []}, "at least 2"),
        ({"values": [1.0]}, "at least 2"),
        ({"values": [1.0, NAN]}, "must be finite"),
        ({"values": [1, 2], "level": 1}, "level must lie between 0 and 1"),
        ({"values": [1, 25], "low": 0, "high": 24}, "within the bounds 0 and 24"),
        ({"values": [-1, 5], "low": 0, "high": 24}, "within the bounds 0 and 24"),
        ({"values": [1, 2], "low": 5, "high": 0}, "within the bounds 5 and 0"),
        ({"values": [1, 2], "high": NAN}, "within the bounds"),
    ],
)
def test_prediction_interval_refuses_bad_input(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        prediction_interval(**arguments)


# pass@k


@pytest.mark.parametrize(
    "n, c, k, value",
    [
        (8, 0, 8, 0.0),
        (8, 1, 8, 1.0),
        (8, 3, 1, 3 / 8),
        (4, 2, 2, 5 / 6),
        (5, 4, 2, 1.0),
    ],
)
def test_pass_at_k_by_hand(n, c, k, value):
    assert pass_at_k(n, c, k) == value


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass(counts):
    n, c, k = counts
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == float(Fraction(sum(map(any, subsets)), len(subsets)))


def test_pass_at_k_is_accurate_where_one_minus_the_ratio_would_cancel():
    n = 10**17
    assert 1 - (n - 1) / n == 0
    assert pass_at_k(n, 1, 1) == 1e-17


@pytest.mark.parametrize(
    "n, c, k, sentence",
    [
        (8, 9, 1, "9 passes among 8 samples"),
        (8, -1, 1, "-1 passes among 8 samples"),
        (8, 4, 9, "k must lie between 1 and the 8 samples"),
        (8, 4, 0, "k must lie between 1 and the 8 samples"),
        (0, 0, 1, "k must lie between 1 and the 0 samples"),
        (8, NAN, 1, "passes among 8 samples"),
    ],
)
def test_pass_at_k_refuses_impossible_counts(n, c, k, sentence):
    with pytest.raises(ValueError, match=sentence):
        pass_at_k(n, c, k)


def test_count_interval_of_equal_counts_is_as_wide_as_binomial_chance():
    low, high = count_interval([12] * 6, 24)
    assert low < 12 < high
    angle = np.arcsin(np.sqrt((12 + 3 / 8) / (24 + 3 / 4)))
    half = t_distribution.ppf(0.975, 5) / (2 * np.sqrt(24.5)) * np.sqrt(7 / 6)
    ends = np.sin([angle - half, angle + half]) ** 2 * 24.75 - 3 / 8
    assert (low, high) == (np.floor(ends[0]), np.ceil(ends[1]))


def test_count_interval_stays_possible_and_need_not_hold_everything():
    assert count_interval([0] * 6, 64).low == 0
    assert 0 < count_interval([0] * 6, 64).high < 8
    assert count_interval([24] * 6, 24).high == 24
    low, high = count_interval([17, 8, 6, 5, 2, 4], 24)
    assert low == 0 and 17 < high < 24


@given(st.lists(st.integers(0, 30), min_size=2, max_size=8))
def test_count_interval_mirrors_when_hits_and_misses_swap(counts):
    low, high = count_interval(counts, 30)
    other = count_interval([30 - c for c in counts], 30)
    assert (other.low, other.high) == (30 - high, 30 - low)


@pytest.mark.parametrize("counts", [[1], [1, 31], [-1, 2], [1, float("nan")]])
def test_count_interval_refuses_what_is_no_count(counts):
    with pytest.raises(ValueError):
        count_interval(counts, 30)
