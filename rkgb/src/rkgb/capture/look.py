"""A second look: a step is recorded again and compared with the recording of its plan.

A forward may read values outside of its arguments and its module that no guard covers. Two
recordings of one call show their changes, because every difference is another decision of Python's.
The second recording computes little (each kernel runs once, no content is kept), and its effects
are undone.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence

import torch
from torch import nn

from rkgb.capture.record import let_go, record
from rkgb.capture.sizes import record_without_content
from rkgb.device.base import no_collection
from rkgb.device.chosen import device_of
from rkgb.device.rng import KeptGenerators
from rkgb.elements.sample import Sample
from rkgb.errors import DataDependentError, RkgbError, SideEffectError
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.differences import Difference, differences
from rkgb.module_state.start_of_call import PythonRandom
from rkgb.recording.sizes import TooLargeError

_log = logging.getLogger("rkgb")
_STATES = 6  # random states that a recording holds


def look_again(
    model: nn.Module,
    sample: Sample,
    known: BasicGraph,
    numbers: Sequence[float] = (),
    *,
    within: tuple[Sequence[int], int] | None = None,
) -> list[Difference] | None:
    """Return the differences of a step of `model` on `sample` from its `known` recording.

    `numbers` are the unspecialised numbers of `known` for this call. The recording stays `within` a
    memory limit, given the bytes that operations need. If necessary it is made without content,
    which takes several times as long. None if it was not possible.
    """
    if within is not None:
        needs, most_bytes = within
        most_bytes -= _STATES * device_of(torch.device("cpu")).random_state_bytes
        most_bytes -= sum(buffer.nbytes for buffer in model.buffers())
        if most_bytes < 0:  # restoring states, and a copy of the buffers, take as much again
            return None
        within = needs, most_bytes
    stream, python = KeptGenerators.keep(sample.device), PythonRandom()
    with no_collection():  # what is made stays young, and is freed without a look at all objects
        try:
            return _differences(model, sample, known, numbers, within)
        finally:
            stream.restore()
            python.restore()
            gc.collect(1)  # the recording is in cycles; free it before the step


def _differences(
    model: nn.Module,
    sample: Sample,
    known: BasicGraph,
    numbers: Sequence[float],
    within: tuple[Sequence[int], int] | None,
) -> list[Difference] | None:
    with_content = True
    try:
        found = _recorded_again(model, sample, known, within)
        if found is None:
            with_content = False
            found = record_without_content(model, sample, known, known.kind)
    except (DataDependentError, SideEffectError) as error:
        let_go(error)
        if with_content and error.module_path is not None:
            return [Difference(error.module_path, "", f"cannot be recorded any more: {error}")]
        _log.debug("a step was not recorded once more: %s", error)
        return None
    except (RkgbError, RuntimeError, MemoryError) as error:
        let_go(error)
        _log.debug("a step was not recorded once more: %s", error)
        return None
    others = differences(known, found, numbers)
    # Without content, assignments to parts of a tensor run other views; this is no difference.
    return others if with_content or not others else None


def _recorded_again(
    model: nn.Module, sample: Sample, known: BasicGraph, within: tuple[Sequence[int], int] | None
) -> BasicGraph | None:
    """Return another recording, without running opaque calls; None if it takes too much memory.

    Raises:
        RkgbError: it cannot be recorded now.
    """
    try:
        return record(
            *(model, sample, known.kind),
            opaque=known.opaque,
            known=known,
            runs_pieces=False,
            bound=within,
        )
    except TooLargeError as error:
        let_go(error)
    gc.collect(0)  # free the recording before the next one; what still lives gets no older than 1
    return None
