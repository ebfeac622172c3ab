"""The fastest way to call an operation from Python.

An overload called by name goes through a generic, boxed path. Torch's own Python bindings parse the
same arguments about twice as fast. A trial call shows whether a binding is the same operation:
exactly this overload with these arguments must reach the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.numbers import is_unspecialised
from rkgb.elements.op import Op
from rkgb.torch_api.kernel_choice import calling_with
from rkgb.torch_api.private.modes import DispatchMode
from rkgb.torch_api.private.tables import binding_places

_FILLED_IN = {"layout": torch.strided, "pin_memory": False}
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def choose_callee(op: Op, arguments: Callable[[], Arguments]) -> Callable[..., Any]:
    """Return the function that runs `op` on `arguments()`: a binding of torch if one is equal.

    Each trial gets new arguments, because the operation may write to them.
    """
    if op.flags or getattr(op.target, "namespace", "") != "aten":
        return calling_with(op.flags, op.kernel)
    args, kwargs = arguments()
    for place in binding_places():
        binding = getattr(place, op.target_name, None)
        if binding is None:
            continue
        seen = _Seen()
        try:
            with seen:
                binding(*args, **kwargs)
        except Exception:  # it takes other arguments
            continue
        if seen.is_exactly(op.target, args, kwargs):
            return binding  # type: ignore[no-any-return]
        args, kwargs = arguments()
    return op.kernel


class _Seen(DispatchMode):
    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], Mapping[str, Any]]] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)

    def is_exactly(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether exactly one call was seen, of `target` with these arguments."""
        if len(self.calls) != 1:
            return False
        func, seen_args, seen_kwargs = self.calls[0]
        # `mul.Scalar` is `mul.Tensor` with the number wrapped; the binding wraps it directly.
        wraps = target._overloadname == "Scalar" and func._overloadname == "Tensor"
        if func is not target and not (wraps and func.overloadpacket is target.overloadpacket):
            return False
        names = [argument.name for argument in target._schema.arguments]
        # Defaults that the bindings fill in.
        defaults = {a.name: a.default_value for a in target._schema.arguments}
        defaults.update((n, v) for n, v in _FILLED_IN.items() if n in names)
        ours = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        seen = {**defaults, **dict(zip(names, seen_args, strict=False)), **seen_kwargs}
        return all(_same(ours[name], seen[name]) for name in names)


def _same(ours: Any, seen: Any) -> bool:
    if is_unspecialised(ours):  # torch sees its value
        ours = ours.kind(ours)
    if isinstance(ours, Tensor) or isinstance(seen, Tensor):
        return ours is seen
    if isinstance(ours, (list, tuple)) and isinstance(seen, (list, tuple)):
        return len(ours) == len(seen) and all(map(_same, ours, seen))
    if type(ours) is not type(seen) and not (
        isinstance(ours, (int, float)) and isinstance(seen, (int, float))
    ):
        return False
    return bool(ours == seen) and isinstance(ours, bool) == isinstance(seen, bool)
