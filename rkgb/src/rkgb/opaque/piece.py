"""An opaque call as one operation: the user's Python, with a separate autograd graph.

    out_0, token, before = run_moe(x)                       # the forward
    out_0, token, _ = run_moe_again(x, before)              # a recomputation
    grad_x, grad_w = run_moe_backward(token, [x], [grad_0])  # the backward

`token` represents the graph that autograd has made inside, and counts its bytes. A recomputation
starts from the random states, attributes and buffers of the first run, and restores the present
ones. Sizes, structure and plain values of the results must be those of the sample, because later
operations were recorded with them; otherwise the step raises an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements.op import Op, Ref
from rkgb.elements.spread import settled
from rkgb.elements.target import OpCost, Restart, Target, running_model
from rkgb.elements.tensor_info import storage_id
from rkgb.elements.trees import Structure
from rkgb.errors import OpaquePieceError, shown
from rkgb.module_state.start_of_call import FirstRun
from rkgb.opaque.call import Call, Given, Place, TensorKind, run_call, same_plain_value, taken_apart
from rkgb.opaque.gradients import added, gradients_of
from rkgb.opaque.inner_graph import InnerGraph
from rkgb.outside.readable import Readable
from rkgb.safeguards.traces import without_traces

# Strides of the gradients of a call's differentiable results; None if they do not matter.
Tangents = tuple[tuple[int, ...] | None, ...]


def strides_of(gradient: Tensor | None) -> tuple[int, ...] | None:
    """Return the strides of a gradient, without those of dimensions that have one place."""
    if gradient is None or gradient.layout is not torch.strided or not gradient.numel():
        return None
    pairs = zip(gradient.shape, gradient.stride(), strict=True)
    return tuple(0 if size == 1 else step for size, step in pairs)


@dataclass(frozen=True, eq=False)
class Seen:
    """What one run of an opaque call on the sample shows."""

    results: Structure
    plain: tuple[Any, ...]  # leaves of the result: plain values, or a `Place` for a tensor
    kinds: tuple[TensorKind, ...]  # of the tensors among the results
    lies_in: tuple[int, ...]  # the input whose memory a result shares, or -1
    # Results of which others are computed inside, or that are arguments, in order. A part of their
    # gradient stays inside: who asks for it outside would miss that part.
    inner: tuple[int, ...]
    # What Python learns of each result from how it was made, or which input it is.
    facts: tuple[Mapping[str, Any] | int, ...]
    differentiable: tuple[bool, ...]
    tangents: Tangents  # with which the gradients were seen
    casts: tuple[str, ...]  # parameters that autocast casts in it, once per region
    draws: bool  # random numbers in its backward, as hooks of its own do
    checkpoints: bool  # plain PyTorch runs a part of it again in the backward


@dataclass(frozen=True, eq=False)
class Piece(Seen):
    """An opaque call, with the facts from its runs on the sample."""

    call: Call
    # Of inputs, then of parameters, part by part; None if there was none.
    gradients: tuple[TensorKind | None, ...]
    parts: tuple[int, ...]  # number of parts of each gradient; one for inputs
    needs: tuple[tuple[str, int], ...]  # inputs and results that the backward reads
    buffer_bytes: int  # of copies for a recomputation; 0 if the call writes to no buffer
    held_bytes: int
    workspace_bytes: tuple[int, int]  # of forward and backward, without their results
    freeing_workspace_bytes: int  # of a backward that frees donated gradients
    time_ms: tuple[float, float]
    flops: tuple[int, int]
    runs_once: bool = False  # it changes or consumes outside state, so it must save its results
    reads: Readable | None = None  # what its functions may read outside, if it may run again
    written: tuple[str, ...] = ()  # parameters that the call writes
    over: dict[str, int] = field(default_factory=dict)  # largest bytes that no plan counts, by what

    def result(self, tensors: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
        """Return the result of the call, with these tensors that it made and that it was given."""
        kept = list(self.plain)
        for at, leaf in enumerate(kept):
            if isinstance(leaf, (Place, Given)):
                kept[at] = (tensors if isinstance(leaf, Place) else given)[leaf.number]
        return self.results.unflatten(kept)

    @property
    def path(self) -> str:
        return self.call.path

    @property
    def kind(self) -> str:
        return self.call.kind

    @property
    def function(self) -> Any:
        return self.call.function

    @property
    def plain_values(self) -> Sequence[Any]:
        return [x for place, x in enumerate(self.call.leaves) if place not in self.call.numbers]

    def costs_as(self, other: Piece) -> bool:
        """Return whether another piece has the same memory, time and inputs."""
        ours, theirs = self.call, other.call
        return all(getattr(self, name) == getattr(other, name) for name in _COSTS) and all(
            getattr(ours, name) == getattr(theirs, name) for name in _CALLS
        )

    def run(self, given: Sequence[Any]) -> tuple[list[Tensor], InnerGraph]:
        """Run the module on tensors, followed by numbers of the call.

        Returns its tensors and its graph.
        """
        model = running_model()
        count = len(self.call.places)
        tensors, numbers = given[:count], given[count:]
        result, inner, inputs, _ = run_call(self.call, model, tensors, numbers)
        leaves, results, structure = taken_apart(self.call, result, inputs)
        if structure != self.results or len(leaves) != len(self.plain):
            raise self._differs(f"a result like {structure}, not like {self.results}")
        for leaf, plain in zip(leaves, self.plain, strict=True):
            if not same_plain_value(leaf, plain):
                raise self._differs(f"{_in_words(leaf)}, not {_in_words(plain)}")
        made = self._as_recorded(results, tensors)
        tensors = results
        if tuple(t.requires_grad for t in tensors) != self.differentiable:
            raise self._differs("other results that require a gradient")
        inner.finish(inputs, tensors, self.needs)
        self._weigh(inner, model)
        inner.close()
        return made, inner

    def _as_recorded(self, results: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        taken = {storage_id(t): place for place, t in enumerate(given)}
        found: list[Tensor] = []
        for result, kind, place in zip(results, self.kinds, self.lies_in, strict=True):
            tensor = settled(result.detach())
            if not kind.is_of(tensor):  # operations that follow compute otherwise
                raise self._differs(f"a tensor of {TensorKind.of(result)}, not of {kind}")
            if taken.get(storage_id(tensor), -1) != place:  # and may write to it, or to its base
                own = "memory of its own" if place >= 0 else "the memory of one of its inputs"
                raise self._differs(f"a tensor in {own}")
            found.append(tensor)
        return found

    def _differs(self, what: str) -> OpaquePieceError:
        return OpaquePieceError(
            f"module {self.call}, which is run whole because it could not be recorded, has "
            f"returned {what}, as it did for the sample. What follows was recorded with that. "
            "Name a module around it: opaque=['path.of.module'].",
            module_path=self.call.path,
        )

    def _weigh(self, inner: InnerGraph, model: nn.Module) -> None:
        held = inner.held_bytes([*model.parameters(), *model.buffers()])
        if held > self.held_bytes and "bytes" not in self.over:
            self.over["bytes"] = held
            warnings.warn(
                f"module {self.call} holds {held} bytes for its backward, and {self.held_bytes} "
                "were planned for it from the sample. Set bytes aside with reserve=.",
                RuntimeWarning,
                stacklevel=2,
            )


_COSTS = (
    *("results", "plain", "kinds", "lies_in", "differentiable", "gradients", "parts", "needs"),
    *("buffer_bytes", "held_bytes", "workspace_bytes", "freeing_workspace_bytes"),
)
_CALLS = (
    *("path", "kind", "number", "places", "again", "own", "numbers", "wanting", "parameters"),
    *("function", "left"),
)


def _in_words(leaf: Any) -> str:
    if isinstance(leaf, Given):
        return f"argument {leaf.number}"
    return f"tensor {leaf.number}" if isinstance(leaf, Place) else shown(leaf)


class _OfPiece(Target):
    runs_python = True
    which = ""  # of the operations of a piece

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.__name__ = f"run_{piece.call.kind}{self.which.replace(' ', '_')}"

    def __repr__(self) -> str:
        return f"run {self.piece.call.path} {self.piece.call.number}{self.which}"

    def costs_as(self, other: object) -> bool:
        return type(self) is type(other) and (
            other.piece is self.piece or self.piece.costs_as(other.piece)
        )

    def is_of_kind(self, other: object) -> bool:
        return type(self) is type(other) and other.piece.call.is_of_kind(self.piece.call)


class RunPiece(_OfPiece):
    """The forward operation of a piece."""

    def __init__(self, piece: Piece, *, keeps_state: bool = True) -> None:
        super().__init__(piece)
        self.whole, self.keeps_state = piece, keeps_state

    def cost(self, op: Op) -> OpCost:
        piece = self.piece
        return OpCost(piece.time_ms[0], piece.flops[0], piece.workspace_bytes[0])

    def flops(self, count: Callable[[Op], int]) -> int:
        return self.piece.flops[0]

    def once(self, op: Op) -> Op:
        """Return the operation for a plan that does not recompute the piece."""
        target = RunPiece(self.piece, keeps_state=False)
        return replace(op, target=target, results=(*op.results[:-1], ""))

    def again(self, op: Op) -> Op:
        """Return the operation of a recomputation, which takes the state of the first run."""
        *results, before = op.results
        args = (*op.args, Ref(before))
        target = RunPieceAgain(self.piece)
        return replace(op, target=target, args=args, results=(*results, ""), writes=())

    def takes_as(self, other: object) -> bool:
        return not isinstance(other, RunPiece) or self.piece.call.like(
            other.piece.call, but_for_numbers=True
        )

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        before = _Before(self.piece) if self.keeps_state else None
        made, inner = self.piece.run(given)
        if before is not None:
            before.remember(made, inner)
        return (*made, inner, before)


class RunPieceAgain(_OfPiece):
    """The forward operation of a recomputation."""

    which = " again"

    def __init__(self, piece: Piece, *, is_last: bool = False) -> None:
        super().__init__(piece)
        self.is_last = is_last

    def once(self, op: Op) -> Op:
        """Return the operation of the last recomputation, which uses the state up."""
        return replace(op, target=RunPieceAgain(self.piece, is_last=True))

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        *taken, before = given
        before.refuse_changes()
        with before.start.as_then(is_last=self.is_last), without_traces():
            made, inner = self.piece.run(taken)
        before.compare(made, inner)
        return (*made, inner, None)


class RunPieceBackward(_OfPiece):
    """The backward operation: gradients of the inputs and parameters that require one.

    It takes its arguments in a list, which it empties. The gradients at the positions `frees` among
    its inputs are donated: they are freed inside, as in autograd.
    """

    which = " backward"

    def __init__(
        self,
        piece: Piece,
        in_parts: frozenset[int] = frozenset(),
        frees: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(piece)
        self.in_parts = in_parts  # positions of gradients that are added part by part later
        self.frees = frees

    def __repr__(self) -> str:
        return super().__repr__() + (f" frees {sorted(self.frees)}" if self.frees else "")

    def freeing(self, places: frozenset[int], own: frozenset[int]) -> RunPieceBackward:
        """Return the same call with the gradients at these positions donated to it."""
        first = 1 + len(self.piece.needs)  # after the token and the saved tensors
        return RunPieceBackward(
            self.piece, self.in_parts, frozenset(at for at in places if at >= first)
        )

    def cost(self, op: Op) -> OpCost:
        piece = self.piece
        return OpCost(piece.time_ms[1], piece.flops[1], self.workspace_bytes(op.args[2]))

    def flops(self, count: Callable[[Op], int]) -> int:
        return self.piece.flops[1]

    def costs_as(self, other: object) -> bool:
        return super().costs_as(other) and getattr(other, "in_parts", None) == self.in_parts

    def workspace_bytes(self, given: Sequence[Any]) -> int:
        """Return the temporary memory of the call; `given` says which gradients there are.

        A gradient that is not there makes no room, just as one that is held.
        """
        wanting = zip(self.piece.kinds, self.piece.differentiable, strict=True)
        kinds = [kind for kind, differentiable in wanting if differentiable]
        there = [at for at, gradient in enumerate(given) if gradient is not None]
        first = 1 + len(self.piece.needs)
        freed = {there[at - first] for at in self.frees}
        kept = sum(kind.size_bytes for at, kind in enumerate(kinds) if at not in freed)
        return min(self.piece.workspace_bytes[1], self.piece.freeing_workspace_bytes + kept)

    def __call__(
        self, inner: InnerGraph, needed: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> tuple[Any, ...]:
        return self.run([inner, needed, list(grads)])

    def run(self, boxed: list[Any]) -> tuple[Any, ...]:
        """Run the backward on a list of arguments, which is emptied."""
        inner, needed, grads = boxed
        boxed.clear()
        first = 1 + len(self.piece.needs)
        frees = frozenset(at - first for at in self.frees)
        given = dict(zip(self.piece.needs, needed, strict=True))
        kept = set[tuple[int, int]]() if self._has_hooks() else None
        parts = gradients_of(inner, given, grads, frees, kept)
        if kept:
            self._tell_of_kept(sum(end - start for start, end in kept))
        count, wanting = len(self.piece.call.places), self.piece.call.wanting
        found = [
            self._gradient(place, own) for place, own in enumerate(parts[:count]) if wanting[place]
        ]
        rest = iter(self.piece.gradients[count:])
        for own, many in zip(parts[count:], self.piece.parts[count:], strict=True):
            # Autograd adds them one by one to other gradients, as in plain PyTorch.
            alone = [*own, *[None] * (many - len(own))][: many - 1]
            last = added(own[many - 1 :]) if len(own) >= many else None
            for part, kind in zip((*alone, last), rest, strict=False):
                found.append(part if kind is None or part is None else kind.fitting(part))
        return tuple(found)

    def _has_hooks(self) -> bool:
        """Return whether hooks may keep gradients, which has not been told yet."""
        if "gradients" in self.piece.over:
            return False
        module = running_model().get_submodule(self.piece.call.path)
        return any(m._backward_hooks or m._backward_pre_hooks for m in module.modules())

    def _tell_of_kept(self, kept_bytes: int) -> None:
        """Warn of gradients that are not freed; trials do not call the hooks that keep them."""
        self.piece.over["gradients"] = kept_bytes
        warnings.warn(
            f"hooks of module {self.piece.call} keep {kept_bytes} bytes of gradients after its "
            "backward, and none were planned for it. Set bytes aside with reserve=.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _gradient(self, place: int, parts: list[Tensor]) -> Any:
        kind = self.piece.gradients[place]
        if not parts:
            if kind is not None:
                raise self._differs("no gradient", "one")
            return None
        if kind is None:
            raise self._differs("a gradient", "none")
        return parts if place in self.in_parts else kind.fitting(added(parts))

    def _differs(self, now: str, then: str) -> OpaquePieceError:
        return OpaquePieceError(
            f"module {self.piece.call}, which is run whole, has {now} for one of its inputs, and "
            f"had {then} for the sample. Name a module around it: opaque=['path.of.module'].",
            module_path=self.piece.call.path,
        )


class _Before(Restart):
    """The state at the first run, and the trail that a recomputation must have."""

    def __init__(self, piece: Piece) -> None:
        model, self.piece = running_model(), piece
        self.trail: Any = None
        module = model.get_submodule(piece.call.path)
        written = (*module.buffers(), *map(model.get_parameter, piece.written))
        copied = written if piece.buffer_bytes else ()
        reads = () if piece.reads is None else (piece.reads,)
        path = piece.call.path
        self.start = FirstRun(module, copied, reads, path=path, around=model, raises_versions=True)
        self.tensors = self.start.tensors

    def remember(self, made: Sequence[Tensor], inner: InnerGraph) -> None:
        self.trail = _trail(made, inner)

    def refuse_changes(self) -> None:
        if name := self.start.changed():
            raise OpaquePieceError(
                f"'{name}' was changed between the forward and the backward of a planned module, "
                f"and module {self.piece.call}, which may read it, runs again for the backward. "
                "Change it after backward, or plan with a larger budget.",
                module_path=self.piece.call.path,
            )

    def compare(self, made: Sequence[Tensor], inner: InnerGraph) -> None:
        if _trail(made, inner) != self.trail:
            raise OpaquePieceError(
                f"module {self.piece.call} took another way when it was run again for the "
                "backward. It depends on something that is not restored (a clock, a file, another "
                "thread). Exclude it from recomputation or make it depend on its inputs only.",
                module_path=self.piece.call.path,
            )


def _trail(made: Sequence[Tensor], inner: InnerGraph) -> Any:
    """Return a value that is equal for two runs that took the same branches."""
    return [TensorKind.of(t) for t in made], inner.trail
