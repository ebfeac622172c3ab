"""One recorded operation, the element of every graph in this package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rkgb.torch_api.kernel_choice import Flags

# In training they write to their statistics, arguments 3 and 4. Their schemas do not say so.
BATCH_NORMS = frozenset(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"))

# The operation of autocast's casts.
CAST: Any = torch.ops.aten._to_copy.default

# For display: operations that compute nothing.
VIEW_NAMES = frozenset(
    """
    view reshape transpose permute expand unsqueeze squeeze select slice narrow split chunk
    split_with_sizes unbind unflatten flatten getitem t alias detach contiguous to view_as expand_as
    as_strided empty_strided diagonal swapaxes movedim real imag view_as_real view_as_complex
    _unsafe_view
    """.split()  # noqa: SIM905  (a list would take a line for each)
)


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the value called `name`."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """`results = target(*args, **kwargs)`: one call of a kernel, below autograd.

    `name` is the first result; an operation without visible results has a name of its own.
    `sequence_nr` is a number of autograd's: in the forward, of the node that the operation made, or
    the latest before it; in the backward, of the running node.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[str, ...]  # one per returned value; '' if it is no tensor
    returns_many: bool = False  # a tuple or list of any length
    module_path: str = ""
    source: str = ""  # "file.py:12"
    sequence_nr: int = -1
    is_random: bool = False
    writes: tuple[str, ...] = ()  # values and externals that it overwrites
    flags: Flags = ()  # torch's settings that the forward has changed and that choose kernels

    inputs: tuple[str, ...] = field(init=False)  # in argument order, repeated when read twice

    def __post_init__(self) -> None:
        found: list[str] = []
        _collect(self.args, found)
        if self.kwargs:
            _collect(self.kwargs, found)
        object.__setattr__(self, "inputs", tuple(found))

    @property
    def target_name(self) -> str:
        """'addmm' for aten.addmm.default."""
        return str(getattr(self.target, "__name__", self.target)).split(".")[0]

    @property
    def kernel(self) -> Callable[..., Any]:
        """The target without torch's wrapper around an overload, which takes time at each call."""
        found: Callable[..., Any] = getattr(self.target, "_op", self.target)
        return found

    def __str__(self) -> str:
        parts = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        made = ", ".join(name or "_" for name in self.results) or self.name
        return f"{made} = {self.target_name}({', '.join(parts)})"


def _collect(tree: Any, found: list[str]) -> None:
    """Append the names in a tree of arguments, in order."""
    kind = type(tree)
    if kind is Ref:
        found.append(tree.name)
    elif kind is tuple or kind is list:
        for value in tree:
            _collect(value, found)
    elif kind is dict:
        for value in tree.values():
            _collect(value, found)


def map_refs(tree: Any, function: Callable[[str], Any]) -> Any:
    """Return `tree` with every Ref replaced by `function(name)`."""
    kind = type(tree)
    if kind is Ref:
        return function(tree.name)
    if kind is tuple:
        return tuple([map_refs(value, function) for value in tree])
    if kind is list:
        return [map_refs(value, function) for value in tree]
    if kind is dict:
        return {key: map_refs(value, function) for key, value in tree.items()}
    return tree


def call_like(
    op: Op, target: Callable[..., Any], takes: Iterable[str], results: tuple[str, ...]
) -> Op:
    """Return the call of another target with these values, in the place of an operation."""
    return Op(
        name=results[0],
        target=target,
        args=tuple(map(Ref, takes)),
        kwargs={},
        results=results,
        returns_many=True,
        module_path=op.module_path,
        source=op.source,
        sequence_nr=op.sequence_nr,
    )


def renamed(op: Op, current: Callable[[str], str]) -> Op:
    """Return an operation with the current names of its values."""
    if all(current(name) == name for name in (*op.inputs, *op.results, *op.writes)):
        return op

    def reference(name: str) -> Ref:
        return Ref(current(name))

    return replace(
        op,
        args=map_refs(op.args, reference),
        kwargs=map_refs(dict(op.kwargs), reference),
        results=tuple(map(current, op.results)),
        writes=tuple(map(current, op.writes)),
    )


def call_op(op: Op, values: Mapping[str, Any], run: Callable[..., Any] | None = None) -> Any:
    """Return what an operation gives for arguments from `values`, or what `run` gives."""
    args = map_refs(op.args, values.__getitem__)
    kwargs = map_refs(dict(op.kwargs), values.__getitem__) if op.kwargs else {}
    return (run or op.target)(*args, **kwargs)


def run_op(op: Op, values: dict[str, Any], run: Callable[..., Any] | None = None) -> None:
    """Run one operation on `values`, and add its results to them."""
    made = call_op(op, values, run)
    results = made if op.returns_many else (made,)
    values.update((name, v) for name, v in zip(op.results, results, strict=False) if name)
