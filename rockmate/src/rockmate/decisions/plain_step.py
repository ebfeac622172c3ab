"""A plain step of a root, before and beside the planned ones, and what all of them leave alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import nn

from rkgb.engine import Sample
from rkgb.outside import Contents
from rkgb.torch_api import operations_unwatched, set_version
from rockmate.blockwise.rehearsal import kept_as_it_is
from rockmate.comparison.eager import StepResult, run_step

_log = logging.getLogger("rockmate")


class KeptParameters:
    """The values of parameters that a forward may write to, copied to the host.

    Steps run with another object in place of the root; hooks may know the root itself, and set its
    attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.root = Contents()
        self.root.add(model, lends=False)
        self.rows = [
            (p, p.data, p.detach().to("cpu", copy=True), p._version) for p in model.parameters()
        ]

    def restore(self) -> None:
        """Restore the values that have changed, and the versions by which autograd knows them."""
        self.root.restore()
        for parameter, own, content, version in self.rows:
            if parameter.data_ptr() != own.data_ptr():
                parameter.data = own
            if not torch.equal(own.cpu(), content):
                own.copy_(content)
            set_version(parameter, version)

    @contextlib.contextmanager
    def kept(self, model: nn.Module, sample: Sample) -> Iterator[None]:
        """Undo everything that steps inside change."""
        try:
            given = (sample.args, sample.keywords)
            # Parameters are restored here, so that nothing needs to see what writes to them.
            with kept_as_it_is(model, sample.device, given), operations_unwatched():
                yield
        finally:
            self.restore()


def plain_step(bare: nn.Module, sample: Sample, parameters: KeptParameters) -> StepResult | None:
    """Run one plain step; None if the device has too little memory for it."""
    try:
        with parameters.kept(bare, sample):
            return run_step(bare, bare, sample, keep="fingerprints")
    except torch.OutOfMemoryError:
        _log.warning("a plain step of %s does not fit, and is not compared", type(bare).__name__)
        return None
