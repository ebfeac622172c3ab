"""A recorded opaque call, connected to autograd, and the gradients that come to it.

Gradients that a call makes in several parts are added part by part, as autograd does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements.op import Op, Ref
from rkgb.elements.spread import memory_of
from rkgb.opaque.call import TensorKind
from rkgb.opaque.piece import Piece, RunPiece, RunPieceBackward, Tangents, strides_of
from rkgb.recording.recorder import Recorder
from rkgb.torch_api.private.autograd import current_autograd_node, latest_sequence_nr


class Tried:
    """The opaque calls that were tried for one recording, and the gradients that came to them.

    The gradients of a call's inputs lie in memory as the call's own backward makes them, and that
    follows from how the gradients of its results lie. Trials take those to lie as the results do.
    Where a recorded backward shows that they come otherwise, the call is tried with these.
    """

    def __init__(self) -> None:
        self.pieces: dict[tuple[str, int], Piece] = {}
        self.tangents: dict[tuple[str, int], Tangents] = {}
        self.looks_again = False
        self._seen: set[tuple[str, int, Tangents]] = set()

    def note(self, piece: Piece) -> Piece:
        """Keep a piece that was tried, and return it."""
        path, number = piece.call.path, piece.call.number
        self.pieces[path, number] = piece
        self._seen.add((path, number, piece.tangents))
        return piece

    def compare(self, piece: Piece, grads: Sequence[Tensor | None]) -> None:
        """Compare the gradients of a piece's results with those of its trials."""
        path, number = piece.call.path, piece.call.number
        pairs = zip(map(strides_of, grads), piece.tangents, strict=True)
        came = tuple(then if now is None else now for now, then in pairs)
        # What lies otherwise in each attempt would be tried for ever.
        if came != piece.tangents and (path, number, came) not in self._seen:
            self.tangents[path, number] = came
            self.looks_again = True


class Link:
    """A recorded call, with what is needed to record its backward."""

    def __init__(
        self,
        recorder: Recorder,
        twin: nn.Module,
        tried: Tried,
        piece: Piece,
        inputs: list[str],
        followed: Sequence[int] = (),
        number: int | None = None,
    ) -> None:
        call = piece.call
        self.recorder, self.twin, self.tried = recorder, twin, tried
        self.piece, self.inputs, self.number = piece, inputs, number
        self.followed = tuple(followed)
        self.token = recorder.declare(f"{call.kind.lower()}_inner", piece.held_bytes)
        self.before = recorder.declare(f"{call.kind.lower()}_before", 0)
        self.results: list[str] = []
        self.since = 0

    def named(self, outputs: Sequence[Tensor]) -> None:
        """Record the forward operation with these outputs."""
        recorder, piece = self.recorder, self.piece
        path, source = recorder.places.here()
        names = recorder.results_of(piece.call.kind.lower(), outputs)
        pairs = zip(names, piece.differentiable, strict=True)
        recorder.wanting.update(name for name, differentiable in pairs if differentiable)
        self.results = list(names)
        self.since = recorder.count + 1
        if self.followed and recorder.numbers is not None:
            recorder.numbers.uses[len(recorder.forward)] = self.followed
            recorder.forget_origin(names)
        recorder.forward.append(
            Op(
                name=names[0] if names else self.token,
                target=RunPiece(piece),
                args=(*map(Ref, self.inputs), *piece.call.own_numbers()),
                kwargs={},
                results=(*names, self.token, self.before),
                returns_many=True,
                module_path=path,
                source=source,
                sequence_nr=latest_sequence_nr() if self.number is None else self.number,
                is_random=True,  # at another step it may draw
                flags=recorder.flags(),
            )
        )

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        recorder, piece = self.recorder, self.piece
        values = {"input": self.inputs, "result": self.results}
        needed = [values[kind][place] for kind, place in piece.needs]
        for name in needed:
            recorder.refuse_overwritten(name, self.since)
        given = [
            None if grad is None else Ref(recorder.argument(grad))
            for grad, wanted in zip(grads, piece.differentiable, strict=True)
            if wanted
        ]
        wants = [grad for grad, asked in zip(grads, piece.differentiable, strict=True) if asked]
        self.tried.compare(piece, wants)
        wanted = (*piece.call.wanting, *[True] * len(piece.call.parameters))
        places = [place for place, many in enumerate(piece.parts) for _ in range(many)]
        names: list[str] = []
        found: list[Tensor | None] = []
        for place, kind in zip(places, piece.gradients, strict=True):
            if not wanted[place]:
                found.append(None)
                continue
            tensor = self._stand_in(place, kind)
            found.append(tensor)
            if tensor is None:
                names.append("")
            else:
                names += recorder.results_of(f"{piece.call.kind.lower()}_grad", [tensor])
        node: Any = current_autograd_node()
        recorder.backward.append(
            Op(
                name=next(filter(None, names), self.token + "_backward"),
                target=RunPieceBackward(piece),
                args=(Ref(self.token), [Ref(name) for name in needed], given),
                kwargs={},
                results=tuple(names),
                returns_many=True,
                sequence_nr=int(node._sequence_nr()),
            )
        )
        return found

    def _stand_in(self, place: int, kind: TensorKind | None) -> Tensor | None:
        count, device = len(self.piece.call.places), self.recorder.device
        if place >= count:
            name = self.piece.call.parameters[place - count]
            parameter = self.twin.get_parameter(name)
            # At another step it may get one, for example an expert that the sample did not use.
            if kind is None and not self.piece.call.path:
                # If the whole module is one opaque call, there is no headroom for it.
                return parameter.detach()
            if kind is None or memory_of(parameter) is not parameter:
                return torch.full_like(parameter, 0.5)
        return None if kind is None else kind.made(device)


class Connect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Link, made: list[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.link = link
        outputs = tuple(t.detach() for t in made)
        pairs = zip(outputs, link.piece.differentiable, strict=True)
        ctx.mark_non_differentiable(*(t for t, differentiable in pairs if not differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with ctx.link.recorder.paused(), torch.no_grad():
            return (None, None, *ctx.link.backward(grads))


_ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


@dataclass(frozen=True)
class AddParts:
    """`total + part` for each part, as autograd adds gradients when they arrive."""

    in_place: bool

    @property
    def __name__(self) -> str:
        return "add_parts_" if self.in_place else "add_parts"

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, total: Tensor, parts: Tensor | Sequence[Tensor]) -> Tensor:
        for part in [parts] if isinstance(parts, Tensor) else parts:
            total = total.add_(part) if self.in_place else total + part
        return total


def add_in_parts(backward: Sequence[Op]) -> list[Op]:
    """Return the backward in which the parts of an opaque call's gradients are added as in
    autograd.

    Autograd does not sum the parts first: it adds each one to the gradient from elsewhere.
    """
    readers: dict[str, list[int]] = {}
    for index, op in enumerate(backward):
        for name in op.inputs:
            readers.setdefault(name, []).append(index)
    changed = list(backward)
    for index, op in enumerate(backward):
        if not isinstance(op.target, RunPieceBackward):
            continue
        in_parts = set()
        wanted = [i for i, wants in enumerate(op.target.piece.call.wanting) if wants]
        for place, name in zip(wanted, op.results, strict=False):
            reading = readers.get(name, [])
            if not name or len(reading) != 1:
                continue
            add = backward[reading[0]]
            if add.target in _ADDS and add.sequence_nr == op.sequence_nr and len(add.args) == 2:
                first, second = add.args
                if second == Ref(name) and first != second:
                    in_place = add.target is torch.ops.aten.add_.Tensor
                    changed[reading[0]] = replace(add, target=AddParts(in_place=in_place))
                    in_parts.add(place)
        if in_parts:
            target = RunPieceBackward(op.target.piece, frozenset(in_parts))
            changed[index] = replace(op, target=target)
    return changed
