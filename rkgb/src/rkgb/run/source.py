"""Write a step program down as Python source, and compile it.

    def forward(externals):
        p_weight, p_bias, args_0 = externals; externals.clear()
        # F0 addmm (layer.0)
        t = f4_t(p_weight)
        addmm = f5_addmm(p_bias, args_0, t)
        # F1 gelu (layer.1)
        gelu = f6_gelu(addmm)
        del addmm
        return [gelu], [p_weight, p_bias, args_0, t]

    def backward(saved, tangents):
        p_weight, p_bias, args_0, t = saved; saved.clear()
        tangent_0, = tangents; tangents.clear()
        # F0 again: addmm (layer.0)
        grad_mode(True)
        …
        # B1 gelu (layer.1)
        grad_mode(False)
        gelu_backward = f7_gelu_backward(tangent_0, addmm)
        del tangent_0
        …
        given = [view, mm]
        del view, mm
        yield given

Variables are the values' own names. What a line calls stands in the function's globals, as the name
of the operation with a number. `keep_random` and `put_back_random` save and restore the state of
the generators, `clone` copies a buffer, and `grad_mode` switches what kernels may ask for.
"""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from rkgb.op import Op, Ref
from rkgb.rng import RngState
from rkgb.run.program import Begin, Call, Copy, Draw, Drop, Give, Statement, StepProgram
from rkgb.simplified import SimplifiedGraph
from rkgb.torch_private import set_grad_mode

Callee = Callable[[Op], Callable[..., Any]]
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.device)
# What the source itself calls by name: a value of that name, as of `aten.clone`, gets another.
_TAKEN = frozenset(
    (
        *("externals", "saved", "tangents", "given"),
        *("clone", "keep_random", "put_back_random", "grad_mode"),
    )
)
_numbers = itertools.count()


@dataclass(frozen=True)
class CompiledStep:
    """A step program as two functions; the source is for people."""

    program: StepProgram
    # Takes the externals in order, empties the list; returns the outputs and what it leaves over.
    forward: Callable[[list[Tensor]], tuple[list[Tensor], list[Any]]]
    # Takes what the forward left and the gradients of the outputs, and empties both lists. Yields
    # the gradients of each `Give`, in order, as a list that the caller empties.
    backward: Callable[[list[Any], list[Tensor]], Iterator[list[Tensor]]]
    source: str


def compile_step(sg: SimplifiedGraph, program: StepProgram, callee: Callee) -> CompiledStep:
    """Return the functions of a program; `callee` gives the function that runs an operation."""
    writer = _Writer(sg, callee)
    head = _unpack("externals", program.externals)
    lines = ["def forward(externals):", *_indented(head)]
    lines += _indented(line for s in program.forward for line in writer.lines(s))
    outputs, saved = writer.names(program.outputs), writer.names(program.saved)
    lines += _indented([f"return [{outputs}], [{saved}]"])
    lines += ["", "def backward(saved, tangents):"]
    lines += _indented([*_unpack("saved", program.saved), *_unpack("tangents", program.tangents)])
    lines += _indented(line for s in program.backward for line in writer.backward_lines(s))
    lines += _indented([] if program.gives else ["return", "yield"])
    source = "\n".join([*lines, ""])
    name = f"<rkgb step {next(_numbers)} of {sg.dataflow.basic.model_name}>"
    code = compile(source, name, "exec")
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space = dict(writer.scope)
    _execute(code, space)
    return CompiledStep(program, space["forward"], space["backward"], source)


def _execute(code: CodeType, space: dict[str, Any]) -> None:
    exec(code, space)


def _unpack(source: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    text = ", ".join(map(_variable, names))
    return [f"{text}{',' if len(names) == 1 else ''} = {source}; {source}.clear()"]


def _indented(lines: Any) -> list[str]:
    return [f"    {line}" for line in lines]


def _variable(name: str) -> str:
    return f"{name}_" if keyword.iskeyword(name) or name in _TAKEN else name


class _Writer:
    def __init__(self, sg: SimplifiedGraph, callee: Callee) -> None:
        self.sg, self.callee = sg, callee
        self.device = sg.dataflow.basic.device
        self.scope: dict[str, Any] = {
            "keep_random": lambda: RngState.save(self.device),
            "put_back_random": RngState.restore,
            "clone": torch.clone,
            "grad_mode": set_grad_mode,
        }
        self.in_forward = False
        self.known: dict[int, str] = {}

    def names(self, names: Sequence[str]) -> str:
        return ", ".join(map(_variable, names))

    def backward_lines(self, statement: Statement) -> list[str]:
        """Return the lines of a statement; forwards run in grad mode there too.

        Some kernels are chosen by it, or make what a backward needs only then (LSTM on a CPU).
        """
        if not isinstance(statement, Begin):
            return self.lines(statement)
        again = statement.kind == "F"
        switch = [f"grad_mode({again})"] if again != self.in_forward else []
        self.in_forward = again
        return [*self.lines(statement), *switch]

    def lines(self, statement: Statement) -> list[str]:
        match statement:
            case Begin(kind, node, again):
                main = self.sg.nodes[node]
                what = f"{main.main.target_name} ({main.module_path or 'top'})"
                return [f"# {kind}{node}{' again:' if again else ''} {what}"]
            case Call(op):
                return [self._call(op)]
            case Drop(names):
                return [f"del {self.names(names)}"]
            case Copy(name, source):
                return [f"{_variable(name)} = clone({_variable(source)})"]
            case Draw(name, "keep"):
                return [f"{name} = keep_random()"]
            case Draw(name, _):
                return [f"put_back_random({name})"]
            case Give(_, gradients, dropped):
                lines = [f"given = [{self.names([value for _, value in gradients])}]"]
                lines += [f"del {self.names(dropped)}"] if dropped else []
                return [*lines, "yield given"]

    def _call(self, op: Op) -> str:
        function = self.callee(op)
        text = self._arguments(op)
        call = f"{self._constant(function, op.target_name)}({text})"
        results = [_variable(name) if name else "_" for name in op.results]
        if not results:
            return call
        if op.returns_many:
            return f"{', '.join(results)}{',' if len(results) == 1 else ''} = {call}"
        return f"{results[0]} = {call}"

    def _arguments(self, op: Op) -> str:
        parts = [self._text(arg) for arg in op.args]
        return ", ".join([*parts, *(f"{k}={self._text(v)}" for k, v in op.kwargs.items())])

    def _text(self, tree: Any) -> str:
        if isinstance(tree, Ref):
            return _variable(tree.name)
        if isinstance(tree, (list, tuple)):
            inner = "".join(f"{self._text(item)}, " for item in tree)
            return f"[{inner}]" if isinstance(tree, list) else f"({inner})"
        if tree is None or isinstance(tree, (bool, str)) or type(tree) is int:
            return repr(tree)
        if type(tree) is float and math.isfinite(tree):
            return repr(tree)
        hint = str(tree).removeprefix("torch.") if isinstance(tree, _CONSTANTS) else "constant"
        return self._constant(tree, hint)

    def _constant(self, value: Any, hint: str) -> str:
        key = id(value)
        if key not in self.known:
            plain = "".join(c if c.isalnum() else "_" for c in hint)
            self.known[key] = f"f{len(self.scope)}_{plain}"
            self.scope[self.known[key]] = value
        return self.known[key]


def plain_callee(op: Op) -> Callable[..., Any]:
    """Return what runs an operation: the overload itself, without a look at its arguments."""
    return getattr(op.target, "_op", op.target)
