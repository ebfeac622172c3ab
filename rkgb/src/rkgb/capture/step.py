"""One recorded step of a copy of a model.

The step is a real one, with eager's kernels, on the sample's real values. The copy's parameters are
new leaves on the same memory, so that the user's module is not affected.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import set_detect_anomaly

from rkgb.capture.backward import AskedKind, RecordedBackward, flows_of
from rkgb.capture.externals import Externals
from rkgb.capture.hooks import HookTables, HookWatch, ReadHooksError
from rkgb.capture.twin import geometry_of, twin_of
from rkgb.capture.ways import Asked, Way
from rkgb.device.base import Span
from rkgb.device.chosen import trace_memory
from rkgb.elements.effect import Assertion, Assign, Effect, InputMutation
from rkgb.elements.module_paths import is_inside_any
from rkgb.elements.sample import Sample
from rkgb.elements.trees import Structure, UnknownTreeError, flatten, holds_tensors
from rkgb.errors import (
    NeedsContentError,
    NotRecordedError,
    RkgbError,
    SideEffectError,
    StopsRecordingError,
    TraceError,
    UnsupportedDeviceError,
    WritesInputError,
    noting_stops,
)
from rkgb.graphs.basic import BackwardKind, BasicGraph, Metered
from rkgb.guards.code_watch import CodeWatch, Seen
from rkgb.guards.loads import ANY, loads_of
from rkgb.guards.sources import ReadInBackward, Sources
from rkgb.module_state.kept_writes import KeptWrites, ParameterPlaces
from rkgb.outside.changes import Outside
from rkgb.outside.readable import Readable
from rkgb.recording.facts import TensorFacts
from rkgb.recording.places import Places
from rkgb.recording.repeated import KERNEL
from rkgb.recording.sizes import saving
from rkgb.recording.watch import (
    CallWatch,
    as_written,
    no_idle_looks,
    no_reading,
    refused_calls,
    refused_modes,
    sets_by_hand,
)
from rkgb.safeguards.assignments import Arguments, AssignsError, Attributes, Hidden
from rkgb.safeguards.refusals import explained
from rkgb.safeguards.settling import Setting, SettlesError, all_settings, settings_of
from rkgb.safeguards.side_effects import KeptState, Printed, RemembersError, Said
from rkgb.safeguards.traces import without_traces
from rkgb.torch_api.modes_left import Modes
from rkgb.torch_api.private.autograd import current_autograd_node
from rkgb.torch_api.quiet import printing_to, without_warnings
from rkgb.torch_api.tensor_facts import placed_parameters, written_on

if TYPE_CHECKING:
    from rkgb.opaque import PieceRecorder


class RecordedStep:
    """One step on a copy of the module."""

    def __init__(self, model: nn.Module, sample: Sample, asked: Asked, way: Way) -> None:
        self.model, self.device, self.keep_content = model, sample.device, way.keeps_content
        numbers, known = asked.numbers, asked.known
        twin = twin_of(model, hooks_know_model=True)
        self.twin, self.originals, self.own_tensors = twin.module, twin.originals, twin.tensors
        # Python may test whether two inputs are one object; keys of plans contain that.
        self.sample = sample.detached()
        if numbers is not None:
            self.sample = self.sample.with_leaves(numbers.begin(self.sample.leaves))
        for module in (self.twin, *([] if numbers is None else numbers.owners)):
            self.sample.set_attributes(module)
        self.places = Places(self.twin)
        self.recorder = asked.recorder(type(model).__name__, self.device, self.places)
        self.recorder.numbers = numbers
        own = dict(model.named_parameters())
        parameters = {id(new): own[name] for name, new in self.twin.named_parameters()}
        self.facts = TensorFacts({**self.originals, **parameters})
        self.said = Said(self.twin, lambda: self.recorder.is_paused)
        takes_parameters = any(isinstance(leaf, nn.Parameter) for leaf in sample.leaves)
        self.outside = Outside(self.twin, twin.copies.of, takes_parameters=takes_parameters)
        self.remembers = way.remembers
        places = self.places
        self.codes = CodeWatch(lambda: places.path, self.outside.note)
        # Code of the user's Functions and hooks that runs in the backward.
        self.backward_codes = CodeWatch(
            *(lambda: places.path, self.outside.note),
            elsewhere=lambda: current_autograd_node() is not None,
        )
        if way.keeps_content or not way.repeats:
            self.recorder.repeated = None
        self.is_metered = asked.is_metered and self.recorder.repeated is not None
        self.opaque, self.pieces = way.opaque, None
        self.functions: list[tuple[Any, str, Any]] = []
        if way.opaque or way.functions:
            self.pieces = self._pieces(way, asked)
        self.externals = Externals(self.recorder, self.twin, self.sample.leaves)
        self.inputs = self.externals.inputs
        self.written = [self.inputs.index(name) for name in sorted(way.written)]
        self.copies: list[Tensor] = []  # of mutated arguments
        self.hidden, self.settling = Hidden(self.twin, way.hidden), way.settling
        self.hooks = HookWatch(
            *(self.recorder, self.codes, model, self.twin, self.outside),
            () if known is None else known.effects,
            *(way.read_hooks, twin.copies),
        )

    def _pieces(self, way: Way, asked: Asked) -> PieceRecorder:
        """Return the recorder of opaque calls."""
        # A step without any does without this part of the package.
        from rkgb.opaque import PieceRecorder, run_functions_whole

        pieces = PieceRecorder(
            *(self.recorder, self.twin, way.opaque, asked.known),
            *(self.codes, self._looked_at, self.facts),
            tried=way.tried,
            runs=asked.runs_pieces,
        )
        self.places.run_whole(way.opaque, pieces.call)
        self.functions = run_functions_whole(pieces, way.functions)
        return pieces

    @property
    def _left(self) -> dict[tuple[str, str], None]:
        """The attributes in which opaque calls leave tensors."""
        return {} if self.pieces is None else self.pieces.left

    def run(self, asked: AskedKind) -> BasicGraph:
        """Return the recording, with the memory of kernels if it is metered."""
        # Context variables that it sets are set in a copy of the context.
        return contextvars.copy_context().run(self._metered_or_not, asked)

    def _metered_or_not(self, asked: AskedKind) -> BasicGraph:
        if not self.is_metered:
            return self._run(asked)
        found: list[BasicGraph] = []

        def run(span: Span) -> None:
            assert self.recorder.repeated is not None
            self.recorder.repeated.span = span
            found.append(self._run(asked))

        # Tensors must be made and freed inside, or torch warns that it cannot count them.
        before = self.recorder.random_state
        spans = trace_memory(run, self.device).spans
        del before
        highest = [span.added_peak_bytes for span in spans if span.name == KERNEL]
        metered = zip(self.recorder.metered, highest, strict=True)
        known = {op.name: Metered(op, peak) for op, peak in metered if op is not None}
        return replace(found[0], metered=known)

    def _run(self, asked: AskedKind) -> BasicGraph:
        before = KeptState(self.twin, self.opaque)
        with (
            contextlib.ExitStack() as stack,
            without_warnings(),
            set_detect_anomaly(False),  # which looks for NaN in each gradient: no decision
            without_traces(self.said.add) as importing,
            printing_to(Printed(self.said, "stdout")),
            printing_to(Printed(self.said, "stderr"), "stderr"),
            no_reading(self.recorder),
            self.recorder.patched(self.functions),
            self.recorder,
            contextlib.closing(self.outside.begin()),  # before patches are undone
        ):
            self.codes.around_import = functools.partial(self._importing, importing)
            # Not a second mode, whose memory would be metered.
            self.recorder.kept_writes = KeptWrites(placed_parameters(self.twin))
            stack.callback(self.recorder.kept_writes.restore)
            stack.callback(HookTables(self.model).restore)
            stack.callback(before.restore)  # Python's random state, if the step is refused
            if self.pieces is not None:
                stack.callback(self.pieces.close)
            with contextlib.nullcontext() if self.keep_content else saving(self.recorder):
                result = self._forward_or_refusal()
            ran = self.codes.seen.values()
            before.refuse_changes(self._call, lambda: self.recorder.is_paused, ran)
            self.outside.refuse(ran, self.originals)
            self.outside.refuse_read_elsewhere(self.hidden.targets, [*ran], self.originals)
            if self.outside.remembers and not self.remembers:
                raise RemembersError
            self.said.refuse()
            effects = self._effects()
            returned = len(self._taken_apart(result)[0])
            if effects:
                result = (result, tuple(value for _, value in effects))
            outputs, output_spec = self._taken_apart(result)
            del result
            backward = RecordedBackward(
                self.recorder, self.twin, self.externals.leaves, keep_content=self.keep_content
            )
            roots = backward.roots(outputs)
            try:
                names = tuple(map(self.externals.named, outputs))
            except NotRecordedError as error:
                name = type(self.model).__name__
                raise explained(self.twin, name, error, module_path="") from error
            root_names = tuple(self.recorder.name_of(root) or "" for root in roots)
            kind = backward.kind(asked, roots, outputs[:returned])
            self._refuse_on_host(root_names, kind)
            flows = flows_of(roots)
            del outputs
            attributes = Attributes(self.twin)
            with self._following(self.backward_codes):
                tangent_names, kind = backward.run(roots, kind, flows)
            if ran := self.backward_codes.seen.values():
                before.refuse_changes(self._call, lambda: self.recorder.is_paused, ran)
                attributes.refuse_assigned_in_backward()
                self.outside.refuse(ran, self.originals)
        return self._graph(
            outputs=names,
            output_spec=output_spec,
            effects=tuple(effect for effect, _ in effects),
            roots=root_names,
            kind=kind,
            tangent_names=tangent_names,
            hand_overs=tuple(backward.hand_overs),
            leaf_edges=backward.leaf_edges,
            flows=flows,
        )

    @contextlib.contextmanager
    def _importing(
        self, leaving: Callable[[str], contextlib.AbstractContextManager[None]], name: str
    ) -> Iterator[None]:
        """Around the code of a module that the forward imports: it is not of the recording."""
        with self.recorder.unwatched(), leaving(name):
            yield

    def _graph(self, *, roots: tuple[str, ...], **found: Any) -> BasicGraph:
        """Return the recording, from the recorder's operations and the step's results."""
        recorder, externals, pieces = self.recorder, self.externals, self.pieces
        back = recorder.backward if pieces is None else pieces.finished(externals.parameters)
        wanting = recorder.wanting.union(roots)
        return BasicGraph(
            ops=tuple(recorder.forward),
            backward=tuple(back),
            opaque=self.opaque,
            reads=tuple(recorder.reads),
            catches=self.places.catches,
            parameters=externals.parameters,
            buffers=externals.buffers,
            constants={n: self._users(t) for n, t in recorder.constants.items()},
            inputs=tuple(self.inputs),
            input_spec=self.sample.structure,
            infos={n: replace(i, requires_grad=n in wanting) for n, i in recorder.infos.items()},
            roots=roots,
            device=self.device,
            model_name=type(self.model).__name__,
            sources=self._sources(),
            **found,
        )

    def _refuse_written_tensors(self) -> None:
        """Refuse a tensor that is an attribute of an input: a recording would keep this one.

        Raises:
            NotRecordedError: one is asked for.
        """
        own = (pair for leaf in self.sample.tensors for pair in written_on(leaf).items())
        written = [name for name, value in own if holds_tensors(value)]
        if not written:
            return
        asked = {
            name
            for one in self.codes.seen.values()
            if not all(is_inside_any(path, self.opaque) for path in one.paths)
            for name in (*loads_of(one.code).attributes, *one.names)
        }
        read = written if ANY in asked else [name for name in written if name in asked]
        if read:
            raise NotRecordedError(
                f"reads the attribute '{read[0]}' of a tensor that it gets, which holds a tensor",
                "pass that as an argument of its own",
            )

    def _refuse_on_host(self, roots: Sequence[str], kind: BackwardKind) -> None:
        """Refuse gradients that begin on the host: autograd runs each device in its own thread.

        Raises:
            UnsupportedDeviceError: one does; it says which.
        """
        for name, tangent in zip(roots, kind.tangents, strict=True):
            if tangent is not None and self.recorder.infos[name].is_on_host:
                raise UnsupportedDeviceError(
                    f"an output of {type(self.model).__name__} lies on the CPU and gets a "
                    f"gradient ({self.recorder.infos[name]}), beside a step on {self.device}. "
                    "Return it where it was computed, and move it outside of forward."
                )

    def _users(self, constant: Tensor) -> Tensor:
        """Return the user's tensor for a constant that is a copy of it, or the constant itself."""
        own = self.originals.get(id(constant))
        if not isinstance(own, Tensor):  # another object on the same memory
            own = self.own_tensors.get(geometry_of(constant))
        return constant if own is None else own.detach() if own.requires_grad else own

    def _sources(self) -> Sources:
        """Return the sources that the forward's Python has read, besides its arguments."""
        seen = [*self.codes.seen.values(), *self.backward_codes.seen.values()]
        ran = {id(one.code) for one in seen}
        seen += [one for one in self.outside.ran_for_results if id(one.code) not in ran]
        library = [*self.codes.library.values(), *self.backward_codes.library.values()]
        found = Sources.of(seen, self.originals, library)
        again = frozenset(self.places.called_again)
        checkpointed = [one for one in self.codes.seen.values() if one.paths & again]
        in_backward = [*self.backward_codes.seen.values(), *checkpointed]
        if in_backward or again:
            found.of_backward = ReadInBackward(Sources.of(in_backward, self.originals), again)
        for (_, name), (tensor, where) in self.facts.asked.items():
            found.add_fact(tensor, name, where)
        for key, module in self.places.outside.items():
            own = self.originals.get(key, module)
            found.called[id(own)] = weakref.ref(own)
        return found

    def _forward_or_refusal(self) -> Any:
        try:
            result = self._forward()
            self.hooks.refuse_read(self.codes.seen.values())
            return result
        except RkgbError as error:
            self.hooks.refuse_read(self.codes.seen.values())
            if error.module_path is None:
                error.module_path = self.places.raised_in[-1]
            raise
        except (AssignsError, SettlesError, NeedsContentError, WritesInputError, ReadHooksError):
            raise
        except (Exception, StopsRecordingError) as error:
            self.hooks.refuse_read(self.codes.seen.values())
            raise explained(
                *(self.twin, type(self.model).__name__, error, self.sample.leaves),
                module_path=self.places.raised_in[-1],
            ) from error

    # ------------------------------------------------------------------ forward

    def _forward(self) -> Any:
        attributes = Attributes(self.twin)
        places = ParameterPlaces(self.twin)
        is_with_grad = torch.is_grad_enabled()
        with Modes() as modes:
            with self.hidden.watching():
                result = self._call()
            left = modes.changed()
        if torch.is_grad_enabled() != is_with_grad:
            raise sets_by_hand(type(self.model).__name__, "whether gradients are computed")
        if left:
            raise NotRecordedError(
                f"leaves torch set otherwise ({left}), which a recording would not do",
                "set it outside of forward, or put it back",
            )
        places.refuse_moves()
        self.arguments.refuse_written()
        self._refuse_written_tensors()
        settings = self._settings(attributes.before)
        if settings:
            raise SettlesError(settings, self.recorder.forward, self._sources())
        new = attributes.assigned() - {*self.hidden.targets, *self._left}
        attributes.refuse_others(new, self.codes.seen.values())
        if new:
            raise AssignsError(new)
        return result

    def _settings(self, attributes: Mapping[str, Mapping[str, Any]]) -> list[Setting]:
        """Return the values that it has read and then set, or [] if some are not plain."""
        found: list[list[Setting] | None] = []
        for owner, content, path in self.outside.changed_of_module():
            if content is None:
                return []
            held = owner if isinstance(owner, dict) else vars(owner)
            own = self.originals.get(id(owner), owner)
            found.append(settings_of(owner, own, content, held.keys() | content.keys(), path))
        for path, name in self.settling:
            own = self.model.get_submodule(path)
            copied, before = self.twin.get_submodule(path), attributes[path]
            found.append(settings_of(copied, own, before, (name,), path))
        return all_settings(found)

    def _effects(self) -> list[tuple[Effect, Any]]:
        """Return the side effects of the step with their values, those that may fail first."""
        found: list[tuple[Effect, Any]] = []
        for path, source, seen in self.recorder.checks:
            with self.recorder.paused():
                found.append((Assertion(path, source, bool(seen)), seen))
        for place, copy in zip(self.written, self.copies, strict=True):
            if copy.requires_grad:
                raise SideEffectError.to_capture(
                    type(self.model).__name__,
                    "let its forward work on a copy: x = x.clone()",
                    f"it writes to argument {place} what has a gradient, and a later use of "
                    "it would have one",
                )
            found.append((InputMutation(place), copy))
        found += self.arguments.refilled()
        for path, name in self._left.keys() - {*self.hidden.targets}:
            value = vars(self.twin.get_submodule(path))[name]
            found.append((Assign(path, name), value))
        return [*found, *self.hidden.effects(), *self.hooks.looks]

    def _sample(self) -> Sample:
        """Return the sample for the forward, with copies of mutated arguments."""
        leaves = list(self.sample.leaves)
        self.copies = [leaves[place].clone() for place in self.written]
        for place, copy in zip(self.written, self.copies, strict=True):
            own = self.sample.leaves[place]
            leaves = [copy if leaf is own else leaf for leaf in leaves]
        return self.sample.with_leaves(tuple(leaves)) if self.written else self.sample

    def _looked_at(self, ran: list[Seen]) -> Readable | None:
        """Return what functions that ran in an opaque call may read outside of it.

        None means that they change or consume something there, so that they must run once.
        """
        with self.codes.resting():  # nothing of the user's runs, and what they lead to may be much
            if self.outside.reasons(ran, self.originals, of_piece=True):
                return None
            return Readable.led_to(ran, self.originals, self.twin.modules())

    def _call(self) -> Any:
        watched, plain = self.places.watching(), as_written(self.places.in_checkpoint)
        with (
            watched,
            plain,
            no_idle_looks(),
            refused_calls(self.recorder),
            refused_modes(type(self.model).__name__),
            CallWatch(self.recorder, self.facts),
            self._following(self.codes),
        ):
            sample = self._sample()
            self.arguments = Arguments(sample)
            with noting_stops() as stops:
                result = self.twin(*sample.args, **sample.keywords)
            if stops:  # an `except` of the forward has gone on
                raise stops[0]
            return result

    @contextlib.contextmanager
    def _following(self, codes: CodeWatch) -> Iterator[None]:
        """While active, note the user's functions that run."""
        with codes:
            self.recorder.following = codes
            try:
                yield
            finally:
                self.recorder.following = None

    def _taken_apart(self, result: Any) -> tuple[list[Any], Structure]:
        try:
            return flatten(result, self.originals)
        except UnknownTreeError as error:
            raise TraceError.to_capture(
                type(self.model).__name__,
                "return tensors in tuples, lists, dicts or simple objects",
                f"its forward returns {error}, so that a recording cannot make another one "
                "with the tensors of another step",
            ) from None
