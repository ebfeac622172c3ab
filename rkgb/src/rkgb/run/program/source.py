"""Code generation: a step program as Python source, compiled.

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

Where an output that others were computed from gets its gradient, `yield` gives parts of it and
returns the whole, in a list. Variables are the values' own names. Where a program adds gradients to
what it has handed over, `sum_of_0` says whether that is still there, and `late_for_0` takes what is
to be added if not. `numbers` are what follows from the numbers of a call, where a plan serves for
all of them. What a line calls stands in the function's globals, as the name of the operation with a
number. `keep_random` and `put_back_random` save and restore the state of the generators, `clone`
copies a buffer, and `grad_mode` switches what kernels may ask for, and the flags that choose them
back to those of the forward. Where storages leave the device meanwhile, `moving` is the memory on
the other side, and `moved_relu` the storage of `relu`: `moving.out` starts a copy, `leave` waits
for it and frees the storage, `back` takes memory again and starts to fill it, `arrive` waits. Under
a profiler, `span_of` begins a span of the comment's text in place of the comment.
"""

from __future__ import annotations

import functools
import itertools
import keyword
import linecache
import math
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from rkgb.copies import Copies
from rkgb.device.cpu import is_profiled_by_user
from rkgb.device.rng import RngState
from rkgb.elements.numbers import is_unspecialised
from rkgb.elements.op import Op, Ref
from rkgb.elements.target import Boxed, target_of
from rkgb.errors import InvalidGraphError
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.run.program.lowering import for_backward_alone
from rkgb.run.program.statements import (
    Begin,
    Call,
    Copy,
    Draw,
    Drop,
    Give,
    MoveOut,
    Moving,
    Statement,
    StepProgram,
    Sum,
    TakeArena,
)
from rkgb.torch_api.kernel_choice import calling_with, switch_forward

Callee = Callable[[Op], Callable[..., Any]]
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.device)
# What the source itself calls by name: a value of that name, as of `aten.clone`, gets another.
_TAKEN = frozenset(
    (
        *("externals", "saved", "tangents", "given", "boxed", "numbers", "sums"),
        *("clone", "keep_random", "put_back_random", "grad_mode", "span_of", "span"),
        "copies",
    )
)
_numbers = itertools.count()


@dataclass(frozen=True)
class CompiledStep:
    """A step program as two functions; the source is for people."""

    program: StepProgram
    # Takes the externals in order and empties the list; returns the outputs and the saved tensors.
    # If the graph has unspecialised numbers, it takes these too, here and in the backward.
    forward: Callable[..., tuple[list[Tensor], list[Any]]]
    # Takes what the forward left and the gradients of the outputs, and empties both lists; then
    # `sums`, where the program makes some. Yields the gradients of each `Give`, in order, as a list
    # that the caller empties. It is sent a list of what those receive that do.
    backward: Callable[..., Generator[list[Tensor], list[Tensor] | None, None]]
    source: str
    # Another program of the same graph, with the same functions for its operations.
    other: Callable[[StepProgram], CompiledStep]

    @cached_property
    def forward_again(self) -> Callable[..., tuple[list[Tensor], list[Any]]]:
        """The second forward for another backward: it returns no outputs."""
        return self.other(for_backward_alone(self.program)).forward


def compile_step(
    sg: SimplifiedGraph, program: StepProgram, callee: Callee, copies: Copies | None = None
) -> CompiledStep:
    """Return the functions of a program; `callee` gives the function that runs an operation.

    `copies` takes the storages that the program moves.

    Under a user's profiler a second form runs, which is made when it is first needed. It names each
    part of the step for `torch.profiler` and its traces, like the comments of the source.
    """
    if program.arena_bytes and copies is None:
        raise InvalidGraphError(
            f"the plan of {sg.basic.model_name} moves storages, and nothing was given "
            "that takes them. Give compile_step what does, such as Host()."
        )
    plain, source = _Writer(sg, callee, copies, with_spans=False).functions(program)

    @functools.cache
    def named() -> dict[str, Any]:
        return _Writer(sg, callee, copies, with_spans=True).functions(program)[0]

    def forward(*given: Any) -> Any:
        return (named() if is_profiled_by_user() else plain)["forward"](*given)

    def backward(*given: Any) -> Any:
        return (named() if is_profiled_by_user() else plain)["backward"](*given)

    def other(program: StepProgram) -> CompiledStep:
        return compile_step(sg, program, callee, copies)

    return CompiledStep(program, forward, backward, source, other)


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
    def __init__(
        self, sg: SimplifiedGraph, callee: Callee, copies: Copies | None, *, with_spans: bool
    ) -> None:
        self.sg, self.callee, self.with_spans = sg, callee, with_spans
        self.device = sg.basic.device
        self.scope: dict[str, Any] = {
            "keep_random": lambda: RngState.save(self.device),
            "put_back_random": RngState.restore,
            "clone": torch.clone,
            "grad_mode": switch_forward,
            "span_of": _begun_span,
            **({} if copies is None else {"copies": copies}),
        }
        self.in_forward = False
        self.in_span = False
        self.in_try = False
        self.known: dict[int, str] = {}
        self.sums: dict[str, int] = {}  # leaf -> number of its sum

    def functions(self, program: StepProgram) -> tuple[dict[str, Any], str]:
        """Return the functions of a program by their names, and their source."""
        more = "" if self.sg.basic.numbers is None else ", numbers"
        lines = [f"def forward(externals{more}):"]
        lines += _indented(_unpack("externals", program.externals))
        lines += _indented(line for s in program.forward for line in self.forward_lines(s))
        outputs, saved = self.names(program.outputs), self.names(program.saved)
        lines += _indented([*self.end_of_span(), f"return [{outputs}], [{saved}]"])
        sums = ", sums" if program.has_sums else ""
        lines += ["", f"def backward(saved, tangents{sums}{more}):"]
        taken = [*_unpack("saved", program.saved), *_unpack("tangents", program.tangents)]
        lines += _indented(taken)
        lines += _indented(line for s in program.backward for line in self.backward_lines(s))
        lines += _indented([*self.end_of_span(), *([] if program.gives else ["return", "yield"])])
        source = "\n".join([*lines, ""])
        name = f"<rkgb step {next(_numbers)} of {self.sg.basic.model_name}>"
        code = compile(source, name, "exec")
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        space = dict(self.scope)
        exec(code, space)
        weakref.finalize(space["forward"], linecache.cache.pop, name, None)
        return space, source

    def names(self, names: Sequence[str]) -> str:
        return ", ".join(map(_variable, names))

    def forward_lines(self, statement: Statement) -> list[str]:
        """Return the lines of a statement of the forward."""
        if isinstance(statement, Draw) and statement.name == "random_now":
            return self._moved_back(statement)
        return self._in_try(self.lines(statement))

    def backward_lines(self, statement: Statement) -> list[str]:
        """Return the lines of a statement of the backward, in which forwards run in grad mode.

        Grad mode decides between some kernels, and whether they return what a backward needs (LSTM
        on a CPU).
        """
        if not isinstance(statement, Begin):
            return self.forward_lines(statement)
        again = statement.kind == "F"
        switch = [f"grad_mode({again})"] if again != self.in_forward else []
        self.in_forward = again
        return [*self.lines(statement), *switch]

    def _moved_back(self, statement: Draw) -> list[str]:
        """Return the lines around a recomputation that draws random numbers again.

        They restore the random state even if something raises in between.
        """
        self.in_try = statement.kind == "keep"
        lines = self.lines(statement)
        return [*lines, "try:"] if self.in_try else ["finally:", *_indented(lines)]

    def _in_try(self, lines: list[str]) -> list[str]:
        return _indented(lines) if self.in_try else lines

    def lines(self, statement: Statement) -> list[str]:
        match statement:
            case Begin(kind, node, again):
                main = self.sg.nodes[node]
                what = f"{main.main.target_name} ({main.module_path or 'top'})"
                text = f"{kind}{node}{' again:' if again else ''} {what}"
                if not self.with_spans:
                    return [f"# {text}"]
                before = self.end_of_span()
                self.in_span = True
                return [*before, f"span = span_of({text!r})"]
            case Call(op, frees):
                run = target_of(op).run
                return [self._call(op)] if run is None else self._boxed_call(op, run, frees)
            case Drop(names):
                return [f"del {self.names(names)}"]
            case Copy(name, source):
                return [f"{_variable(name)} = clone({_variable(source)})"]
            case Draw(name, "keep"):
                return [f"{name} = keep_random()"]
            case Draw(name, _):
                return [f"put_back_random({name})"]
            case Give(_, gradients, dropped):
                # Code that runs during a hand-over is autograd's and not part of this span.
                values = [_variable(value) if value else "None" for _, value in gradients]
                values += [f"*sums.end({leaf!r}, {added})" for leaf, added in statement.ends]
                lines = [*self.end_of_span(), f"given = [{', '.join(values)}]"]
                dropped = tuple(name for name in dropped if name != statement.receives)
                lines += [f"del {self.names(dropped)}"] if dropped else []
                if not statement.receives:
                    return [*lines, "yield given"]
                # In a list, because the caller of `send` holds its argument until the next
                # hand-over.
                return [*lines, f"{_variable(statement.receives)} = (yield given).pop()"]
            case Sum("first", leaf, value):
                n = self.sums.setdefault(leaf, len(self.sums))
                return [f"sum_of_{n}, late_for_{n} = sums.first({leaf!r}, {_variable(value)})"]
            case Sum(_, leaf, value):
                # In one line, because a variable would be a second owner of the sum.
                n, name = self.sums[leaf], _variable(value)
                return [
                    f"late_for_{n}({name}) if sum_of_{n}() is None else sum_of_{n}().add_({name})"
                ]

            case TakeArena(size_bytes):
                return [f"moving = copies.arena({size_bytes})"]
            case MoveOut(name, source, offset, size_bytes):
                return [f"{name} = moving.out({_variable(source)}, {offset}, {size_bytes})"]
            case Moving(name, kind):
                return [f"{name}.{kind}()"]

    def end_of_span(self) -> list[str]:
        """Return the line that ends the open span, if there is one."""
        was, self.in_span = self.in_span, False
        return ["span.__exit__(None, None, None)"] if was else []

    def _call(self, op: Op) -> str:
        function = self.callee(op)
        text = self._arguments(op)
        call = f"{self._constant(function, op.target_name)}({text})"
        return f"{_assigned(op)}{call}" if op.results else call

    def _boxed_call(self, op: Op, run: Boxed, frees: Sequence[str]) -> list[str]:
        """Return the lines of a call that takes a list and empties it."""
        made, function = _assigned(op), self._constant(run, op.target_name)
        if not frees:
            return [f"{made}{function}([{self._arguments(op)}])"]
        return [
            f"boxed = [{self._arguments(op)}]",
            f"del {self.names(frees)}",
            f"{made}{function}(boxed)",
        ]

    def _arguments(self, op: Op) -> str:
        parts = [self._text(arg) for arg in op.args]
        return ", ".join([*parts, *(f"{k}={self._text(v)}" for k, v in op.kwargs.items())])

    def _text(self, tree: Any) -> str:
        if isinstance(tree, Ref):
            return _variable(tree.name)
        if isinstance(tree, (list, tuple)):
            inner = ", ".join(map(self._text, tree))
            return f"[{inner}]" if isinstance(tree, list) else f"({inner}{',' * (len(tree) == 1)})"
        if is_unspecialised(tree):
            return f"numbers[{tree.place}]"
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


def _assigned(op: Op) -> str:
    """Return the left side of a line that calls an operation."""
    results = [_variable(name) if name else "_" for name in op.results]
    is_tuple = op.returns_many and len(results) == 1
    return f"{', '.join(results) if op.returns_many else results[0]}{',' * is_tuple} = "


def _begun_span(name: str) -> record_function:
    span = record_function(name)
    span.__enter__()
    return span


def plain_callee(op: Op) -> Callable[..., Any]:
    """Return the function that runs an operation: the overload, whatever its arguments."""
    return calling_with(op.flags, op.kernel)
