"""Run a program under autograd: the user writes `loss.backward()` and nothing else.

The forward phase runs at once. Autograd then gets a chain of small functions, one per node that
uses a parameter (or an input that requires a gradient), joined by an empty token. Their backwards
run in reverse; each advances the program through its own node's backward step and hands that
node's parameter gradients to autograd, which accumulates them right away, in eager's order: hooks,
gradient accumulation, optimizers in backward and DDP's overlap see what they always see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rkgb.runner import Runner, StepState
from rkgb.tensor_info import storage_bytes, storage_id
from rockmate.errors import (
    BackwardTwiceError,
    ChangedTensorError,
    DoubleBackwardError,
    InvalidPlanError,
)
from rockmate.partial_backward import active_nodes, partial_program
from rockmate.problem import Problem
from rockmate.program import Instruction, Program

# Called around each instruction while calibrating: (instruction, state) -> context manager.
Observer = Callable[[Instruction, StepState], AbstractContextManager[None]]


@dataclass(frozen=True)
class Layout:
    """How the problem's numbers map to the runner's tensors."""

    storage_names: tuple[tuple[str, ...], ...]  # per storage; empty for a phantom
    outside: tuple[tuple[str, ...], ...]  # per node: externals that get a gradient, per use
    grad_inputs: tuple[tuple[str, ...], ...]  # per node: values whose gradient it contributes to
    output_names: tuple[str, ...]  # values the user gets, in order
    differentiable: tuple[bool, ...]  # per output


@dataclass(frozen=True)
class Executor:
    """A program bound to the runner that executes its instructions."""

    runner: Runner
    problem: Problem
    program: Program
    layout: Layout
    observe: Observer | None = None
    _partial: dict[tuple[bool, ...], Sequence[Instruction]] = field(default_factory=dict)

    def __call__(self, external: Mapping[str, Tensor]) -> list[Tensor]:
        """Run the forward phase and return the outputs, connected to autograd."""
        step = _Step(self, external)
        for instruction in self.program.forward_phase:
            step.execute(instruction)
        token = torch.empty(0, device=self.runner.device, requires_grad=True)
        for node, names in enumerate(self.layout.outside):
            if names and self.problem.nodes[node].has_backward:
                tensors = [external[name] for name in names]
                token = _NodeFunction.apply(step, node, token, *tensors)  # type: ignore[no-untyped-call]
        step.remember_versions()
        outputs = _OutputFunction.apply(step, token)  # type: ignore[no-untyped-call]
        return list(outputs)

    @functools.cached_property
    def freed(self) -> tuple[tuple[int | None, tuple[str, ...]], ...]:
        """Per storage: the node whose graph goes with it (of a phantom), and its values."""
        return tuple(
            (storage.producer if storage.is_phantom else None, names)
            for storage, names in zip(self.problem.storages, self.layout.storage_names, strict=True)
        )

    @functools.cached_property
    def watched(self) -> frozenset[str]:
        """Names of externals that nodes read and none of them writes."""
        nodes, volatile = self.runner.graph.nodes, self.runner.volatile
        read = {name for node in nodes for name in node.externals}
        return frozenset(read.difference(*volatile))

    @functools.cached_property
    def reread_outputs(self) -> tuple[str, ...]:
        """Outputs of the model that the backward phase may read."""
        pairs = zip(self.problem.storages, self.layout.storage_names, strict=True)
        read = {
            name
            for storage, names in pairs
            if storage.is_output and (storage.bwd_users or storage.fwd_users)
            for name in names
        }
        return tuple(name for name in self.layout.output_names if name in read)

    @functools.cached_property
    def last_node(self) -> int:
        """The node whose gradients autograd asks for last."""
        return next(
            node
            for node, names in enumerate(self.layout.outside)
            if names and self.problem.nodes[node].has_backward
        )

    def backward_instructions(self, given: tuple[bool, ...]) -> Sequence[Instruction]:
        """Return the backward phase for gradients that arrive at only some outputs."""
        if all(
            has or not wants for has, wants in zip(given, self.layout.differentiable, strict=True)
        ):
            return self.program.backward_phase
        if given not in self._partial:
            start = {n for n, has in zip(self.layout.output_names, given, strict=True) if has}
            active = active_nodes(
                self.problem,
                [node.outputs for node in self.runner.graph.nodes],
                self.layout.grad_inputs,
                start,
            )
            self._partial[given] = partial_program(self.problem, self.program, active)
        return self._partial[given]


class _Step:
    """One forward and its backward: the tensors it holds and how far the program has come."""

    def __init__(self, executor: Executor, external: Mapping[str, Tensor]) -> None:
        self.executor = executor
        self.state = StepState(external=external)
        self.instructions: Sequence[Instruction] = ()
        self.position = 0
        self.started = False
        self.last_backward = len(executor.problem.nodes)
        self.found: dict[int, list[tuple[str, Tensor | None]]] = {}
        self.seen: dict[str, tuple[int, int]] = {}  # external -> (version, storage)
        self.output_versions: dict[str, int] = {}

    # ------------------------------------------------------------------ instructions

    def execute(self, instruction: Instruction) -> None:
        observe = self.executor.observe
        if observe is None:
            self._run(instruction)
            self._free(instruction)
        else:
            with observe(instruction, self.state):
                self._run(instruction)
                self._free(instruction)

    def _run(self, instruction: Instruction) -> None:
        runner, state, node = self.executor.runner, self.state, instruction.node
        if instruction.kind == "B":
            self._check_unchanged(node)
            if node not in state.graphs or node >= self.last_backward:
                # Skipping it would lose gradients without a word.
                raise InvalidPlanError(f"the backward of node {node} cannot run at this place")
            self.last_backward = node
            self.found[node] = runner.backward(node, state)
            return
        if not instruction.is_rerun:
            if node != len(state.ran):
                # Random draws and buffer updates happen once, in the order of the program.
                raise InvalidPlanError(f"the first forward of node {node} is out of order")
            runner.forward(
                node, state, record=instruction.record, keep_state=instruction.saves_state
            )
            return
        self._check_unchanged(node)
        # What the user holds stays as it is; the new copy of it is dropped at once.
        kept = {n: state.values[n] for n in runner.graph.nodes[node].outputs if n in state.values}
        runner.forward(node, state, record=instruction.record, keep_state=False)
        state.values.update(kept)

    def _free(self, instruction: Instruction) -> None:
        state, freed = self.state, self.executor.freed
        for index in instruction.frees:
            node, names = freed[index]
            if node is not None:
                state.graphs.pop(node, None)
            for name in names:
                state.values.pop(name, None)
        if instruction.frees_state:
            state.rng.pop(instruction.node, None)
            state.buffers.pop(instruction.node, None)

    # ------------------------------------------------------------------ backward

    def start(self, grads: Sequence[Tensor | None]) -> None:
        if self.started:
            raise BackwardTwiceError(
                "backward was called a second time on the same forward of a Rockmate module; its "
                "activations are gone after the first. Add the losses before calling backward, or "
                "run the forward again."
            )
        self.started = True
        layout = self.executor.layout
        for name, version in self.output_versions.items():
            if self.state.values[name]._version != version:
                raise ChangedTensorError(
                    f"the output '{name}' of a Rockmate module was changed in place between "
                    "forward and backward, which reads it. Work on a copy: y = y.clone()."
                )
        given = []
        for name, wants, grad in zip(
            layout.output_names, layout.differentiable, grads, strict=True
        ):
            given.append(wants and grad is not None)
            if wants and grad is not None:
                self.state.grads[name] = grad
                self.state.borrowed.add(storage_id(grad))
        self.instructions = self.executor.backward_instructions(tuple(given))

    def advance(self, node: int) -> list[Tensor | None]:
        """Run the program through the backward of `node`; return its parameter gradients."""
        names = self.executor.layout.outside[node]
        while self.position < len(self.instructions):
            instruction = self.instructions[self.position]
            if instruction.kind == "B" and instruction.node < node:
                break  # `node` has no backward step in this (partial) program
            self.position += 1
            self.execute(instruction)
            if instruction.kind == "B" and instruction.node == node:
                break
        found = self.found.pop(node, [])
        if node == self.executor.last_node:
            # Nobody will ask for more: a backward that is left would never run, without a word.
            if any(left.kind == "B" for left in self.instructions[self.position :]):
                raise InvalidPlanError("a backward is left after that of the last node")
            self._finish()
        return [grad for _, grad in found] if found else [None] * len(names)

    def _finish(self) -> None:
        state = self.state
        for table in (state.values, state.grads, state.grad_parts, state.graphs):
            table.clear()
        state.rng.clear()
        state.buffers.clear()

    # ------------------------------------------------------------------ the user's own tensors

    def remember_versions(self) -> None:
        state, executor = self.state, self.executor
        for name in executor.watched:
            tensor = state.external[name]
            if not tensor.is_inference():
                self.seen[name] = (tensor._version, storage_id(tensor))
        self.output_versions = {
            n: state.values[n]._version for n in executor.reread_outputs if n in state.values
        }

    def _check_unchanged(self, node: int) -> None:
        seen, external = self.seen, self.state.external
        for name in self.executor.runner.graph.nodes[node].externals:
            if name not in seen:
                continue
            version, storage = seen[name]
            tensor = external[name]
            # Not its address: FSDP frees and fills the memory of the same storage.
            if tensor._version != version or storage_id(tensor) != storage:
                raise ChangedTensorError(
                    f"'{name}' was changed in place between the forward and the backward of a "
                    "Rockmate module, and the backward needs its old content. Change parameters "
                    "and inputs after backward, or run the forward again."
                )


class _NodeFunction(torch.autograd.Function):
    """Stands for one node in autograd's graph: hands its parameter gradients over."""

    @staticmethod
    def forward(ctx: Any, step: _Step, node: int, token: Tensor, *_outside: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.node = step, node
        return token.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return (None, None, grad, *ctx.step.advance(ctx.node))
        return (None, None, grad, *ctx.step.advance(ctx.node))


class _OutputFunction(torch.autograd.Function):
    """Returns the outputs; its backward hands their gradients to the step."""

    @staticmethod
    def forward(ctx: Any, step: _Step, token: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.step = step
        layout = step.executor.layout
        # Fresh views of the table's tensors: autograd marks what is returned here, and a marked
        # tensor inside the table would keep this very function, and so the table, alive for ever.
        outputs = [step.state.values[name].detach() for name in layout.output_names]
        ctx.mark_non_differentiable(
            *(t for t, wants in zip(outputs, layout.differentiable, strict=True) if not wants)
        )
        ctx.token = token.detach()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # autograd enables it here for create_graph=True only
            raise DoubleBackwardError(
                "backward with create_graph=True was asked of a Rockmate module, whose gradients "
                "cannot be differentiated again. Use the original module (`.original`) for that "
                "step."
            )
        ctx.step.start(grads)
        return None, ctx.token


def gradient_bytes(state: StepState) -> int:
    """Return the bytes of all activation gradients that are alive, each storage once."""
    tensors = list(state.grads.values())
    tensors += [grad for parts in state.grad_parts.values() for _, grad in parts]
    return sum({storage_id(t): storage_bytes(t) for t in tensors}.values())
