"""Record one step of a module: its forward and its backward, operation by operation.

If something stops the recording, the smallest submodule around it becomes an opaque call, and the
step is recorded again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rkgb.capture.backward import AskedKind
from rkgb.capture.hooks import ReadHooksError, refuse_hooks_inside
from rkgb.capture.step import RecordedStep
from rkgb.capture.ways import Asked, Way
from rkgb.device.rng import RngState
from rkgb.elements.module_paths import group_of, is_inside
from rkgb.elements.sample import Sample
from rkgb.elements.tensor_info import storage_id
from rkgb.errors import (
    BrokenPieceError,
    ChangesArgumentsError,
    HookInsideError,
    NeedsContentError,
    NoStepError,
    OtherTangentsError,
    ReadsDataError,
    RkgbError,
    SideEffectError,
    WritesInputError,
)
from rkgb.graphs.basic import BackwardKind, BasicGraph
from rkgb.recording.numbers import NumberTrace
from rkgb.recording.places import Places
from rkgb.safeguards.assignments import AssignsError, ReadsBeforeError
from rkgb.safeguards.interrupts import signals_wait
from rkgb.safeguards.refusals import (
    has_backward_hooks,
    refuse_hidden_leaves,
    refuse_lazy_modules,
    refuse_used_up,
)
from rkgb.safeguards.settling import Settled, SettlesError
from rkgb.safeguards.side_effects import RemembersError, Said

_log = logging.getLogger("rkgb")


def make_B(
    model: nn.Module,
    inputs: Any,
    device: torch.device | str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    kind: BackwardKind | None = None,
) -> BasicGraph:
    """Record `model` on sample `inputs` (a tensor, a tuple of arguments, or a dict of keywords).

    The model is recorded in the mode (train or eval) that it is in, and is not changed. `device`
    is only checked: the model and the inputs must be on it already. See `record` for `kind`.

    Raises:
        TraceError: see `record`; or the devices differ.
    """
    return record(model, Sample.of(model, inputs, kwargs, device), kind)


def record(
    model: nn.Module,
    sample: Sample,
    kind: AskedKind = None,
    *,
    opaque: Collection[str] = (),
    strict: bool = True,
    guards: bool = True,
    known: BasicGraph | None = None,
    held_bytes: dict[str, int] | None = None,
    numbers: NumberTrace | None = None,
    is_metered: bool = False,
    runs_pieces: bool = True,
    bound: tuple[Sequence[int], int] | None = None,
) -> BasicGraph:
    """Return the recording of one step of `model` on `sample` in the mode the model is in.

    Buffers, attributes, gradients and the random state are restored.

    Args:
        kind: strides of the gradients of outputs, and the autocast region of the backward. The
            default is strides like the outputs', and no region. It may also be a function that
            changes that usual kind.
        opaque: paths of submodules that become opaque calls.
        strict: raise an error instead of making further submodules opaque calls.
        guards: allow Python to read values that follow from inputs and buffers. The recording then
            holds for calls with the same values (see `Outcomes`).
        known: an earlier recording of the same call: its observer hooks are not called again, and
            its opaque calls are not tried again.
        held_bytes: if given, tensors have no content, and it is filled (see `record_sizes`).
        numbers: if given, numbers of the call are tracked, and it is filled (see `numbered`).
        runs_pieces: False to replace opaque calls by stand-ins for the results of `known` ones.
        bound: bytes needed by each operation, and a memory limit; the recording stops with a
            `TooLargeError` before it exceeds the limit.
        is_metered: record the memory of kernels; each runs once for equal arguments.

    Raises:
        DataDependentError: control flow, a size or a Python number depends on the input's values.
        SideEffectError: the forward prints, draws Python random numbers, or changes attributes.
        TraceError: anything else that stops the recording; the cause is chained.
    """
    refuse_lazy_modules(model)
    refuse_hidden_leaves(model)
    refuse_used_up(model, sample)
    asked = Asked(guards, known, held_bytes, numbers, is_metered, runs_pieces, bound)
    stream = RngState.save(sample.device)
    grad_mode = torch.is_grad_enabled()
    with signals_wait():
        try:
            torch.set_grad_enabled(True)
            return _Recording(model, sample, kind, asked, opaque).made(stream, strict=strict)
        finally:
            torch.set_grad_enabled(grad_mode)
            stream.restore()


class _Recording:
    """The attempts to record one step, each with more opaque calls than the one before."""

    def __init__(
        self,
        model: nn.Module,
        sample: Sample,
        kind: AskedKind,
        asked: Asked,
        opaque: Collection[str],
    ) -> None:
        self.model, self.sample, self.kind, self.asked = model, sample, kind, asked
        wholes = () if asked.known is None else asked.known.whole_calls
        functions = dict.fromkeys(w.function for w in wholes if w.function is not None)
        self.opaque, self.functions = tuple(opaque), tuple(functions)
        self.failed: list[str] = []  # paths of submodules
        self.places: Places | None = None  # what the last attempt has seen of the module

    def made(self, stream: RngState, *, strict: bool) -> BasicGraph:
        """Return the recording; unless `strict`, with the opaque calls that it takes."""
        first: RkgbError | None = None
        while True:
            settled = Settled(self.model)
            try:
                recorded = self._once(settled)
                if first is not None:
                    let_go(first)
                return recorded
            except RkgbError as error:
                first = first or error
                can_go_on = not strict and _can_run_whole() and self._runs_more_whole(error)
                if error is not first:
                    let_go(error)
                if not can_go_on:
                    if isinstance(error, ChangesArgumentsError):
                        first.apart = tuple(self.failed)
                    elif isinstance(error, HookInsideError):  # what calls that module calls it
                        around = {error.hooked: error.hooked.rpartition(".")[0]}
                        first.apart = tuple(around.get(path, path) for path in self.failed)
                    told = error if isinstance(error, NoStepError) else first
                    raise told from told.__cause__
                stream.restore()
            finally:
                settled.undo()
                self.places = None

    def _runs_more_whole(self, error: RkgbError) -> bool:
        """Return whether the submodule or Function that failed is an opaque call from now on."""
        from rkgb.opaque import function_of

        function = function_of(error)
        if function is not None and function not in self.functions:
            _log.info("running %s as one operation: %s", function.__name__, error)
            self.functions = (*self.functions, function)
            return True
        wider = None if self.places is None else _wider(self.opaque, error, self.places)
        if wider is None:
            return False
        _log.info("running '%s' whole: %s", wider or "(root)", error)
        self.failed.append(wider)
        for path in _alike(self.model, wider):
            self.opaque = (*(p for p in self.opaque if not is_inside(p, path)), path)
        return True

    def _once(self, settled: Settled) -> BasicGraph:
        """Record with the present opaque calls; values that a first call sets are `settled`."""
        model, sample, asked = self.model, self.sample, self.asked
        stream = RngState.save(sample.device)
        way = Way(
            self.opaque,
            self.functions,
            hidden=asked.hidden,
            # Without content, saved tensors need not be given up.
            keeps_content=asked.held_bytes is not None,
            # Opaque calls are tried on their real arguments.
            repeats=not asked.runs_pieces or not (self.opaque or self.functions),
        )
        refused: ReadsBeforeError | None = None
        said: Said | None = None  # by an attempt whose results functions remember
        while True:
            step = RecordedStep(model, sample, asked, way)
            self.places = step.places
            refuse_hooks_inside(model, way.opaque)
            try:
                basic = self._run(step, said)
                settled.refuse_others(basic.ops)
                return replace(basic, sources=settled.sources(basic.sources))
            except RemembersError:  # later calls read these results
                said, way = step.said, replace(way, remembers=True)
                stream.restore()
                continue
            except ReadsDataError:
                assert asked.held_bytes is None, "it has been explained"
                # A backward has read a value. With real contents it may take its usual branch.
                way = replace(way, keeps_content=True)
            except SettlesError as settles:
                try:
                    settled.take(settles)
                except SideEffectError as error:
                    raise (refused or error) from None
            except ReadsBeforeError as reads:
                if reads.target in way.settling:
                    raise
                let_go(reads)
                refused, target = reads, {reads.target}
                way = replace(way, settling=way.settling | target, hidden=way.hidden - target)
            except AssignsError as assigns:
                if assigns.names & way.settling:  # not a plain value
                    assert refused is not None
                    raise refused from None
                way = replace(way, hidden=way.hidden | assigns.names)
            except WritesInputError as writes:
                more = _writable(model, sample, step.inputs, writes)
                way = replace(way, written=way.written | more)
            except NeedsContentError:
                way = replace(way, repeats=False)
            except ReadHooksError as read:
                way = replace(way, read_hooks=way.read_hooks | read.hooks)
            except OtherTangentsError as other:
                let_go(other)
                way = replace(way, tried=other.tried)
            except RkgbError as error:
                # A kernel may refuse the stand-ins for results of skipped kernels.
                repeated = step.recorder.repeated
                was_kernel = isinstance(error.__cause__, RuntimeError)
                if repeated is None or not repeated.has_repeated or not was_kernel:
                    raise
                let_go(error)
                way = replace(way, repeats=False)
            stream.restore()
            said = None

    def _run(self, step: RecordedStep, said: Said | None) -> BasicGraph:
        """Run an attempt; then put out what was `said` before and is said no more."""
        try:
            return step.run(self.kind)
        finally:
            if said is not None:
                said.put_out_but(step.said)


def _can_run_whole() -> bool:
    """Return whether this package has the part that makes opaque calls."""
    try:
        import rkgb.opaque  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def _writable(
    model: nn.Module, sample: Sample, inputs: Sequence[str | None], writes: WritesInputError
) -> set[str]:
    """Return the argument that is mutated, if the step can use a copy of it.

    Raises:
        SideEffectError: it shares its memory with another argument, or overlaps itself.
    """
    own = sample.leaves[inputs.index(writes.name)]
    sharing = len({id(t) for t in sample.tensors if storage_id(t) == storage_id(own)})
    strides = torch.empty_like(own, device="meta").stride()
    if sharing == 1 and own.stride() == strides:
        return {writes.name}
    raise SideEffectError(
        f"cannot place '{writes.operation}' ({writes.path or 'root'}, {writes.source}): it "
        f"overwrites the input '{writes.name}' of {type(model).__name__}, whose memory others "
        "share. Work on a copy: x = x.clone().",
        module_path=writes.path,
    )


def _wider(opaque: Sequence[str], error: RkgbError, places: Places) -> str | None:
    """Return the submodule to make an opaque call, or None if that would not help."""
    path: str | None = error.module_path
    if isinstance(error, BrokenPieceError) or "" in opaque:
        return None
    if path is None:  # no particular submodule
        return "" if places.called else None
    inside = next((p for p in opaque if is_inside(path, p)), None)
    if inside is not None:  # it cannot be an opaque call either: take the call around it
        calls = places.raised_in
        path = calls[calls.index(inside) - 1] if inside in calls[1:] else ""
    while path and places.called and path not in places.called:  # a ModuleList is never called
        path = path.rpartition(".")[0]
    return path


def let_go(error: BaseException) -> None:
    """Clear the frames of an error.

    Tensors in the frames refer to autograd graphs, which refer back to the frames by hooks that
    Python's garbage collection does not see. So nothing of the attempt would ever be freed.
    """
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def _alike(model: nn.Module, path: str) -> list[str]:
    """Return the paths of a submodule and of its counterparts in other layers.

    Hooks are one module's: with one, counterparts without do not count.
    """
    own = model.get_submodule(path)
    kind, place, is_hooked = type(own), group_of(path), has_backward_hooks(own)
    return [
        other
        for other, module in model.named_modules()
        if type(module) is kind
        and group_of(other) == place
        and has_backward_hooks(module) == is_hooked
    ]
