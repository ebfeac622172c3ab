"""Twins of parameters: the same memory, and gradients of their own that nobody sees.

What a stage takes in a step includes that autograd adds each gradient to what its parameter has.
Doing this to the parameters themselves would change their gradients, and run hooks that users,
optimizers or DDP have put there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rotor.runtime.stages import CodeStage


@contextmanager
def twin_parameters(code: CodeStage) -> Iterator[list[nn.Parameter]]:
    """Put twins in the place of a stage's parameters, which come back at exit; return the twins.

    A twin has a gradient of zeros where its parameter has a gradient. A module that keeps its
    parameters in other places too (`nn.LSTM`) goes on using those.
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
    if parameter.grad is not None:
        twin.grad = torch.zeros_like(parameter.grad)
    return twin
