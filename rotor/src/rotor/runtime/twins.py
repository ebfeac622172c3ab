"""Twins of parameters: parameters of the same memory, with private gradients.

The time of a stage in a training step includes the accumulation of its gradients. Accumulating into
the parameters themselves would change their gradients, and run hooks of users, optimizers or DDP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rotor.runtime.stages import CodeStage


@contextmanager
def twin_parameters(code: CodeStage) -> Iterator[list[nn.Parameter]]:
    """Replace a stage's parameters by twins, yield the twins, and restore the parameters at exit.

    A twin has a gradient of zeros if its parameter has a gradient. A module that also keeps its
    parameters elsewhere (`nn.LSTM`) goes on using the originals.
    """
    twins = {parameter: _twin(parameter) for parameter in code.parameters()}
    places = [
        (module, name, parameter)
        for module in code.submodules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    try:
        for module, name, parameter in places:
            module._parameters[name] = twins[parameter]
        yield list(twins.values())
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def _twin(parameter: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    if type(twin) is not type(parameter):
        twin.__class__ = type(parameter)
        twin.__dict__ = vars(parameter)  # what the memory of a quantised weight means
    if parameter.grad is not None:
        twin.grad = torch.zeros_like(parameter.grad)
    return twin
