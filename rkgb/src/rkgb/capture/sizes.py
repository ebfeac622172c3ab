"""Record a step of a model without its memory; parameters may be on `meta`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.capture.backward import AskedKind
from rkgb.capture.record import record
from rkgb.capture.twin import Copies, Memo, deep_copy, uncopied
from rkgb.device.chosen import device_of
from rkgb.elements.op import Op, map_refs
from rkgb.elements.sample import Sample, bind_inputs
from rkgb.elements.trees import flatten
from rkgb.errors import StopsRecordingError
from rkgb.graphs.basic import BackwardKind, BasicGraph
from rkgb.outside.known import forget_stand_ins
from rkgb.torch_api.private.modes import without_content
from rkgb.torch_api.quiet import without_warnings
from rkgb.torch_api.tensor_facts import leaf_of_kind, placed_parameters

_log = logging.getLogger("rkgb")


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Keep torch from logging tracebacks of errors that are raised and explained anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@dataclass(frozen=True)
class SizedStep:
    """A step that was recorded without content."""

    basic: BasicGraph
    external: Mapping[str, Tensor]  # parameters and inputs by name, without content
    held_bytes: Mapping[str, int]  # of plain PyTorch after each operation, by its name


def record_sizes(
    model: nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    kind: AskedKind = None,
) -> SizedStep:
    """Return the recording of a step as it would run on `device`; see `record` for the `kind`.

    Model and inputs may be on any device, also `meta`. Only their shapes, strides and types are
    read. `device` must exist, because torch queries it.

    Raises:
        DataDependentError: the forward reads values.
        TraceError: anything else that stops the recording; there are no opaque calls here.
    """
    with _bare_call(model, inputs, kwargs, device) as (twin, sample):
        held_bytes: dict[str, int] = {}
        with sample.device:  # for tensors that the forward makes
            basic = record(twin, sample, kind, strict=True, held_bytes=held_bytes)
    parameters = dict(placed_parameters(twin, remove_duplicate=False))
    external: dict[str, Tensor] = {n: parameters[t] for n, t in basic.parameters.items()}
    named = zip(basic.inputs, sample.leaves, strict=True)
    external.update((name, leaf) for name, leaf in named if name is not None)
    return SizedStep(basic, external, held_bytes)


def outputs_without_content(
    model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None, device: torch.device | str
) -> list[Tensor]:
    """Return the outputs of a forward of `model` on `device`, without content.

    Raises:
        Exception: any error of a forward without content.
    """
    with _bare_call(model, inputs, kwargs, device) as (twin, sample), sample.device:
        found = flatten(twin(*sample.args, **sample.keywords))[0]
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def record_other_backward(
    model: nn.Module, sample: Sample, known: BasicGraph, kind: BackwardKind
) -> BasicGraph | None:
    """Return a recording of the `known` step with another backward, without content.

    None if it differs from the recording on real tensors: by an operation of the forward, or by a
    kind of operation that the known backward did not have.
    """
    try:
        found = record_without_content(model, sample, known, kind)
    except (Exception, StopsRecordingError) as error:
        # A recording on real tensors will raise it again.
        _log.debug("no recording without content: %s", error)
        return None
    if not _is_same_forward(found, known) or not _knows_backward(found, known):
        return None
    return replace(found, constants=known.constants, reads=known.reads, device=known.device)


def record_without_content(
    model: nn.Module, sample: Sample, known: BasicGraph, kind: BackwardKind
) -> BasicGraph:
    """Return another recording of the `known` step, without content.

    Opaque calls are not run.

    Raises:
        RkgbError: it cannot be recorded now, or not without content.
    """
    without = _bare_call(model, sample.args, sample.kwargs, sample.device)
    with without as (twin, bare), bare.device:
        return record(
            *(twin, bare, kind), opaque=known.opaque, known=known, held_bytes={}, runs_pieces=False
        )


def _is_same_forward(found: BasicGraph, known: BasicGraph) -> bool:
    if len(found.ops) != len(known.ops) or {*found.constants} != {*known.constants}:
        return False
    alike = (
        (a.name, a.results, repr(a.args), repr(a.kwargs), a.target)
        == (b.name, b.results, repr(b.args), repr(b.kwargs), b.target)
        for a, b in zip(found.ops, known.ops, strict=True)
    )
    names = [name for op in known.ops for name in op.results if name]
    same = all(_geometry(found, n) == _geometry(known, n) for n in (*names, *known.externals))
    return same and all(alike) and repr(found.outputs) == repr(known.outputs)


def _knows_backward(found: BasicGraph, known: BasicGraph) -> bool:
    """Return whether each operation was recorded on real tensors with the same layouts."""
    seen = {_in_and_out(known, op) for op in known.backward}
    return all(_in_and_out(found, op) in seen for op in found.backward)


def _in_and_out(basic: BasicGraph, op: Op) -> tuple[Any, ...]:
    results = (_geometry(basic, name) if name else None for name in op.results)
    geometries = (_geometry(basic, name) for name in op.inputs)
    plain = map_refs((list(op.args), op.kwargs), lambda _: None)
    return op.target, repr(plain), op.flags, tuple(geometries), tuple(results)


def _geometry(basic: BasicGraph, name: str) -> tuple[Any, ...]:
    info = basic.infos[name]
    return info.shape, info.stride, info.dtype, info.offset, info.storage_bytes


@contextlib.contextmanager
def _bare_call(
    model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None, device: torch.device | str
) -> Iterator[tuple[nn.Module, Sample]]:
    """Yield copies of a model and a sample without content; results inside have none either."""
    where = device_of(device).where
    # Torch warns about copies of tensors without content.
    with without_content() as mode, without_warnings(), _without_log():
        made = Memo({id(mode): mode})

        def bare(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in made:
                like = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=where
                )
                like.requires_grad_(value.requires_grad)
                of_kind = leaf_of_kind(value, like) if isinstance(value, nn.Parameter) else like
                made[id(value)] = of_kind
            return made[id(value)]

        for tensor in (*model.parameters(), *model.buffers()):
            bare(tensor)
        made.update(uncopied(model))
        twin = deep_copy(model, made, lambda tensor: bare(tensor).detach())
        leaves, structure = flatten(bind_inputs(inputs, kwargs))
        args, keywords = structure.unflatten([bare(leaf) for leaf in leaves])
        try:
            with Copies(model, twin, made).copied_again():
                yield twin, Sample.of(twin, args, keywords)
        finally:
            forget_stand_ins()
