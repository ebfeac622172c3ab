"""What Python can ask a tensor for beside its kind: how it was made, and what is written on it.

Steps run on tensors that stand for a user's: new leaves on the same memory. Each remembers what the
user's answers. Where it answers otherwise, what asks for it can be seen. Parameters are found by
where they lie in a module.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.torch_api.private.autograd import set_version

_MARK = "_rkgb_facts"  # attribute of a tensor that stands for another one
_MADE = "_rkgb_made"  # of one that stands for a result: what that answers to these
_OF_RESULTS = ("_base", "_is_view", "_version", "output_nr")


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _has_gradient(tensor: Tensor) -> Hashable:
    may_have = tensor.is_leaf or tensor.retains_grad  # torch warns about others
    return may_have and tensor._grad is not None


def _history(tensor: Tensor) -> Hashable:
    return "" if tensor.grad_fn is None else tensor.grad_fn.name()


def _storage_offset(tensor: Tensor) -> Hashable:
    return tensor.storage_offset() if tensor.layout is torch.strided else 0


def _is_pinned(tensor: Tensor) -> Hashable:
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.is_pinned()


# By the names of attributes and methods, with what most tensors answer.
_FACTS: Mapping[str, tuple[Callable[[Tensor], Hashable], Hashable]] = {
    "is_leaf": (lambda tensor: tensor.is_leaf, True),
    **dict.fromkeys(("grad_fn", "_grad_fn"), (_history, "")),
    **dict.fromkeys(("grad", "_grad"), (_has_gradient, False)),
    **dict.fromkeys(("_base", "_is_view"), (lambda t: t._is_view(), False)),
    "_version": (_version, 0),
    "output_nr": (lambda tensor: tensor.output_nr, 0),
    "retains_grad": (lambda tensor: tensor.retains_grad, False),
    "_backward_hooks": (lambda tensor: bool(tensor._backward_hooks), False),
    "is_inference": (lambda tensor: tensor.is_inference(), False),
    "is_pinned": (_is_pinned, False),
    "storage_offset": (_storage_offset, 0),
}
NAMES = frozenset(_FACTS)
# Those whose answer is the fact itself.
PLAIN = NAMES - {"grad_fn", "_grad_fn", "grad", "_grad", "_base", "_backward_hooks"}


def fact(tensor: Tensor, name: str) -> Hashable:
    """Return what a tensor answers to one of `NAMES`: of a gradient, whether there is one."""
    return _FACTS[name][0](tensor)


def unusual_facts(tensor: Tensor, asked: frozenset[str]) -> tuple[tuple[str, Hashable], ...]:
    """Return what a tensor answers to those of `asked` to which most answer otherwise."""
    names = _among(asked)
    if not names:
        return ()
    found = ((name, fact(tensor, name)) for name in names)
    return tuple((name, answer) for name, answer in found if answer != _FACTS[name][1])


@functools.lru_cache(maxsize=256)
def _among(asked: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(asked & NAMES))


def standing_for(tensor: Tensor, other: Tensor) -> Tensor:
    """Let a tensor stand for another: it gets what is written on it, and remembers its facts."""
    attributes = _attributes_of(other)
    known = attributes.get(_MARK) or {name: original_fact(other, name) for name in _FACTS}
    vars(tensor).update({**attributes, _MARK: known})
    return tensor


@contextlib.contextmanager
def as_in_a_step(tensors: Sequence[Tensor]) -> Iterator[None]:
    """While active, these remember what they answer, and nothing was written on them yet.

    A step may compute them without the writes of the user's code.
    """
    new = [tensor for tensor in tensors if not stands_for_another(tensor)]
    for tensor in new:
        standing_for(tensor, tensor)
    versions = [(t, t._version) for t in tensors if not t.is_inference()]
    try:
        for tensor, _ in versions:
            set_version(tensor, 0)
        yield
    finally:
        for tensor, version in versions:
            set_version(tensor, version)
        for tensor in new:
            vars(tensor).pop(_MARK, None)


def facts_of_result(tensor: Tensor) -> dict[str, Any]:
    """Return what a result answers that depends on how it was made."""
    return {name: original_fact(tensor, name) for name in _OF_RESULTS}


def answering_as(tensor: Tensor, facts: Mapping[str, Any]) -> None:
    """Let a tensor that stands for a result answer as that does; later writes are counted on."""
    vars(tensor)[_MADE] = {**facts, "_version": facts["_version"] - _version(tensor)}


def _attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor, of which one without content has its own."""
    kind = type(tensor)
    is_traced = kind is not Tensor and "__torch_dispatch__" in vars(kind)
    return {} if is_traced else attributes_of(tensor)


def written_on(tensor: Tensor) -> dict[str, object]:
    """Return the attributes that a user or a library has set on a tensor."""
    own = _attributes_of(tensor).items()
    return {name: value for name, value in own if name not in (_MARK, _MADE)}


def set_attribute(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Return the name of an attribute that is another object than before, if one is."""
    names = (*before, *now)
    return next((n for n in names if now.get(n, _MARK) is not before.get(n, _MARK)), None)


def stands_for_another(tensor: Tensor) -> bool:
    """Whether a tensor was made to stand for a user's."""
    return _MARK in vars(tensor)


def original_fact(tensor: Tensor, name: str) -> Any:
    """Return what the tensor answers to one of `NAMES` for which this one stands, if for any."""
    known = vars(tensor).get(_MARK)
    if known is not None:
        return known[name]
    made, own = vars(tensor).get(_MADE, {}), fact(tensor, name)
    return made[name] + own if name == "_version" and made else made.get(name, own)


def placed_parameters(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with the path by which `get_parameter` finds it."""
    return nn.Module.named_parameters(module, remove_duplicate=remove_duplicate)


def leaf_of_kind(like: nn.Parameter, memory: Tensor) -> nn.Parameter:
    """Return a leaf on this memory, of the type of a parameter; it has no attributes yet."""
    made = nn.Parameter(memory, like.requires_grad)
    if type(memory) is Tensor and type(like) is not nn.Parameter:
        made.__class__ = type(like)
    return made


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor in which a library or a user keeps what it means.

    A tensor around others has these among its own, and looks after them itself.
    """
    return {} if hasattr(type(tensor), "__tensor_flatten__") else vars(tensor)


def share_attributes(leaf: nn.Parameter, parameter: nn.Parameter) -> None:
    """Let what is set on one be set on the other."""
    if attributes_of(parameter):
        leaf.__dict__ = vars(parameter)
