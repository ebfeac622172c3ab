"""The recurrence against Dijkstra over memory states, which knows only what the ops do."""

from hypothesis import given
from hypothesis import strategies as st

from oracles.best_schedule import exhaustive_search
from oracles.recurrence import ReferenceTable
from rotor import simulate
from zoo.chains import chains

INFINITY = float("inf")


def makespan(found):
    return INFINITY if found is None else found[0]


@given(chains(4, options=3), st.integers(0, 12))
def test_recurrence_is_optimal_among_persistent_schedules(chain, above):
    table = ReferenceTable(chain, 1, 60)
    budget = min(table.smallest_slot + above, 60)
    assert table.makespan(budget) == makespan(exhaustive_search(chain, budget))


@given(chains(5, options=2), st.integers(0, 20))
def test_recurrence_is_optimal_at_five_stages(chain, above):
    table = ReferenceTable(chain, 1, 60)
    budget = min(table.smallest_slot + above, 60)
    assert table.makespan(budget) == makespan(exhaustive_search(chain, budget))


@given(chains(4), st.integers(0, 40))
def test_recurrence_is_never_better_than_any_schedule(chain, budget):
    unrestricted = makespan(exhaustive_search(chain, budget, persistent=False))
    assert ReferenceTable(chain, 1, budget).makespan(budget) >= unrestricted


@given(chains(4, options=3))
def test_smallest_budget_is_exact(chain):
    least = ReferenceTable(chain, 1, 0).smallest_slot
    assert exhaustive_search(chain, least) is not None
    assert least == 0 or exhaustive_search(chain, least - 1) is None


@given(chains(6, options=3), st.integers(0, 30))
def test_schedules_cost_what_the_table_says(chain, above):
    table = ReferenceTable(chain, 1, 90)
    budget = min(table.smallest_slot + above, 90)
    timeline = simulate(chain, table.ops(budget))
    assert timeline.makespan_ms == table.makespan(budget)
    assert timeline.peak_bytes <= budget
    assert simulate(chain, table.tight_ops(budget)).peak_bytes <= budget


@given(chains(5), st.integers(2, 9), st.integers(5, 60))
def test_rounding_is_safe(chain, unit, slots):
    """Sizes round up and budgets round down: a schedule in slots fits in bytes."""
    table = ReferenceTable(chain, unit, slots)
    exact = ReferenceTable(chain, 1, unit * slots)
    for m in range(table.smallest_slot, slots + 1):
        assert simulate(chain, table.ops(m)).peak_bytes <= m * unit
        assert table.makespan(m) >= exact.makespan(m * unit)
