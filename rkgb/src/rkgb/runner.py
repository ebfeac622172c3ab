"""Run single nodes forward and backward on a table of tensors that the caller owns.

Each node is its own small autograd graph. Its inputs are detached leaves, one per use, and tensors
that autograd wants to save are replaced by handles into the table, so that autograd owns nothing
but phantoms: whoever drives the runner frees and refills tensors as a plan says. The runner decides
nothing; it is used to measure nodes (rkgb) and to execute plans (rockmate).

Nothing recomputed is visible: random state is saved where a node moves it and put back around its
recomputation; buffers that the forward updates are updated by the first run only, later runs work
on copies of what the first run saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rkgb.compile_node import Piece, compile_node
from rkgb.errors import InvalidGraphError
from rkgb.gradient_order import Use, gradient_order
from rkgb.recorded import DirectCalls, Leaf, Recorded, record_outputs
from rkgb.rng import RngState
from rkgb.saved import SavedView, SavingHooks, SeenTensor, geometry_of, looking_hooks
from rkgb.simplified import SimplifiedGraph
from rkgb.tensor_info import storage_bytes, storage_id


@dataclass(frozen=True, slots=True)
class SavedFacts:
    """What one piece's autograd graph saves, found out by recording it once.

    It is the same at every recording: shapes and strides are those of the sample.
    """

    plan: tuple[SavedView | None, ...]  # per saved tensor; None: it is in nobody's table
    phantoms: Mapping[int, int]  # storage id -> bytes, of what belongs to nobody else
    direct: DirectCalls | None  # how to run the graph without the engine


@dataclass(slots=True)
class StepState:
    """Everything that one forward and its backward hold; dropping it frees all of it."""

    external: Mapping[str, Tensor]
    values: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    grad_parts: dict[str, list[tuple[Use, Tensor]]] = field(default_factory=dict)
    borrowed: set[int] = field(default_factory=set)  # storages of gradients that are the user's
    graphs: dict[int, list[Recorded]] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)
    rng: dict[int, RngState] = field(default_factory=dict)
    buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    hooks: SavingHooks = field(init=False)

    def __post_init__(self) -> None:
        self.hooks = SavingHooks.of(self.values)


class Runner:
    """Runs the nodes of a simplified graph, in any order that the caller has the data for."""

    def __init__(self, sg: SimplifiedGraph, device: torch.device) -> None:
        self.graph = sg
        self.device = device
        order = gradient_order(sg)
        externals = frozenset(sg.dataflow.basic.externals)
        self.pieces: tuple[tuple[Piece, ...], ...] = tuple(
            compile_node(node, externals, order.splits.get(index, ()))
            for index, node in enumerate(sg.nodes)
        )
        self.collected = order.collected
        written = {name for node in sg.nodes for name in node.written_buffers}
        # Buffers of a node that any node writes: its recomputation must see the old content.
        self.volatile: tuple[tuple[str, ...], ...] = tuple(
            tuple(name for name in node.externals if name in written) for node in sg.nodes
        )
        self.facts: dict[tuple[int, int], SavedFacts] = {}
        self.always_record: set[int] = set()  # nodes whose result depends on the grad mode
        self._grad_names: set[str] = set()
        self._empty: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    # ------------------------------------------------------------------ forward

    def forward(self, index: int, state: StepState, *, record: bool, keep_state: bool) -> None:
        """Run node `index`; its outputs enter `state.values`.

        With `record`, its autograd graph enters `state.graphs`. `keep_state` says that the node
        will be run again in this step, so random state and buffers must be kept for it.
        """
        node = self.graph.nodes[index]
        first = index not in state.ran
        state.ran.add(index)
        overrides: dict[str, Tensor] = {}
        if self.volatile[index]:
            if not first:
                overrides = {n: t.clone() for n, t in state.buffers[index].items()}
            elif keep_state:
                state.buffers[index] = {n: state.external[n].clone() for n in self.volatile[index]}
        users_stream = None
        if node.is_random:
            if not first:
                users_stream = RngState.save(self.device)
                state.rng[index].restore()
            elif keep_state:
                state.rng[index] = RngState.save(self.device)
        try:
            if record:
                self._record(index, state, overrides)
            else:
                self._run_only(index, state, overrides)
        finally:
            if users_stream is not None:
                users_stream.restore()

    def _run_only(self, index: int, state: StepState, overrides: Mapping[str, Tensor]) -> None:
        if index in self.always_record:
            kept = state.graphs.get(index)
            self._record(index, state, overrides)
            if kept is None:
                del state.graphs[index]
            else:
                state.graphs[index] = kept
            return
        values, external = state.values, state.external

        def value(name: str, _use: int) -> Tensor:
            return values[name]

        def outside(name: str, _use: int) -> Tensor:
            # Parameters keep requires_grad: some kernels are chosen by it even without grad mode.
            return overrides[name] if name in overrides else external[name]

        inner: list[str] = []
        with torch.no_grad():
            for piece in self.pieces[index]:
                for name, result in zip(piece.outputs, piece.run(value, outside), strict=True):
                    values[name] = result.detach()
                    inner.append(name)
        self._drop_inner(index, state, inner)

    def _record(self, index: int, state: StepState, overrides: Mapping[str, Tensor]) -> None:
        recorded: list[Recorded] = []
        inner: list[str] = []
        for number in range(len(self.pieces[index])):
            recorded.append(self._record_piece(index, number, state, overrides, inner))
        state.graphs[index] = recorded
        self._drop_inner(index, state, inner)

    def _drop_inner(self, index: int, state: StepState, made: list[str]) -> None:
        if len(self.pieces[index]) > 1:
            for name in made:
                if name not in self.graph.nodes[index].outputs:
                    del state.values[name]

    def _record_piece(
        self,
        index: int,
        number: int,
        state: StepState,
        overrides: Mapping[str, Tensor],
        inner: list[str],
    ) -> Recorded:
        piece = self.pieces[index][number]
        facts = self.facts.get((index, number))
        values, external, grad_names = state.values, state.external, self.grad_names
        leaves: list[Leaf] = []

        def value(name: str, use: int) -> Tensor:
            leaf = values[name].detach()
            if name in grad_names:
                leaf.requires_grad_()
                leaves.append((False, name, piece.uses[use], leaf))
            return leaf

        def outside(name: str, use: int) -> Tensor:
            tensor = overrides[name] if name in overrides else external[name]
            if not tensor.requires_grad:
                return tensor
            leaf = tensor.detach().requires_grad_()
            leaves.append((True, name, piece.uses[use], leaf))
            return leaf

        seen: list[SeenTensor] = []
        if facts is None:
            pack, unpack = looking_hooks(values, seen)
        else:
            pack, unpack = state.hooks.pack, state.hooks.unpack
            state.hooks.plan[0] = iter(facts.plan)
        with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            results = piece.run(value, outside)
        if piece.operations > 1:
            leaves.sort(key=lambda leaf: (-leaf[2][0], leaf[2][1]))
        wanting = [(n, r) for n, r in zip(piece.outputs, results, strict=True) if r.requires_grad]
        grad_names.update(name for name, _ in wanting)
        for name, result in zip(piece.outputs, results, strict=True):
            values[name] = result.detach()
            inner.append(name)
        if facts is None:
            direct = DirectCalls.of([result for _, result in wanting], leaves)
            self._classify(index, number, state, seen, inner, overrides, direct)
        recorded = record_outputs(wanting, leaves, direct=self.facts[index, number].direct)
        for is_external, _, _, leaf in leaves:
            if not is_external:  # the graph must not own its input
                leaf.data = self._nothing(leaf)
        return recorded

    @property
    def grad_names(self) -> set[str]:
        """Values of which some recording required a gradient."""
        return self._grad_names

    def _classify(
        self,
        index: int,
        number: int,
        state: StepState,
        seen: list[SeenTensor],
        inner: list[str],
        overrides: Mapping[str, Tensor],
        direct: DirectCalls | None,
    ) -> None:
        """Decide for every saved tensor who owns its memory, now that the piece has run."""
        node = self.graph.nodes[index]
        owner: dict[int, str] = {}
        for name in (*(n for n in node.outputs if n in inner), *node.inputs):
            owner.setdefault(storage_id(state.values[name]), name)
        resident = {storage_id(t) for n, t in state.external.items() if n not in overrides}
        plan: list[SavedView | None] = []
        phantoms: dict[int, int] = {}
        for handle in seen:
            assert handle.tensor is not None
            if handle.tensor._version != handle.version:
                raise InvalidGraphError(
                    f"'{node.name}' ({node.module_path or 'root'}, {node.main.source}) overwrites "
                    "a tensor that its own backward needs; eager PyTorch refuses this backward "
                    "too. Replace the in-place operation."
                )
            key = storage_id(handle.tensor)
            if key in resident:
                plan.append(None)
            elif key in owner:
                base = state.values[owner[key]]
                geometry = geometry_of(handle.tensor)
                same = geometry == geometry_of(base)
                plan.append(SavedView(owner[key], None if same else geometry))
                handle.view, handle.tensor = plan[-1], None
                handle.tensor = None
            else:
                plan.append(None)
                phantoms[key] = storage_bytes(handle.tensor)
        self.facts[index, number] = SavedFacts(tuple(plan), phantoms, direct)

    def _nothing(self, like: Tensor) -> Tensor:
        key = (like.dtype, like.device)
        if key not in self._empty:
            self._empty[key] = torch.empty(0, dtype=like.dtype, device=like.device)
        return self._empty[key]

    # ------------------------------------------------------------------ backward

    def backward(self, index: int, state: StepState) -> list[tuple[str, Tensor | None]]:
        """Run the backward of node `index`, which must have been recorded.

        Gradients of values are added to `state`. Returns the gradients of parameters and inputs of
        the model, one entry per use, in the order in which autograd would add them.
        """
        with torch.no_grad():
            return self._backward(index, state)

    def _backward(self, index: int, state: StepState) -> list[tuple[str, Tensor | None]]:
        recorded = state.graphs.pop(index)
        outside: list[tuple[str, Tensor | None]] = []
        for piece in reversed(recorded):
            edges, grads = [], []
            for name, edge in piece.out_edges:
                grad = self._take_gradient(name, state)
                if grad is not None:
                    edges.append(edge)
                    grads.append(grad)
            if not edges or not piece.leaves:
                outside += [(name, None) for is_ext, name, _, _ in piece.leaves if is_ext]
                continue
            del grad, edge  # what is still named here would live until the end of the run
            found = piece.run(edges, grads)
            for place, (is_external, name, use, _) in enumerate(piece.leaves):
                part = found[place]
                found[place] = None
                if is_external:
                    outside.append((name, part))
                elif part is not None:
                    self._add_gradient(name, use, part, state, found)
                del part
        return outside

    def outside_uses(self, index: int, state: StepState) -> tuple[str, ...]:
        """Return what `backward` will return gradients for, in its order; the node is recorded."""
        return tuple(
            name
            for piece in reversed(state.graphs[index])
            for is_external, name, _, _ in piece.leaves
            if is_external
        )

    def _take_gradient(self, name: str, state: StepState) -> Tensor | None:
        total = state.grads.pop(name, None)
        parts = state.grad_parts.pop(name, None)
        if parts is not None:
            parts.sort(key=lambda part: (-part[0][0], part[0][1]))
            for _, part in parts:
                total = part if total is None else total + part
        return total

    def _add_gradient(
        self, name: str, use: Use, part: Tensor, state: StepState, pending: list[Tensor | None]
    ) -> None:
        if name in self.collected:
            state.grad_parts.setdefault(name, []).append((use, part))
            return
        old = state.grads.get(name)
        if old is None:
            state.grads[name] = part
            return
        # Autograd adds in place where it may; doing so saves one buffer and changes no bit.
        others = {storage_id(t) for key, t in state.grads.items() if key != name}
        others.update(storage_id(t) for t in pending if t is not None)
        others.update(storage_id(t) for parts in state.grad_parts.values() for _, t in parts)
        others |= state.borrowed
        first, second = storage_id(old), storage_id(part)
        same_kind = old.dtype == part.dtype and old.shape == part.shape
        if same_kind and first != second and first not in others and old.is_contiguous():
            old.add_(part)
        elif same_kind and first != second and second not in others and part.is_contiguous():
            state.grads[name] = part.add_(old)
        else:
            state.grads[name] = old + part
