"""The facts of every node: its storages, its costs, and the peaks of its forward and backward.

Memory is not measured here. It is read off the statements of a program, from recorded sizes and
measured workspaces. Above its start, a part holds the same in every plan, except for phantoms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rkgb.costs.op_costs import op_key
from rkgb.device.chosen import device_of
from rkgb.elements.op import Op
from rkgb.elements.target import GradientCut, OpCost, target_of
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode
from rkgb.graphs.uses import made_by as roots_made_by
from rkgb.graphs.uses import roots_of
from rkgb.run.graph.node_storages import NodeStorage, dying_in_backward, storages_of
from rkgb.run.program.lowering import lowered_parts
from rkgb.run.program.places import Step
from rkgb.run.program.state import rerun_ops, rerun_state, runs_once
from rkgb.run.program.statements import Call, Give, Statement, dropped_by, free_variables, made_by


@dataclass(frozen=True, slots=True)
class Cost:
    """Time and, if counted, FLOPs of one node."""

    fwd_time_ms: float
    bwd_time_ms: float
    fwd_flops: int = 0
    bwd_flops: int = 0


@dataclass(frozen=True)
class NodeFacts:
    """What one node makes, needs and costs. Peaks are above what is alive at the start."""

    cost: Cost
    storages: tuple[NodeStorage, ...]
    state_bytes: int  # random state and buffer copies that a recomputation needs
    has_backward: bool
    fwd_peak_bytes: int  # if it keeps its phantoms
    fwd_peak_dropping_bytes: int  # if it drops its phantoms
    bwd_peak_bytes: int
    grads_before_bytes: int  # gradients that are alive when the backward starts
    fwd_overhead_bytes: int  # temporary memory of the forward, above its results
    bwd_overhead_bytes: int

    @property
    def phantom_bytes(self) -> int:
        """Bytes of saved tensors that only the node's own backward reads."""
        return sum(s.size_bytes for s in self.storages if s.is_phantom)


def node_facts(
    sg: SimplifiedGraph, costs: Mapping[str, OpCost], *, in_blocks: bool = True
) -> tuple[NodeFacts, ...]:
    """Return the facts of every node of `sg`; `costs` has every kind of its operations.

    Sizes are those of the allocator's blocks, or with `in_blocks=False` those of the requests.
    """
    return _Facts(sg, costs, in_blocks).all()


class _Facts:
    def __init__(self, sg: SimplifiedGraph, costs: Mapping[str, OpCost], in_blocks: bool) -> None:
        self.sg, self.costs, self.infos = sg, costs, sg.infos
        self._cost_of: dict[int, OpCost] = {}  # by identity, because making a key is slow
        device = device_of(sg.basic.device)
        # Each storage is rounded by itself: two of 8 bytes take two blocks.
        self.rounded = device.block_bytes if in_blocks else int
        self.random_bytes = device.random_state_bytes
        self.storages = tuple(
            tuple(replace(s, size_bytes=self.rounded(s.size_bytes)) for s in made)
            for made in storages_of(sg)
        )
        self.dying = dying_in_backward(self.storages)
        self.known = {*sg.producer, *sg.basic.externals}  # what is no gradient
        count = len(sg.nodes)
        forward: list[Step] = [("F", index) for index in range(count)]
        plain = lowered_parts(sg, [*forward, *(("B", i) for i in reversed(range(count)))])
        backwards = [step for i in reversed(range(count)) for step in self._with_rerun(i)]
        dropping = lowered_parts(sg, [*forward, *backwards])
        self.keeping, self.dropping = (
            [self._forward_peak(lines) for lines in parts[:count]] for parts in (plain, dropping)
        )
        self.backwards = self._backward_peaks(plain)

    def all(self) -> tuple[NodeFacts, ...]:
        return tuple(self._node(index, node) for index, node in enumerate(self.sg.nodes))

    def _node(self, index: int, node: SimplifiedNode) -> NodeFacts:
        copied = rerun_state(self.sg, node)
        state = sum(map(self._copy_bytes, copied))
        written = roots_of(self.infos, (n for op in rerun_ops(self.sg, node) for n in op.writes))
        # A recomputation that is not the last one keeps the copies, and writes to copies of them,
        # or runs between copies of what is there now.
        twice = sum(self._copy_bytes(n) for n in copied if self.infos[n].alias_of in written)
        copies = sum(map(_copied_buffers, node.ops))
        beside = copies + (self.random_bytes if node.is_random else 0)
        state += beside
        twice += beside
        # A recomputation briefly holds the recorded and the present state.
        least = max(copies, self.random_bytes if node.is_random else 0)
        keeping = max(least, self.keeping[index])
        dropping = max(least, self.dropping[index])
        before, peak, left = self.backwards[index]
        kept = sum(s.size_bytes for s in self.storages[index])
        return NodeFacts(
            cost=Cost(
                self._sum(node.ops, lambda cost: cost.time_ms),
                self._sum(node.backward, lambda cost: cost.time_ms),
                int(self._sum(node.ops, lambda cost: cost.flops)),
                int(self._sum(node.backward, lambda cost: cost.flops)),
            ),
            storages=self.storages[index],
            state_bytes=state,
            has_backward=bool(node.backward or node.hand_overs),
            fwd_peak_bytes=keeping,
            fwd_peak_dropping_bytes=dropping + twice,
            bwd_peak_bytes=peak,
            grads_before_bytes=before,
            fwd_overhead_bytes=max(0, keeping - kept),
            bwd_overhead_bytes=max(0, peak - max(0, left)),
        )

    def _sum(self, ops: Sequence[Op], part: Callable[[OpCost], float]) -> float:
        return sum(part(self._cost(op)) for op in ops)

    def _cost(self, op: Op) -> OpCost:
        found = self._cost_of.get(id(op))
        if found is None:
            found = self._cost_of[id(op)] = self.costs[op_key(op, self.infos)]
        return found

    def _size(self, root: str) -> int:
        return self.rounded(self.infos[root].counted_bytes)

    def _copy_bytes(self, name: str) -> int:
        info = self.infos[name]
        return 0 if info.is_on_host else self.rounded(info.size_bytes)

    def _workspace(self, op: Op) -> int:
        return self.rounded(self._cost(op).workspace_bytes)

    def _made(self, op: Op) -> list[str]:
        if isinstance(op.target, GradientCut) and op.target.from_outside:
            return []  # it existed before
        return roots_made_by(self.infos, op)

    # ------------------------------------------------------------------ peaks

    def _with_rerun(self, index: int) -> list[Step]:
        again: list[Step] = [("F", index)]
        return [*([] if runs_once(self.sg, self.sg.nodes[index]) else again), ("B", index)]

    def _forward_peak(self, lines: Sequence[Statement]) -> int:
        """Return the peak of a forward above its start."""
        held = _Held(self.infos)
        alive = peak = 0
        for statement in lines:
            if isinstance(statement, Call):
                made = self._made(statement.op)
                held.own.update(made)
                alive += sum(map(self._size, made))
                peak = max(peak, alive + self._workspace(statement.op))
            alive -= sum(self._size(root) for root in held.after(statement) if root in held.own)
        return peak

    def _backward_peaks(self, parts: Sequence[Sequence[Statement]]) -> dict[int, _Peak]:
        """Return what each backward of a program without recomputation takes, by its node."""
        basic, count = self.sg.basic, len(self.sg.nodes)
        held = _Held(self.infos)
        for statement in itertools.chain(*parts[:count]):
            held.after(statement)
        held.keep_only(free_variables(itertools.chain(*parts[count:])))
        waiting = [op.name for op in basic.cuts if op.target.from_outside]  # type: ignore[attr-defined]
        held.make([*filter(None, basic.tangent_names), *waiting])
        # The gradient of a loss starts the backward, and autograd holds it to the end.
        held.for_good = {n for n in basic.tangent_names if n and not self.infos[n].shape}
        found = {}
        for index, lines in zip(reversed(range(count)), parts[count:], strict=True):
            before = sum(self._size(root) for root in held.names if root not in self.known)
            found[index] = _Peak(before, *self._backward_peak(index, lines, held))
        return found

    def _backward_peak(
        self, index: int, lines: Sequence[Statement], held: _Held
    ) -> tuple[int, int]:
        """Return the bytes above the start: at the peak and at the end."""
        alive = peak = 0
        for statement in lines:
            gone = held.after(statement)
            if isinstance(statement, Call):
                op = statement.op
                alive += sum(map(self._size, self._made(op)))
                peak = max(peak, alive + self._workspace(op) - self._reused_bytes(op, gone))
            elif isinstance(statement, Give):
                # Autograd copies a gradient whose strides differ from its parameter's.
                copied = sum(self._copied_bytes(*pair) for pair in statement.gradients if pair[1])
                peak = max(peak, alive + copied)
            # The plan decides when other storages are freed.
            own = (r for r in gone if r not in self.known or r in self.dying[index])
            alive -= sum(map(self._size, own))
        return peak, alive + sum(map(self._size, self.dying[index]))

    def _reused_bytes(self, op: Op, gone: Sequence[str]) -> int:
        """Return the bytes of a summed gradient that lies in the memory of its parts."""
        if not isinstance(op.target, GradientCut) or op.target.from_outside or not op.inputs:
            return 0
        root = self.infos[op.inputs[0]].alias_of
        return self._size(op.name) if root in gone and root not in self.known else 0

    def _copied_bytes(self, leaf_name: str, name: str) -> int:
        leaf, value = self.infos[leaf_name], self.infos[name]
        if value.shape and not value.stride:  # a sparse one is not copied
            return 0
        whole = value.storage_bytes == value.size_bytes
        return 0 if leaf.stride == value.stride and whole else self._copy_bytes(leaf_name)


class _Peak(NamedTuple):
    """What a backward finds of gradients, takes above that, and leaves above that."""

    before_bytes: int
    peak_bytes: int
    left_bytes: int


class _Held:
    """Which variables of a program hold each storage."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.infos = infos
        self.names: dict[str, set[str]] = {}  # by storage
        self.own: set[str] = set()  # storages that were made here
        self.for_good: set[str] = set()

    def make(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.infos:
                self.names.setdefault(self.infos[name].alias_of, set()).add(name)

    def keep_only(self, names: Collection[str]) -> None:
        """Let all other variables go."""
        kept = {root: own & {*names} for root, own in self.names.items()}
        self.names = {root: own for root, own in kept.items() if own}

    def after(self, statement: Statement) -> list[str]:
        """Run a statement; return the storages that nothing holds any more."""
        self.make(made_by(statement))
        gone = []
        for name in dropped_by(statement):
            root = self.infos[name].alias_of if name in self.infos else ""
            if root in self.names and name not in self.for_good:
                self.names[root].discard(name)
                if not self.names[root]:
                    del self.names[root]
                    gone.append(root)
        return gone


def _copied_buffers(op: Op) -> int:
    whole = target_of(op).whole
    return 0 if whole is None else whole.buffer_bytes
