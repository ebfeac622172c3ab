"""A second look: a step recorded once more, and held against the recording that its plan is for.

What a forward reads outside of its arguments and its module may be such that nobody sees it change.
Two recordings of one call show it: whatever differs between them, Python has decided otherwise. The
look computes next to nothing (each kernel runs once, no content is kept) and leaves no trace.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence

import torch
from torch import nn

from rkgb.capture.record import let_go, record
from rkgb.capture.sizes import record_without_content
from rkgb.device.chosen import device_of
from rkgb.device.rng import KeptGenerators
from rkgb.elements.sample import Sample
from rkgb.errors import DataDependentError, RkgbError, SideEffectError
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.differences import Difference, differences
from rkgb.module_state.start_of_call import PythonRandom
from rkgb.recording.bounded import TooLargeError

_log = logging.getLogger("rkgb")
_STATES = 6  # of generators that a recording keeps


def look_again(
    model: nn.Module,
    sample: Sample,
    known: BasicGraph,
    numbers: Sequence[float] = (),
    *,
    within: tuple[Sequence[int], int] | None = None,
) -> list[Difference] | None:
    """Return what a step of `model` on `sample` has otherwise than its `known` recording.

    `numbers` are what the program of `known` takes from the numbers of this call. The look holds no
    more bytes than those it is to stay `within`, where operations need so much; if need be it is
    made without content, which takes several times as long. None where it was not possible.
    """
    if within is not None:
        needs, most_bytes = within
        most_bytes -= _STATES * device_of(torch.device("cpu")).random_state_bytes
        most_bytes -= sum(buffer.nbytes for buffer in model.buffers())
        if most_bytes < 0:  # putting the states back, and a copy of the buffers, take as much again
            return None
        within = needs, most_bytes
    stream, python = KeptGenerators.keep(sample.device), PythonRandom()
    try:
        return _differences(model, sample, known, numbers, within)
    finally:
        stream.restore()
        python.restore()
        gc.collect(1)  # what was recorded lies in cycles, and the step comes on top of it


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
            gc.collect()
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
    # Without content, assignments to parts of a tensor run other views: nobody has decided that.
    return others if with_content or not others else None


def _recorded_again(
    model: nn.Module,
    sample: Sample,
    known: BasicGraph,
    within: tuple[Sequence[int], int] | None,
) -> BasicGraph | None:
    """Return another recording, in which nothing runs whole; None if it takes too much memory.

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
    gc.collect()  # what was recorded lies in cycles, and another recording comes on top of it
    return None
