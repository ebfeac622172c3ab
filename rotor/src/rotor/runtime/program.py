"""A schedule in the form that the executor runs: one group of ops for each call by autograd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from rotor.errors import InvalidScheduleError
from rotor.runtime.stages import CodeStage
from rotor.schedules.ops import Backward, ForwardEnableGrad, Op


@dataclass(frozen=True, slots=True)
class RunStage:
    """A stage with what its recomputation needs to know."""

    code: CodeStage
    mutated_buffers: tuple[tuple[nn.Module, str], ...] = ()
    detached_outputs: frozenset[int] = frozenset()  # outputs that carry no gradient
    always_record: bool = False  # without recording, its kernels give other bits
    reused_parameters: frozenset[int] = frozenset()  # used by several of its operations


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule as one forward op and one group of backward ops per stage."""

    stages: tuple[RunStage, ...]
    forward: tuple[Op, ...]
    backward: tuple[tuple[Op, ...], ...]  # [k]: what runs between B(k+1) and the end of B(k)
    rerun: dict[int, int]  # number of recomputations of each stage that has any
    plain: frozenset[int]  # stages that keep everything and run directly under autograd
    modules: tuple[tuple[nn.Module, ...], ...]  # [k]: the modules inside stage k
    devices: tuple[torch.device, ...]
    preserve_rng: bool

    @classmethod
    def build(
        cls,
        stages: tuple[RunStage, ...],
        ops: Iterable[Op],
        devices: tuple[torch.device, ...],
        preserve_rng: bool,
    ) -> Program:
        """Cut a valid schedule into a program.

        Raises:
            InvalidScheduleError: its forward phase does not run each stage once, in order.
        """
        todo = list(ops)
        count = len(stages)
        forward, rest = tuple(todo[:count]), todo[count:]
        in_order = [op.stage for op in forward] == list(range(count))
        if not in_order or any(isinstance(op, Backward) for op in forward):
            raise InvalidScheduleError("the forward phase must run each stage once, in order.")
        groups: list[tuple[Op, ...]] = []
        group: list[Op] = []
        for op in rest:
            group.append(op)
            if isinstance(op, Backward):
                groups.append(tuple(group))
                group = []
        again = dict(Counter(op.stage for op in rest if not isinstance(op, Backward)))
        modules = tuple(tuple(stage.code.submodules()) for stage in stages)
        back = tuple(reversed(groups))
        plain = frozenset(
            k
            for k, op in enumerate(forward)
            if isinstance(op, ForwardEnableGrad)
            and not op.forget_input
            and k not in again
            and len(back[k]) == 1
        )
        return cls(stages, forward, back, again, plain, modules, devices, preserve_rng)
