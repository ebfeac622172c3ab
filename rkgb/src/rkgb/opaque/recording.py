"""Recording opaque calls of submodules: one operation each for forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements.module_paths import around
from rkgb.elements.op import CAST, Op, Ref
from rkgb.elements.spread import memory_of, read_lazily
from rkgb.elements.target import running_on
from rkgb.elements.trees import flatten
from rkgb.errors import BrokenPieceError, OtherTangentsError, RkgbError, SideEffectError
from rkgb.graphs.basic import BasicGraph, ambient_autocast
from rkgb.guards.code_watch import CodeWatch, Seen
from rkgb.guards.outside import Readable
from rkgb.module_state.kept_writes import KeptTensors
from rkgb.module_state.start_of_call import Lent, ModuleState
from rkgb.opaque.adding import add_in_parts
from rkgb.opaque.call import Call, TensorKind
from rkgb.opaque.piece import Piece, RunPiece, RunPieceBackward, Tangents, strides_of
from rkgb.opaque.recurrent import draws_by_cudnn
from rkgb.opaque.trial import Trials
from rkgb.recording.recorder import Recorder
from rkgb.torch_api.placed import placed_parameters
from rkgb.torch_api.private.autograd import (
    current_autograd_node,
    latest_sequence_nr,
    without_saved_hooks,
)


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


class PieceRecorder:
    """Records the calls of some submodules as opaque calls."""

    def __init__(
        self,
        recorder: Recorder,
        twin: nn.Module,
        paths: Sequence[str],
        known: BasicGraph | None,
        codes: CodeWatch,
        looked_at: Callable[[list[Seen]], Readable | None],
        *,
        tried: Tried | None = None,
        runs: bool = True,
    ) -> None:
        self.codes, self.looked_at = codes, looked_at
        targets = [op.target for op in known.ops] if known is not None else []
        pieces = [target.piece for target in targets if isinstance(target, RunPiece)]
        self.tried = Tried() if tried is None else tried
        self.tried.looks_again = False
        self.known = {(piece.call.path, piece.call.number): piece for piece in pieces}
        self.known.update(self.tried.pieces)
        self.recorder, self.twin, self.paths = recorder, twin, tuple(paths)
        self.trials = Trials(twin, recorder.device)
        self.count = 0
        self.left: dict[tuple[str, str], None] = {}  # attributes in which calls leave tensors
        self.runs = runs  # otherwise stand-ins replace the results of `known` calls

    def close(self) -> None:
        """Drop references to the watchers: autograd may hold this object longer than the step."""
        del self.codes, self.looked_at

    def call(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Record one call, and return its result, connected to autograd.

        Raises:
            SideEffectError: the call changes its arguments, or depends on a tensor that it does
                not take; only a larger submodule can be an opaque call.
        """
        own = dict.fromkeys(
            self.trials.names[id(p)] for p in module.parameters() if p.requires_grad
        )
        name = type(module).__name__
        tensors, followed, call = self._call(path, name, args, kwargs, tuple(own))
        inputs = [self.recorder.argument(tensor) for tensor in tensors]
        with self.recorder.paused():
            piece, made = self._explored(call, module, tensors)
            outputs = self._connected(piece, made, tensors, inputs, followed)
        result = piece.result(outputs)
        if piece.call.left:
            result, *values = result
            for (place, name), value in zip(piece.call.left, values, strict=True):
                vars(self.twin.get_submodule(place))[name] = value
            self.left.update(dict.fromkeys(piece.call.left))
        return result

    def function(
        self, kind: Any, args: tuple[Any, ...], number: int
    ) -> tuple[Piece, list[Tensor], Link]:
        """Record one call of a Function, whose autograd node has this number."""
        recorder = self.recorder
        path, _ = recorder.places.here()
        tensors, followed, call = self._call(path, kind.__name__, args, {}, (), kind)
        inputs = [recorder.argument(tensor) for tensor in tensors]
        with recorder.paused():
            piece, made = self._explored(call, self.twin.get_submodule(path), tensors)
        return piece, made, Link(self, piece, inputs, followed, number)

    def _call(
        self,
        path: str,
        kind: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        parameters: tuple[str, ...],
        function: Any = None,
    ) -> tuple[list[Tensor], list[int], Call]:
        """Return (tensors of a call, tracked numbers that it takes, the call)."""
        leaves, structure = flatten((args, dict(kwargs)))
        trace, followed = self.recorder.numbers, list[int]()
        if trace is not None:
            leaves = trace.plain(leaves, followed)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        grad_mode = torch.is_grad_enabled()
        self.count += 1
        return (
            tensors,
            followed,
            Call(
                path=path,
                kind=kind,
                number=self.count - 1,
                structure=structure,
                leaves=tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves),
                places=tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)),
                wanting=tuple(grad_mode and t.requires_grad for t in tensors),
                parameters=parameters if grad_mode else (),
                grad_mode=grad_mode,
                autocast=ambient_autocast(),
                function=function,
                numbers=tuple(i for i, leaf in enumerate(leaves) if type(leaf) in (float, int)),
                trainable=frozenset(self.trials.names.values()),
            ),
        )

    def finished(self, parameters: Mapping[str, str]) -> list[Op]:
        """Return the backward, in which partial gradients are added one by one.

        Raises:
            OtherTangentsError: gradients have come to opaque calls otherwise than in their trials.
            SideEffectError: a larger submodule has to be an opaque call.
        """
        recorder = self.recorder
        if self.runs and self.tried.looks_again:
            raise OtherTangentsError(self.tried)
        if self.paths:
            self._refuse_shared_writes((*recorder.forward, *recorder.backward), parameters)
            self._refuse_shared_casts(recorder.forward, parameters)
        return add_in_parts(recorder.backward)

    def _refuse_shared_writes(self, ops: Sequence[Op], parameters: Mapping[str, str]) -> None:
        """Refuse a parameter that is used inside and outside of an opaque call, and written by one.

        A recomputed opaque call restores only parameters that it writes itself.

        Raises:
            SideEffectError: only the whole module can be an opaque call.
        """
        infos = self.recorder.infos
        first: dict[int, str] = {}  # parameters with several names
        every = placed_parameters(self.twin, remove_duplicate=False)
        own = {name: first.setdefault(id(p), name) for name, p in every}
        uses: dict[str, set[object]] = {}
        written: set[str] = set()
        for place, op in enumerate(ops):
            if isinstance(op.target, RunPiece):
                module = self.twin.get_submodule(op.target.piece.call.path)
                inside = {id(p) for p in module.parameters()}
                changed = {own[name] for name in op.target.piece.written}
                written |= changed
                for name in changed | {n for key, n in first.items() if key in inside}:
                    uses.setdefault(name, set()).add(place)
            for name in (*op.inputs, *op.writes):
                target = parameters.get(infos[name].alias_of)
                if target is not None:
                    uses.setdefault(own[target], set()).add("ops")
                    if name in op.writes:
                        written.add(own[target])
        shared = sorted(name for name in written if len(uses[name]) > 1)
        if shared:
            raise SideEffectError(
                f"cannot run a part of {self.recorder.model_name} whole: '{shared[0]}' is written "
                "to by the forward, and is used both inside of the part and outside.",
                module_path="",
            )

    def _refuse_shared_casts(self, ops: Sequence[Op], parameters: Mapping[str, str]) -> None:
        """Refuse a parameter that autocast casts both inside and outside of an opaque call.

        Autocast casts it once per region, and sums the gradients of all uses before it casts back.

        Raises:
            SideEffectError: a larger submodule has to be an opaque call.
        """
        uses: dict[str, list[str]] = {}
        for op in ops:
            if isinstance(op.target, RunPiece):
                for name in op.target.piece.casts:
                    uses.setdefault(name, []).append(op.target.piece.call.path)
            elif op.target is CAST and op.inputs and op.inputs[0] in parameters:
                uses.setdefault(parameters[op.inputs[0]], []).append(op.module_path or "")
        inside = {n for op in ops if isinstance(op.target, RunPiece) for n in op.target.piece.casts}
        for name, paths in uses.items():
            if name in inside and len(paths) > 1:
                raise SideEffectError(
                    f"cannot run a part of {self.recorder.model_name} whole: autocast casts "
                    f"'{name}' for it, and for others that use it, once for all of them.",
                    module_path=around([path.rpartition(".")[0] for path in paths]),
                )

    # ------------------------------------------------------------------ trials

    def _explored(
        self, call: Call, module: nn.Module, tensors: Sequence[Tensor]
    ) -> tuple[Piece, list[Tensor]]:
        try:
            # torch.cond compiles, and a compiler would capture the recording's modes. Tensors that
            # autograd saves in an inner backward would stay alive under the recording's hooks.
            with self.recorder.unwatched(), without_saved_hooks():
                found = self._run(call, module, tensors)
        except RkgbError:
            raise
        except Exception as error:
            raise BrokenPieceError(
                f"cannot run module {call}: it raised {type(error).__name__}: {error}"
            ) from error
        self.recorder.follow_random()
        return found

    def _run(
        self, call: Call, module: nn.Module, tensors: Sequence[Tensor]
    ) -> tuple[Piece, list[Tensor]]:
        known = self.known.get((call.path, call.number))
        if not self.runs:
            return self._stood_in(known, call, tensors)
        tangents = self.tried.tangents.get((call.path, call.number))
        if (
            known is None
            or (tangents is not None and tangents != known.tangents)
            or not known.call.like(call)
            or not known.call.serves(call.trainable)
        ):
            with self.codes.apart() as ran:
                seen = self.trials.once(call, module, tensors)
            # Always asked: what it uses up is put back from now on.
            reads = self.looked_at(ran)
            runs_once = reads is None or seen.moves or seen.retains
            if any(tensor.is_cuda for tensor in tensors):
                runs_once |= any(map(draws_by_cudnn, module.modules()))
            call = replace(call, left=seen.attributes)
            with self.codes.resting():
                piece, made = self.trials.piece(call, module, tensors, seen.written, tangents)
            piece = self.tried.note(replace(piece, runs_once=runs_once, reads=reads))
            return piece, made
        state, lent = ModuleState(module), Lent(module)
        contents = KeptTensors(map(self.twin.get_parameter, known.written))
        try:
            with running_on(self.twin), self.codes.resting(), self.codes.like_it() as codes:
                made, _ = known.run((*tensors, *call.own_numbers()))
        finally:
            contents.restore()
            lent.end()
            state.restore()
        if not known.runs_once and self.looked_at([*codes.seen.values()]) is None:
            # It went another way than when it was tried.
            known = replace(known, runs_once=True)
        return known, made

    def _stood_in(
        self, known: Piece | None, call: Call, tensors: Sequence[Tensor]
    ) -> tuple[Piece, list[Tensor]]:
        """Return stand-ins for the results of a known call, with the plain values of this one.

        Raises:
            SideEffectError: no known call is of this kind.
        """
        if known is None or not known.call.is_of_kind(call):
            raise SideEffectError(
                f"module {call}, which runs whole, is called otherwise.",
                module_path=call.path.rpartition(".")[0],
            )
        made: list[Tensor] = []
        for kind, place in zip(known.kinds, known.lies_in, strict=True):
            if place < 0 or kind.sparse:
                made.append(kind.made(self.recorder.device))
            else:
                shared = tensors[place].detach().as_strided(kind.shape, kind.stride)
                made.append(read_lazily(shared, kind.lazy))
        return replace(known, call=replace(known.call, leaves=call.leaves)), made

    # ------------------------------------------------------------------ the recording

    def _connected(
        self,
        piece: Piece,
        made: Sequence[Tensor],
        tensors: Sequence[Tensor],
        inputs: Sequence[str],
        followed: Sequence[int],
    ) -> list[Tensor]:
        outputs = list(made)
        link = Link(self, piece, list(inputs), followed)
        if any(piece.differentiable):
            many = piece.parts[len(tensors) :]
            named = zip(piece.call.parameters, many, strict=True)
            parameters = [self.twin.get_parameter(name) for name, n in named for _ in range(n)]
            outputs = list(_Connect.apply(link, list(made), *tensors, *parameters))  # type: ignore[no-untyped-call]
        link.named(outputs)
        return outputs


class Link:
    """A recorded call, with what is needed to record its backward."""

    def __init__(
        self,
        owner: PieceRecorder,
        piece: Piece,
        inputs: list[str],
        followed: Sequence[int] = (),
        number: int | None = None,
    ) -> None:
        recorder, call = owner.recorder, piece.call
        self.owner, self.piece, self.inputs, self.number = owner, piece, inputs, number
        self.followed = tuple(followed)
        self.token = recorder.declare(f"{call.kind.lower()}_inner", piece.held_bytes)
        self.before = recorder.declare(f"{call.kind.lower()}_before", 0)
        self.results: list[str] = []
        self.since = 0

    def named(self, outputs: Sequence[Tensor]) -> None:
        """Record the forward operation with these outputs."""
        recorder, piece = self.owner.recorder, self.piece
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
        recorder, piece = self.owner.recorder, self.piece
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
        self.owner.tried.compare(piece, wants)
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
        count, device = len(self.piece.call.places), self.owner.recorder.device
        if place >= count:
            name = self.piece.call.parameters[place - count]
            parameter = self.owner.twin.get_parameter(name)
            # At another step it may get one, for example an expert that the sample did not use.
            if kind is None and not self.piece.call.path:
                # If the whole module is one opaque call, there is no headroom for it.
                return parameter.detach()
            if kind is None or memory_of(parameter) is not parameter:
                return torch.full_like(parameter, 0.5)
        return None if kind is None else kind.made(device)


class _Connect(torch.autograd.Function):
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
        with ctx.link.owner.recorder.paused(), torch.no_grad():
            return (None, None, *ctx.link.backward(grads))
