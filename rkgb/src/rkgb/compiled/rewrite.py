"""Put compiled pieces into a simplified graph, each as one node, and bring the facts into line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rkgb.compiled.classes import (
    CompiledClass,
    Made,
    NotCompiledError,
    Place,
    compile_joint,
)
from rkgb.compiled.grouping import merging, refusal, runs_of
from rkgb.compiled.joint import Joint, joint_of, reference
from rkgb.compiled.layouts import channels_last, laid_out
from rkgb.compiled.statistics import MoveStatistics
from rkgb.device.rng import RngState
from rkgb.elements.op import Op
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.backward_slices import slice_backward
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.dataflow import DataFlowGraph
from rkgb.graphs.passes import PLANNED_PASSES
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph, SimplifiedNode
from rkgb.torch_api.torch_private import kernel_flags, refuse_missing_compiler

_log = logging.getLogger("rkgb")
Note = Callable[[str, float], None]  # what is being done, and the fraction that is behind it
# Compiled classes of this process, by everything that their code depends on. A second budget, a
# second layer and a second module of the same kind compile nothing.
_known: dict[object, CompiledClass | str] = {}
_MOST_KNOWN = 1024


@dataclass(frozen=True)
class EagerPiece:
    """A node that stays as it was recorded, and why."""

    module_path: str
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.module_path or '(root)'}): {self.why}"


@dataclass(frozen=True)
class CompiledGraph:
    """A graph with compiled pieces, and what became of each of its nodes."""

    graph: SimplifiedGraph
    recorded: SimplifiedGraph  # the same nodes before
    classes: tuple[str, ...]  # digest of each node's class; '' of a node that stays eager
    compiled_now: int  # classes that were not known yet
    eager: tuple[EagerPiece, ...]
    as_recorded: frozenset[int] = frozenset()  # nodes about which all values lie as recorded

    @property
    def count(self) -> int:
        """How many nodes are compiled."""
        return sum(map(bool, self.classes))


def compile_pieces(dg: DataFlowGraph, note: Note | None = None) -> CompiledGraph:
    """Return the planned graph of `dg` with its pieces compiled.

    `note` hears of each class, and what part of the pieces is behind it. The random stream is as
    before afterwards.

    Raises:
        CompilerMissingError: inductor has no compiler for the device.
    """
    refuse_missing_compiler(dg.basic.device)
    plain = D_to_S(dg, passes=PLANNED_PASSES)
    eager = {i: why for i, node in enumerate(plain.nodes) if (why := refusal(node, plain))}
    before = len(_known)
    stream = RngState.save(dg.basic.device)
    try:
        compiling, recorded = _compiled(dg, plain, eager, note or _ignore)
    finally:
        stream.restore()
    tried = {index for run in runs_of(plain, eager) for index in run}
    for index in range(len(plain.nodes)):
        if index not in tried:
            eager.setdefault(index, "has nothing to compute in the backward")
    found = [plain.nodes[i] for i in eager]
    pieces = [
        EagerPiece(node.module_path, node.name, why)
        for node, why in zip(found, eager.values(), strict=True)
    ]
    for piece in pieces:
        _log.debug("not compiled: %s", piece)
    return CompiledGraph(
        compiling.rewritten(),
        compiling.recorded,
        compiling.classes,
        len(_known) - before,
        tuple(pieces),
        recorded,
    )


def _compiled(
    dg: DataFlowGraph, plain: SimplifiedGraph, eager: dict[int, str], note: Note
) -> tuple[_Compiling, frozenset[int]]:
    """Compile the runs of `plain` that can be; `eager` learns of nodes that cannot, and why.

    Also return the nodes about which values lie as recorded, since they do not compile otherwise.
    """
    stay: set[int] = set()  # of the plain nodes
    while True:
        runs = runs_of(plain, eager)
        merged = D_to_S(dg, passes=(*PLANNED_PASSES, merging(plain, runs)))
        home = {p: i for i, node in enumerate(merged.nodes) for p in node.positions}
        at = [home[plain.nodes[run[0]].positions[0]] for run in runs]
        recorded = frozenset(i for i, run in zip(at, runs, strict=True) if stay & {*run})
        compiling = _Compiling(merged, {*at} - recorded, note)
        failed = False
        for index, run in zip(at, runs, strict=True):
            why = compiling.compile(index)
            if not why:
                continue
            failed = True
            if compiling.is_laid_out(index):
                stay.update(run)
            else:
                if why not in eager.values():  # once for all layers of a kind
                    path = merged.nodes[index].module_path
                    _log.warning("%s stays eager: %s", path or "(root)", why)
                eager.update(dict.fromkeys(run, why))
        if not failed:
            return compiling, recorded


def compile_variant(known: CompiledGraph, basic: BasicGraph) -> SimplifiedGraph:
    """Return the same nodes with the backward of another recording of the same forward.

    What a node keeps follows from its backward, too: the forward is another one then.
    """
    sg = with_backward(known.recorded, basic)
    wanted = [i for i, code in enumerate(known.classes) if code and not refusal(sg.nodes[i], sg)]
    stay = {*known.as_recorded}
    stream = RngState.save(basic.device)
    try:
        while True:
            compiling = _Compiling(sg, {*wanted} - stay, _ignore)
            failed = {index for index in wanted if compiling.compile(index)}
            if not failed:
                break
            laid = {*filter(compiling.is_laid_out, failed)}
            stay |= laid
            wanted = [index for index in wanted if index not in failed - laid]
    finally:
        stream.restore()
    return compiling.rewritten()


def _ignore(_: str, __: float) -> None: ...


class _Compiling:
    """Compiles nodes of a graph; about those of `free`, images may lie in another order."""

    def __init__(self, sg: SimplifiedGraph, free: Collection[int], note: Note) -> None:
        self.recorded, self.laid = sg, channels_last(sg, free)
        self.sg, self.note = laid_out(sg, self.laid), note
        self.compiled: dict[int, tuple[Joint, CompiledClass]] = {}

    def is_laid_out(self, index: int) -> bool:
        """Whether what goes into a node or comes out of it lies otherwise than recorded."""
        joint = joint_of(self.sg, index)
        names = (*joint.primals, *joint.tangents, *joint.results, *joint.gradients)
        return any(name in self.laid for name in names)

    @property
    def classes(self) -> tuple[str, ...]:
        """The class of each node; '' where it stays eager."""
        codes = (self.compiled.get(index) for index in range(len(self.sg.nodes)))
        return tuple("" if code is None else code[1].forward.digest for code in codes)

    def compile(self, index: int) -> str:
        """Compile a node; return why it cannot be, or nothing."""
        basic = self.sg.dataflow.basic
        joint = joint_of(self.sg, index)
        if joint.reads_what_it_updates:
            return "reads a buffer that it updates"
        key = (joint.key, str(basic.device), torch.get_num_threads(), kernel_flags())
        if key not in _known:
            fraction = index / len(self.sg.nodes)
            self.note(f"compiling {self.sg.nodes[index].main.target_name}", fraction)
            try:
                made: CompiledClass | str = compile_joint(joint, basic.device)
            except NotCompiledError as error:
                made = str(error)
            while len(_known) >= _MOST_KNOWN:
                _known.pop(next(iter(_known)))
            _known[key] = made
        known = _known[key]
        if isinstance(known, str):
            return known
        self.compiled[index] = (joint, known)
        return ""

    def rewritten(self) -> SimplifiedGraph:
        """Return the graph with the operations of its compiled nodes replaced."""
        facts = _Facts(self.sg)
        nodes = list(self.sg.nodes)
        for index, node in enumerate(nodes):
            if index not in self.compiled:
                facts.follow(node.ops)
                continue
            nodes[index] = facts.forward(node, *self.compiled[index])
        for index in reversed(range(len(nodes))):
            if index not in self.compiled:
                facts.follow(nodes[index].backward)
                continue
            nodes[index] = facts.backward(nodes[index], *self.compiled[index])
        dg = self.sg.dataflow
        dataflow = replace(dg, basic=replace(dg.basic, infos=facts.infos))
        return replace(self.sg, dataflow=dataflow, nodes=tuple(nodes))


class _Facts:
    """Facts about values while operations are replaced: what lies elsewhere is followed."""

    def __init__(self, sg: SimplifiedGraph) -> None:
        self.recorded: Mapping[str, TensorInfo] = sg.dataflow.infos
        self.infos = dict(self.recorded)
        self.is_on_host = sg.dataflow.basic.device.type == "cpu"
        self.made: dict[str, tuple[str, ...]] = {}  # results by the name of the operation

    def follow(self, ops: Sequence[Op]) -> None:
        """Let views of values that lie elsewhere now lie there, too."""
        for op in ops:
            for name in filter(None, op.results):
                info = self.recorded[name]
                sources = (n for n in op.inputs if self.recorded[n].alias_of == info.alias_of)
                source = next(sources, None)
                if info.alias_of == name or source is None:
                    continue
                old, new = self.recorded[source], self.infos[source]
                if (old.alias_of, old.offset) != (new.alias_of, new.offset):
                    self.infos[name] = replace(
                        info,
                        alias_of=new.alias_of,
                        storage_bytes=new.storage_bytes,
                        offset=info.offset - old.offset + new.offset,
                    )

    def forward(self, node: SimplifiedNode, joint: Joint, code: CompiledClass) -> SimplifiedNode:
        """Return a node with its forward replaced."""
        main = node.main
        first = joint.results[0]
        count = len(code.results) - len(joint.results)
        extra = [self._new(f"{first}_kept_{place}") for place in range(count)]
        results = (*joint.results, *extra)
        self.made[first] = results
        places = {"primal": joint.primals, "tangent": joint.tangents, "result": results}
        self._describe(results, code.results, places)
        run = Op(
            name=first,
            target=code.forward,
            args=reference([joint.primals[place] for place in code.takes]),
            kwargs={},
            results=results,
            returns_many=True,
            module_path=main.module_path,
            source=main.source,
            sequence_nr=main.sequence_nr,
        )
        moves = []
        for place, statistics in enumerate(joint.statistics):
            buffers = (statistics.mean, statistics.variance)
            moves.append(
                Op(
                    name=f"{extra[2 * place]}_moved",
                    target=MoveStatistics(statistics.momentum),
                    args=reference([*buffers, *extra[2 * place : 2 * place + 2]]),
                    kwargs={},
                    results=(),
                    module_path=main.module_path,
                    source=main.source,
                    writes=buffers,
                )
            )
        name = f"compiled {node.name}"
        return replace(node, name=name, ops=(run, *moves, *joint.effects))

    def backward(self, node: SimplifiedNode, joint: Joint, code: CompiledClass) -> SimplifiedNode:
        """Return a node with its backward replaced."""
        results = self.made[joint.results[0]]
        places = {
            **{"primal": joint.primals, "tangent": joint.tangents},
            **{"result": results, "gradient": joint.gradients},
        }
        self._describe(joint.gradients, code.gradients, places)
        run = Op(
            name=joint.gradients[0],
            target=code.backward,
            args=reference([places[kind][at] for kind, at in code.takes_back]),
            kwargs={},
            results=joint.gradients,
            returns_many=True,
            sequence_nr=joint.backward[0].sequence_nr,
        )
        return replace(node, backward=(run,))

    def _describe(
        self, names: Sequence[str], made: Sequence[Made], places: Mapping[str, Sequence[str]]
    ) -> None:
        for name, form in zip(names, made, strict=True):
            home = self._at(form.home, places, names)
            root = name if home == name else self.infos[home].alias_of
            known = self.recorded.get(name)
            wants = known.requires_grad if known is not None else False
            info = form.info(root, wants, self.is_on_host)
            # How what comes in lies in its storage was recorded, and is no matter of the class.
            if known is not None and root == known.alias_of and root != name:
                info = replace(info, offset=known.offset, storage_bytes=known.storage_bytes)
            elif home != name:
                info = replace(info, storage_bytes=self.infos[home].storage_bytes)
            self.infos[name] = info

    def _at(self, place: Place, places: Mapping[str, Sequence[str]], names: Sequence[str]) -> str:
        kind, at = place
        return places[kind][at] if kind in places else names[at]

    def _new(self, name: str) -> str:
        while name in self.infos:
            name += "_"
        self.infos[name] = TensorInfo((), torch.float32, (), False, name, 0, 0)
        return name


def with_backward(sg: SimplifiedGraph, basic: BasicGraph) -> SimplifiedGraph:
    """Return a recorded graph with the backward of another recording of the same forward."""
    node_of = {place: i for i, node in enumerate(sg.nodes) for place in node.positions}
    slices = slice_backward(basic, len(sg.nodes), node_of)
    nodes = tuple(
        replace(node, backward=backward, hand_overs=hand_overs)
        for node, (backward, hand_overs) in zip(sg.nodes, slices, strict=True)
    )
    dataflow = replace(sg.dataflow, basic=basic)
    return replace(sg, dataflow=dataflow, nodes=nodes)
