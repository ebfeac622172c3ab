"""One run of a module under autograd, and its graph for the backward.

Saved tensors that are inputs or results of the run are not held by the graph: the step holds or
recomputes them, and passes them to the backward. Only tensors that are made inside stay in the
graph.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from rkgb.device.rng import RngState
from rkgb.elements.spread import lazy_bits, memory_of, read_lazily, settled, wrapper_of
from rkgb.elements.tensor_info import storage_id, storage_of
from rkgb.errors import DrawsAgainError, OpaquePieceError, in_module
from rkgb.torch_api.patches import Patches
from rkgb.torch_api.private.autograd import (
    back_to_autograd,
    nodes_from,
    saved_hooks,
    without_saved_hooks,
)

_CAST_BACKWARD = "ToCopyBackward0"


class _Saved:
    """One saved tensor: held, or taken from inputs and results in the backward.

    Or what hooks around the step have made of it, with what they find it again by.
    """

    __slots__ = ("__weakref__", "geometry", "packed", "place", "shell", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.place: tuple[str, int] | None = None
        self.geometry: Any = None
        self.shell: Any = None
        self.packed: tuple[Callable[[Any], Tensor], Any] | None = None

    def give_up(self, place: tuple[str, int]) -> None:
        assert self.tensor is not None
        self.place, self.shell = place, wrapper_of(self.tensor)
        tensor = memory_of(self.tensor)
        geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self.geometry = (geometry, tensor.dtype, lazy_bits(tensor))
        self.tensor = None

    def unpacked(self) -> Tensor:
        """Return what hooks around the step give back."""
        assert self.packed is not None
        unpack, packed = self.packed
        return unpack(packed)


def _is_earlier(path: str) -> OpaquePieceError:
    return OpaquePieceError(
        f"the backward of module '{path or '(root)'}', which is run whole, goes on into "
        "an earlier forward, whose inputs are held no longer: the module keeps a tensor with "
        "history from one call to the next. Detach what it keeps (self.state = "
        "state.detach()), run the backward of each forward before the next one, or run them "
        "under `with rockmate.plain():`.",
        module_path=path,
    )


_HOST = torch.device("cpu")


@dataclass
class InnerGraph:
    """The graph of a run: its differentiable results, its leaves, and its saved tensors."""

    path: str = ""  # of the module
    device: torch.device = _HOST
    results: list[_WayBack] = field(default_factory=list)
    # Where gradients leave the graph: for an input its entry node, for a parameter its leaf.
    ends: list[Any] = field(default_factory=list)
    # Weak references: only autograd holds saved tensors, so those the run drops are freed at once.
    saved: list[weakref.ref[_Saved]] = field(default_factory=list)
    given: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)  # positions of the inputs, by storage
    around: list[weakref.ref[_Saved]] = field(default_factory=list)  # what outer hooks packed
    trail: list[Any] = field(default_factory=list)  # saved tensors; equal runs have equal trails
    # The ends that got parts of gradients, in order, by the nodes that gave them.
    came: list[tuple[int, ...]] = field(default_factory=list)
    transforms: bool = False  # whether autograd ran inside a transform, which allows no hooks
    checkpoints: bool = False  # whether plain PyTorch would run a part of it again in the backward

    def entering(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the same memory to which a gradient flows.

        It is no leaf, because autograd would hold a leaf's memory as long as the graph.
        """
        gate = torch.empty(0, requires_grad=True, device="cpu")
        entered: Tensor = _Entry.apply(gate, tensor.detach(), self.refuse_foreign)  # type: ignore[no-untyped-call]
        self.ends.append(entered.grad_fn)
        return entered

    @contextlib.contextmanager
    def in_checkpoint(self, keeps_random_state: bool) -> Iterator[None]:
        """Around what a checkpoint runs.

        Raises:
            DrawsAgainError: its second run would draw other random numbers.
        """
        self.checkpoints = True
        before = None if keeps_random_state else RngState.save(self.device)
        yield
        if before is not None and not before.equals(RngState.save(self.device)):
            raise DrawsAgainError.at("the model", in_module(self.path))

    @property
    def refuse_foreign(self) -> Callable[[Tensor | None], None]:
        """Refuse a gradient from another backward than this graph's own."""
        path = self.path

        def refuse(grad: Tensor | None) -> None:
            if grad is not None:  # this graph's backward takes gradients before they get here
                raise OpaquePieceError(
                    f"a gradient has come into module '{path or '(root)'}', which is run whole, by "
                    "a tensor that it keeps elsewhere than in its attributes (in a global "
                    "variable, a class or a closure). Return this tensor, keep it as an attribute, "
                    "or run the step under `with rockmate.plain():`.",
                    module_path=path,
                )

        return refuse

    def finish(
        self,
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        given: Sequence[tuple[str, int]] | None = None,
    ) -> None:
        """Drop the run's inputs and results, but keep the way back from the results.

        With `given`, drop only the tensors that the backward will be given.
        """
        # In reverse: nodes that are made last run first, and autograd adds gradients in that order.
        ways = [_WayBack.of(t, self.ends) for t in reversed(results) if t.requires_grad]
        self.results = ways[::-1]
        places: dict[int, tuple[str, int]] = {}
        for kind, tensors in (("input", inputs), ("result", results)):
            for index, tensor in enumerate(tensors):
                if given is None or (kind, index) in given:
                    places.setdefault(storage_id(tensor), (kind, index))
        for entry in self._alive():
            held = entry.tensor
            if held is None or held.layout is not torch.strided:
                continue
            if place := places.get(storage_id(held)):
                entry.give_up(place)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While active, this graph takes the saved tensors.

        An exception is a transform (`torch.func.grad`), which refuses to run under hooks.
        """
        refuse = torch.autograd.graph.disable_saved_tensors_hooks

        @contextlib.contextmanager
        def disable(message: str) -> Iterator[None]:
            self.transforms = True
            with without_saved_hooks(), refuse(message):
                yield

        patch = Patches([(torch.autograd.graph, "disable_saved_tensors_hooks", disable)])
        with patch, self._hooks():
            yield

    def _hooks(self) -> saved_tensors_hooks:
        """Return the hooks, which do not hold the graph: autograd holds hooks in its nodes."""
        mine, hooks, path = weakref.ref(self), saved_hooks(), self.path

        def pack(tensor: Tensor) -> _Saved:
            graph = mine()
            assert graph is not None
            entry = graph.pack(tensor)
            if hooks is not None:  # a checkpoint lets go of it, and gives that of another run
                pack_around, unpack_around = hooks
                entry.packed = unpack_around, pack_around(tensor.detach())
                entry.tensor = None
                graph.around.append(weakref.ref(entry))
            return entry

        def unpack(entry: _Saved) -> Tensor:
            graph = mine()
            if graph is None:
                raise _is_earlier(path)
            return graph.unpack(entry)

        return saved_tensors_hooks(pack, unpack)

    def pack(self, tensor: Tensor) -> _Saved:
        """Take a saved tensor."""
        entry = _Saved(tensor.detach() if tensor.requires_grad else tensor)
        entry.version = tensor._version
        self.saved.append(weakref.ref(entry))
        place = self.inputs.get(storage_id(tensor)) if tensor.layout is torch.strided else None
        self.trail.append((tensor.shape, tensor.dtype, place))
        return entry

    def _alive(self) -> Iterator[_Saved]:
        return filter(None, (entry() for entry in self.saved))

    def unpack(self, entry: _Saved) -> Tensor:
        """Return a saved tensor to autograd.

        Raises:
            RuntimeError: it was changed in place since; autograd would raise the same.
            OpaquePieceError: the backward of a later run has reached this graph.
        """
        if entry.packed is not None:
            return entry.unpacked()
        if entry.tensor is not None:
            if entry.tensor._version != entry.version:
                raise RuntimeError(
                    "a tensor that the backward of an opaque module needs was changed in place"
                )
            return entry.tensor
        assert entry.place is not None
        geometry, dtype, bits = entry.geometry
        tensor = self.given.get(entry.place)
        if tensor is None:
            raise _is_earlier(self.path)
        whole = read_lazily(tensor, (False, False))
        whole = whole if whole.dtype == dtype else whole.view(dtype)
        found = read_lazily(whole.as_strided(*geometry), bits)
        return found if entry.shell is None else entry.shell(found)

    def close(self) -> None:
        """Drop all references of this object; autograd frees its own during the backward."""
        self.saved = []

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Return the inputs and results that the backward needs."""
        found = dict.fromkeys(s.place for s in self._alive() if s.place is not None)
        return tuple(sorted(found))

    def held_bytes(self, resident: Sequence[Tensor]) -> int:
        """Return the bytes that the graph holds, without `resident` (parameters, buffers)."""
        known = {storage_id(tensor) for tensor in resident}
        sizes = {
            storage_id(s.tensor): storage_of(s.tensor).nbytes()
            for s in self._alive()
            if s.tensor is not None
        }
        return sum(size for key, size in sizes.items() if key not in known)

    def backward(
        self, given: dict[tuple[str, int], Tensor], grads: list[Tensor | None]
    ) -> list[list[Tensor]]:
        """Return for each leaf the parts of its gradient, in the order of their arrival.

        `grads` are those of `results`. The list is emptied, so each is freed when autograd no
        longer needs it. The graph can be used once.
        """
        self.given = given
        # A checkpoint runs its forward once for each backward, of which the one inside is another.
        for entry in filter(None, (taken() for taken in self.around)):
            entry.tensor, entry.packed = entry.unpacked(), None
            entry.version = entry.tensor._version
        parts: list[list[Tensor]] = [[] for _ in self.ends]
        place_of = {_key(end): place for place, end in enumerate(self.ends) if end is not None}
        ways = []
        grads.reverse()
        for way in self.results:
            grad = grads.pop()
            if grad is not None and way.exit is None:  # an input or parameter that is a result
                parts[place_of[_key(way.node)]].append(grad)
            elif grad is not None:
                way.box.append(grad)
                ways.append(way)
        grad = None
        hooks = self._catch(parts, place_of, [way.node for way in ways])
        try:
            if ways:
                torch.autograd.backward([w.exit for w in ways], [w.exit.detach() for w in ways])
        finally:
            for hook in hooks:
                hook.remove()
            self.given = {}
            self.results, self.saved = [], []
        return parts

    def _catch(
        self, parts: list[list[Tensor]], place_of: dict[int, int], roots: Sequence[Any]
    ) -> list[Any]:
        """Take each part of a gradient at the node that makes it, before autograd sums them."""
        hooks = []
        for node in nodes_from(roots):
            edges: dict[int, int] = {}
            for index, (source, _) in enumerate(node.next_functions):
                if source is not None and _key(source) in place_of:
                    edges[index] = place_of[_key(source)]
            if edges:
                hooks.append(node.register_hook(_noting(edges, parts, self.came)))
        return hooks

    def casts(self) -> frozenset[int]:
        """Return the indices of the ends that are cast, for example by autocast."""
        place_of = {_key(end): place for place, end in enumerate(self.ends) if end is not None}
        nodes = nodes_from([way.node for way in self.results])
        cast = (n.next_functions[0][0] for n in nodes if type(n).__name__ == _CAST_BACKWARD)
        return frozenset(place_of[_key(end)] for end in cast if _key(end) in place_of)

    def strangers(self) -> list[Tensor]:
        """Return leaves on which the results depend, without those in `ends`."""
        known = {_key(end) for end in self.ends if end is not None}
        found: dict[int, Tensor] = {}
        for node in nodes_from([way.node for way in self.results]):
            variable = getattr(node, "variable", None)
            if variable is not None and _key(node) not in known and variable.numel():
                found[id(variable)] = variable
        return list(found.values())


def _key(end: Any) -> int:
    """Return the identity of an end: of a leaf (autograd may make its node again), or of a node."""
    if isinstance(end, Tensor):
        return id(end)
    variable = getattr(end, "variable", None)
    return id(end) if variable is None else id(variable)


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _gate: Tensor, tensor: Tensor, refuse: Callable[[Tensor | None], None]
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.refuse = refuse
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        ctx.refuse(grad)
        return None, None, None


def is_entry(node: Any) -> bool:
    """Whether a node is one by which an argument enters a graph."""
    return isinstance(node, _Entry._backward_cls)


class _WayBack:
    """The entry of a gradient into the graph: a gradient in the box enters at the node.

    Gradients that Python passes to autograd directly are held until its backward has ended.
    """

    __slots__ = ("box", "exit", "node")

    def __init__(self, node: Any, box: list[Tensor], exit_: Any) -> None:
        self.node, self.box, self.exit = node, box, exit_

    @classmethod
    def of(cls, result: Tensor, ends: Sequence[Any]) -> _WayBack:
        """Return the way back from a result; it has no exit if the result is itself an end."""
        node, box = get_gradient_edge(result).node, list[Tensor]()
        if any(end is not None and _key(end) == _key(node) for end in ends):
            return cls(node, box, None)
        with back_to_autograd(), torch.enable_grad():
            return cls(node, box, _Exit.apply(box, result))  # type: ignore[no-untyped-call]


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, box: list[Tensor], result: Tensor) -> Tensor:
        ctx.box = box
        return torch.empty(0, device=result.device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, Tensor]:
        return None, ctx.box.pop()


def _noting(edges: dict[int, int], parts: list[list[Tensor]], came: list[tuple[int, ...]]) -> Any:
    def note(grad_inputs: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        got: list[int] = []
        for index, place in edges.items():
            part = grad_inputs[index]
            if part is not None:
                parts[place].append(settled(part))
                got.append(place)
        came.append(tuple(got))
        return tuple(None if i in edges else g for i, g in enumerate(grad_inputs))

    return note
