"""What a plan takes for granted about the inputs and the module, checked at every call.

A captured graph freezes shapes, Python values, train/eval flags and the modules themselves. When
one of them differs at a call, running the graph would silently compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.trace import plain_attributes
from rockmate.errors import InputMismatchError, UnsupportedModuleError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class _TensorLeaf:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorLeaf:
        return cls(
            tuple(tensor.shape), tensor.dtype, tensor.device, tensor.stride(), tensor.requires_grad
        )

    def __str__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"
        return text + (" requiring a gradient" if self.requires_grad else "")


@dataclass(frozen=True)
class InputSignature:
    """Structure of (args, kwargs), and kind of every leaf."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    autocast: tuple[str, torch.dtype] | None  # the region that the call is in

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InputSignature:
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        kinds = tuple(_TensorLeaf.of(x) if isinstance(x, Tensor) else x for x in leaves)
        return cls(spec, kinds, _ambient_autocast())

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of a call that matches.

        Raises:
            InputMismatchError: it does not; the text says what was planned and what came.
        """
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        if _ambient_autocast() != self.autocast:
            raise InputMismatchError(
                f"the call is in autocast region {_ambient_autocast()}, and was planned for "
                f"{self.autocast}. {_ADVICE}"
            )
        if spec != self.spec:
            raise InputMismatchError(
                "the inputs have another structure than the sample: planned "
                f"{_describe(self.spec)}, got {_describe(spec)}. {_ADVICE}"
            )
        for place, (planned, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            found = _TensorLeaf.of(leaf) if isinstance(leaf, Tensor) else leaf
            if type(found) is not type(planned) or found != planned:
                same = isinstance(found, _TensorLeaf) and str(found) == str(planned)
                detail = f" (strides {planned.stride} and {found.stride})" if same else ""
                raise InputMismatchError(
                    f"input {place} differs from the sample: planned {planned}, got "
                    f"{found}{detail}. {_ADVICE}"
                )
        return leaves


_ADVICE = (
    "A plan holds for the sample's shapes, types, strides, Python values and autocast region. Call "
    "with such inputs, allow more plans (`max_plans=`), or call `.original` for an unbounded step."
)


def _describe(spec: pytree.TreeSpec) -> str:
    args, kwargs = spec.unflatten(["*"] * spec.num_leaves)
    return f"args {args}, kwargs {kwargs}"


class ModuleGuard:
    """The state of a module that a capture froze."""

    def __init__(self, model: nn.Module) -> None:
        refuse_hooks(model)
        self.children: list[tuple[dict[str, Any], str, nn.Module]] = []
        self.modules: list[tuple[str, nn.Module, bool, dict[str, Any], int]] = []
        self.parameters: list[tuple[str, dict[str, Any], str, tuple[Any, ...]]] = []
        for path, module in model.named_modules():
            self.modules.append(
                (path, module, module.training, plain_attributes(module), len(module._modules))
            )
            for name, child in module._modules.items():
                if child is not None:
                    self.children.append((module._modules, name, child))
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        where = f"{path}.{name}" if path else name
                        self.parameters.append((where, table, name, _kind(tensor)))

    def check(self) -> None:
        """Compare with the module as it is now.

        Raises:
            InputMismatchError: a submodule, a flag, a number or a parameter's kind has changed.
            UnsupportedModuleError: a hook was added.
        """
        for table, name, child in self.children:
            if table.get(name) is not child:
                raise InputMismatchError(
                    f"submodule '{name}' was replaced since planning. {_AGAIN}"
                )
        for path, module, training, attributes, count in self.modules:
            if module.training is not training:
                raise InputMismatchError(
                    f"module '{path or '(root)'}' was switched to "
                    f"{'train' if module.training else 'eval'} mode since planning. {_AGAIN}"
                )
            if len(module._modules) != count:
                raise InputMismatchError(
                    f"submodules of '{path or '(root)'}' were added or removed since planning. "
                    f"{_AGAIN}"
                )
            state = vars(module)
            for name, value in attributes.items():
                if state.get(name) != value:
                    raise InputMismatchError(
                        f"attribute '{name}' of module '{path or '(root)'}' was {value!r} when "
                        f"planned and is {state.get(name)!r}. {_AGAIN}"
                    )
            if any(state[hooks] for hooks in _HOOKS):
                _refuse_hook(path, module)
        for where, table, name, kind in self.parameters:
            tensor = table.get(name)
            if tensor is None or _kind(tensor) != kind:
                raise InputMismatchError(
                    f"'{where}' was {_kind_text(kind)} when planned and is "
                    f"{'missing' if tensor is None else _kind_text(_kind(tensor))}. {_AGAIN}"
                )


_AGAIN = "Build the Rockmate module anew for the changed module, or undo the change."


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.requires_grad, tensor.shape, tensor.stride()


def _kind_text(kind: tuple[Any, ...]) -> str:
    dtype, device, requires_grad, shape, _ = kind
    frozen = "" if requires_grad else " without gradient"
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}{frozen}"


def refuse_hooks(model: nn.Module) -> None:
    """Raise UnsupportedModuleError if a module inside carries hooks, which would not be called."""
    for path, module in model.named_modules():
        if any(vars(module)[hooks] for hooks in _HOOKS):
            _refuse_hook(path, module)


def _refuse_hook(path: str, module: nn.Module) -> None:
    kinds = [hooks.strip("_") for hooks in _HOOKS if vars(module)[hooks]]
    raise UnsupportedModuleError(
        f"module '{path or '(root)'}' ({type(module).__name__}) has {', '.join(kinds)}, which a "
        "captured graph would not call. Remove them before wrapping; hooks on the wrapper itself "
        "and on parameters work."
    )


def _ambient_autocast() -> tuple[str, torch.dtype] | None:
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            return kind, torch.get_autocast_dtype(kind)
    return None
