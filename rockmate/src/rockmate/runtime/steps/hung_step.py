"""A step with several outputs, each of which is the result of its own Function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rkgb.graphs import Flow
from rkgb.torch_api import apply_function, keeps_graph
from rockmate.runtime.steps.running_step import RunningStep, refuse_create_graph


class HungStep(RunningStep):
    """A forward and its backward, which gets gradients of outputs one by one."""

    keeper: Any = None  # its node saved tensors, for hooks on saved tensors, and lives as it does
    is_noted = False  # whether the Function of an output has a hook
    come: dict[int, Tensor]  # gradients of outputs that were not used yet, by position of the root
    nodes: dict[int, weakref.ref[Any]]

    @property
    def flows(self) -> tuple[Flow, ...]:
        """The outputs from which each output was computed."""
        return self.executable.outputs.flows

    def hang(self, outputs: list[Tensor], passed: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs, each connected to autograd separately."""
        self.come, self.nodes = {}, {}
        assert self.rail is not None
        if passed:
            self.keeper = apply_function(_Keeper, passed, self.rail.token)
        found = [tensor.detach() for tensor in outputs]
        outputs.clear()
        self.connect(found)
        return found

    def connect(self, found: list[Tensor]) -> None:
        """Replace each output by the result of its own Function."""
        raise NotImplementedError

    def arrive(self, place: int, grad: Tensor | None) -> Sequence[Tensor | None]:
        """Take the gradient of an output; return parts for the outputs that it uses."""
        raise NotImplementedError

    def carried(self) -> None:
        """Attach this step to its rail; refuse a second backward without retain_graph."""
        if self.rail is None:
            self.refuse_twice()
        if self.inner is not None:
            self.inner.refuse_asked()
        assert self.rail is not None
        self.rail.carry(self)

    def take_back_kept(self) -> None:
        """Continue with the tensors that hooks on saved tensors return, if there are any."""
        if self.keeper is not None:
            self.take_back(self.keeper.grad_fn.saved_tensors)
            if not keeps_graph():
                self.keeper = None


class Output(torch.autograd.Function):
    """Returns an output; its backward passes the gradient to the step."""

    @staticmethod
    def forward(
        ctx: Any, step: HungStep, place: int, made: Tensor, token: Tensor, *edges: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.place, ctx.edges = step, place, len(edges)
        return made.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        refuse_create_graph()
        parts = ctx.step.arrive(ctx.place, grads[0])
        return (None, None, None, None, *parts, *(None,) * (ctx.edges - len(parts)))


class _OutputNode(Output._backward_cls):  # type: ignore[name-defined, misc]
    """A node that notes hooks on it in its step."""

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        self.step.is_noted = True
        return super().register_hook(hook)

    def register_prehook(self, hook: Callable[..., Any]) -> Any:
        self.step.is_noted = True
        return super().register_prehook(hook)


Output._backward_cls = _OutputNode


class _Keeper(torch.autograd.Function):
    """Saves tensors in autograd, so that hooks on saved tensors are called."""

    @staticmethod
    def forward(ctx: Any, passed: Sequence[Tensor], token: Tensor) -> Tensor:
        ctx.save_for_backward(*passed)
        return token.detach()
