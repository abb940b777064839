"""The search for an interval, on curves of our own: no model, and no assumption that a curve is monotone."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lens_geometry.experiments.search import Line, edge, search, wanted

LINE = Line(low=-1.0, high=3.0, step=0.25, tolerance=0.02)


def find(curve, line=LINE, bound=1.0):
    """Both edges of one curve under a bound, and all that was tried."""
    tried = search(["curve"], lambda ask: {"curve": {x: curve(x) for x in ask["curve"]}}, [lambda y: y < bound], line)
    inside = {x: y < bound for x, y in tried["curve"].items()}
    return edge(inside, line, -1), edge(inside, line, 1), inside


def test_a_valley_has_both_edges_to_the_tolerance():
    low, high, _ = find(lambda s: ((s - 1) / 0.7) ** 2)
    assert 0.3 <= low.inside <= 0.32
    assert 1.68 <= high.inside <= 1.7
    assert low.outside < 0.3 < low.inside
    assert high.inside < 1.7 < high.outside
    assert not any((low.open, high.open, low.reentrant, high.reentrant))


def test_a_flat_curve_is_open_to_the_limits_and_costs_the_grid_alone():
    low, high, inside = find(lambda s: 0.0)
    assert (low.inside, high.inside) == (-1.0, 3.0)
    assert low.open
    assert high.open
    assert sorted(inside) == [k / 4 for k in range(-4, 13) if k != 4]


def test_leaving_at_the_first_step_gives_an_interval_about_1_that_is_as_short_as_it_is():
    low, high, _ = find(lambda s: abs(s - 1) / 0.03)
    assert 0.97 < low.inside <= 1.0
    assert 1.0 <= high.inside < 1.03
    low, high, _ = find(lambda s: 0.0 if s == 1 else 5.0)  # not even the smallest step
    assert (low.inside, high.inside) == (1.0, 1.0)
    assert 1 - 0.02 <= low.outside < 1


def test_a_bump_ends_the_interval_though_the_curve_comes_back():
    low, high, inside = find(lambda s: 2.0 if 1.4 < s < 1.8 else 0.0)
    assert 1.38 <= high.inside <= 1.4
    assert high.reentrant  # 2.0 was tried and is inside again
    assert not high.open
    assert inside[2.0]
    assert low.open


def test_a_re_entry_further_out_than_was_asked_for_is_not_looked_at():
    def curve(s):
        return 0.0 if s < 1.4 or s > 2.1 else 2.0

    for beyond, seen in ((0, False), (2, False), (3, True)):
        _, high, inside = find(curve, Line(-1, 3, 0.25, 0.02, beyond=beyond))
        assert high.reentrant is seen
        assert max(inside) == 1.5 + 0.25 * beyond


def test_a_bump_that_only_bisection_meets_shrinks_the_interval():
    _, high, inside = find(lambda s: 2.0 if 1.55 < s < 1.7 or s > 1.72 else 0.0)  # 1.75 is out, then 1.625 is too
    assert 1.5 <= high.inside <= 1.55
    assert all(inside[x] for x in inside if 1 < x <= high.inside)


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_what_is_not_finite_is_outside(lost):
    low, high, _ = find(lambda s: lost if s < 0.4 else 0.0)
    assert 0.4 <= low.inside <= 0.42
    assert high.open


def test_two_criteria_share_what_was_tried_and_each_gets_its_edge():
    rounds = []

    def evaluate(ask):
        rounds.append(ask)
        return {name: {x: abs(x - 1) * slope for x in ask[name]} for name, slope in (("a", 1), ("b", 2)) if name in ask}

    tried = search(["a", "b"], evaluate, [lambda y: y < 1.1, lambda y: y < 0.5], LINE)
    for name, slope in (("a", 1), ("b", 2)):
        for bound in (1.1, 0.5):
            inside = {x: y < bound for x, y in tried[name].items()}
            assert edge(inside, LINE, 1).inside == pytest.approx(1 + bound / slope, abs=0.02)
            assert wanted(inside, LINE) == []
    asked = [(name, x) for ask in rounds for name, points in ask.items() for x in points]
    assert len(asked) == len(set(asked))  # nothing twice
    assert len(rounds) < 10  # both targets, both sides and both criteria in one round


def test_whole_numbers_are_searched_to_the_last_one_inside():
    line = Line(low=0, high=23, step=5, tolerance=1, start=0, digits=0)
    for last in range(24):
        low, high, inside = find(lambda k, last=last: k - last, line, bound=0.5)
        assert high.inside == last
        assert low.inside == 0
        assert all(x == int(x) for x in inside)
    assert find(lambda k: 0, Line(0, 0, 1, 1, start=0, digits=0))[2] == {}


def test_limits_that_the_grid_does_not_meet_are_tried_themselves():
    _, _, inside = find(lambda s: 0.0, Line(0.9, 1.7, 0.25, 0.02))
    assert sorted(inside) == [0.9, 1.25, 1.5, 1.7]
    assert find(lambda s: 0.0, Line(1.0, 1.2, 0.25, 0.02))[0] == (1.0, None, False)


SCALES = st.floats(-1.4, 3.4, allow_nan=False)


@given(left=st.floats(0.001, 2.5), right=st.floats(0.001, 2.5), step=st.sampled_from([0.1, 0.25, 0.7]))
@settings(deadline=None)
def test_edges_of_a_monotone_curve_are_within_the_tolerance_of_its_crossings(left, right, step):
    line = Line(-1.0, 3.0, step, 0.02)
    low, high, _ = find(lambda s: (1 - s) / left if s < 1 else (s - 1) / right, line)
    for found, crossing, limit in ((low, 1 - left, -1.0), (high, 1 + right, 3.0)):
        if found.open:
            assert found.inside == limit
            assert abs(crossing - 1) > abs(limit - 1)
        else:
            assert abs(found.inside - 1) <= abs(crossing - 1) + 1e-9
            assert abs(found.inside - crossing) <= 0.02 + 1e-9
        assert not found.reentrant


@given(
    outside=st.lists(st.tuples(SCALES, st.floats(0.01, 1.0)), max_size=5),
    step=st.sampled_from([0.1, 0.25, 0.3]),
    beyond=st.integers(0, 4),
)
@settings(deadline=None)
def test_whatever_the_curve_the_interval_holds_1_and_nothing_tried_in_it_is_outside(outside, step, beyond):
    line = Line(-1.0, 3.0, step, 0.02, beyond)

    def curve(s):
        return math.nan if any(start < s < start + width for start, width in outside) else 0.0

    low, high, inside = find(curve, line)
    assert low.inside <= 1 <= high.inside
    assert all(inside[x] for x in inside if low.inside <= x <= high.inside)
    for found, limit in ((low, -1.0), (high, 3.0)):
        if found.open:
            assert found.inside == limit
        else:
            assert not inside[found.outside]
            assert abs(found.outside - found.inside) <= 0.02 + 1e-9
    steps = [x for x in line.grid(1) if x <= high.inside]
    assert all(x in inside for x in steps)  # no step of the coarse grid was skipped
