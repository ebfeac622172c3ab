"""Record one step of a module: its forward and its backward, operation by operation.

What stops a recording is run whole instead, the smallest submodule around it, until nothing does.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rkgb.capture.backward import AskedKind
from rkgb.capture.functions import Function, function_of
from rkgb.capture.hooks import refuse_hooks_inside
from rkgb.capture.step import RecordedStep
from rkgb.device.rng import RngState
from rkgb.elements.effect import Assign
from rkgb.elements.module_paths import is_inside
from rkgb.elements.sample import Sample
from rkgb.elements.tensor_info import storage_id
from rkgb.errors import BrokenPieceError, RkgbError, SideEffectError
from rkgb.graphs.basic import BackwardKind, BasicGraph
from rkgb.opaque.piece import RunPiece
from rkgb.recording.bounded import BoundedRecorder
from rkgb.recording.numbers import NumberTrace
from rkgb.recording.places import Places
from rkgb.recording.recorder import Recorder
from rkgb.recording.sizes import SizeRecorder
from rkgb.recording.stops import NeedsContentError, ReadsDataError, WritesInputError
from rkgb.safeguards.assignments import AssignsError, ReadsBeforeError
from rkgb.safeguards.refusals import (
    refuse_backward_hooks,
    refuse_hidden_leaves,
    refuse_lazy_modules,
)
from rkgb.safeguards.settling import Settled, SettlesError

_DIGITS = re.compile(r"\d+")
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

    `kind` says how the gradients of the outputs will lie in memory, and in which autocast region
    the backward will run; without it they lie like the outputs, and it runs in none. It may be
    what tells the kind from that usual one. Buffers,
    attributes, gradients and the random stream are as before afterwards.

    The submodules `opaque` run whole; unless `strict`, so does the smallest one around whatever
    stops the recording. Python may look at values that follow from inputs and buffers alone: the
    recording holds for calls that see the same (see `Outcomes`); without `guards` it may not.
    Hooks that were found to only look are not called again, and what runs whole is not tried again,
    where a recording of the same call is `known`. With `held_bytes`, which is
    filled, tensors have no content (see `record_sizes`). With `numbers`, which is filled, those of
    the call are followed (see `numbered`). Unless it `runs_pieces`, what runs whole does not run:
    something like what the `known` calls have made stands for it. With a `bound`, which is what
    each operation needs and the most bytes, it stops with a `TooLargeError` before it takes more.
    If it `is_metered`, the recording says what memory its kernels took, where they ran once for
    equal arguments.

    Raises:
        DataDependentError: control flow, a size or a Python number depends on the input's values.
        SideEffectError: the forward prints, draws Python random numbers, or changes attributes.
        TraceError: anything else that stops the recording; the cause is chained.
    """
    refuse_lazy_modules(model)
    refuse_hidden_leaves(model)
    stream = RngState.save(sample.device)
    grad_mode = torch.is_grad_enabled()
    paths, functions = list(opaque), _functions_of(known)
    first: RkgbError | None = None
    try:
        torch.set_grad_enabled(True)
        while True:
            places: list[Places] = []
            settled = Settled(model)
            try:
                recorded = _recorded(
                    *(model, sample, kind, paths, functions, guards, places, settled, known),
                    held_bytes=held_bytes,
                    numbers=numbers,
                    is_metered=is_metered,
                    runs_pieces=runs_pieces,
                    bound=bound,
                )
                if first is not None:
                    let_go(first)
                return recorded
            except RkgbError as error:
                first = first or error
                function = None if strict else function_of(error)
                if error is not first:
                    let_go(error)
                if function is not None and function not in functions:
                    _log.info("running %s as one operation: %s", function.__name__, error)
                    functions.append(function)
                    stream.restore()
                    continue
                wider = None if strict or not places else _wider(paths, error, places[-1])
                if wider is None:
                    raise first from first.__cause__
                _log.info("running '%s' whole: %s", wider or "(root)", error)
                for path in _alike(model, wider):
                    paths = [p for p in paths if not is_inside(p, path)] + [path]
                stream.restore()
            finally:
                settled.undo()
    finally:
        torch.set_grad_enabled(grad_mode)
        stream.restore()


def _functions_of(known: BasicGraph | None) -> list[type[Function]]:
    """Return the Functions that are one operation in a recording of the same call."""
    targets = [op.target for op in known.ops] if known is not None else []
    calls = (target.piece.call for target in targets if isinstance(target, RunPiece))
    return list(dict.fromkeys(call.function for call in calls if call.function is not None))


def _recorded(
    model: nn.Module,
    sample: Sample,
    kind: AskedKind,
    opaque: Sequence[str],
    functions: Sequence[type[Function]],
    guards: bool,
    places: list[Places],
    settled: Settled,
    known: BasicGraph | None = None,
    *,
    held_bytes: dict[str, int] | None = None,
    numbers: NumberTrace | None = None,
    is_metered: bool = False,
    runs_pieces: bool = True,
    bound: tuple[Sequence[int], int] | None = None,
) -> BasicGraph:
    """Record once; `places` gets what the attempt has seen of the module.

    What a first call sets is `settled` meanwhile.
    """
    stream = RngState.save(sample.device)
    # Without content there is nothing to give up.
    keep_content, hidden = held_bytes is not None, frozenset[tuple[str, str]]()
    if known is not None and not runs_pieces:
        hidden |= {(e.path, e.name) for e in known.effects if isinstance(e, Assign)}
    make: Callable[..., Recorder] = Recorder
    if held_bytes is not None:
        make = functools.partial(SizeRecorder, held_bytes)
    elif bound is not None:
        make = functools.partial(BoundedRecorder, *bound)
    written, settling = frozenset[str](), frozenset[tuple[str, str]]()
    refused: ReadsBeforeError | None = None
    # What runs whole is tried out on what it gets.
    repeats = not runs_pieces or (not opaque and not functions)
    while True:
        step = RecordedStep(
            *(model, sample, opaque, hidden, known, make),
            guards=guards,
            keep_content=keep_content,
            repeats=repeats,
            written=written,
            functions=functions,
            numbers=numbers,
            is_metered=is_metered,
            runs_pieces=runs_pieces,
            settling=settling,
        )
        places.append(step.places)
        refuse_backward_hooks(model, opaque)
        refuse_hooks_inside(model, opaque)
        try:
            basic = step.run(kind)
            settled.refuse_others(basic.ops)
            basic.sources.settings = tuple(settled.settings)
            return basic
        except ReadsDataError:
            assert held_bytes is None, "it has been explained"
            # A backward has looked at a value: with what it really computes it may take its usual
            # way.
            keep_content = True
        except SettlesError as settles:
            try:
                settled.take(settles)
            except SideEffectError as error:
                raise (refused or error) from None
        except ReadsBeforeError as reads:
            if reads.target in settling:
                raise
            let_go(reads)
            refused = reads
            settling, hidden = settling | {reads.target}, hidden - {reads.target}
        except AssignsError as assigns:
            if assigns.names & settling:  # it is no plain value
                assert refused is not None
                raise refused from None
            hidden |= assigns.names
        except WritesInputError as writes:
            written |= _writable(model, sample, step.inputs, writes)
        except NeedsContentError:
            repeats = False
        except RkgbError as error:
            # A kernel may refuse what stands for the results of those that were not run.
            repeated = step.recorder.repeated
            was_kernel = isinstance(error.__cause__, RuntimeError)
            if repeated is None or not repeated.has_repeated or not was_kernel:
                raise
            let_go(error)
            repeats = False
        stream.restore()


def _writable(
    model: nn.Module, sample: Sample, inputs: Sequence[str | None], writes: WritesInputError
) -> set[str]:
    """Return the argument that is written to, if a copy in its place does for the step.

    Raises:
        SideEffectError: it shares its memory with another one, or with itself.
    """
    own = sample.leaves[inputs.index(writes.name)]
    sharing = len({id(t) for t in sample.tensors if storage_id(t) == storage_id(own)})
    strides = torch.empty_like(own, device="meta").stride()
    if sharing == 1 and own.stride() == strides:
        return {writes.name}
    error = SideEffectError(
        f"cannot place '{writes.operation}' ({writes.path or 'root'}, {writes.source}): it "
        f"overwrites the input '{writes.name}' of {type(model).__name__}, whose memory others "
        "share. Work on a copy: x = x.clone()."
    )
    error.module_path = writes.path
    raise error


def _wider(opaque: Sequence[str], error: RkgbError, places: Places) -> str | None:
    """Return the submodule to run whole instead, or None where that would not help."""
    path: str | None = error.module_path
    if isinstance(error, BrokenPieceError) or "" in opaque:
        return None
    if path is None:  # nobody in particular is to blame
        return "" if places.called else None
    inside = next((p for p in opaque if is_inside(path, p)), None)
    if inside is not None:  # not even that can be run whole: the call around it
        calls = places.raised_in
        path = calls[calls.index(inside) - 1] if inside in calls[1:] else ""
    while path and places.called and path not in places.called:  # a list of modules never is
        path = path.rpartition(".")[0]
    return path


def let_go(error: BaseException) -> None:
    """Let an error hold no frames.

    The tensors in them lead to graphs of autograd that lead back to the frames, by hooks that
    Python's search for cycles does not see: nothing of the attempt would ever be freed.
    """
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def _alike(model: nn.Module, path: str) -> list[str]:
    """Return the paths of a submodule and of those that other layers have in its place."""
    kind, place = type(model.get_submodule(path)), _DIGITS.sub("#", path)
    return [
        other
        for other, module in model.named_modules()
        if type(module) is kind and _DIGITS.sub("#", other) == place
    ]
