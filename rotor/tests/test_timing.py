"""Prices of a stage from several rounds, and when rounds end; no clock is read."""

import pytest

from rotor.runtime.timing import MAX_ROUNDS, MIN_ROUNDS, PATIENCE_MS, Prices, StageTimes, in_rounds


def times(factor=1.0, *, first=1.2, again=5.5, emptied=3.4):
    return StageTimes(*(factor * ms for ms in (first, 0.9, 1.0, 2.0, again, emptied)))


def counted(lengths):
    """Visits of two stages that take so much longer than they need, and how many were made."""
    visits = []

    def visit_all():
        visits.append(lengths(len(visits)))
        return [times(factor) for factor in visits[-1]]

    in_rounds(visit_all)
    return len(visits)


def test_rounds_end_when_the_two_least_of_each_stage_agree():
    assert counted(lambda turn: (1, 1)) == MIN_ROUNDS
    # each round is disturbed, but never at the same stage twice
    assert counted(lambda turn: (1 + (turn == 0), 1 + (turn == 1))) == MIN_ROUNDS
    assert counted(lambda turn: (1, 9 - turn)) == MAX_ROUNDS


def test_long_stages_are_visited_once():
    assert counted(lambda turn: (PATIENCE_MS, 1)) == 1


def test_prices_have_a_graph_of_its_own_and_fetching_in_them():
    prices = Prices.of([times(), times(2.0)], always_record=False)
    assert (prices.record, prices.backward) == (pytest.approx(1.0 + 0.3), 2.0)
    assert prices.forward == pytest.approx(0.9 + 0.3 + (5.5 - 3.9))
    assert prices.forget == pytest.approx((3.4 - 3.0) + (5.5 - 3.9))


def test_noise_makes_no_price_negative_and_a_recording_stage_pays_for_it():
    prices = Prices.of([times(first=0.5, again=1.0, emptied=1.0)], always_record=True)
    assert (prices.forward, prices.forget) == (1.0, 0.0)
