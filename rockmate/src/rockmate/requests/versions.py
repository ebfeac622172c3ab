"""Known graphs of a module's steps, and the kind of backward to expect for another call.

A plan has a graph for each kind of backward so far. If a loss reads only one of two outputs, the
other gets no gradient, at every length. A recording that expects the last kind of backward avoids a
second recording when the backward begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rkgb.graphs import BackwardKind, BasicGraph, SimplifiedGraph, Tangent
from rkgb.run import rerun_state
from rockmate.networks.planned import Planned
from rockmate.runtime.executable import Executable
from rockmate.runtime.outputs import plain_strides


@dataclass(frozen=True)
class Version:
    """A plan, and its graph for one kind of backward."""

    planned: Planned
    graph: SimplifiedGraph
    is_apart: bool  # its steps differ from the plan's


def has_same_nodes(ours: SimplifiedGraph, theirs: SimplifiedGraph) -> bool:
    """Return whether two graphs of one program have the same nodes, so that steps serve both.

    Nodes also depend on what the backward reads. A graph for another backward of a known forward
    has the nodes of the usual backward. A recording that expects the other backward has different
    nodes.
    """
    first, second = (
        [(node.name, len(node.ops), len(node.backward)) for node in graph.nodes]
        for graph in (ours, theirs)
    )
    return first == second


def can_run_again(graph: SimplifiedGraph) -> bool:
    """Return whether the forward can be run again for unexpected gradients."""
    has_state = any(rerun_state(graph, node) for node in graph.nodes)
    return not graph.basic.whole_calls and not has_state


def versions_like(known: Sequence[Planned], basic: BasicGraph) -> Iterator[Version]:
    """Yield the versions of known plans that have as many operations as a recording."""
    ours = _counts(basic)
    for planned in reversed(known):
        for executable in planned.executor.variants.values():
            if _counts(executable.basic) == ours:
                yield Version(planned, executable.graph, executable.is_apart)


def _counts(basic: BasicGraph) -> tuple[int, int, list[bool]]:
    return len(basic.ops), len(basic.backward), [t is None for t in basic.kind.tangents]


class ExpectedKind:
    """Turns the usual kind of backward into the one that came last."""

    def __init__(self, executable: Executable) -> None:
        basic, kind = executable.basic, executable.kind
        infos = [basic.infos[name] for name in basic.roots]
        self._forms = [
            _form(i.shape, i.stride, t) for i, t in zip(infos, kind.tangents, strict=True)
        ]
        self._autocast = kind.autocast
        self._losses = ["none" if info.shape else "usual" for info in infos]

    def is_usual(self, *, losses: bool) -> bool:
        """Return whether the expected kind is the usual one: gradients at losses, or at all."""
        usual = self._losses if losses and "usual" in self._losses else ["usual"] * len(self._forms)
        return self._autocast is None and self._forms == usual

    @classmethod
    def after(cls, known: Sequence[Planned]) -> ExpectedKind | None:
        """Return the expected kind after the steps of known plans, or None.

        If the forward could not be run again for other gradients, no kind is expected.
        """
        last = known[-1].executor.latest if known else None
        if last is None or last.runs_python or last.unrepeatable or last.keeps_by_backward:
            return None
        return cls(last)

    def __call__(self, usual: BackwardKind) -> BackwardKind:
        """Return the expected kind, given the usual one."""
        if len(self._forms) != len(usual.tangents):
            return usual
        pairs = zip(self._forms, usual.tangents, strict=True)
        return BackwardKind(tuple(_tangent(f, u) for f, u in pairs), self._autocast)


def _form(shape: Sequence[int], stride: Sequence[int], tangent: Tangent) -> str:
    if tangent is None:
        return "none"
    like = torch.empty_strided(tuple(shape), tuple(stride), device="meta")
    if tangent == plain_strides(shape, torch.empty_like(like).stride()):
        return "usual"
    return "one number" if not any(tangent) else "usual"


def _tangent(form: str, usual: Tangent) -> Tangent:
    if form == "none" or usual is None:
        return None
    return (0,) * len(usual) if form == "one number" else usual
