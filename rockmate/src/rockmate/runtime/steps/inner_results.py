"""Results of parts that run whole, from which these parts compute further results.

A part that returns `x` and `sin(x)` adds up the gradient of `x` inside. Outside, `x` is another
tensor, which gets the gradient of its other uses only. The step itself needs no more. But whoever
asks for the gradient of that tensor would get only a part of it, and is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor

from rkgb.guards import is_users
from rkgb.torch_api import asked_of_backwards, is_to_run
from rockmate.errors import UnsupportedModuleError

if TYPE_CHECKING:
    from rockmate.runtime.gradients.rails import Rail


class InnerResults:
    """Sees whether somebody asks for gradients of such results of a step."""

    def __init__(self, model_name: str, rail: Rail, outputs: Sequence[Tensor]) -> None:
        self._name, self._start, self._end = model_name, rail.start, rail.end
        self._rows: list[tuple[dict[int, Any], ref[Tensor]]] = []
        for tensor in outputs:
            if tensor.grad_fn is None:
                continue
            hooks: Any = tensor._backward_hooks
            if hooks is None:
                hooks = tensor._backward_hooks = OrderedDict()
                tensor.grad_fn._register_hook_dict(tensor)
                hooks[-1] = self._come  # as the gradient passes, or is taken by autograd.grad
            self._rows.append((hooks, ref(tensor)))

    def refuse_asked(self) -> None:
        """Refuse hooks on these results, gradients that they retain, and backwards for them.

        Raises:
            UnsupportedModuleError: there is one.
        """
        for hooks, tensor in self._rows:
            alive = tensor()
            if any(map(_asks, hooks.values())) or (alive is not None and alive.retains_grad):
                self._refuse()
        if self._end is not None and not is_to_run(self._end):  # a backward for only some tensors
            results = [alive for _, tensor in self._rows if (alive := tensor()) is not None]
            edges = [(alive.grad_fn, alive.output_nr) for alive in results]
            for asked in asked_of_backwards():
                is_edge = isinstance(asked, tuple) and asked[:2] in edges  # a GradientEdge
                if is_edge or any(asked is alive for alive in results):
                    self._refuse()

    def _come(self, _: Tensor) -> None:
        if not is_to_run(self._start):
            self._refuse()  # the backward ends here

    def _refuse(self) -> None:
        raise UnsupportedModuleError(
            f"the gradient of a result of {self._name} is asked for (by a hook, retain_grad or "
            "torch.autograd.grad), and a part that runs whole returns or keeps this tensor and "
            "computes others of it, or takes it as an argument: what comes to it inside does not "
            "pass here. Return a view of it (x.view_as(x)) beside what is computed of it, or run "
            "this step under `with rockmate.plain():`."
        )


def _asks(hook: Any) -> bool:
    """Whether a hook is the user's: torch's own (of FSDP, for one) only look when they come."""
    called = hook.func if isinstance(hook, partial) else hook
    return is_users(getattr(called, "__module__", None))
