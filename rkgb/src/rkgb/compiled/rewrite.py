"""Put compiled pieces into a simplified graph, each as one node.

A piece has two partitions. The forward of the other one saves what the backward would otherwise
recompute: it is faster and takes more memory, so the plan chooses for each node. Bits must not
depend on that choice. So both are run on the same values, twice, and the other one is offered only
if all bits of all results and gradients agree.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rkgb.compiled.code.classes import CompiledClass, NotCompiledError
from rkgb.compiled.code.known import KnownClasses
from rkgb.compiled.pieces.grouping import refusal, runs_of
from rkgb.compiled.pieces.joint import Joint, joint_of
from rkgb.compiled.pieces.layouts import channels_last, laid_out
from rkgb.compiled.replacing import replaced
from rkgb.device.rng import drawing_nothing
from rkgb.elements.tensor_info import same_values, storage_id
from rkgb.graphs.basic import BasicGraph
from rkgb.graphs.dataflow import DataFlowGraph
from rkgb.graphs.passes import PLANNED_PASSES
from rkgb.graphs.simplified import D_to_S, SimplifiedGraph, merging
from rkgb.run.stand_ins import Drawn, StandIns
from rkgb.torch_api.private.autograd import straight_to_kernels
from rkgb.torch_api.private.inductor import refuse_missing_compiler

_log = logging.getLogger("rkgb")
Note = Callable[[str, float], None]  # what is being done, and the completed fraction
PutInto = Callable[[SimplifiedGraph], SimplifiedGraph]
_known = KnownClasses()
_known_keeping = KnownClasses()  # their other partition


@dataclass(frozen=True)
class EagerPiece:
    """A node that stays eager, and why."""

    module_path: str
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.module_path or '(root)'}): {self.why}"


@dataclass(frozen=True)
class Apart:
    """Nodes that stay as `graph` has them, because they run in another way."""

    graph: SimplifiedGraph
    nodes: Collection[int]
    why: str
    # Returns another graph of the step, in which other nodes are merged, with these nodes.
    put_into: PutInto


@dataclass(frozen=True)
class CompiledGraph:
    """A graph with compiled pieces, and the outcome for each of its nodes."""

    graph: SimplifiedGraph
    recorded: SimplifiedGraph  # the same nodes with recorded operations
    laid: SimplifiedGraph  # the same, with the layouts of values between pieces
    classes: tuple[str, ...]  # digest of each node's class; '' of a node that stays eager
    compiled_now: int  # number of new classes
    eager: tuple[EagerPiece, ...]
    as_recorded: frozenset[int] = frozenset()  # nodes whose inputs and results keep their layout
    pieces: Mapping[int, tuple[Joint, CompiledClass]] = field(default_factory=dict)
    keeping: Mapping[int, CompiledClass] = field(default_factory=dict)  # faster, but saves more

    def with_kept(self, nodes: Collection[int]) -> SimplifiedGraph:
        """Return the graph in which these nodes of `keeping` save more for their backward."""
        other = {i: (self.pieces[i][0], self.keeping[i]) for i in nodes}
        return replaced(self.laid, {**self.pieces, **other})

    def with_backward(self, basic: BasicGraph, put_into: PutInto | None = None) -> SimplifiedGraph:
        """Return the same nodes with the backward of another recording of the same forward.

        The compiled forward may differ, because the saved tensors also depend on the backward.
        `put_into` is as in `Apart`.
        """
        sg = (put_into or _as_it_is)(self.recorded.with_backward(basic))
        wanted = [i for i, code in enumerate(self.classes) if code and not refusal(sg.nodes[i], sg)]
        stay = {*self.as_recorded}
        with drawing_nothing(basic.device):
            while True:
                compiling = _Compiling(sg, {*wanted} - stay, _ignore)
                failed = {index for index in wanted if compiling.compile(index)}
                if not failed:
                    return compiling.rewritten()
                laid = {*filter(compiling.is_laid_out, failed)}
                stay |= laid
                wanted = [index for index in wanted if index not in failed - laid]

    @property
    def count(self) -> int:
        """The number of compiled nodes."""
        return sum(map(bool, self.classes))


def compile_pieces(
    dg: DataFlowGraph, note: Note | None = None, *, both: bool = False, apart: Apart | None = None
) -> CompiledGraph:
    """Return the planned graph of `dg` with its pieces compiled, but for nodes that are `apart`.

    With `both`, also compile the faster partitions that save more, if their bits are the same.
    `note` is called with each class and the completed fraction of pieces. The random state is
    restored.

    Raises:
        CompilerMissingError: inductor has no compiler for the device.
    """
    refuse_missing_compiler(dg.basic.device)
    apart = apart or Apart(D_to_S(dg, passes=PLANNED_PASSES), (), "", _as_it_is)
    plain = apart.graph
    eager = {i: why for i, node in enumerate(plain.nodes) if (why := refusal(node, plain))}
    eager.update(dict.fromkeys(apart.nodes, apart.why))
    before = _known.compiled
    with drawing_nothing(dg.basic.device):
        compiling, merged, recorded = _compiled(dg, apart, eager, note or _ignore)
        keeping = compiling.keeping() if both else {}
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
        *(merged, compiling.sg, compiling.classes, _known.compiled - before),
        *(tuple(pieces), recorded, compiling.compiled, keeping),
    )


def _compiled(
    dg: DataFlowGraph, apart: Apart, eager: dict[int, str], note: Note
) -> tuple[_Compiling, SimplifiedGraph, frozenset[int]]:
    """Compile the runs of a graph; add nodes that do not compile to `eager`, with the reason.

    Also return the graph as recorded, and the nodes that compile only with the recorded layout of
    their values.
    """
    plain = apart.graph
    stay: set[int] = set()  # indices in `plain`
    while True:
        runs = runs_of(plain, eager)
        together = [*runs, *((index,) for index in apart.nodes)]
        merged = D_to_S(dg, passes=(*PLANNED_PASSES, merging(plain, together)))
        home = {p: i for i, node in enumerate(merged.nodes) for p in node.positions}
        at = [home[plain.nodes[run[0]].positions[0]] for run in runs]
        recorded = frozenset(i for i, run in zip(at, runs, strict=True) if stay & {*run})
        compiling = _Compiling(apart.put_into(merged), {*at} - recorded, note)
        failed = False
        for index, run in zip(at, runs, strict=True):
            why = compiling.compile(index)
            if not why:
                continue
            failed = True
            if compiling.is_laid_out(index):
                stay.update(run)
            else:
                if why not in eager.values():  # logged once for all layers of a kind
                    path = merged.nodes[index].module_path
                    _log.warning("%s stays eager: %s", path or "(root)", why)
                eager.update(dict.fromkeys(run, why))
        if not failed:
            return compiling, merged, recorded


def _ignore(_: str, __: float) -> None: ...


def _as_it_is(sg: SimplifiedGraph) -> SimplifiedGraph:
    return sg


class _Compiling:
    """Compiles nodes of a graph; values of nodes in `free` may change their layout."""

    def __init__(self, sg: SimplifiedGraph, free: Collection[int], note: Note) -> None:
        self.laid = channels_last(sg, free)
        self.sg, self.note = laid_out(sg, self.laid), note
        self.compiled: dict[int, tuple[Joint, CompiledClass]] = {}

    def is_laid_out(self, index: int) -> bool:
        """Return whether an input or a result of a node has another layout than recorded."""
        joint = joint_of(self.sg, index)
        names = (*joint.primals, *joint.tangents, *joint.results, *joint.gradients)
        return any(name in self.laid for name in names)

    @property
    def classes(self) -> tuple[str, ...]:
        """The class of each node; '' where it stays eager."""
        codes = (self.compiled.get(index) for index in range(len(self.sg.nodes)))
        return tuple("" if code is None else code[1].forward.digest for code in codes)

    def compile(self, index: int) -> str:
        """Compile a node; return why it does not compile, or ''."""
        joint = joint_of(self.sg, index)
        if joint.reads_what_it_updates:
            return "reads a buffer that it updates"

        note = functools.partial(self._note, index, "compiling")
        known = _known.get(joint, self.sg.basic.device, note=note)
        if isinstance(known, str):
            return known
        self.compiled[index] = (joint, known)
        return ""

    def keeping(self) -> dict[int, CompiledClass]:
        """Compile the other partition of the compiled nodes, as far as there is one."""
        device = self.sg.basic.device
        found = {}
        for index, (joint, code) in self.compiled.items():
            known = _known_keeping.get(
                *(joint, device, code),
                check=functools.partial(check_bits, joint, device, code),
                note=functools.partial(self._note, index, "keeping in"),
            )
            if isinstance(known, str):
                _log.debug("%s rebuilds: %s", self.sg.nodes[index].module_path, known)
            else:
                found[index] = known
        return found

    def _note(self, index: int, what: str) -> None:
        nodes = self.sg.nodes
        self.note(f"{what} {nodes[index].main.target_name}", index / len(nodes))

    def rewritten(self) -> SimplifiedGraph:
        """Return the graph with the operations of its compiled nodes replaced."""
        return replaced(self.sg, self.compiled)


def check_bits(
    joint: Joint, device: torch.device, found: CompiledClass, other: CompiledClass
) -> None:
    """Compare two partitions of a piece.

    Raises:
        NotCompiledError: some bits differ.
    """
    for shift in (0.0, 0.5):  # values of one sign, then of both
        stand_ins = StandIns(joint.infos, device, {}, drawn=Drawn())
        given = [stand_ins[name] for name in (*joint.primals, *joint.tangents)]
        _shifted(given, shift)
        count = len(joint.primals)
        primals, tangents = given[:count], given[count:]
        ours, theirs = (_values(code, joint, primals, tangents) for code in (found, other))
        if not all(map(same_values, ours, theirs)):
            raise NotCompiledError("keeping more gives other bits")


def _values(
    code: CompiledClass, joint: Joint, primals: Sequence[Tensor], tangents: Sequence[Tensor]
) -> list[Tensor]:
    """Run a class; return results, statistics and gradients."""
    with torch.no_grad(), straight_to_kernels():
        results = list(code.forward.run([primals[place] for place in code.takes]))
        known = {"primal": primals, "tangent": tangents, "result": results}
        gradients = code.backward.run([known[kind][at] for kind, at in code.takes_back])
    return [*results[: len(joint.results) + 2 * len(joint.statistics)], *gradients]


def _shifted(tensors: Sequence[Tensor], shift: float) -> None:
    storages = {storage_id(t): t for t in tensors if t.is_floating_point()}
    for tensor in storages.values() if shift else ():
        torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage()
        ).sub_(shift)
