"""Record a step of a model without its memory: parameters on `meta` will do, or real ones."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.capture.record import record
from rkgb.capture.twin import cannot_copy, uncopied
from rkgb.device.chosen import device_of
from rkgb.elements.sample import Sample, bind_inputs
from rkgb.elements.trees import flatten
from rkgb.graphs.basic import BasicGraph
from rkgb.torch_api.torch_private import without_content


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Let torch not log tracebacks of errors that are raised, and explained, anyway."""
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
    held_bytes: Mapping[str, int]  # by plain PyTorch after each operation, by its name


def record_sizes(
    model: nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> SizedStep:
    """Return the recording of a step as it would run on `device`.

    Model and inputs may be anywhere, `meta` included. Nothing of them is read but shapes, strides
    and types. `device` must exist, since torch asks it things.

    Raises:
        DataDependentError: the forward looks at values.
        TraceError: anything else that stops the recording; no part of the model is run whole.
    """
    where = device_of(device).where
    with without_content() as mode, warnings.catch_warnings(), _without_log():
        warnings.simplefilter("ignore")  # about copies of what has no content
        made: dict[int, Any] = {id(mode): mode}

        def bare(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in made:
                like = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=where
                )
                like.requires_grad_(value.requires_grad)
                is_parameter = isinstance(value, nn.Parameter)
                made[id(value)] = nn.Parameter(like, value.requires_grad) if is_parameter else like
            return made[id(value)]

        for tensor in (*model.parameters(), *model.buffers()):
            bare(tensor)
        made.update(uncopied(model))
        try:
            twin = copy.deepcopy(model, made)
        except Exception as error:
            raise cannot_copy(model, made, error) from error
        leaves, structure = flatten(bind_inputs(inputs, kwargs))
        args, keywords = structure.unflatten([bare(leaf) for leaf in leaves])
        sample = Sample.of(twin, args, keywords)
        held_bytes: dict[str, int] = {}
        with where:  # what the forward makes, wherever this was called
            basic = record(twin, sample, strict=True, held_bytes=held_bytes)
    parameters = dict(twin.named_parameters(remove_duplicate=False))
    external: dict[str, Tensor] = {n: parameters[t] for n, t in basic.parameters.items()}
    named = zip(basic.inputs, sample.leaves, strict=True)
    external.update((name, leaf) for name, leaf in named if name is not None)
    return SizedStep(basic, external, held_bytes)
