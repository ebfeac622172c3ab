"""The casts of weights that a step makes, as autocast would make them once per region."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch

from rkgb.elements import CAST
from rkgb.graphs import SimplifiedGraph
from rkgb.run import StepProgram


@dataclass(frozen=True)
class Casts:
    """The casts of weights in a program, and the gradients that it computes of them."""

    graph: SimplifiedGraph
    program: StepProgram

    @cached_property
    def leaves(self) -> tuple[str, ...]:
        """The weights that autocast would cast once per region."""
        basic = self.graph.basic
        edges = {leaf for leaf, _ in basic.edges}
        found = {op.inputs[0] for op in basic.ops if op.target is CAST and op.inputs}
        inside = {name for whole in basic.whole_calls for name in whole.casts}
        return tuple(
            leaf for leaf in sorted(edges) if leaf in found or basic.parameters.get(leaf) in inside
        )

    @cached_property
    def once(self) -> frozenset[str]:
        """The weights among these whose cast gets a single gradient in this step.

        If a step summed several itself, rounding would differ from autograd's sum over all steps.
        """
        given = Counter(leaf for slots in self.given for _, leaf, _ in slots)
        return frozenset(leaf for leaf, count in given.items() if count == 1)

    @cached_property
    def given(self) -> tuple[tuple[tuple[int, str, torch.dtype], ...], ...]:
        """For each hand-over, the slots with gradients of casts, the weights and the types."""
        basic = self.graph.basic
        casts = {op.results[0]: op for op in basic.ops if op.target is CAST}
        uses = Counter(name for op in basic.ops for name in op.inputs if name in casts)
        once = {(op.inputs[0], op.sequence_nr) for n, op in casts.items() if uses[n] == 1}
        made = {op.results[0]: op for op in basic.backward if op.target is CAST}
        return tuple(
            tuple(
                (slot, leaf, basic.infos[made[value].inputs[0]].dtype)
                for slot, (leaf, value) in enumerate(give.gradients)
                if value in made and (leaf, made[value].sequence_nr) in once
            )
            for give in self.program.gives
        )

    @cached_property
    def given_leaves(self) -> frozenset[str]:
        """The leaves whose gradients the program computes."""
        gives = self.program.gives
        return frozenset(leaf for give in gives for leaf, value in give.gradients if value)

    def type_of(self, name: str) -> torch.dtype:
        """Return the type of a value."""
        return self.graph.basic.infos[name].dtype
