"""Turn the operations of a node into Python functions that run them.

The functions are generated source (kept in `Piece.source` for debugging): values inside a node are
local variables, deleted after their last use so that a node peaks no higher than eager code would.
"""

from __future__ import annotations

import itertools
import keyword
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rkgb.gradient_order import Use
from rkgb.op import Autocast, Op, Ref
from rkgb.simplified import SimplifiedNode

# Both callbacks get the name and the running number of the use; they return the tensor to use.
Lookup = Callable[[str, int], Any]


@dataclass(frozen=True, eq=False)
class Piece:
    """Operations that are recorded in one autograd graph: a whole node, nearly always."""

    run: Callable[[Lookup, Lookup], tuple[Tensor, ...]]
    outputs: tuple[str, ...]
    uses: tuple[Use, ...]  # key of each numbered use, in the order of execution
    source: str
    operations: int


def compile_node(
    node: SimplifiedNode, externals: frozenset[str], splits: Sequence[int] = ()
) -> tuple[Piece, ...]:
    """Return the pieces of `node`, cut after the operations whose indices are in `splits`.

    `externals` are the names that come from outside the forward. Each piece returns the node's
    outputs that it makes, then whatever later pieces of the node read.
    """
    bounds = [0, *splits, len(node.ops)]
    pieces = []
    for low, high in itertools.pairwise(bounds):
        ops, positions = node.ops[low:high], node.positions[low:high]
        later = {name for op in node.ops[high:] for name in op.inputs}
        outputs = tuple(op.name for op in ops if op.name in node.outputs or op.name in later)
        pieces.append(_compile(ops, positions, externals, outputs))
    return tuple(pieces)


def _compile(
    ops: Sequence[Op],
    positions: Sequence[int],
    externals: frozenset[str],
    outputs: tuple[str, ...],
) -> Piece:
    writer = _Writer(externals)
    last_use = {name: index for index, op in enumerate(ops) for name in op.inputs}
    for index, (op, position) in enumerate(zip(ops, positions, strict=True)):
        writer.assign(op, position)
        dead = [
            writer.local[name]
            for name in dict.fromkeys((*op.inputs, op.name))
            if name in writer.local and name not in outputs and last_use.get(name, index) <= index
        ]
        if dead:
            writer.lines.append(f"del {', '.join(dead)}")
    results = "".join(f"{writer.local[name]}, " for name in outputs)
    body = [*writer.lines, f"return ({results})"]
    source = "def piece(value, external):\n" + "".join(f"    {line}\n" for line in body)
    scope = dict(writer.scope)
    exec(compile(source, "<rkgb node>", "exec"), scope)
    return Piece(scope["piece"], outputs, tuple(writer.uses), source, len(ops))


class _Writer:
    def __init__(self, externals: frozenset[str]) -> None:
        self.externals = externals
        self.local: dict[str, str] = {}
        self.lines: list[str] = []
        self.uses: list[Use] = []
        self.scope: dict[str, Any] = {"no_grad": torch.no_grad, "autocast": _autocast}

    def assign(self, op: Op, position: int) -> None:
        self.position, self.argument = position, 0
        args = [self.text(arg) for arg in op.args]
        args += [f"{key}={self.text(arg)}" for key, arg in op.kwargs.items()]
        name = f"v_{op.name}"
        call = f"{name} = {self.constant(op.target)}({', '.join(args)})"
        if op.autocast is not None:
            call = f"with autocast({self.constant(op.autocast)}): {call}"
        if not op.grad_enabled:
            call = f"with no_grad():\n        {call}" if op.autocast else f"with no_grad(): {call}"
        self.lines.append(call)
        self.local[op.name] = name

    def text(self, tree: Any) -> str:
        if isinstance(tree, Ref):
            self.argument += 1
            if tree.name in self.local:
                return self.local[tree.name]
            self.uses.append((self.position, self.argument - 1))
            lookup = "external" if tree.name in self.externals else "value"
            return f"{lookup}({tree.name!r}, {len(self.uses) - 1})"
        if isinstance(tree, (list, tuple)):
            inner = "".join(f"{self.text(item)}, " for item in tree)
            return f"[{inner}]" if isinstance(tree, list) else f"({inner})"
        if isinstance(tree, Mapping):
            return "{" + ", ".join(f"{k!r}: {self.text(v)}" for k, v in tree.items()) + "}"
        if isinstance(tree, slice):
            parts = ", ".join(self.text(v) for v in (tree.start, tree.stop, tree.step))
            return f"slice({parts})"
        if tree is None or isinstance(tree, (bool, str)) or type(tree) is int:
            return repr(tree)
        if type(tree) is float and math.isfinite(tree):
            return repr(tree)
        return self.constant(tree)

    def constant(self, value: Any) -> str:
        hint = "".join(c if c.isalnum() else "_" for c in str(getattr(value, "__name__", "c")))
        name = f"{hint}_{len(self.scope)}"
        if keyword.iskeyword(name) or not name.isidentifier():
            name = f"c_{len(self.scope)}"
        self.scope[name] = value
        return name


def _autocast(region: Autocast) -> AbstractContextManager[Any]:
    # Without the weight cache: a cast that outlives its node would be memory nobody counts.
    return torch.autocast(
        region.device, dtype=region.dtype, enabled=region.enabled, cache_enabled=False
    )
