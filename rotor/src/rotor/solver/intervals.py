"""Chains of up to about 60 stages without the restriction of the recurrence, by CP-SAT.

The recurrence keeps what it stores until its backward. Here a boundary tensor may be dropped and
recomputed. Each stage has one forward in the first sweep and up to two more (four in short chains)
anywhere before its backward. Each tensor has a *retention interval* from one of these forwards to
its last use (after Bartan et al., *MOCCASIN: efficient tensor rematerialization for neural
networks*, ICML 2023). As elsewhere, what a stage saves for its backward is kept from the last of
its forwards.

Time is cut into gaps, one before each backward; in a gap stages run in forward order. So the moment
of stage k in gap g is `g * (n + 1) + k`, and the backward that ends the gap comes last. Memory is
one cumulative constraint over intervals.

The number of forwards per stage is bounded, and a deterministic time limit ends the search. So the
result may be worse than the recurrence's; `improve_with_intervals` returns the better one. A
recorded stage may also forget its input (`Fe*`) and have it recomputed before its backward.
`forget_inputs=False` is for executors that cannot do this. Needs `ortools`, loaded at the first
call.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from dataclasses import dataclass
from typing import Any

from rotor.errors import InfeasibleBudgetError, InvalidScheduleError, RotorError
from rotor.schedules.chain import Chain
from rotor.schedules.ops import Backward, ForwardCheckpoint, ForwardEnableGrad, ForwardNoGrad, Op
from rotor.schedules.simulate import Schedule
from rotor.solver.table import solve_table

log = logging.getLogger(__name__)

MAX_STAGES = 60
MAX_FORWARDS = 3
SHORT_CHAIN = 12  # stages; up to here two more forwards cost little, and tight budgets need them
# In CP-SAT's deterministic units of about a second, so that every machine finds the same answer.
DEFAULT_EFFORT = 1.0
TIME_STEPS = 1_000_000  # the least makespan in integer units; CP-SAT has no fractions
MEMORY_STEPS = 1 << 24  # the budget in integer units, unless it has fewer bytes than that
METHOD = "retention intervals"


class IntervalsUnavailableError(RotorError, ImportError):
    """The constraint solver is not installed."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One possible forward of a stage: whether it happens, when, and with which option."""

    stage: int
    gap: Any
    start: Any
    plain: Any  # literal: it runs without recording
    recorded: tuple[Any, ...]  # literal for each option: it runs for its backward
    end: Any  # of the retention of a plain run's output


def improve_with_intervals(
    chain: Chain,
    budget_bytes: int,
    schedule: Schedule | None,
    *,
    effort: float = DEFAULT_EFFORT,
    forget_inputs: bool = True,
) -> Schedule | None:
    """Return the better one of a schedule (None: none fits) and the interval model's.

    The schedule is returned unchanged if it recomputes nothing, if the chain is too long, or if
    `ortools` is missing.
    """
    if len(chain) > MAX_STAGES or (schedule and schedule.forward_count == len(chain)):
        return schedule
    try:
        found = _search(chain, budget_bytes, schedule, effort, forget_inputs)
    except IntervalsUnavailableError as error:
        log.info("%s", error)
        return schedule
    if found is None or (schedule and found.makespan_ms >= schedule.makespan_ms):
        return schedule
    return found


def solve_intervals(
    chain: Chain, budget_bytes: int, *, effort: float = DEFAULT_EFFORT, forget_inputs: bool = True
) -> Schedule:
    """Return a fast schedule within the budget, which may drop and recompute boundary tensors.

    Raises:
        IntervalsUnavailableError: `ortools` is not installed.
        InfeasibleBudgetError: none was found; `minimum_bytes` is that of the recurrence.
    """
    found = _search(chain, budget_bytes, None, effort, forget_inputs)
    if found is None:
        least = solve_table(chain, 1, slots=1, headroom=1.0).smallest_feasible_bytes
        raise InfeasibleBudgetError(budget_bytes, least, len(chain))
    return found


def _search(
    chain: Chain, budget_bytes: int, hint: Schedule | None, effort: float, forget_inputs: bool
) -> Schedule | None:
    if budget_bytes <= 0:
        return None
    try:
        cp_model = importlib.import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        raise IntervalsUnavailableError(
            f"solving by retention intervals needs ortools, which cannot be loaded ({error}). "
            f"Install it: pip install 'rk-rotor[intervals]'."
        ) from error
    model = _Model(cp_model, chain, budget_bytes, forget_inputs)
    if hint is not None:
        model.add_hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # leaves Ctrl-C to Python
    solver.parameters.linearization_level = 2
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    # The checker decides. Sizes are rounded up, so the peak is never above the budget.
    schedule = Schedule.from_ops(chain, model.ops(solver), METHOD)
    assert schedule.peak_bytes <= budget_bytes
    return _run_late(chain, schedule, budget_bytes)


class _Model:
    """Variables and constraints. Legend: k stage, j its j-th forward, g gap, o option."""

    def __init__(self, cp_model: Any, chain: Chain, budget_bytes: int, forget_inputs: bool) -> None:
        self.forget_inputs = forget_inputs
        self.model = cp_model.CpModel()
        self.chain = chain
        self.count = len(chain)
        self.width = self.count + 1
        self.unit = max(1, budget_bytes // MEMORY_STEPS)
        self.intervals: list[Any] = []
        self.demands: list[int] = []
        self.runs = [self._make_runs(k) for k in range(self.count)]
        for k in range(self.count):
            self._add_memory(k)
            self._add_gradient(k)
            if k > 0:
                self._add_inputs(k)
        self.model.add_cumulative(self.intervals, self.demands, budget_bytes // self.unit)
        self._add_objective()

    def _size(self, count_bytes: int) -> int:
        return -(-count_bytes // self.unit)

    def _backward_time(self, k: int) -> int:
        return (self.count - 1 - k) * self.width + self.count

    def _make_runs(self, k: int) -> list[_Run]:
        model, gaps = self.model, self.count - 1 - k  # B(k) ends gap number `gaps`
        forwards = MAX_FORWARDS + 2 * (self.count <= SHORT_CHAIN)
        runs: list[_Run] = []
        for j in range(1 if gaps == 0 else min(forwards, gaps + 1)):
            gap = model.new_int_var(1, gaps, f"gap{k},{j}") if j else model.new_constant(0)
            start = gap * self.width + k
            end = model.new_int_var(0, self._backward_time(k) + 1, f"end{k},{j}")
            plain = model.new_bool_var(f"plain{k},{j}")
            recorded = tuple(
                model.new_bool_var(f"record{k},{j},{o}")
                for o in range(len(self.chain.stages[k].options))
            )
            runs.append(_Run(k, gap, start, plain, recorded, end))
        # [Constraint] The first sweep runs every stage; a stage without gaps is the last one.
        model.add_exactly_one(runs[0].plain, *runs[0].recorded)
        # [Constraint] One run is recorded, and it is the last of those that happen.
        model.add_exactly_one(literal for run in runs for literal in run.recorded)
        for run, following in itertools.pairwise(runs):
            model.add_at_most_one(following.plain, *following.recorded)
            model.add(following.plain + sum(following.recorded) == run.plain)
            happens = run.plain
            model.add(following.gap > run.gap).only_enforce_if(happens)
            # [Constraint] An output is dropped before it is made again.
            model.add(run.end <= following.start).only_enforce_if(happens)
        model.add(runs[-1].plain == 0)
        return runs

    def _occupy(self, start: Any, end: Any, literal: Any, count_bytes: int) -> None:
        demand = self._size(count_bytes)
        if demand == 0:
            return
        size = self.model.new_int_var(0, self.width * self.width, "")
        self.intervals.append(self.model.new_optional_interval_var(start, size, end, literal, ""))
        self.demands.append(demand)

    def _add_memory(self, k: int) -> None:
        stage = self.chain.stages[k]
        back = self._backward_time(k)
        for run in self.runs[k]:
            self.model.add(run.end >= run.start + 1).only_enforce_if(run.plain)
            self._occupy(run.start, run.end, run.plain, stage.output_bytes)
            on_top = stage.forward_peak_bytes - stage.output_bytes
            self._occupy(run.start, run.start + 1, run.plain, max(on_top, 0))
            for option, literal in zip(stage.options, run.recorded, strict=True):
                self._occupy(run.start, back + 1, literal, option.saved_bytes)
                self._occupy(run.start, run.start + 1, literal, option.fwd_overhead_bytes)
                self._occupy(back, back + 1, literal, option.bwd_overhead_bytes)

    def _add_gradient(self, k: int) -> None:
        # The gradient of a stage's output is alive in the whole gap before its backward. That of
        # the chain's output is alive from the loss on, after the first sweep.
        back = self._backward_time(k)
        begin = back if k == self.count - 1 else back - self.count
        demand = self._size(self.chain.stages[k].output_grad_bytes)
        if demand:
            interval = self.model.new_fixed_size_interval_var(begin, back + 1 - begin, "")
            self.intervals.append(interval)
            self.demands.append(demand)

    def _add_inputs(self, k: int) -> None:
        """Require that x[k] is alive at every run of stage k and at its backward."""
        model, back = self.model, self._backward_time(k)
        for run in self.runs[k]:
            sources = self._sources(k, run.gap, run.start + 1)
            for literal in (run.plain, *run.recorded):
                model.add_bool_or(*(alive for alive, _ in sources)).only_enforce_if(literal)
            if not self.forget_inputs:
                # B(k) needs the same x[k] as the recorded run, whose graph holds it.
                for alive, producer in sources:
                    if producer is not None:
                        for literal in run.recorded:
                            model.add(producer.end >= back + 1).only_enforce_if(alive, literal)
        if self.forget_inputs:
            sources = self._sources(k, self.count - 1 - k, back + 1)
            model.add_bool_or(*(alive for alive, _ in sources))

    def _sources(self, k: int, gap: Any, until: Any) -> list[tuple[Any, _Run | None]]:
        """Return what may keep x[k] alive in a gap until a moment: literals, each with its run.

        The run is None if x[k] is among what stage k-1 has saved: this holds x[k] until after B(k).
        """
        model = self.model
        sources: list[tuple[Any, _Run | None]] = []
        for producer in self.runs[k - 1]:
            from_plain = model.new_bool_var("")
            model.add_implication(from_plain, producer.plain)
            model.add(producer.gap <= gap).only_enforce_if(from_plain)
            model.add(producer.end >= until).only_enforce_if(from_plain)
            from_saved = model.new_bool_var("")
            model.add_bool_or(*producer.recorded).only_enforce_if(from_saved)
            model.add(producer.gap <= gap).only_enforce_if(from_saved)
            sources += [(from_plain, producer), (from_saved, None)]
        return sources

    def _add_objective(self) -> None:
        fastest = zip(self.chain.stages, self.chain.fastest_options, strict=True)
        least = sum(s.options[o].fwd_time_ms + s.options[o].bwd_time_ms for s, o in fastest)
        scale = TIME_STEPS / least if least else 1.0
        terms = []
        for k, stage in enumerate(self.chain.stages):
            for run in self.runs[k]:
                terms.append(run.plain * round(stage.forward_time_ms * scale))
                for option, literal in zip(stage.options, run.recorded, strict=True):
                    both = option.fwd_time_ms + option.bwd_time_ms
                    terms.append(literal * round(both * scale))
        self.model.minimize(sum(terms))

    def add_hint(self, schedule: Schedule) -> None:
        """Begin the search at a schedule, unless it runs a stage too often."""
        seen: dict[int, list[tuple[int, Op]]] = {k: [] for k in range(self.count)}
        gap = 0
        for op in schedule.ops:
            if isinstance(op, Backward):
                gap += 1
            else:
                seen[op.stage].append((gap, op))
        for k, runs in enumerate(self.runs):
            if len(seen[k]) > len(runs):
                return
            for j, run in enumerate(runs):
                happens = j < len(seen[k])
                moment, op = seen[k][j] if happens else (0, ForwardNoGrad(k))
                if happens and j:
                    self.model.add_hint(run.gap, moment)
                self.model.add_hint(run.plain, happens and not isinstance(op, ForwardEnableGrad))
                for o, literal in enumerate(run.recorded):
                    chosen = isinstance(op, ForwardEnableGrad) and op.option == o
                    self.model.add_hint(literal, chosen)

    def ops(self, solver: Any) -> list[Op]:
        """Return the solution as operations, each input dropped after its last use."""
        order: list[tuple[int, Op]] = []
        for k, runs in enumerate(self.runs):
            for run in runs:
                moment = solver.value(run.gap) * self.width + k
                if solver.value(run.plain):
                    order.append((moment, ForwardCheckpoint(k)))
                for o, literal in enumerate(run.recorded):
                    if solver.value(literal):
                        order.append((moment, ForwardEnableGrad(k, o)))
                        order.append((self._backward_time(k), Backward(k, o)))
        order.sort(key=lambda pair: pair[0])
        return _forget_early(_without_idle_runs([op for _, op in order]))


def _run_late(chain: Chain, schedule: Schedule, budget_bytes: int) -> Schedule:
    """Move recomputations behind backwards that do not need them, if they fit in the budget.

    A kept stage needs no Function if nothing runs between its backward and the one before it.
    """
    ops = list(schedule.ops)
    start = len(chain)  # of the forwards before the next backward
    for position in range(start, len(ops)):
        if not isinstance(ops[position], Backward):
            continue
        if start < position < len(ops) - 1:
            moved = [*ops[:start], ops[position], *ops[start:position], *ops[position + 1 :]]
            try:
                later = Schedule.from_ops(chain, moved, schedule.method)
            except InvalidScheduleError:
                later = None
            if later is not None and later.peak_bytes <= budget_bytes:
                ops, schedule = moved, later
                start += 1
                continue
        start = position + 1
    return schedule


def _without_idle_runs(ops: list[Op]) -> list[Op]:
    """Leave out runs whose output nothing reads. A search that was cut short may contain some."""
    kept = list(ops)
    for position in reversed(range(len(kept))):
        op = kept[position]
        if not isinstance(op, ForwardCheckpoint):
            continue
        for later in kept[position + 1 :]:
            if later.stage == op.stage + 1:
                break
            if later.stage == op.stage:
                del kept[position]
                break
    return kept


def _forget_early(ops: list[Op]) -> list[Op]:
    """Let each forward drop its input if it is recomputed before anything else reads it."""
    kept = list(ops)
    saved: set[int] = set()
    for position, op in enumerate(ops):
        if isinstance(op, ForwardEnableGrad):
            saved.add(op.stage)
        if isinstance(op, Backward) or op.stage == 0 or op.stage - 1 in saved:
            continue
        for later in ops[position + 1 :]:
            if later.stage == op.stage:
                break
            if later.stage == op.stage - 1 and not isinstance(later, Backward):
                if isinstance(op, ForwardEnableGrad):
                    kept[position] = ForwardEnableGrad(op.stage, op.option, forget_input=True)
                else:
                    kept[position] = ForwardNoGrad(op.stage)
                break
    return kept
