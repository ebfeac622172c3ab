"""The data types: validation, hashing, and what the errors say."""

import pickle

import pytest

import rotor
from rotor import Chain, InfeasibleBudgetError, InvalidChainError, Option, Stage, solve
from rotor._core import ChainTable
from rotor.errors import TableTooLargeError, format_bytes


def option(**changes):
    values = {
        "saved_bytes": 4,
        "fwd_time_ms": 1.0,
        "bwd_time_ms": 2.0,
        "fwd_overhead_bytes": 0,
        "bwd_overhead_bytes": 1,
    }
    return Option(**{**values, **changes})


def stage(**changes):
    values = {
        "name": "s",
        "options": (option(),),
        "output_bytes": 2,
        "output_grad_bytes": 2,
        "forward_time_ms": 1.0,
        "forward_peak_bytes": 2,
    }
    return Stage(**{**values, **changes})


@pytest.mark.parametrize("field", ["saved_bytes", "fwd_overhead_bytes", "bwd_overhead_bytes"])
def test_negative_bytes_are_refused_by_name(field):
    with pytest.raises(rotor.InvalidChainError, match=f"{field} is -1"):
        option(**{field: -1})


@pytest.mark.parametrize("time_ms", [-1.0, float("inf"), float("nan")])
def test_times_that_are_no_times_are_refused(time_ms):
    with pytest.raises(rotor.InvalidChainError, match="finite"):
        stage(forward_time_ms=time_ms)


def test_a_stage_without_options_and_a_chain_without_stages_are_refused():
    with pytest.raises(rotor.InvalidChainError, match=r"stage 's' has no option"):
        stage(options=())
    with pytest.raises(rotor.InvalidChainError, match="at least one stage"):
        Chain(())


def test_chains_are_values():
    first, second = Chain((stage(), stage())), Chain((stage(), stage()))
    assert first == second
    assert hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(first)) == first
    assert first != Chain((stage(), stage(output_bytes=3)))


def test_fastest_option_prefers_time_and_then_memory():
    ways = (option(bwd_time_ms=3.0), option(saved_bytes=9), option(saved_bytes=5))
    assert Chain((stage(options=ways),)).fastest_options == (2,)


def test_ops_print_as_in_the_paper():
    ops = (
        rotor.ForwardCheckpoint(0),
        rotor.ForwardNoGrad(1),
        rotor.ForwardEnableGrad(2),
        rotor.Backward(2, 1),
    )
    assert [str(op) for op in ops] == ["Fc(0)", "Fn(1)", "Fe(2)", "B(2,1)"]


def test_errors_carry_their_numbers_through_pickle():
    error = rotor.InfeasibleBudgetError(10, 20, 3)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.budget_bytes, copy.minimum_bytes, str(copy)) == (10, 20, str(error))
    table = rotor.TableTooLargeError(100, 10, 3, 500)
    assert pickle.loads(pickle.dumps(table)).needed_bytes == 100


def test_an_unpickled_refusal_has_the_whole_text():
    error = rotor.InfeasibleBudgetError(10, 20, 3, "This is for Revolve; others may need less.")
    copy = pickle.loads(pickle.dumps(error))
    assert copy.detail == error.detail
    assert str(copy) == str(error)


def test_byte_counts_are_written_exactly():
    assert format_bytes(1288490188) == "1.20 GiB (1288490188 bytes)"
    assert format_bytes(17) == "17 bytes"


def _chain_of(size_bytes, stages=5):
    option = Option(size_bytes, 1.0, 2.0, size_bytes, size_bytes)
    stage = Stage("s", (option,), size_bytes, size_bytes, 1.0, size_bytes)
    return Chain((stage,) * stages)


@pytest.mark.parametrize("size_bytes", [1 << 53, 1 << 60, (1 << 62) + 1, 1 << 70])
def test_sizes_whose_sums_could_overflow_are_refused(size_bytes):
    with pytest.raises(InvalidChainError, match=r"2\^53"):
        _chain_of(size_bytes)


def test_the_largest_sizes_that_are_taken_are_solved_exactly():
    unit = (1 << 53) // 30
    large, small = _chain_of(unit), _chain_of(1)
    for stages_kept in range(5, 40):
        budget = stages_kept * unit
        found = []
        for chain, limit in ((large, budget), (small, stages_kept)):
            try:
                found.append(solve(chain, limit, slots=stages_kept).ops)
            except InfeasibleBudgetError as error:
                found.append(error.minimum_bytes // (unit if chain is large else 1))
        assert found[0] == found[1]


def test_more_slots_than_any_memory_has_are_refused_by_the_size_of_their_table():
    chain = _chain_of((1 << 53) // 30)
    with pytest.raises(TableTooLargeError):
        solve(chain, 1 << 50, slots=1 << 62)


def test_the_core_refuses_them_too():
    stage = (1 << 53, 1 << 53, 1 << 53, 1.0, [(1 << 53, 0, 0, 3.0)])
    with pytest.raises(ValueError, match=r"2\^53"):
        ChainTable([stage] * 3, 1, 5)
