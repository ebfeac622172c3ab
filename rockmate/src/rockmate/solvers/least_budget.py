"""A lower bound on the smallest budget, by minimum cuts.

Between two backwards only those nodes can run again that fit beside the gradients. What the next
backwards read and these nodes cannot make was kept while the backward before ran:

    budget >= gradients + peak of that backward + what it reads + the least that makes the rest

The least is a minimum cut: a storage is held, or its producer runs again, which needs its inputs.
The same holds at the run of a node in place of the backward. A node beside which the rest does not
fit cannot run there, which raises other cuts. A node can neither run if one of its inputs is too
large to be kept from the stage before, and making it leaves no room for what makes the others.

All this holds for every schedule whose backwards run in their order, whatever its forward is.
Everything is counted in bytes, and effort in arcs, so the bound depends on no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rockmate.problems.problem import Problem, indices_of

if TYPE_CHECKING:
    from ortools.graph.python.max_flow import SimpleMaxFlow

_SPANS = (1, 2, 3, 4, 6, 8, 12, 16)  # stages whose reads are wanted together
_MANY = 1 << 60  # bytes; more than any sum
_PRECISION = 1000  # the bound is at most one such part too low
_WORK = 1_000_000  # arcs of all cuts, about a second
QUICK_WORK = _WORK // 10


def floor_bytes(problem: Problem) -> int:
    """Return a quick lower bound on the peak of every schedule: the need of a single step."""
    return max((size for size, _, _ in step_floors(problem)), default=0)


def step_floors(problem: Problem) -> list[tuple[int, str, int]]:
    """Return (bytes, kind, node) for each step that must run: the bytes that it alone needs."""
    floors = []
    outputs = 0
    for k, node in enumerate(problem.nodes):
        reads = problem.fwd_input_masks[k] | outputs
        own = min(problem.forward_peaks[k], problem.forward_peaks_nograd[k])
        floors.append((problem.bytes_of(reads) + own, "F", k))
        outputs |= problem.product_masks[k] & problem.output_mask
        if node.has_backward:
            reads = problem.bwd_input_masks[k] | problem.output_mask
            own = node.grads_before_bytes + node.bwd_peak_bytes
            floors.append((problem.bytes_of(reads) + own, "B", k))
    return floors


def least_budget(problem: Problem, enough_bytes: int, *, work: int = _WORK) -> int:
    """Return a lower bound on the peak of every schedule; `enough_bytes` is the peak of one.

    It is the better the more arcs may be looked at. Any number gives a bound.
    """
    low = floor_bytes(problem)
    cuts = _Cuts(problem, work)
    step = max(1, low // _PRECISION)
    for is_refused in (cuts.are_few_impossible, cuts.are_impossible):
        # Most often the plan is as good as the bound, which a single look then tells.
        high, middle = enough_bytes, enough_bytes - step
        while high - low > step and cuts.work > 0:
            if is_refused(middle):
                low = middle + 1
            else:
                high = middle
            middle = (low + high) // 2
    return low


class _Wanted(NamedTuple):
    """Storages that some stages need, and whether each node can run in one of these stages."""

    storages: int
    can_run: Sequence[bool]


class _Cuts:
    """Facts of a problem and the cuts between its stages; stages count from 0 here."""

    def __init__(self, problem: Problem, work: int) -> None:
        self.problem, self.work = problem, work
        self.order = problem.backward_order
        kept = ~problem.output_mask  # outputs are alive throughout the backward
        nodes = problem.nodes
        self.reads = [problem.bwd_input_masks[k] & kept for k in self.order]
        self.inputs = [mask & kept for mask in problem.fwd_input_masks]
        self.makes = [mask & kept for mask in problem.product_masks]
        movable = problem.link is not None  # such storages are elsewhere while nothing uses them
        self.sizes = [
            0 if movable and storage.is_movable else storage.size_bytes
            for storage in problem.storages
        ]
        self.own = [
            min(problem.forward_peaks[k], problem.forward_peaks_nograd[k]) + node.rerun_state_bytes
            for k, node in enumerate(nodes)
        ]
        self.alone = [problem.bytes_of(self.inputs[k]) + own for k, own in enumerate(self.own)]
        self.largest_first = sorted(range(len(nodes)), key=lambda k: (-self.alone[k], k))
        outputs = problem.bytes_of(problem.output_mask)
        self.fixed = [outputs + nodes[k].grads_before_bytes for k in self.order]
        self.needs = [  # of each backward
            self.fixed[t] + nodes[k].bwd_peak_bytes + problem.bytes_of(self.reads[t])
            for t, k in enumerate(self.order)
        ]
        # Those whose backward needs most are first: there it is found out.
        self.stages = sorted(range(len(self.order) - 1), key=lambda t: (-self.needs[t], t))
        self.largest = max(self.sizes, default=0)
        self.known: dict[int, list[bool]] = {}

    def are_few_impossible(self, budget_bytes: int) -> bool:
        """Return whether no schedule fits, by what two neighbouring backwards read."""
        for t in self.stages:
            room = budget_bytes - self.needs[t]
            if self.problem.bytes_of(self.reads[t + 1] & ~self.reads[t]) > room:
                can_run = self._fitting(t + 1, budget_bytes)
                wanted = _Wanted(self.reads[t + 1], can_run)
                if not all(can_run) and self._least_held(self.reads[t], wanted) > room:
                    return True
        return False

    def are_impossible(self, budget_bytes: int) -> bool:
        """Return whether no schedule fits, by what some backwards read; False if work is over."""
        self.known = {}
        rooms = ((t, budget_bytes - self.needs[t]) for t in self.stages)
        return any(
            self._is_too_much_at(t, room, budget_bytes) for t, room in rooms if room < self.largest
        )

    def _is_too_much_at(self, t: int, room: int, budget_bytes: int) -> bool:
        """Return whether what must be held beside a backward takes more than the room for it."""
        later = list(self._windows(t + 1, budget_bytes))
        if any(self._least_held(self.reads[t], wanted) > room for wanted in later):
            return True
        can_run = list(later[0].can_run)
        everything = [_Wanted(self.reads[t + 1], can_run), *later[1:]]
        self._take_out(t + 1, budget_bytes, can_run, everything)
        return self._least_held(self.reads[t], everything[0]) > room

    def _windows(self, first: int, budget_bytes: int) -> Iterator[_Wanted]:
        """Yield what growing numbers of stages want, from a stage on."""
        wanted, end = 0, first
        can_run = [False] * len(self.alone)
        for span in _SPANS:
            for t in range(end, min(len(self.order), first + span)):
                wanted |= self.reads[t]
                here = self._able(t, budget_bytes)
                can_run = [a or b for a, b in zip(can_run, here, strict=True)]
            end = first + span
            yield _Wanted(wanted, can_run)

    def _fitting(self, t: int, budget_bytes: int) -> list[bool]:
        """Return whether each node, with its inputs alone, fits into a stage."""
        return [alone + self.fixed[t] <= budget_bytes for alone in self.alone]

    def _able(self, t: int, budget_bytes: int) -> list[bool]:
        """Return whether each node can run again in a stage, for what that stage itself reads."""
        if t not in self.known:
            can_run = self._fitting(t, budget_bytes)
            wanted = [_Wanted(self.reads[t], can_run)]
            changed = True
            while changed:
                changed = self._take_out(t, budget_bytes, can_run, wanted)
                changed |= self._take_readers(t, budget_bytes, can_run)
            self.known[t] = can_run
        return self.known[t]

    def _candidates(self, t: int, budget_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield nodes, what is there after their run, and the room beside it, largest first."""
        for k in self.largest_first:
            room = budget_bytes - self.fixed[t] - self.alone[k]
            if room >= self.largest:
                return
            if k <= self.order[t]:
                yield k, self.inputs[k] | self.makes[k], room

    def _take_out(
        self, t: int, budget_bytes: int, can_run: list[bool], wanted: Sequence[_Wanted]
    ) -> bool:
        """Take out nodes beside which too much must be held; return whether there are any."""
        found = False
        for k, there, room in self._candidates(t, budget_bytes):
            if can_run[k] and any(self._least_held(there, w) > room for w in wanted):
                can_run[k] = False
                found = True
        return found

    def _take_readers(self, t: int, budget_bytes: int, can_run: list[bool]) -> bool:
        """Take out readers of a storage too large to be kept from the stage before.

        It is made in this stage, and stays. What the reader needs beside it is held when it is
        made, or is made with it alive.
        """
        found = False
        kept_bytes = budget_bytes - self.needs[t - 1]
        for k, there, room in self._candidates(t, budget_bytes):
            if not can_run[k]:
                continue
            for index in indices_of(self.makes[k] & ~self.reads[t - 1]):
                users = [u for u in self.problem.storages[index].fwd_users if u <= self.order[t]]
                missing = [u for u in users if can_run[u] and self.inputs[u] & ~there]
                if self.sizes[index] <= kept_bytes or not missing:
                    continue
                beside = self._beside(1 << index, budget_bytes - self.fixed[t], can_run)
                for user in missing:
                    if self._least_held(there, _Wanted(self.inputs[user], beside)) > room:
                        can_run[user] = False
                        found = True
        return found

    def _beside(self, held: int, room: int, can_run: Sequence[bool]) -> list[bool]:
        bytes_of = self.problem.bytes_of
        return [
            able and bytes_of(inputs | held) + own <= room
            for able, inputs, own in zip(can_run, self.inputs, self.own, strict=True)
        ]

    def _least_held(self, there: int, wanted: _Wanted) -> int:
        """Return the least bytes that, beside what is there, make what is wanted."""
        if self.work <= 0:
            return 0
        open_storages = indices_of(wanted.storages & ~there)
        seen, ran = set(open_storages), set[int]()
        # Storages are vertices from 2 on, the runs of nodes come behind them.
        runs = 2 + len(self.sizes)
        arcs: list[tuple[int, int, int]] = [(0, 2 + i, _MANY) for i in open_storages]
        ends = False
        while open_storages:
            index = open_storages.pop()
            k = self.problem.storages[index].producer
            arcs.append((2 + index, runs + k, self.sizes[index]))
            if k in ran:
                continue
            ran.add(k)
            state = self.problem.nodes[k].rerun_state_bytes
            if not wanted.can_run[k] or state:
                arcs.append((runs + k, 1, state if wanted.can_run[k] else _MANY))
                ends = True
            if wanted.can_run[k]:
                for read in indices_of(self.inputs[k] & ~there):
                    arcs.append((runs + k, 2 + read, _MANY))
                    if read not in seen:
                        seen.add(read)
                        open_storages.append(read)
        self.work -= len(arcs)
        return _flow(arcs) if ends else 0


def _flow(arcs: Iterable[tuple[int, int, int]]) -> int:
    """Return the maximum flow from vertex 0 to vertex 1."""
    from ortools.graph.python import max_flow

    flow: SimpleMaxFlow = max_flow.SimpleMaxFlow()
    for tail, head, capacity in arcs:
        flow.add_arc_with_capacity(tail, head, capacity)
    if flow.solve(0, 1) != flow.OPTIMAL:
        return 0
    return int(flow.optimal_flow())
