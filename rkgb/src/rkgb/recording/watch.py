"""What a forward may do that no kernel sees: found when it is called, and refused.

Values leave torch for numpy or Python without an operation; hooks and gradients of gradients are
asked of autograd, which a recording below it does not see.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint

from rkgb.capture.recorder import NotRecordedError, ReadsDataError, Recorder

_SEEDING = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state")
# What a recording would not do again, and what to do instead.
_NOT_RECORDED = {
    "register_hook": "registers a hook on a tensor, which would not be called. Put it on a "
    "parameter, outside of forward",
    "grad": "calls torch.autograd.grad. Keep that part outside the wrapped module",
    "backward": "calls backward. Keep that part outside the wrapped module",
}
# They hand values to Python or to other libraries without any operation.
_READS = ("numpy", "__array__", "tolist", "__dlpack__", "data_ptr")


class CallWatch(TorchFunctionMode):
    """While active, refuses calls that a recording would lose."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _NOT_RECORDED and getattr(func, "__module__", "").startswith("torch"):
            raise NotRecordedError(_NOT_RECORDED[name])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_reading(recorder: Recorder) -> Iterator[None]:
    """While active, values are handed to nobody but torch, unless they are constants.

    Not a mode: autograd leaves modes while it runs a backward.
    """

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not recorder.knows_value_of(tensor):
                node = recorder.running_node()
                raise ReadsDataError(f"control flow or what '{name}' gives", node)
            return original(tensor, *args, **kwargs)

        return read

    own = {name: vars(Tensor)[name] for name in _READS if name in vars(Tensor)}
    for name in _READS:
        setattr(Tensor, name, watched(name, getattr(Tensor, name)))
    try:
        yield
    finally:
        for name in _READS:
            if name in own:
                setattr(Tensor, name, own[name])
            else:
                delattr(Tensor, name)


@contextlib.contextmanager
def no_seeding() -> Iterator[None]:
    """While active, a call that sets the state of torch's random numbers is refused."""

    def refusing() -> Callable[..., Any]:
        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise NotRecordedError(
                "sets the state of torch's random numbers, which a recording would not do. Seed "
                "outside of forward"
            )

        return refuse

    places = [(place, name) for place in (torch, torch.random, torch.cuda) for name in _SEEDING]
    old = [(place, name, getattr(place, name)) for place, name in places if hasattr(place, name)]
    try:
        for place, name, _ in old:  # one each: torch's compiler, if it is loaded now, compares
            setattr(place, name, refusing())
        yield
    finally:
        for place, name, function in old:
            setattr(place, name, function)


@contextlib.contextmanager
def transparent_checkpoints() -> Iterator[None]:
    """While active, `torch.utils.checkpoint` runs what it is given, and nothing is run again.

    What is kept and what is recomputed is the plan's to decide.
    """

    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return function(*args)

    def generator(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        yield

    # Its first call would load torch's compiler, only to keep away from it.
    plain = getattr(torch_checkpoint.checkpoint, "__wrapped__", None)
    loads = plain is not None and not hasattr(plain, "__dynamo_disable")
    if loads:
        setattr(plain, "__dynamo_disable", plain)
    reentrant = torch_checkpoint.CheckpointFunction
    old_apply = reentrant.apply
    old_generator = torch_checkpoint._checkpoint_without_reentrant_generator
    reentrant.apply = apply  # type: ignore[method-assign]
    torch_checkpoint._checkpoint_without_reentrant_generator = generator
    try:
        yield
    finally:
        del reentrant.apply
        if reentrant.apply != old_apply:
            reentrant.apply = old_apply  # type: ignore[method-assign]
        torch_checkpoint._checkpoint_without_reentrant_generator = old_generator
        if loads:
            delattr(plain, "__dynamo_disable")


@contextlib.contextmanager
def no_idle_looks() -> Iterator[None]:
    """While active, transformers does not look at the data only to give a warning."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    name = "warn_if_padding_and_no_attention_mask"
    old = getattr(base, name, None)
    if old is None:
        yield
        return
    setattr(base, name, lambda *_args, **_kwargs: None)
    try:
        yield
    finally:
        setattr(base, name, old)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves of a tree, each object once."""
    leaves = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return list({id(leaf): leaf for leaf in leaves}.values())
