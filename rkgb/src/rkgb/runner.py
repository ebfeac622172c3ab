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
from rkgb.direct_calls import direct_calls
from rkgb.errors import InvalidGraphError
from rkgb.gradient_order import Use, gradient_order
from rkgb.recorded import Layout, Record, Recorded, recorded, write_record
from rkgb.rng import RngState
from rkgb.saved import SavedView, SavingHooks, SeenTensor, geometry_of, looking_hooks
from rkgb.simplified import SimplifiedGraph
from rkgb.tensor_info import storage_bytes, storage_id


@dataclass(frozen=True, slots=True)
class SavedFacts:
    """What one piece's autograd graph saves, found out by recording it once."""

    layout: Layout
    phantoms: Mapping[int, int]  # storage id -> bytes, of what belongs to nobody else


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
        self.has_state = frozenset(
            index for index, node in enumerate(sg.nodes) if node.is_random or self.volatile[index]
        )
        self.facts: dict[tuple[int, int], SavedFacts] = {}
        self.always_record: set[int] = set()  # nodes whose result depends on the grad mode
        self._grad_names: set[str] = set()
        self._records: dict[tuple[int, int], Record] = {}
        self._empty: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    # ------------------------------------------------------------------ forward

    def forward(self, index: int, state: StepState, *, record: bool, keep_state: bool) -> None:
        """Run node `index`; its outputs enter `state.values`.

        With `record`, its autograd graph enters `state.graphs`. `keep_state` says that the node
        will be run again in this step, so random state and buffers must be kept for it.
        """
        external, users_stream = state.external, None
        if index in self.has_state:
            external, users_stream = self._node_state(index, state, keep_state)
        state.ran.add(index)
        grad_mode, wanted = torch.is_grad_enabled(), record or index in self.always_record
        if grad_mode is not wanted:  # a context manager for every node would cost more
            torch._C._set_grad_enabled(wanted)
        try:
            if wanted:
                graph = self._record(index, state, external)
                if record:
                    state.graphs[index] = graph
            else:
                for piece in self.pieces[index]:
                    piece.run(state.values, external)
            if len(self.pieces[index]) > 1:
                self._drop_inner(index, state)
        finally:
            if grad_mode is not wanted:
                torch._C._set_grad_enabled(grad_mode)
            if users_stream is not None:
                users_stream.restore()

    def _node_state(
        self, index: int, state: StepState, keep_state: bool
    ) -> tuple[Mapping[str, Tensor], RngState | None]:
        """Keep or put back what node `index` reads besides its inputs.

        Returns the externals to run it with and the random state to go back to afterwards.
        """
        first, volatile = index not in state.ran, self.volatile[index]
        external, users_stream = state.external, None
        if volatile:
            if not first:
                copies = {n: t.clone() for n, t in state.buffers[index].items()}
                external = {**external, **copies}
            elif keep_state:
                state.buffers[index] = {n: external[n].clone() for n in volatile}
        if self.graph.nodes[index].is_random:
            if not first:
                users_stream = RngState.save(self.device)
                state.rng[index].restore()
            elif keep_state:
                state.rng[index] = RngState.save(self.device)
        return external, users_stream

    def _record(
        self, index: int, state: StepState, external: Mapping[str, Tensor]
    ) -> list[Recorded]:
        made = []
        for number in range(len(self.pieces[index])):
            key, again = (index, number), self._records.get((index, number))
            if again is None and key not in self.facts:
                made.append(self._record_and_look(index, number, state, external))
                continue
            if again is None:
                again = self._records[key] = self._write_record(index, number, state)
            made.append(again(state.values, external, state.hooks))
        return made

    def _write_record(self, index: int, number: int, state: StepState) -> Record:
        return write_record(
            self.pieces[index][number],
            self.facts[index, number].layout,
            lambda name: self._nothing(state.values[name]),
        )

    def _drop_inner(self, index: int, state: StepState) -> None:
        for piece in self.pieces[index]:
            for name in piece.outputs:
                if name not in self.graph.nodes[index].outputs:
                    del state.values[name]

    def _record_and_look(
        self, index: int, number: int, state: StepState, external: Mapping[str, Tensor]
    ) -> Recorded:
        """Record a piece and find out what every later recording of it will be like."""
        piece = self.pieces[index][number]
        values, inputs, leaves = state.values, [], {}
        for entry in piece.inputs:
            tensor = external[entry.name] if entry.is_external else values[entry.name].detach()
            if tensor.requires_grad or (not entry.is_external and entry.name in self._grad_names):
                tensor = tensor.detach().requires_grad_()
                leaves[entry] = tensor
            inputs.append(tensor)
        order = list(leaves)
        if piece.operations > 1:
            order.sort(key=lambda entry: (-entry.use[0], entry.use[1]))
        tensors = [leaves[entry] for entry in order]
        seen: list[SeenTensor] = []
        with saved_tensors_hooks(*looking_hooks(values, seen)):
            results = piece.call(inputs)
        for name, result in zip(piece.outputs, results, strict=True):
            values[name] = result.detach()
        wanting = {n: r for n, r in zip(piece.outputs, results, strict=True) if r.requires_grad}
        self._grad_names.update(wanting)
        direct = direct_calls(list(wanting.values()), tensors)
        saved, phantoms = self._classify(index, number, state, seen, external)
        outputs = tuple((name, result.output_nr) for name, result in wanting.items())
        layout = Layout(outputs, tuple(order), saved, direct)
        self.facts[index, number] = SavedFacts(layout, phantoms)
        made = recorded(layout, list(wanting.values()), tensors)
        for entry, leaf in leaves.items():
            if not entry.is_external:  # the graph must not own its input
                leaf.data = self._nothing(leaf)
        return made

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
        external: Mapping[str, Tensor],
    ) -> tuple[tuple[SavedView | None, ...], dict[int, int]]:
        """Decide for every saved tensor who owns its memory, now that the piece has run.

        Returns the handles to save, and the bytes of what belongs to nobody else by storage.
        """
        node = self.graph.nodes[index]
        made = {name for piece in self.pieces[index][: number + 1] for name in piece.outputs}
        owner: dict[int, str] = {}
        for name in (*(n for n in node.outputs if n in made), *node.inputs):
            owner.setdefault(storage_id(state.values[name]), name)
        resident = {
            storage_id(t) for n, t in state.external.items() if t is external[n]
        }  # not the copies of buffers
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
            else:
                plan.append(None)
                phantoms[key] = storage_bytes(handle.tensor)
        return tuple(plan), phantoms

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
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._backward(index, state)
        return self._backward(index, state)

    def _backward(self, index: int, state: StepState) -> list[tuple[str, Tensor | None]]:
        outside: list[tuple[str, Tensor | None]] = []
        graphs = state.graphs.pop(index)
        while graphs:
            piece = graphs.pop()
            layout = piece.layout
            places, grads = [], []
            for place, (name, _) in enumerate(layout.outputs):
                grad = self._take_gradient(name, state)
                if grad is not None:
                    places.append(place)
                    grads.append(grad)
            if not places or not layout.leaves:
                outside += [(entry.name, None) for entry in layout.leaves if entry.is_external]
                continue
            del grad  # what is still named here would live until the end of the run
            found = [*piece.run(places, grads)]
            for place, entry in enumerate(layout.leaves):
                part = found[place]
                found[place] = None
                if entry.is_external:
                    outside.append((entry.name, part))
                elif part is not None:
                    name = entry.name
                    if name in state.grads or name in self.collected:
                        self._add_gradient(name, entry.use, part, state, found)
                    else:
                        state.grads[name] = part
            del part
        return outside

    def outside_uses(self, index: int, state: StepState) -> tuple[str, ...]:
        """Return what `backward` will return gradients for, in its order; the node is recorded."""
        return tuple(
            entry.name
            for piece in reversed(state.graphs[index])
            for entry in piece.layout.leaves
            if entry.is_external
        )

    def _take_gradient(self, name: str, state: StepState) -> Tensor | None:
        total = state.grads.pop(name, None)
        parts = state.grad_parts.pop(name, None) if state.grad_parts else None
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
        old = state.grads[name]
        others = {storage_id(t) for key, t in state.grads.items() if key != name}
        others.update(storage_id(t) for t in pending if t is not None)
        others.update(storage_id(t) for parts in state.grad_parts.values() for _, t in parts)
        others |= state.borrowed
        first, second = storage_id(old), storage_id(part)
        # Autograd adds in place where it may; doing so saves one buffer. Like its sum, ours has the
        # strides of the gradient that came first: a reduction of it rounds by its strides.
        alike = old.dtype == part.dtype and old.shape == part.shape and first != second
        if alike and torch.ops.aten.is_non_overlapping_and_dense(old):
            if first not in others:
                old.add_(part)
                return
            if second not in others and part.stride() == old.stride():
                state.grads[name] = part.add_(old)
                return
        state.grads[name] = old + part
