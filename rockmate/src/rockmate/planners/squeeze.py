"""Plans of least memory for graphs of any length: each backward finds its inputs and no more.

A stage is the recomputations before one backward, then that backward. A stage can recompute all
inputs of its backward from the start. That takes little memory if few gradients are alive. If many
are, some values are *carried in* from an earlier stage: the chain of recomputations is cut, and its
first part runs there. A chain runs in node order. If it does not fit, large values that are read
only later are dropped and recomputed in the same stage (*lightened*). So is the forward.

`carried` goes over the stages from last to first and keeps a few cuts that fit into the limit for
each; it costs about one scan of the nodes per stage, whatever the shape of the graph. `squeeze`
searches for the least limit under which it succeeds. `follow` makes the steps, and keeps what fits
into the headroom. Everything depends only on structure and bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rockmate.problems.problem import Problem, indices_of
from rockmate.schedules.steps import Step, Steps
from rockmate.solvers.result import last_useful_stages

_CUTS = 6  # kept for each stage
_LIGHTER_RUNS = 8  # forwards for the recomputation of one storage
_TREE_RUNS = 200  # the same, if it is made from nothing
_ROUNDS = 14  # of the search for the least limit
_PRECISION = 1e-3  # relative, of that limit
_NO_LIMIT = 1 << 62


@dataclass
class _Chain:
    """Runs of nodes that make the wanted storages, last first, as far as they fit."""

    wanted: int
    nodes: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)  # storages that each needs to be alive
    is_whole: bool = True  # it needs no storage to be carried in

    @property
    def cuts(self) -> list[int]:
        """Sets of storages that may be carried in."""
        return [self.wanted, *self.before]


class Squeezer:
    """Facts about one problem that are needed repeatedly; stages count from 0 here."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.order = problem.backward_order
        kept = ~problem.output_mask  # an output stays alive once it is made
        self._reads = [problem.bwd_input_masks[k] & kept for k in self.order]
        self._inputs = [mask & kept for mask in problem.fwd_input_masks]
        self._makes = [mask & kept for mask in problem.product_masks]
        self._maker = [storage.producer for storage in problem.storages]
        self._outputs_bytes = problem.bytes_of(problem.output_mask)
        last = last_useful_stages(problem)
        states = [0] * (len(self.order) + 1)
        for node, stage in zip(problem.nodes, last, strict=True):
            for s in range(stage):
                states[s] += node.rerun_state_bytes
        self._states_bytes = states[0]
        # Alive throughout a stage, whatever it recomputes: outputs, gradients, rerun states.
        self._fixed_bytes = [
            self._outputs_bytes + problem.nodes[k].grads_before_bytes + states[s]
            for s, k in enumerate(self.order)
        ]

    # --- one stage --------------------------------------------------------------------------------

    def _own_bytes(self, k: int, after: int) -> int:
        """Return the peak of a recomputation after which the set `after` stays alive."""
        records = after & self.problem.phantom_masks[k]
        return (self.problem.forward_peaks if records else self.problem.forward_peaks_nograd)[k]

    def _backward_bytes(self, stage: int, held: int) -> int:
        """Return the peak of the backward of a stage while a set of storages is held."""
        own = self.problem.nodes[self.order[stage]].bwd_peak_bytes
        return self._fixed_bytes[stage] + own + self.problem.bytes_of(held)

    def _chain(self, stage: int, wanted: int, there: int, limit_bytes: int) -> _Chain:
        """Return the chain that makes `wanted` from `there`, from its end as far as it fits."""
        bytes_of = self.problem.bytes_of
        room = limit_bytes - self._fixed_bytes[stage]
        chain = _Chain(wanted)
        need, held = wanted, bytes_of(wanted)
        k = self.order[stage]
        while k >= 0:
            made = need & ~there & self._makes[k]
            if not made:
                k -= 1
                continue
            earlier = (need & ~made) | self._inputs[k]
            before = held + bytes_of(earlier & ~need) - bytes_of(made)
            if before + self._own_bytes(k, need) > room:
                lighter = self._lighter(k, need, held, there, room)
                if lighter is None:
                    chain.is_whole = False
                    break
                nodes, sets, held = lighter
                chain.nodes += nodes
                chain.before += sets
                need = sets[-1]
                continue
            need, held = earlier, before
            chain.nodes.append(k)
            chain.before.append(need)
            k -= 1
        return chain

    def _lighter(
        self, k: int, need: int, held: int, there: int, room: int
    ) -> tuple[list[int], list[int], int] | None:
        """Return runs to add after the run of node k, so that less has to be alive before it.

        They recompute the largest storage that k does not read, from storages that are alive or
        small, or else from nothing.
        """
        bytes_of, sizes = self.problem.bytes_of, self.problem.sizes
        waiting = indices_of(need & ~there & ~self._inputs[k] & ~self._makes[k])
        waiting.sort(key=lambda i: (-sizes[i], -i))
        for index in waiting:
            nodes: list[int] = []
            sets: list[int] = []
            best = 0
            best_held = held
            now, now_held = need, held
            fresh = 1 << index
            while fresh and len(nodes) < _LIGHTER_RUNS:
                maker = max(self._maker[i] for i in indices_of(fresh))
                if maker >= k:
                    break
                made = now & ~there & self._makes[maker]
                earlier = (now & ~made) | self._inputs[maker]
                added = earlier & ~now
                before = now_held + bytes_of(added) - bytes_of(made)
                if before + self._own_bytes(maker, now) > room:
                    break
                now, now_held = earlier, before
                fresh = (fresh & ~made) | (added & ~there)
                nodes.append(maker)
                sets.append(now)
                if now_held < best_held:
                    best, best_held = len(nodes), now_held
            if best:
                return nodes[:best], sets[:best], best_held
        for index in waiting:
            peak, runs = self._trees[self._maker[index]]
            others = held - sizes[index]
            if self._maker[index] < k and runs <= _TREE_RUNS and others + peak <= room:
                tree = self._tree(index, need, room)
                if tree is not None:
                    return *tree, others
        return None

    def _tree(self, index: int, need: int, room: int) -> tuple[list[int], list[int]] | None:
        """Return runs that make a storage from nothing, last first, if they fit beside the rest."""
        bytes_of = self.problem.bytes_of
        nodes: list[int] = []
        sets: list[int] = []
        now, open_storages = need, [index]
        while open_storages:
            k = self._maker[open_storages.pop()]
            if not now & self._makes[k]:
                continue
            earlier = (now & ~self._makes[k]) | self._inputs[k]
            if bytes_of(earlier) + self._own_bytes(k, now) > room:
                return None
            open_storages += (i for i in self._in_order(k, self._trees) if not now >> i & 1)
            now = earlier
            nodes.append(k)
            sets.append(now)
        return nodes, sets

    @cached_property
    def _trees(self) -> list[tuple[int, int]]:
        """Peak and number of runs of each node if all its inputs are made from nothing."""
        found: list[tuple[int, int]] = []
        for k in range(len(self._inputs)):
            held, peak, runs = 0, 0, 1
            for index in self._in_order(k, found):
                its_peak, its_runs = found[self._maker[index]]
                peak, runs = max(peak, held + its_peak), runs + its_runs
                held += self.problem.sizes[index]
            found.append((max(peak, held + self._own_bytes(k, 0)), runs))
        return found

    def _in_order(self, k: int, trees: Sequence[tuple[int, int]]) -> list[int]:
        """Return the inputs of a node in the order that takes least memory to make them."""
        sizes = self.problem.sizes

        def excess(index: int) -> tuple[int, int]:
            return sizes[index] - trees[self._maker[index]][0], index

        return sorted(indices_of(self._inputs[k]), key=excess)

    @cached_property
    def _from_nothing(self) -> list[int]:
        """Return the peak of each stage if nothing is carried in or out."""
        peaks = []
        for stage, reads in enumerate(self._reads):
            chain = self._chain(stage, reads, 0, _NO_LIMIT)
            highest = self._backward_bytes(stage, reads)
            for place, k in enumerate(chain.nodes):
                own = self._own_bytes(k, chain.cuts[place])
                held = self.problem.bytes_of(chain.before[place])
                highest = max(highest, self._fixed_bytes[stage] + held + own)
            peaks.append(highest)
        return peaks

    def _forward(self, wanted: int, limit_bytes: int) -> list[int] | None:
        """Return the runs of a forward that keeps a set of storages, or None if it does not fit.

        Where the first runs do not fit, what is read only later is dropped and made again.
        """
        found = self._first_runs(wanted, limit_bytes - self._states_bytes, lightened=False)
        every_state = sum(node.rerun_state_bytes for node in self.problem.nodes)
        return found or self._first_runs(wanted, limit_bytes - every_state, lightened=True)

    def _first_runs(self, wanted: int, room: int, *, lightened: bool) -> list[int] | None:
        bytes_of, problem = self.problem.bytes_of, self.problem
        outputs, need, held = self._outputs_bytes, wanted, bytes_of(wanted)
        runs: list[int] = []
        for k in reversed(range(len(problem.nodes))):
            made_outputs = bytes_of(problem.product_masks[k] & problem.output_mask)
            while True:
                records = need & problem.phantom_masks[k] or not problem.phantom_masks[k]
                own = (problem.forward_peaks if records else problem.forward_peaks_nograd)[k]
                earlier = (need & ~self._makes[k]) | self._inputs[k]
                before = held + bytes_of(earlier & ~need) - bytes_of(need & ~earlier)
                if before + outputs - made_outputs + own <= room:
                    break
                lighter = self._lighter(k, need, held, 0, room - outputs) if lightened else None
                if lighter is None:
                    return None
                nodes, sets, held = lighter
                runs += nodes
                need = sets[-1]
            runs.append(k)
            need, held = earlier, before
            outputs -= made_outputs
        return runs[::-1]

    # --- all stages -------------------------------------------------------------------------------

    def carried(self, limit_bytes: int) -> list[int] | None:
        """Return the storages that each stage needs at its start, or None if none fit."""
        chosen: list[list[tuple[int, int]]] = [[] for _ in self.order]  # set, place at next stage
        states = [0]
        for stage in reversed(range(len(self.order))):
            if states == [0] and self._from_nothing[stage] <= limit_bytes:
                chosen[stage] = [(0, 0)]
                continue
            found: dict[int, int] = {}
            for place, later in enumerate(states):
                wanted = self._reads[stage] | later
                if self._backward_bytes(stage, wanted) > limit_bytes:
                    continue
                chain = self._chain(stage, wanted, 0, limit_bytes)
                if chain.is_whole:
                    found = {0: place}
                    break
                for cut in chain.cuts:
                    found.setdefault(cut, place)
            if not found:
                return None
            states = self._best(list(found), self._reads[stage - 1] if stage else 0)
            chosen[stage] = [(state, found[state]) for state in states]
        fitting = (p for p, state in enumerate(states) if self._forward(state, limit_bytes))
        place = next(fitting, -1)
        if place < 0:
            return None
        needs = []
        for rows in chosen:
            state, place = rows[place]
            needs.append(state)
        return needs

    def _best(self, cuts: list[int], beside: int) -> list[int]:
        """Return the cuts that add least to the earlier stage's reads; none contains another."""
        bytes_of = self.problem.bytes_of
        best: list[int] = []
        for cut in sorted(cuts, key=lambda cut: (bytes_of(cut & ~beside), bytes_of(cut), cut)):
            if not any(other & ~cut == 0 for other in best):
                best.append(cut)
                if len(best) == _CUTS:
                    break
        return best

    # --- steps ------------------------------------------------------------------------------------

    def follow(self, needs: Sequence[int], limit_bytes: int) -> Steps:
        """Return steps within the limit that keep what fits, the storages read soonest first."""
        there = needs[0] if needs else 0
        runs = self._forward(there, limit_bytes)
        assert runs is not None
        steps = [Step("F", k) for k in runs]
        for stage, node in enumerate(self.order):
            later = needs[stage + 1] if stage + 1 < len(needs) else 0
            wanted = self._reads[stage] | later
            chain = self._chain(stage, wanted, there, limit_bytes)
            done = self._run(stage, chain, there, limit_bytes) if chain.is_whole else None
            if done is None:  # as it was found to fit
                chain = self._chain(stage, wanted, 0, limit_bytes)
                if needs[stage]:
                    length = chain.cuts.index(needs[stage])
                    chain = _Chain(wanted, chain.nodes[:length], chain.before[:length])
                done = self._run(stage, chain, needs[stage], limit_bytes)
                assert done is not None
            again, there = done
            steps += (Step("F", k) for k in again)
            steps.append(Step("B", node))
        return tuple(steps)

    def _run(
        self, stage: int, chain: _Chain, there: int, limit_bytes: int
    ) -> tuple[list[int], int] | None:
        """Return the nodes that a stage recomputes and what it leaves, or None if it does not fit.

        Storages that the stage does not need stay alive as long as they fit.
        """
        bytes_of = self.problem.bytes_of
        room = limit_bytes - self._fixed_bytes[stage]
        cuts = chain.cuts
        alive = there
        again = []
        for place in reversed(range(len(chain.nodes))):
            k, needed, after = chain.nodes[place], cuts[place + 1], cuts[place]
            if not after & self._makes[k] & ~alive:
                continue
            records = after | (self._makes[k] & ~self.problem.phantom_masks[k])
            left = room - self._own_bytes(k, records)
            alive = self._evicted(stage, alive, needed, left)
            if bytes_of(alive) > left:
                return None
            again.append(k)
            alive |= records & self._makes[k]
        left = room - self.problem.nodes[self.order[stage]].bwd_peak_bytes
        alive = self._evicted(stage, alive, chain.wanted, left)
        return None if bytes_of(alive) > left else (again, alive)

    def _evicted(self, stage: int, alive: int, needed: int, room: int) -> int:
        """Evict the storages that are read last until the rest fits; return the rest."""
        excess = self.problem.bytes_of(alive) - room
        if excess <= 0:
            return alive
        sizes = self.problem.sizes

        def urgency(index: int) -> tuple[int, int, int]:
            uses = self._uses[index]
            place = bisect_left(uses, stage)
            return -(uses[place] if place < len(uses) else _NO_LIMIT), -sizes[index], index

        for index in sorted(indices_of(alive & ~needed), key=urgency):
            if excess <= 0:
                break
            alive ^= 1 << index
            excess -= sizes[index]
        return alive

    @cached_property
    def _uses(self) -> list[list[int]]:
        """Stages that read each storage, or a value made from it."""
        problem = self.problem
        stage_of = {node: stage for stage, node in enumerate(self.order)}
        rows = []
        for storage in problem.storages:
            made = (i for user in storage.fwd_users for i in problem.products[user])
            readers = {
                *storage.bwd_users,
                *(u for i in made for u in problem.storages[i].bwd_users),
            }
            rows.append(sorted(stage_of[u] for u in readers))
        return rows


def squeeze(problem: Problem, low_bytes: int, high_bytes: int) -> Steps | None:
    """Return steps of low peak between two limits, or None if none fit the higher one."""
    squeezer = Squeezer(problem)
    best = squeezer.carried(low_bytes)
    if best is not None:
        return squeezer.follow(best, low_bytes)
    best = squeezer.carried(high_bytes)
    if best is None:
        return None
    for _ in range(_ROUNDS):
        if high_bytes - low_bytes <= _PRECISION * high_bytes:
            break
        middle = (low_bytes + high_bytes) // 2
        needs = squeezer.carried(middle)
        if needs is None:
            low_bytes = middle
        else:
            best, high_bytes = needs, middle
    return squeezer.follow(best, high_bytes)
