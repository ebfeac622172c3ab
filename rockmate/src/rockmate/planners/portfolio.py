"""Planning: several planners on one problem and one budget, each checked by the exact simulator.

keep everything → fits: done
budget below a cheap low-memory plan → smallest feasible budget → refuse, or take it as fallback
small graphs: equal segments → search in windows → whole graph, hinted; done if near the bound
else: equal segments → chain at both grains → search in windows → whole graph, hinted → bound
long graphs: the same, with equal segments only where chains find nothing
larger efforts: all this at each smaller effort first, so that none gives a worse plan

`PLANNERS` at the end holds every planner by name; a new one is added there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from rockmate.errors import InfeasibleBudgetError, SolverError, UnknownChoiceError
from rockmate.options.options import BlockOption, KnownBlocks
from rockmate.planners.chain import LARGE_BLOCK_NODES, SMALL_BLOCK_NODES, chain_model
from rockmate.planners.effort import effort_of, ladder
from rockmate.planners.moving import plan_with_moves
from rockmate.planners.search import Progress, Search
from rockmate.planners.smallest_budget import feasible
from rockmate.planners.windows import explore, improve, suited
from rockmate.problems.blocks import find_cuts, largest_block, make_blocks, pinned_candidates
from rockmate.problems.problem import Problem
from rockmate.schedules.baselines import best_segments, chen, no_recomputation, recompute_all
from rockmate.schedules.plan import Plan, Trial
from rockmate.schedules.prune import prune
from rockmate.schedules.report import format_bytes
from rockmate.schedules.simulate import simulate
from rockmate.schedules.steps import Steps
from rockmate.solvers import block_solver, check_backend, solve_whole
from rockmate.solvers.result import Solver, SolverResult

# A planner leaves its best plan in the run. It is called only if keeping everything does not fit
# and the budget is feasible.
Planner: TypeAlias = Callable[[Search], None]

# Names and sizes of blocks, in nodes; 0: cut wherever possible. Neither of the first two is always
# better. The third is slow, and better if memory is tight.
GRAINS = (("half blocks", 0), ("blocks", SMALL_BLOCK_NODES), ("double blocks", 26))

_LONG_CHAIN = 600  # nodes; from here on segments take a second, and lose to chains
_LONG_PLAN = 3000  # steps; from here on the background makes each window slow
_FOUND_WITHOUT = 50  # nodes; up to here the solver finds plans without a hint
_MOST_ATTEMPTS = 1000  # to go on after the portfolio, if there is time
_IDLE_ATTEMPTS = 6  # without a better plan, after which more are hopeless
_HINT_WINDOWS = 16  # of each search before the whole graph is solved


def plan(
    problem: Problem,
    budget_bytes: int,
    *,
    effort: str | float = "balanced",
    planner: str = "auto",
    backend: str = "cp-sat",
    seed: int = 0,
    progress: Progress | None = None,
    known: KnownBlocks | None = None,
) -> Plan:
    """Return the fastest plan found whose exact peak is at most the budget.

    `effort` is "fast", "balanced" or "best", or the seconds of processor time after which the
    search stops. Only the names are deterministic. A larger effort gives no worse plan. `planner`
    chooses one planner instead of all; `backend` solves blocks and whole graphs: "cp-sat", "cbc",
    "highs" or "gurobi". Options of blocks are added to `known`, for `replan`.

    Raises:
        UnknownChoiceError: there is no such effort, planner or backend.
        InfeasibleBudgetError: no plan fits. `minimum_bytes` is the smallest budget that is
            accepted; "best" searches for it thoroughly. No schedule fits below `bound_bytes`.
        SolverUnavailableError: the backend is not installed.
        SolverError: the chosen planner found nothing although the budget is feasible.
    """
    check_planner(planner)
    check_backend(backend)
    if problem.link is not None:
        how: dict[str, Any] = {"effort": effort, "planner": planner, "backend": backend}
        still = partial(plan, **how, seed=seed, progress=progress, known=known)
        return plan_with_moves(problem, budget_bytes, still, effort_of(effort), seed)
    run = Search(problem, budget_bytes, effort_of(effort), backend, seed, planner, progress)
    run.known = run.known if known is None else known
    everything = no_recomputation(problem)
    if simulate(problem, everything).peak_bytes <= budget_bytes:
        run.take(everything, "none")
        return run.finish()
    run.fallback = feasible(run)
    run.report(0.05, "simple plans")
    PLANNERS[planner](run)
    if run.best is None:
        raise SolverError(
            f"planner {planner!r} was asked for a plan within {format_bytes(budget_bytes)} and "
            f"found none, although the budget is feasible; use planner='auto'"
        )
    return run.finish()


def check_planner(planner: str) -> None:
    """Refuse an unknown name of a planner.

    Raises:
        UnknownChoiceError: there is no such planner.
    """
    if planner not in tuple(PLANNERS):  # a tuple: the name may not be hashable
        raise UnknownChoiceError("planner", planner, PLANNERS)


# --- planners -------------------------------------------------------------------------------------


def _auto(run: Search) -> None:
    """The portfolio at each smaller effort, then at this one, then windows while there is time."""
    effort = run.effort
    rungs = ladder(effort)
    for place, rung in enumerate(rungs):
        run.effort = rung
        run.share = 0.05 + 0.9 * place / len(rungs), 0.05 + 0.9 * (place + 1) / len(rungs)
        _portfolio(run)
        if run.is_over() or run.is_within(effort.close_enough):
            break
    run.effort = effort
    if effort.seconds is not None:
        _go_on(run)


def _go_on(run: Search) -> None:
    """Search in other windows and solve the whole graph for longer, until the time is over."""
    idle, limit = 0, run.effort.whole_limit
    for attempt in range(1, _MOST_ATTEMPTS):
        before = run.best_ms
        if run.is_over() or idle == _IDLE_ATTEMPTS or run.is_within(run.effort.close_enough):
            return
        small = len(run.problem.nodes) <= run.effort.hinted_nodes
        if small and limit > 0:
            limit = 2 * limit
            # Proven: a longer search finds nothing in this class of plans.
            limit = 0.0 if _solve_whole(run, run.best, limit, 0.0) else limit
        _search(
            run, suited(run.problem), run.effort.windows, 0.9, 0.95, seed=run.seed + 2 + 2 * attempt
        )
        idle = 0 if run.best_ms < before else idle + 1


def _portfolio(run: Search) -> None:
    """All planners that suit the graph, until a plan is near enough to the bound."""
    problem, effort = run.problem, run.effort
    is_long = len(problem.nodes) > _LONG_CHAIN
    if not is_long:
        _simple(run)
    whole_first = _is_small(run)
    if whole_first:
        # The result of a short search is a good hint for the whole graph.
        _search(run, explore, min(effort.windows, _HINT_WINDOWS), 0.1, 0.2)
        run.report(0.2, "whole graph")
        if run.is_within(effort.whole_enough):
            return
        unhinted = effort.unhinted_limit if len(problem.nodes) > _FOUND_WITHOUT else None
        is_best = _solve_whole(run, run.best, effort.whole_limit, unhinted)
        if is_best or run.is_within(effort.small_enough):
            return
    run.report(0.3, "blocks")
    if not run.is_over():
        _chains(run)
    if run.best is None:
        _simple(run)
    if not run.is_over():
        _search(run, suited(problem), effort.windows, 0.6, 0.9, seed=run.seed + 2)
    if not whole_first and len(problem.nodes) <= effort.hinted_nodes and not run.is_over():
        # The last improvements of a good plan are often small changes in many places at once.
        run.report(0.9, "whole graph")
        if not run.is_within(effort.whole_enough):
            _solve_whole(run, run.best, effort.hinted_limit, 0.0)


def _is_small(run: Search) -> bool:
    """Return whether to solve the whole graph before chains are tried.

    For a graph with many equal blocks chains are better, because equal blocks are solved once.
    """
    nodes, effort = len(run.problem.nodes), run.effort
    if nodes <= effort.whole_nodes or nodes > effort.unlike_nodes:
        return nodes <= effort.whole_nodes
    pinned = _pinned_sets(run)[0]
    blocks = make_blocks(run.problem, find_cuts(run.problem, pinned), pinned)
    return len(blocks) < 2 * len({block.class_id for block in blocks})


def _only(make: Callable[[Problem], Steps]) -> Planner:
    """Return a planner with a single plan, which does not depend on the budget."""

    def planner(run: Search) -> None:
        steps = make(run.problem)
        peak = simulate(run.problem, steps).peak_bytes
        if peak > run.budget_bytes:
            raise InfeasibleBudgetError(
                f"this planner has a single plan, which needs {format_bytes(peak)}, and the budget "
                f"is {format_bytes(run.budget_bytes)}; use planner='auto' or raise the budget",
                asked_bytes=run.budget_bytes,
                minimum_bytes=peak,
                bound_bytes=peak,
            )
        run.take(steps, run.planner)

    return planner


def _segments(run: Search) -> None:
    """The best number of equal segments, each recomputed before its backward."""
    run.attempt("segments", lambda: best_segments(run.problem, run.budget_bytes))


def _simple(run: Search) -> None:
    """Equal segments, or else the plan of least memory."""
    _segments(run)
    if run.best is None and run.fallback is not None:
        steps = prune(run.problem, run.fallback, run.budget_bytes)
        run.consider("low memory", steps, time.perf_counter())


def _rotor(run: Search) -> None:
    """A chain of the smallest blocks, each of which saves everything or nothing."""
    _chain(run, "rotor", max_nodes=0, solver=_no_options, cache=None, pruned=1)


def _windows(run: Search) -> None:
    """The best equal segments, improved window by window."""
    _segments(run)
    if run.best is None and run.fallback is not None:
        run.consider("low memory", run.fallback, time.perf_counter())
    _search(run, improve, run.effort.windows, 0.6, 0.95)


# --- parts of planners ----------------------------------------------------------------------------


def _asked_whole(run: Search, backend: str) -> None:
    """Solve the whole graph, with only simple plans as hints."""
    start = best_segments(run.problem, run.budget_bytes) or run.fallback
    hint = None if start is None else prune(run.problem, start, run.budget_bytes)
    run.forget()
    _solve_whole(run, hint, run.effort.whole_limit, backend=backend)


def _solve_whole(
    run: Search,
    hint: Steps | None,
    limit: float,
    unhinted_limit: float | None = None,
    *,
    backend: str = "",
) -> bool:
    """Solve the whole graph at once; return whether the answer is proven the best of its class.

    Without a plan to start from, the solver rarely finds one: a ResNet-50 near its smallest budget
    took 20 s.
    """
    begin, backend = time.perf_counter(), backend or run.backend
    result = solve_whole(
        run.problem,
        run.budget_bytes,
        backend=backend,
        hint=hint,
        deterministic_limit=limit,
        unhinted_limit=unhinted_limit,
        wall_limit_s=run.seconds_left(),
        seed=run.seed,
    )
    note = "best of its class" if result.status == "optimal" else result.status
    run.consider(f"whole graph ({backend})", result.steps, begin, note)
    return result.status == "optimal"


def _chains(run: Search, *, asked: bool = False) -> None:
    """Chains of blocks of all sizes; for small graphs only those that can help `auto`."""
    problem = run.problem
    solver = block_solver(run.backend, run.effort.block_limit)
    cache: dict[object, tuple[BlockOption, ...]] = {}
    small = not asked and _is_small(run)
    for pinned in _pinned_sets(run):
        if small and largest_block(problem, pinned) > LARGE_BLOCK_NODES:
            run.tried.append(Trial("chain", 0.0, note="blocks too large"))
            continue
        for grain, max_nodes in GRAINS[: run.effort.grains]:
            name = f"chain of {grain}" + (f", {len(pinned)} pinned" if pinned else "")
            _chain(run, name, max_nodes=max_nodes, solver=solver, cache=cache, pinned=pinned)
            if not asked and run.is_within(run.effort.close_enough):
                return


def _chain(
    run: Search,
    name: str,
    *,
    max_nodes: int,
    solver: Solver,
    cache: dict[object, tuple[BlockOption, ...]] | None,
    pinned: frozenset[int] = frozenset(),
    pruned: int = 4,
) -> None:
    """Add the plan of one chain of blocks, unless the time is over."""
    if run.is_over():
        return
    begin = time.perf_counter()
    model = chain_model(
        run.problem, solver, merged=max_nodes > 0, pinned=pinned, cache=cache, max_nodes=max_nodes
    )
    if model is None:
        run.tried.append(Trial(name, time.perf_counter() - begin, note="no cut"))
        return
    run.known.add(model.blocks, model.options, pinned)
    run.consider(name, model.plan(run.budget_bytes, pruned=pruned), begin)


def _pinned_sets(run: Search) -> list[frozenset[int]]:
    """Return sets of storages to pin: the empty set, and sets that give more cuts.

    If pinning a few bytes gives far more cuts, only that set is returned.
    """
    sets = pinned_candidates(run.problem, run.budget_bytes // 4)[:3]
    for pinned in reversed(sets[1:]):
        if sum(run.problem.sizes[i] for i in pinned) <= run.budget_bytes // 10:
            return [pinned]
    return sets


def _search(
    run: Search,
    search: Callable[..., Steps],
    windows: int,
    begin_at: float,
    end_at: float,
    seed: int | None = None,
) -> None:
    """Search in windows, reporting progress from `begin_at` to `end_at` (fractions)."""
    if run.best is None or run.is_within(run.effort.close_enough):
        return
    begin = time.perf_counter()
    windows = _affordable(windows, len(run.best))
    done = 0

    def stop() -> bool:
        nonlocal done
        done += 1
        part = min(1.0, done / windows)
        run.report(begin_at + (end_at - begin_at) * part, "search")
        return run.is_over()

    steps = search(
        run.problem,
        run.best,
        run.budget_bytes,
        windows=windows,
        window_limit=run.effort.window_limit,
        seed=run.seed if seed is None else seed,
        stop=stop,
    )
    run.consider("search in windows", steps, begin)


def _affordable(windows: int, steps: int) -> int:
    """Return fewer windows if the plan has so many steps that each window takes seconds."""
    longer = max(1.0, steps / _LONG_PLAN)
    return min(windows, max(2, int(windows / longer**2)))


def _no_options(problem: Problem, budget_bytes: int, hint: Steps) -> SolverResult:
    """The solver of classic rotor: it has no options between saving everything and nothing."""
    return SolverResult("infeasible")


PLANNERS: dict[str, Planner] = {
    "auto": _auto,
    "none": _only(no_recomputation),
    "recompute_all": _only(recompute_all),
    "chen": _only(chen),
    "segments": _segments,
    "rotor": _rotor,
    # A chain of blocks with several options each, also for a small graph.
    "rockmate": partial(_chains, asked=True),
    # The 0/1 program of the whole graph, by a solver of such programs; then by the backend.
    "checkmate": lambda run: _asked_whole(run, "cbc" if run.backend == "cp-sat" else run.backend),
    "intervals": lambda run: _asked_whole(run, run.backend),
    "search": _windows,
}
