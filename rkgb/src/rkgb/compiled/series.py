"""Compile operations that run one after the other, with no backward of their own.

A loop over pieces of rows is such a series. Between its matrix products, which write into memory
that they are given, light operations are compiled into one call. Views of what comes in run before
it, so that what the call makes shares no memory with it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rkgb.compiled.code.known import KnownClasses
from rkgb.compiled.pieces.grouping import is_light, is_product
from rkgb.compiled.pieces.joint import Joint
from rkgb.device.rng import drawing_nothing
from rkgb.elements.op import VIEW_NAMES, Op, call_like, run_op
from rkgb.elements.tensor_info import TensorInfo, storage_bytes, storage_id

_log = logging.getLogger("rkgb")
_known = KnownClasses()
_FEWEST = 2  # operations beside views, for which a call is worth compiling


def products_first(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Return operations in an order in which what is no product waits for one that needs it.

    In `down(silu(gate) * up)` silu and multiplication are neighbours then. With what a product
    needs comes what follows from it at once: in the backward, both factors' gradients.
    """
    left, waiting, found = [*ops], list[Op](), list[Op]()
    to_come = {name for op in ops for name in op.results}
    while left:
        op = left.pop(0)
        if not is_product(op):
            waiting.append(op)
            continue
        made = {name for each in waiting for name in each.results}
        if not made.isdisjoint(op.inputs):
            for later in [*left]:
                follows = not made.isdisjoint(later.inputs) and not is_product(later)
                if follows and made.issuperset(to_come.intersection(later.inputs)):
                    left.remove(later)
                    waiting.append(later)
                    made.update(later.results)
            found += waiting
            waiting = []
            to_come -= made
        found.append(op)
        to_come.difference_update(op.results)
    return (*found, *waiting)


def compile_series(
    ops: Sequence[Op], given: Mapping[str, Tensor], kept: Collection[str], device: torch.device
) -> tuple[Op, ...]:
    """Return operations that make the same, with runs of light ones compiled into one call each.

    `given` are the inputs as tensors without content. Others read the results in `kept`.
    """
    values = dict(given)
    infos: dict[str, TensorInfo] = {}
    with torch.no_grad():
        for op in ops:
            run_op(op, values, None)
            infos.update((name, _info(values[name], name)) for name in op.inputs)
            infos.update((name, _info(values[name], name)) for name in op.results if name)
    found: list[Op] = []
    for run in _runs(ops, infos):
        later = (name for op in ops[ops.index(run[-1]) + 1 :] for name in op.inputs)
        found += _compiled(run, values, {*kept, *later}, device)
    return tuple(found)


def _info(tensor: Tensor, name: str) -> TensorInfo:
    return TensorInfo.of(tensor, name, storage_bytes(tensor))


def _runs(ops: Sequence[Op], infos: Mapping[str, TensorInfo]) -> Iterator[list[Op]]:
    """Yield the operations in order, light neighbours together."""
    run: list[Op] = []
    for op in ops:
        if is_light(op, infos):
            run.append(op)
            continue
        if run:
            yield run
        yield [op]
        run = []
    if run:
        yield run


def _compiled(
    run: Sequence[Op], values: Mapping[str, Tensor], kept: Collection[str], device: torch.device
) -> list[Op]:
    """Return views of what comes in, and one compiled call for the rest, or all as they are."""
    inner: set[str] = set()
    views, rest = [], []
    for op in run:
        is_of_inner = not inner.isdisjoint(op.inputs)
        if op.target_name in VIEW_NAMES and not is_of_inner:
            views.append(op)
        else:
            rest.append(op)
            inner.update(filter(None, op.results))
    if sum(op.target_name not in VIEW_NAMES for op in rest) < _FEWEST:
        return [*run]
    joint = _joint(rest, values, [name for name in inner if name in kept])
    with drawing_nothing(device):
        code = _known.get(joint, device)
    if isinstance(code, str):
        _log.debug("a series from %s on stays eager: %s", rest[0], code)
        return [*run]
    takes = (joint.primals[place] for place in code.takes)
    return [*views, call_like(rest[-1], code.forward, takes, joint.results)]


def _joint(ops: Sequence[Op], values: Mapping[str, Tensor], results: Sequence[str]) -> Joint:
    """Return a piece without a backward; what comes in lies in memory of its own."""
    made = [name for op in ops for name in op.results if name]
    primals = tuple(dict.fromkeys(n for op in ops for n in op.inputs if n not in made))
    known = {name: _apart(values[name]) for name in primals}
    with torch.no_grad():
        for op in ops:
            run_op(op, known, None)
    homes: dict[int, str] = {}
    infos: dict[str, TensorInfo] = {}
    for name in (*primals, *made):
        home = homes.setdefault(storage_id(known[name]), name)
        infos[name] = TensorInfo.of(known[name], home, storage_bytes(known[name]))
    return Joint(
        forward=tuple(ops),
        backward=(),
        primals=primals,
        tangents=(),
        results=tuple(name for name in made if name in results),
        gradients=(),
        statistics=(),
        effects=(),
        static=frozenset(),
        infos=infos,
        written=frozenset(),
    )


def _apart(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
