"""Recording opaque calls of submodules: one operation each for forward and backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements.module_paths import around
from rkgb.elements.op import CAST, Op
from rkgb.elements.spread import read_lazily
from rkgb.elements.target import running_on
from rkgb.elements.trees import flatten
from rkgb.errors import (
    BrokenPieceError,
    OtherTangentsError,
    RkgbError,
    SideEffectError,
    StopsRecordingError,
    noting_stops,
)
from rkgb.graphs.basic import BasicGraph, ambient_autocast
from rkgb.guards.code_watch import CodeWatch, Seen
from rkgb.module_state.kept_writes import KeptTensors
from rkgb.module_state.start_of_call import Lent, ModuleState
from rkgb.opaque.call import Call
from rkgb.opaque.left_behind import left_by
from rkgb.opaque.link import Connect, Link, Tried, add_in_parts
from rkgb.opaque.piece import Piece, RunPiece
from rkgb.opaque.trial import Trials
from rkgb.outside.readable import Readable
from rkgb.recording.facts import TensorFacts
from rkgb.recording.recorder import Recorder
from rkgb.torch_api.modes_left import Modes
from rkgb.torch_api.private.autograd import without_saved_hooks
from rkgb.torch_api.tensor_facts import (
    answering_as,
    facts_of_result,
    original_fact,
    placed_parameters,
    stands_for_another,
    written_on,
)


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
        facts: TensorFacts,
        *,
        tried: Tried | None = None,
        runs: bool = True,
    ) -> None:
        self.codes, self.looked_at, self.facts = codes, looked_at, facts
        targets = [op.target for op in known.ops] if known is not None else []
        pieces = [target.piece for target in targets if isinstance(target, RunPiece)]
        self.tried = Tried() if tried is None else tried
        self.tried.looks_again = False
        self.known = {(piece.call.path, piece.call.number): piece for piece in pieces}
        self.known.update(self.tried.pieces)
        self.recorder, self.twin, self.paths = recorder, twin, tuple(paths)
        # The parameters that want gradients, by identity.
        self.names = {id(p): n for n, p in placed_parameters(twin) if p.requires_grad}
        self.takes_by_values = False  # whether a call runs a kernel whose workspace depends on them
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
        own = dict.fromkeys(self.names[id(p)] for p in module.parameters() if p.requires_grad)
        name = type(module).__name__
        tensors, followed, call = self._call(path, name, args, kwargs, tuple(own))
        inputs = [self.recorder.argument(tensor) for tensor in tensors]
        with self.recorder.paused():
            piece, made = self._explored(call, module, tensors)
            outputs = self._connected(piece, made, tensors, inputs, followed)
        if piece.checkpoints:
            self.recorder.places.note_again(path)
        result = piece.result(outputs, tensors)
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
        return piece, made, Link(recorder, self.twin, self.tried, piece, inputs, followed, number)

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
        tensors, where = _tensors_among(leaves, self.twin, path, function)
        own = tensors if function is None else ()
        if any(written_on(t) and not stands_for_another(t) for t in own):
            raise SideEffectError(
                f"cannot run a part of {self.recorder.model_name} whole: an attribute is set on a "
                "tensor that it gets, which a planned step would not do. Pass it as an argument.",
                module_path=path.rpartition(".")[0],
            )
        grad_mode = torch.is_grad_enabled()
        self.count += 1
        call = Call(
            path=path,
            kind=kind,
            number=self.count - 1,
            structure=structure,
            leaves=tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            **where,
            wanting=tuple(grad_mode and t.requires_grad for t in tensors),
            parameters=parameters if grad_mode else (),
            grad_mode=grad_mode,
            autocast=ambient_autocast(),
            function=function,
            numbers=tuple(i for i, leaf in enumerate(leaves) if type(leaf) in (float, int)),
            trainable=frozenset(self.names.values()),
        )
        return tensors, followed, call

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
            # A step leaves modes as the call does. torch.cond compiles, and a compiler would
            # capture the recording's modes. Tensors that autograd saves in an inner backward would
            # stay alive under the recording's hooks.
            with Modes(), self.recorder.unwatched(), without_saved_hooks(), noting_stops():
                found = self._run(call, module, tensors)
        except RkgbError:
            raise
        except (Exception, StopsRecordingError) as error:
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
                seen = left_by(call, module, tensors, self.twin, self.recorder.device, self.facts)
            # Always asked: what it uses up is put back from now on.
            self.takes_by_values |= seen.takes_by_values
            reads = self.looked_at(ran)
            runs_once = reads is None or seen.moves or seen.retains
            if any(tensor.is_cuda for tensor in tensors):
                runs_once |= any(map(draws_by_cudnn, module.modules()))
            call = replace(call, left=seen.attributes)
            codes = self.codes.like_it()
            trials = Trials(
                *(self.twin, self.recorder.device, self.names, call, module, tensors),
                *(seen.written, tangents, self.takes_by_values, codes),
            )
            with self.codes.resting():
                piece, made = trials.piece()
            in_forward = {id(one.code) for one in ran}
            if any(id(one.code) not in in_forward for one in codes.seen.values()):
                self.looked_at([*codes.seen.values()])  # what a backward changes is put back, too
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
        link = Link(self.recorder, self.twin, self.tried, piece, list(inputs), followed)
        if any(piece.differentiable):
            many = piece.parts[len(tensors) :]
            named = zip(piece.call.parameters, many, strict=True)
            parameters = [self.twin.get_parameter(name) for name, n in named for _ in range(n)]
            outputs = list(Connect.apply(link, list(made), *tensors, *parameters))  # type: ignore[no-untyped-call]
        link.named(outputs)
        for output, facts, place in zip(outputs, piece.facts, piece.lies_in, strict=True):
            if isinstance(facts, int):
                answering_as(output, facts_of_result(tensors[facts]))
                continue
            written = 0 if place < 0 else original_fact(tensors[place], "_version")
            answering_as(output, {**facts, "_version": facts["_version"] + written})
        return outputs


def _tensors_among(
    leaves: Sequence[Any], twin: nn.Module, path: str, function: Any
) -> tuple[list[Tensor], dict[str, tuple[Any, ...]]]:
    """Return the tensors among the leaves of a call, each once, and where they are.

    Python may ask which of them are one object. A Function has a gradient for each argument.
    """
    tensors, known = list[Tensor](), dict[int, int]()
    places, again, own = list[int](), list[tuple[int, int]](), list[tuple[int, str]]()
    held = {} if function is not None else _tensors_of(twin, path)
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        if id(leaf) in held:
            own.append((place, held[id(leaf)]))
        elif id(leaf) in known and function is None:
            again.append((place, known[id(leaf)]))
        else:
            known[id(leaf)] = len(tensors)
            tensors.append(leaf)
            places.append(place)
    return tensors, {"places": (*places,), "again": (*again,), "own": (*own,)}


def _tensors_of(twin: nn.Module, path: str) -> dict[int, str]:
    """Return the names of the parameters and buffers inside a submodule, by their identity."""
    module, around = twin.get_submodule(path), f"{path}." if path else ""
    named = (*module.named_parameters(), *module.named_buffers())
    return {id(tensor): f"{around}{name}" for name, tensor in named}


_log = logging.getLogger("rkgb")
_told: set[str] = set()


def draws_by_cudnn(module: nn.Module) -> bool:
    """Return whether a module on CUDA draws from that state, and say so once for each type."""
    if not (isinstance(module, nn.RNNBase) and module.training and module.dropout > 0):
        return False
    name = type(module).__name__
    if name not in _told:
        _told.add(name)
        _log.warning(
            "%s draws the dropout between its layers by cuDNN, from a state that torch cannot put "
            "back: it runs once in a step, and its masks may be others than in a plain run from "
            "the same seed. Single layers with nn.Dropout between them have plain PyTorch's bits.",
            name,
        )
    return True
