"""The compiled recurrence against the reference, and what `solve` promises at any budget."""

import dataclasses
import itertools
import random
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rotor
from oracles.recurrence import ReferenceTable
from rotor import Chain, InfeasibleBudgetError, TableTooLargeError, simulate, solve, solve_table
from rotor.solver.table import CompiledTable, fastest_within
from zoo.chains import chains, random_chain


@given(chains(12, options=3), st.integers(1, 4), st.booleans())
def test_compiled_equals_reference(chain, unit, share):
    reference = ReferenceTable(chain, unit, 70)
    compiled = CompiledTable(chain, unit, 70, share=share)
    assert compiled.smallest_slot == reference.smallest_slot
    for m in range(71):
        assert compiled.makespan(m) == reference.makespan(m)
    for m in range(compiled.smallest_slot, 71, 9):
        timeline = simulate(chain, compiled.ops(m))
        assert timeline.makespan_ms == compiled.makespan(m)
        assert timeline.peak_bytes <= m * unit
        assert compiled.tight_ops(m) == reference.tight_ops(m)


def repeated_chain(blocks, repeats, seed=0):
    """A few kinds of stages, again and again."""
    kinds = random_chain(random.Random(seed), blocks, options=2).stages
    return Chain(kinds * repeats)


@pytest.mark.parametrize(("blocks", "repeats"), [(1, 12), (2, 6), (3, 5)])
def test_shared_cells_change_nothing(blocks, repeats):
    chain = repeated_chain(blocks, repeats)
    shared = CompiledTable(chain, 1, 120)
    plain = CompiledTable(chain, 1, 120, share=False)
    assert shared.table_bytes < plain.table_bytes
    assert [shared.makespan(m) for m in range(121)] == [plain.makespan(m) for m in range(121)]
    assert shared.ops(120) == plain.ops(120)


def test_identical_stages_need_two_cells_a_length():
    from rotor import _core
    from rotor.solver.table import chain_tuples

    chain = repeated_chain(1, 50)
    table = _core.ChainTable(chain_tuples(chain), 1, 100)
    assert table.cell_count == 2 * 50 - 1  # every run, inside the chain or at its end


def test_names_and_keys_do_not_prevent_sharing_but_numbers_do():
    chain = repeated_chain(1, 4)
    renamed = Chain(tuple(dataclasses.replace(s, name=str(i)) for i, s in enumerate(chain.stages)))
    slower = Chain((dataclasses.replace(chain.stages[0], forward_time_ms=99.0), *chain.stages[1:]))
    assert CompiledTable(renamed, 1, 50).table_bytes == CompiledTable(chain, 1, 50).table_bytes
    assert CompiledTable(slower, 1, 50).table_bytes > CompiledTable(chain, 1, 50).table_bytes


@given(chains(8, options=3))
def test_more_memory_is_never_slower(chain):
    table = CompiledTable(chain, 1, 100)
    makespans = [table.makespan(m) for m in range(101)]
    assert makespans == sorted(makespans, reverse=True)


@given(chains(8, options=3, largest=900), st.integers(1, 60), st.floats(0, 1.2))
def test_smallest_budget_is_accepted_and_one_byte_less_refused(chain, slots, more):
    """Whatever the rounding, what is feasible in bytes is solved, within the budget."""
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(chain, 0, slots=slots)
    least = caught.value.minimum_bytes
    if least > 0:
        with pytest.raises(InfeasibleBudgetError, match=f"at least {least} bytes"):
            solve(chain, least - 1, slots=slots)
    for budget in (least, least + int(more * least)):
        schedule = solve(chain, budget, slots=slots)
        timeline = simulate(chain, schedule.ops)
        assert timeline.peak_bytes == schedule.peak_bytes <= budget
        assert timeline.makespan_ms == schedule.makespan_ms


@given(chains(8, options=2, largest=50), st.integers(2, 7))
def test_scaling_bytes_and_budget_changes_nothing(chain, factor):
    def scale(stage):
        return dataclasses.replace(
            stage,
            output_bytes=stage.output_bytes * factor,
            output_grad_bytes=stage.output_grad_bytes * factor,
            forward_peak_bytes=stage.forward_peak_bytes * factor,
            options=tuple(
                dataclasses.replace(
                    option,
                    saved_bytes=option.saved_bytes * factor,
                    fwd_overhead_bytes=option.fwd_overhead_bytes * factor,
                    bwd_overhead_bytes=option.bwd_overhead_bytes * factor,
                )
                for option in stage.options
            ),
        )

    scaled = Chain(tuple(scale(stage) for stage in chain.stages))
    small, large = CompiledTable(chain, 5, 90), CompiledTable(scaled, 5 * factor, 90)
    assert [small.makespan(m) for m in range(91)] == [large.makespan(m) for m in range(91)]


@given(chains(9, options=3))
def test_unlimited_budget_recomputes_nothing(chain):
    schedule = solve(chain, 10**9)
    assert schedule.forward_count == len(chain)
    fastest = [min(o.fwd_time_ms + o.bwd_time_ms for o in s.options) for s in chain.stages]
    assert schedule.makespan_ms == sum(fastest)


@given(chains(8, options=2, largest=2000), st.floats(1.0, 2.5))
def test_candidates_are_distinct_ever_faster_and_begin_within_the_budget(chain, factor):
    table = solve_table(chain, int(3 * table_minimum(chain)), slots=40)
    budget = int(table.smallest_feasible_bytes * factor)
    found = list(table.candidates(budget))
    assert found
    assert found[0].peak_bytes <= budget
    times = [schedule.makespan_ms for schedule in found]
    assert all(later < earlier for earlier, later in itertools.pairwise(times))
    assert len({schedule.ops for schedule in found}) == len(found)
    assert fastest_within(found, budget).peak_bytes <= budget
    assert table.solve(budget).makespan_ms == fastest_within(found, budget).makespan_ms


def table_minimum(chain):
    return max(solve_table(chain, 1).smallest_feasible_bytes, 1)


def test_looking_above_the_budget_gains_what_rounding_lost():
    """Coarse slots plus headroom are never slower than coarse slots alone, and often faster."""
    gains = 0
    for seed in range(20):
        chain = random_chain(random.Random(seed), 12, options=2, largest=5000)
        budget = int(1.3 * table_minimum(chain))
        plain = solve(chain, budget, slots=40, headroom=1.0)
        inflated = solve(chain, budget, slots=40, headroom=1.5)
        exact = solve(chain, budget, slots=4000, headroom=1.0)
        assert inflated.makespan_ms <= plain.makespan_ms
        gains += inflated.makespan_ms < plain.makespan_ms
        assert inflated.makespan_ms >= exact.makespan_ms * 0.99
    assert gains >= 5


def test_a_table_that_is_too_large_is_refused_before_it_is_made():
    chain = random_chain(random.Random(1), 40)
    with pytest.raises(TableTooLargeError, match=r"40 stages and .* slots takes") as caught:
        solve(chain, table_minimum(chain) + 5, slots=500, max_table_bytes=1000)
    assert caught.value.needed_bytes > caught.value.limit_bytes == 1000
    huge = random_chain(random.Random(1), 40, largest=10**9)
    with pytest.raises(TableTooLargeError):  # terabytes: nothing has been allocated
        CompiledTable(huge, 1, 10**10, max_table_bytes=10**9)


def test_table_is_within_its_bound_and_long_chains_meet_no_recursion_limit():
    chain = repeated_chain(1, 1500)
    schedule = solve(chain, table_minimum(chain) * 12, slots=500)
    assert len(schedule.ops) > 2 * len(chain)
    mixed = random_chain(random.Random(3), 150, largest=900)
    table = CompiledTable(mixed, 40, 500)
    assert table.table_bytes <= 2 * 150**2 * 500


def test_ten_options_are_as_exact_as_one():
    chain = random_chain(random.Random(8), 7, options=10)
    table, reference = CompiledTable(chain, 1, 80), ReferenceTable(chain, 1, 80)
    assert [table.makespan(m) for m in range(81)] == [reference.makespan(m) for m in range(81)]


@pytest.mark.parametrize(("slots", "feasible"), [(0, 0), (31, 4), (32, 4), (33, 4), (257, 12)])
def test_blocks_of_slots_leave_no_seam(slots, feasible):
    """The compiled table is filled 32 slots at a time; sizes here span several of them, or none."""
    solved = 0
    for seed in range(12):
        chain = random_chain(random.Random(seed), 9, options=5, largest=[20, 60, 200][seed % 3])
        compiled, reference = CompiledTable(chain, 3, slots), ReferenceTable(chain, 3, slots)
        rows = [[table.makespan(m) for m in range(slots + 1)] for table in (compiled, reference)]
        assert rows[0] == rows[1]
        if compiled.smallest_slot <= slots:
            solved += 1
            assert simulate(chain, compiled.ops(slots)).makespan_ms == rows[0][slots]
    assert solved == feasible


def test_solving_releases_the_gil():
    """Another thread makes progress while the extension computes (a lock would starve it)."""
    chain = random_chain(random.Random(5), 150, largest=900)
    counted, done = [], threading.Event()

    def count():
        while not done.wait(0):
            counted.append(1)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = len(counted)
        CompiledTable(chain, 10, 2000)
        during = len(counted) - before
    finally:
        done.set()
        thread.join()
    assert during > 100


@pytest.mark.parametrize(
    ("arguments", "message"), [({"slots": 0}, "slots is 0"), ({"headroom": 0.5}, "headroom is 0.5")]
)
def test_nonsense_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        solve(random_chain(random.Random(0), 3), 50, **arguments)


def test_solver_modules_load_without_torch():
    """Runs the chain and solver files in a process where importing torch fails."""
    code = (
        "import sys, types, pathlib\n"
        "sys.modules['torch'] = None\n"
        f"package = types.ModuleType('rotor'); package.__path__ = [{str(rotor.__path__[0])!r}]\n"
        "sys.modules['rotor'] = package\n"
        "import rotor.schedules.simulate, rotor.schedules.simulate, rotor.solver\n"
        "import rotor.errors, rotor.solver.table\n"
        "try:\n    import torch\nexcept ImportError:\n    print('loaded')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "loaded", result.stderr
