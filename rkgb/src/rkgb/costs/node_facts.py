"""The facts of every node: its storages, its costs, and the peaks of its forward and backward.

Memory is not measured here. It is simulated operation by operation, in the order and with the frees
of the generated program, from recorded sizes and measured workspaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rkgb.costs.op_costs import op_key
from rkgb.device.chosen import device_of
from rkgb.elements.cut import GradientCut
from rkgb.elements.op import Op
from rkgb.elements.target import OpCost, target_of
from rkgb.graphs.basic import HandOver
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode
from rkgb.graphs.uses import At, made_by, roots_of
from rkgb.run.node_storages import NodeStorage, dying_in_backward, storages_of
from rkgb.run.state import rerun_ops, rerun_state


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
        self.sg, self.costs, self.infos = sg, costs, sg.dataflow.infos
        self._cost_of: dict[int, OpCost] = {}  # by identity, because making a key is slow
        device = device_of(sg.dataflow.basic.device)
        # Each storage is rounded by itself: two of 8 bytes take two blocks.
        self.rounded = device.block_bytes if in_blocks else _as_asked
        self.random_bytes = device.random_state_bytes
        self.storages = tuple(
            tuple(replace(s, size_bytes=self.rounded(s.size_bytes)) for s in made)
            for made in storages_of(sg)
        )
        self.dying = dying_in_backward(self.storages)
        self.gradient_roots = self._gradients()

    def all(self) -> tuple[NodeFacts, ...]:
        return tuple(self._node(index, node) for index, node in enumerate(self.sg.nodes))

    def _node(self, index: int, node: SimplifiedNode) -> NodeFacts:
        copied = rerun_state(self.sg, node)
        state = sum(map(self._copy_bytes, copied))
        written = roots_of(self.infos, (n for op in rerun_ops(self.sg, node) for n in op.writes))
        # A recomputation that is not the last one keeps the copies, and writes to copies of them.
        twice = sum(self._copy_bytes(n) for n in copied if self.infos[n].alias_of in written)
        copies = sum(map(_copied_buffers, node.ops))
        beside = copies + (self.random_bytes if node.is_random else 0)
        state += beside
        twice += beside + copies
        others = {s.root for s in self.storages[index] if not s.is_phantom}
        all_kept = {s.root for s in self.storages[index]}
        # A recomputation briefly holds the recorded and the present random state.
        least = self.random_bytes if node.is_random else 0
        keeping = max(least, self._forward_peak(index, all_kept))
        dropping = max(least, self._forward_peak(index, others))
        before = sum(
            self._size(root)
            for root, (made, last) in self.gradient_roots.items()
            if made > index >= last
        )
        peak, left = self._backward_peak(index, node)
        kept = sum(self._size(root) for root in all_kept)
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
        return self.rounded(self.infos[root].storage_bytes)

    def _copy_bytes(self, name: str) -> int:
        return self.rounded(self.infos[name].size_bytes)

    def _workspace(self, op: Op) -> int:
        return self.rounded(self._cost(op).workspace_bytes)

    def _made(self, op: Op) -> list[str]:
        if isinstance(op.target, GradientCut) and op.target.from_outside:
            return []  # it existed before
        return made_by(self.infos, op)

    # ------------------------------------------------------------------ forward

    def _forward_peak(self, index: int, kept: set[str]) -> int:
        """Return the peak of a forward that keeps the storages `kept` to its end."""
        last = self.sg.uses.last
        alive = peak = 0
        mine: set[str] = set()
        for place, op in enumerate(self.sg.nodes[index].ops):
            made = self._made(op)
            mine.update(made)
            alive += sum(map(self._size, made))
            peak = max(peak, alive + self._workspace(op))
            ends = {root for root in mine if last[root] == At(index, place)}
            alive -= sum(map(self._size, ends - kept))
        return peak

    # ------------------------------------------------------------------ backward

    def _gradients(self) -> dict[str, tuple[int, int]]:
        """Return the maker and the last reader of each gradient's storage, as nodes.

        The gradient of an output counts as made by a node after the last one.
        """
        behind, basic = self.sg.uses_behind, self.sg.dataflow.basic
        known = {*self.sg.producer, *basic.externals}
        found = {
            root: (behind.first[root].part, last.part)
            for root, last in behind.last.items()
            if root not in known
        }
        waiting = [op.name for op in basic.cuts if op.target.from_outside]  # type: ignore[attr-defined]
        for name in (*filter(None, basic.tangent_names), *waiting):
            # The gradient of a loss starts the backward, and autograd holds it to the end.
            last = found.get(name, (0, 0))[1] if self.infos[name].shape else -1
            found[name] = len(self.sg.nodes), last
        return found

    def _backward_peak(self, index: int, node: SimplifiedNode) -> tuple[int, int]:
        """Return the bytes above the start: at the peak and at the end."""
        alive = peak = 0
        for place, op in enumerate(node.backward):
            at = At(index, place)
            alive += sum(map(self._size, self._made(op)))
            peak = max(peak, alive + self._workspace(op) - self._reused_bytes(op, at))
            alive -= sum(map(self._size, self._ending.get(at, ())))
        # Autograd copies a gradient whose strides differ from its parameter's.
        peak = max(peak, alive + sum(map(self._copied_bytes, node.hand_overs)))
        alive -= sum(map(self._size, self._ending.get(At(index, len(node.backward)), ())))
        return peak, alive + sum(map(self._size, self.dying[index]))

    @cached_property
    def _ending(self) -> Mapping[At, Sequence[str]]:
        """The storages that a backward frees after their last use: gradients and dying values."""
        found: dict[At, list[str]] = {}
        for root, at in self.sg.uses_behind.last.items():
            if root in self.dying[at.part] or self._goes_in(root, at.part):
                found.setdefault(at, []).append(root)
        return found

    def _goes_in(self, root: str, index: int) -> bool:
        """Return whether `root` is a gradient's storage and this backward is its last reader."""
        return root in self.gradient_roots and self.gradient_roots[root][1] == index

    def _reused_bytes(self, op: Op, at: At) -> int:
        """Return the bytes of a summed gradient that lies in the memory of its parts."""
        if not isinstance(op.target, GradientCut) or op.target.from_outside or not op.inputs:
            return 0
        root = self.infos[op.inputs[0]].alias_of
        is_alone = self._goes_in(root, at.part) and self.sg.uses_behind.last[root] == at
        return self._size(op.name) if is_alone else 0

    def _copied_bytes(self, hand_over: HandOver) -> int:
        leaf = self.infos[hand_over.leaf]
        value = self.infos[hand_over.value]
        if value.shape and not value.stride:  # a sparse one is not copied
            return 0
        whole = value.storage_bytes == value.size_bytes
        return 0 if leaf.stride == value.stride and whole else self.rounded(leaf.size_bytes)


def _copied_buffers(op: Op) -> int:
    whole = target_of(op).whole
    return 0 if whole is None else whole.buffer_bytes


def _as_asked(size_bytes: int) -> int:
    return size_bytes
