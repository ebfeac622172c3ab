"""A step with hidden states beside its result whose gradients have not been needed so far.

A hidden state is an output that other outputs use. The backward of this step runs as one, from the
gradients of all outputs. Every output is the result of its own Function, which is connected to
those of the outputs it uses. So the first gradient arrives before autograd reaches hidden states.
If one of them has hooks, retains its gradient or is an input of `torch.autograd.grad`, the backward
is split after all, also in later steps (split_step.py). In this step, gradients of leaves wait
until those of all outputs have arrived.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from rkgb.elements import settled
from rkgb.torch_api import apply_function, current_backward, is_to_run
from rockmate.errors import UnsupportedModuleError
from rockmate.runtime.steps.hung_step import HungStep, Output
from rockmate.runtime.steps.split_step import SplitStep


class JointStep(HungStep):
    """A forward and its backward, which begins once the gradients of all outputs have arrived."""

    number = -1  # of autograd's backward in which gradients have arrived
    # Hidden states by position of the root: hooks (the node keeps them), and the tensor.
    hidden: dict[int, tuple[dict[int, Any], weakref.ref[Tensor]]]

    def connect(self, found: list[Tensor]) -> None:
        """Replace each output by the result of a Function, connected to those of used outputs."""
        self.hidden = {}
        assert self.rail is not None
        token = self.rail.token
        for place, output, used, is_hidden in self.executable.outputs.joints:
            inner = self.executable.outputs.inner_before(output)
            edges = [found[other] for other in (*used, *inner)]
            made = apply_function(Output, self, place, found[output], token, *edges)
            found[output] = made
            self.nodes[place] = weakref.ref(made.grad_fn)
            if is_hidden:
                hooks: dict[int, Any] = OrderedDict()
                made._backward_hooks = hooks
                made.grad_fn._register_hook_dict(made)
                self.hidden[place] = hooks, weakref.ref(made)

    def arrive(self, place: int, grad: Tensor | None) -> Sequence[Tensor | None]:
        """Take the gradient of an output; return parts for the outputs that it uses."""
        self.carried()
        number = current_backward()
        if number != self.number:
            self.number = number
            self.come.clear()
        below = self.executable.outputs.below[place]
        if below and self._shows(below):
            return self._split(place, grad)
        if grad is not None:
            self.come[place] = settled(grad)
        return ()

    def _shows(self, places: Sequence[int]) -> bool:
        """Return whether the gradient of one of these hidden states is needed."""
        assert self.rail is not None
        if self.is_noted or not is_to_run(self.rail.end):  # a backward for only some tensors
            return True
        for place in places:
            hooks, tensor = self.hidden[place]
            if hooks or ((alive := tensor()) is not None and alive.retains_grad):
                return True
        return False

    def _split(self, place: int, grad: Tensor | None) -> Sequence[Tensor | None]:
        flows, come = self.flows, self.come
        passed = any(self.executable.outputs.below[other] for other in come)
        self.__class__ = LateSplitStep  # type: ignore[assignment]
        assert isinstance(self, LateSplitStep)
        self.early, self.parts, self.come = {}, {}, {}
        if passed:
            self.refuse_late()
        self.come = {p: g for p, g in come.items() if not flows[p].uses}
        return self.arrive(place, grad)

    def advance(self, place: int) -> Sequence[Tensor | None]:
        """Run the program to its next hand-over; return the gradients of number `place`."""
        if place == 0 and self.number >= 0:
            self._begin()
        return super().advance(place)

    def _begin(self) -> None:
        arrived = [self.come.get(place) for place in range(len(self.flows))]
        self.come.clear()
        self.number = -1
        self.take_back_kept()
        self.begin_with(arrived)


class LateSplitStep(SplitStep):
    """A step whose backward is split although its forward did not expect it."""

    hidden: Any
    number = -1
    is_noted = True

    def arrive(self, place: int, grad: Tensor | None) -> Sequence[Tensor | None]:
        """Take the gradient of an output; return parts of those that it was computed from."""
        super().arrive(place, grad)
        flows, inner = self.flows, self.executable.outputs.inner_roots
        if grad is None and place in inner:
            return ()
        known = {*self.come, place, *inner}  # these run, but may get nothing
        waits = [node() for p, node in self.nodes.items() if not flows[p].uses and p not in known]
        if not flows[place].uses and any(node is not None and is_to_run(node) for node in waits):
            self.refuse_late()
        self.go_on()
        while self.program is not None and self.may_take() and not self.is_over:
            self.take()
        if self.program is not None and self._come_too_late(flows[place].reaches):
            self.refuse_late()
        found: list[Tensor | None] = []
        for other in flows[place].reaches:
            parts = self.parts.pop(other, [])
            found += [*parts, *(None,) * (flows[other].uses - len(parts))]
        return found

    def _come_too_late(self, reached: Collection[int]) -> bool:
        """Whether parts for one of these come after the sum of another, which does not lead to it.

        Then nothing that is still to run could hand them on.
        """
        outputs, taken = self.runs.outputs, self.taken
        waits = {place for place in (self.at, *outputs.received[taken:]) if place is not None}
        return any(
            other in outputs.given[taken:]
            and not any(other in self.flows[place].reaches for place in waits - {other})
            for other in reached
        )

    def refuse_late(self) -> None:
        """Refuse to split a backward that starts at several results, or asks in another order.

        Raises:
            UnsupportedModuleError: always.
        """
        kind = replace(self.executable.kind, outside=())
        assert self.variant is not None
        self.backwards.for_backward(kind, self.variant)
        raise UnsupportedModuleError(
            "a backward from outputs of a Rockmate module goes through others of them, whose "
            "gradients are asked for, by hooks or by torch.autograd.grad, for the first time, and "
            "in an order in which this step does not make them. Run the step again: it is planned "
            "for that from now on."
        )
