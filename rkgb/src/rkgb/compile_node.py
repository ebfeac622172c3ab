"""Turn the operations of a node into Python functions that run them.

The functions are generated source: values inside a node are local variables, deleted after their
last use so that a node peaks no higher than eager code would.
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

from rkgb.generated import define
from rkgb.gradient_order import Use
from rkgb.op import Autocast, Op, Ref
from rkgb.simplified import SimplifiedNode


@dataclass(frozen=True, slots=True)
class Input:
    """One use of a tensor that a piece does not make itself."""

    name: str
    is_external: bool  # a parameter, buffer or input of the model, not a value of the table
    use: Use


@dataclass(frozen=True, eq=False)
class Piece:
    """Operations that are recorded in one autograd graph: a whole node, nearly always."""

    body: tuple[str, ...]  # lines that read the variables u0, u1, … and make those of `results`
    scope: Mapping[str, Any]  # what the lines name besides
    inputs: tuple[Input, ...]  # u0, u1, …: one per use, in the order of execution
    outputs: tuple[str, ...]
    results: tuple[str, ...]  # the variable of each output
    operations: int
    call: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]  # inputs -> outputs
    # Takes the table of values and the externals, and puts the outputs into the table.
    run: Callable[[dict[str, Tensor], Mapping[str, Tensor]], None]


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
    body, scope, inputs = tuple(writer.lines), dict(writer.scope), tuple(writer.inputs)
    results = tuple(writer.local[name] for name in outputs)
    scope |= {f"in{place}": entry.name for place, entry in enumerate(inputs)}
    scope |= {f"out{place}": name for place, name in enumerate(outputs)}
    takes = [f"u{place} = inputs[{place}]" for place in range(len(inputs))]
    gives = f"return ({''.join(f'{result}, ' for result in results)})"
    call = define("call(inputs)", [*takes, *body, gives], scope)
    # Parameters keep requires_grad: some kernels are chosen by it even without grad mode.
    takes = [f"u{place} = {lookup(entry, place)}" for place, entry in enumerate(inputs)]
    puts = [f"values[out{place}] = {result}.detach()" for place, result in enumerate(results)]
    run = define("run(values, external)", [*takes, *body, *puts], scope)
    return Piece(body, scope, inputs, outputs, results, len(ops), call, run)


def lookup(entry: Input, place: int) -> str:
    return f"{'external' if entry.is_external else 'values'}[in{place}]"


class _Writer:
    def __init__(self, externals: frozenset[str]) -> None:
        self.externals = externals
        self.local: dict[str, str] = {}
        self.lines: list[str] = []
        self.inputs: list[Input] = []
        self.scope: dict[str, Any] = {"no_grad": torch.no_grad, "autocast": _autocast}

    def assign(self, op: Op, position: int) -> None:
        self.position, self.argument = position, 0
        args = [self.text(arg) for arg in op.args]
        args += [f"{key}={self.text(arg)}" for key, arg in op.kwargs.items()]
        name = f"v{len(self.local)}"
        call = f"{name} = {self.constant(op.target)}({', '.join(args)})"
        regions = [] if op.grad_enabled else ["no_grad()"]
        if op.autocast is not None:
            regions.append(f"autocast({self.constant(op.autocast)})")
        if regions:
            call = f"with {', '.join(regions)}: {call}"
        self.lines.append(call)
        self.local[op.name] = name

    def text(self, tree: Any) -> str:
        if isinstance(tree, Ref):
            self.argument += 1
            if tree.name in self.local:
                return self.local[tree.name]
            use = (self.position, self.argument - 1)
            self.inputs.append(Input(tree.name, tree.name in self.externals, use))
            return f"u{len(self.inputs) - 1}"
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
