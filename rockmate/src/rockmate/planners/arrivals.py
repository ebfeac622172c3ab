"""The problem in which storages arrive: bringing one in is a node that runs again.

That node reads nothing and takes no time. The planners search in this problem as in any other;
`Arrivals.split` turns what they find into steps of the original, and places where storages arrive.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Sequence

from rockmate.planners.copy_times import begins_of
from rockmate.problems.link import Link
from rockmate.problems.problem import Node, Problem
from rockmate.schedules.steps import Step, Steps, end_of_forward, first_forwards
from rockmate.solvers.result import stages_of

_ARRIVAL_PRICE = 0.02  # of the time of a copy: between equal plans the one with fewer copies


class Arrivals:
    """The problem in which each chosen storage is made by a node of its own.

    That node comes just before the storage's producer, which then works in its memory: it counts as
    a reader. The node reads nothing and takes no time. So running it again stands for bringing the
    storage in. The backward during which its copy must begin counts as a reader, because the memory
    is taken from there on; not so if copies take no time.
    """

    def __init__(self, problem: Problem, chosen: Sequence[int], *, takes_time: bool = True) -> None:
        assert problem.link is not None
        self.original, self.chosen = problem, tuple(chosen)
        by_producer: dict[int, list[int]] = {}
        for index in chosen:
            by_producer.setdefault(problem.storages[index].producer, []).append(index)
        nodes: list[Node] = []
        self._place: list[int] = []  # of each node of the original
        self._arrival: dict[int, int] = {}  # by storage
        for k, node in enumerate(problem.nodes):
            own = by_producer.get(k, [])
            for index in own:
                self._arrival[index] = len(nodes)
                nodes.append(self._arriving(problem.link, index, node))
            self._place.append(len(nodes))
            less = sum(problem.sizes[index] for index in own)
            nodes.append(
                dataclasses.replace(
                    node,
                    fwd_peak_bytes=problem.forward_peaks[k] - less,
                    fwd_peak_nograd_bytes=problem.forward_peaks_nograd[k] - less,
                )
            )
        self._made = by_producer
        place, flights = self._place, _flights(problem, self.chosen) if takes_time else {}
        readers = [
            ((s.producer,) if index in self._arrival else ()) + s.fwd_users
            for index, s in enumerate(problem.storages)
        ]
        storages = (
            dataclasses.replace(
                storage,
                producer=self._arrival.get(index, place[storage.producer]),
                fwd_users=tuple(place[user] for user in readers[index]),
                bwd_users=tuple(
                    place[user] for user in (*storage.bwd_users, *flights.get(index, ()))
                ),
                is_movable=False,
            )
            for index, storage in enumerate(problem.storages)
        )
        self.problem = Problem(tuple(nodes), tuple(storages))

    def _arriving(self, link: Link, index: int, producer: Node) -> Node:
        storage = self.original.storages[index]
        price_ms = _ARRIVAL_PRICE * link.in_ms(storage.size_bytes)
        name, path = f"arrival of {storage.name}", producer.module_path
        return Node(name, price_ms, has_backward=False, module_path=path, op="arrival")

    def hint(self, steps: Sequence[Step]) -> Steps:
        """Return steps of the original in which chosen storages arrive.

        Each arrives where the steps make it again, and before its first use in the backward.
        """
        count, place = len(self.original.nodes), self._place
        found = [Step("F", k) for k in range(len(self.problem.nodes))]
        there: set[int] = set()
        for kind, k in steps[end_of_forward(steps, count) :]:
            made = self._made.get(k, ()) if kind == "F" else ()
            for index in (*self.problem.reads(kind, place[k]), *made):
                if index in self._arrival and (index not in there or index in made):
                    found.append(Step("F", self._arrival[index]))
                    there.add(index)
            found.append(Step(kind, place[k]))
        return tuple(found)

    def split(self, steps: Sequence[Step]) -> tuple[Steps, dict[int, list[int]]]:
        """Return the steps of the original, and before which of them each storage arrives."""
        back = {place: k for k, place in enumerate(self._place)}
        index_of = {node: index for index, node in self._arrival.items()}
        found: list[Step] = []
        places: dict[int, list[int]] = {index: [] for index in self.chosen}
        for is_first, (kind, k) in zip(first_forwards(steps), steps, strict=True):
            if k not in index_of:
                found.append(Step(kind, back[k]))
            elif not is_first:
                places[index_of[k]].append(len(found))
        return tuple(found), places


def _flights(problem: Problem, chosen: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return for storages the node in whose backward they must begin to come in.

    Copies come one after the other, each as late as it can without a step that waits.
    """
    assert problem.link is not None
    stage, order = stages_of(problem), problem.backward_order
    begins = begins_of(problem.nodes[k].bwd_time_ms for k in order)
    first = {i: min(stage[user] for user in problem.storages[i].bwd_users) for i in chosen}
    latest = math.inf
    found: dict[int, tuple[int, ...]] = {}
    for index in sorted(chosen, key=lambda i: (-first[i], i)):
        latest = min(latest, begins[first[index] - 1]) - problem.link.in_ms(problem.sizes[index])
        at = max(1, bisect_right(begins, latest))
        if at < first[index]:
            found[index] = (order[at - 1],)
    return found
