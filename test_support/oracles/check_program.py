"""Check a step program against its recording, statement by statement, without running it.

Contents of memory are numbered: two have one number exactly when the same operations made them from
the same contents and the same random numbers. The recording is followed first, then the program,
and every operation must find what it found when it was recorded, whether it runs for the first time
or again. Nothing here is shared with what writes programs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from oracles.check_pieces import check_pieces
from oracles.moved_memory import MovedMemory
from oracles.numbered_memory import (
    AS_STRIDED,
    WRITES_OVER,
    FollowedRecording,
    Geometry,
    NumberedMemory,
)
from rkgb.elements.op import Op, Ref
from rkgb.elements.target import GradientCut, GradientPart
from rkgb.errors import InvalidGraphError
from rkgb.graphs.simplified import SimplifiedGraph
from rkgb.rows.call import InPieces
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

_SUM = torch.ops.aten.sum.dim_IntList


def check_program(graph: SimplifiedGraph, program: StepProgram) -> None:
    """Check that `program` computes what was recorded and drops what is not needed, and no more.

    Raises:
        InvalidGraphError: it does not; the first statement that is wrong is named.
    """
    _Check(graph, program).run()


class _Check:
    def __init__(self, graph: SimplifiedGraph, program: StepProgram) -> None:
        self.graph, self.program = graph, program
        basic = graph.basic
        numbers: dict[Hashable, int] = {}
        self.recording = FollowedRecording(basic, numbers)
        self.memory = NumberedMemory(basic.infos, numbers)
        self.moved = MovedMemory()
        self.externals = frozenset(basic.externals)
        self.alive: set[str] = set()
        self.gone: dict[str, str] = {}  # variable -> the statement that dropped it
        self.outside: set[int] = set()  # storages of externals
        self.rewritten: set[int] = set()  # of them, those that another forward writes to as well
        self.given: dict[int, str] = {}  # storage -> leaf that has it as a gradient
        self.firsts: dict[str, str] = {}  # leaf -> value that is about to be handed over
        self.sums: dict[str, tuple[int, int]] = {}  # leaf -> storage of its sum, and terms after it
        self.passing: dict[str, list[Op]] = {}  # output -> what hands over its gradient
        for op in basic.backward:
            if isinstance(op.target, (GradientCut, GradientPart)):
                self.passing.setdefault(op.target.root, []).append(op)
        self.missing = {leaf: list(parts) for leaf, parts in self.recording.gradients.items()}
        self.begun: list[tuple[str, int]] = []
        self.again = False
        self.where = "the beginning"

    def run(self) -> None:
        program = self.program
        needed = _needed_at_part_ends(program)
        for name in program.externals:
            self._expect(name in self.externals, f"'{name}' is no external")
            self.memory.add_external(name)
        for name in self.recording.buffers:  # what is in them is compared in the end
            self.memory.add_external(name)
        self.alive = set(program.externals)
        self.outside.update(v.storage for v in self.memory.variables.values())
        written = self.recording.written
        self.rewritten.update(
            v.storage for n, v in self.memory.variables.items() if self.memory.root(n) in written
        )
        self._half("forward", program.forward, needed[0])
        count = len(self.graph.nodes)
        self.where = "the end of the forward"
        self._expect(self.begun == [("F", k) for k in range(count)], "not every forward has run")
        self._end_of_forward()
        self.alive = {*program.saved, *program.tangents}
        self.memory.begin_backward(program.tangents)
        self.begun.clear()
        self._half("backward", program.backward, needed[1])
        self.where = "the end of the backward"
        late = next((leaf for leaf, parts in self.missing.items() if parts), None)
        self._expect(late is None, f"a gradient of '{late}' has not been handed over")
        late = next((output for output, ops in self.passing.items() if ops), None)
        self._expect(late is None, f"the gradient of '{late}' has not been received")
        self._expect(not self.sums, f"sums of {', '.join(self.sums)} have no end")
        self._same_end(self.recording.backward_end)
        left = sorted(self.alive - self.externals)
        self._expect(not left, f"{', '.join(left)} is still there")

    def _expect(self, fact: bool, otherwise: str) -> None:
        if not fact:
            raise InvalidGraphError(f"wrong program at {self.where}: {otherwise}.")

    def _right(self, wrong: str) -> None:
        self._expect(not wrong, wrong)

    # ------------------------------------------------------------------ halves

    def _half(self, half: str, statements: Sequence[Statement], needed: list[set[str]]) -> None:
        ends = iter(needed)
        for index, statement in enumerate(statements):
            if isinstance(statement, Begin) and index:
                self._end_of_part(next(ends))
            self.where = f"statement {index} of the {half}, '{_words(statement)}'"
            self._follow(half, statement)
        if statements:
            self._end_of_part(next(ends))

    def _end_of_part(self, needed: set[str]) -> None:
        idle = sorted(self.alive - self.externals - needed)
        self._expect(not idle, f"nobody reads {', '.join(idle)} any more, and it is still there")

    def _end_of_forward(self) -> None:
        program = self.program
        for name in (*program.outputs, *program.saved):
            self._expect(name in self.alive, f"'{name}' is not there{self._who_dropped(name)}")
            if name in program.outputs:
                self._right(self.moved.use(self.memory.storage_of(name)))
        self._expect(
            program.outputs == tuple(self.graph.output_names)
            and program.tangents == self.recording.tangents,
            "it does not return what was recorded, or takes other gradients",
        )
        for name in program.outputs:
            same = self.memory.seen(name) == self.recording.outputs.get(name)
            self._expect(same, f"the output '{name}' is not what it was when it was recorded")
        lost = sorted(self.alive - self.externals - {*program.outputs, *program.saved})
        self._expect(not lost, f"{', '.join(lost)} is read later, and not in `saved`")
        free = _free(program.backward)
        idle = [n for n in program.saved if n not in free or program.saved.count(n) > 1]
        self._expect(not idle, f"{', '.join(idle)} is in `saved` twice, or for nobody")
        self._same_end(self.recording.forward_end)

    def _same_end(self, end: tuple[int, Mapping[str, tuple[int, Geometry]]]) -> None:
        random, buffers = end
        self._expect(self.memory.random == random, "the random state is not the recorded one")
        for name, content in buffers.items():
            same = self.memory.seen(name) == content
            self._expect(same, f"the buffer '{name}' has not been written as it was recorded")

    # ------------------------------------------------------------------ statements

    def _move_out(self, statement: MoveOut, source: str, size_bytes: int) -> None:
        storage = self.memory.variables[source].storage
        known = self.graph.infos[self.memory.root(source)].storage_bytes
        self._expect(size_bytes == known, f"it has {known} bytes")
        held = self.outside | self.given.keys()
        held |= {
            self.memory.variables[n].storage for n in self.graph.output_names if n in self.alive
        }
        self._expect(storage not in held, f"others than the program hold '{source}'")
        self._right(self.moved.out(statement, storage, self.memory.content[storage]))

    def _follow(self, half: str, statement: Statement) -> None:
        for name in _reads(statement):
            self._expect(name in self.alive, f"'{name}' is not there{self._who_dropped(name)}")
            fresh = not self.again or self.memory.storage_of(name) not in self.rewritten
            self._expect(fresh, f"another forward may have written to '{name}' since")
            if not isinstance(statement, Moving):
                self._right(self.moved.use(self.memory.storage_of(name)))
        for name in _makes(statement):
            self._expect(name not in self.alive, f"'{name}' is there already")
        match statement:
            case Begin(kind, node, again):
                self._begin(half, kind, node, again)
            case Call(op, frees):
                self._call(op)
                if isinstance(op.target, InPieces):
                    kept = {*op.target.lent.values()} - {*frees}
                    self._expect(not kept, f"it writes over {', '.join(kept)}, which stays")
                self._drop(frees)
            case Drop(names):
                self._drop(names)
            case Copy(name, source):
                self.memory.copy(name, source)
            case Draw(name, "keep"):
                self.memory.kept_random[name] = self.memory.random
            case Draw(name, _):
                self.memory.random = self.memory.kept_random[name]
            case Give(_, parts, dropped) if statement.output:
                self._pass(statement.output, parts, statement.receives)
                self._drop(name for name in dropped if name != statement.receives)
            case Give(_, gradients, dropped):
                self._give(gradients)
                self._drop(dropped)
                self._end_sums(statement.ends)
            case Sum("first", leaf, value):
                self._expect(leaf not in self.sums, f"'{leaf}' has a first gradient already")
                self.sums[leaf] = self.memory.variables[value].storage, 0
                self.firsts[leaf] = value
            case Sum(_, leaf, value):
                self._take(leaf, value)
                self._add(leaf)
            case TakeArena(size_bytes):
                self._expect(half == "forward" and not self.moved.arena_bytes, "there is one")
                self.moved.arena_bytes = size_bytes
            case MoveOut(_, source, _, size_bytes):
                self._move_out(statement, source, size_bytes)
            case Moving(name):
                content = self.memory.content[self.moved.storage(name)]
                self._right(self.moved.follow(statement, content))
        self.alive.update(_makes(statement))
        if isinstance(statement, Give) and statement.receives in statement.dropped:
            self.alive.remove(statement.receives)

    def _begin(self, half: str, kind: str, node: int, again: bool) -> None:
        if half == "forward":
            right = (kind, node, again) == ("F", len(self.begun), False)
            self._expect(right, f"F{len(self.begun)} is next")
        else:
            right = again == (kind == "F") and (kind == "F" or (kind, node) not in self.begun)
            self._expect(right, "backwards run once, and forwards again")
        self.begun.append((kind, node))
        self.again = again

    def _call(self, op: Op) -> None:
        kind, index = self.begun[-1] if self.begun else ("F", -1)
        self._expect(index >= 0, "no part has begun")
        node = self.graph.nodes[index]
        mine = node.ops if kind == "F" else node.backward
        self._expect(any(o.name == op.name for o in mine), f"it is no part of {kind}{index}")
        for name in op.writes:
            self._right(self.moved.use(self.memory.storage_of(name), writes=True))
            owner = self.given.get(self.memory.variables[name].storage)
            self._expect(owner is None, f"'{name}' was handed over as the gradient of '{owner}'")
            outside = self.memory.variables[name].storage in self.outside
            self._expect(not (outside and self.again), f"it writes '{name}' once more")
        if isinstance(op.target, InPieces):
            self._call_in_pieces(op, op.target)
            return
        recorded = self.recording.ops.get(op.name)
        if recorded is None or (op.target is AS_STRIDED and recorded.target is not AS_STRIDED):
            self._expect(op.target is AS_STRIDED and not op.writes, "it was not recorded")
            self.memory.call(op, op if recorded is None else recorded)
            return
        if op.target_name == "add_selected_":
            op = self._with_zeros(op, recorded)
        if op.target is _SUM and op.results != recorded.results:
            op = recorded = self._without_dims(op, recorded)
        computes = self.memory.call(op, recorded)
        self._expect(
            computes == self.recording.computes[op.name],
            "it does not compute what it did when it was recorded: it reads something else, or "
            "something that has been overwritten",
        )

    def _call_in_pieces(self, op: Op, call: InPieces) -> None:
        """Follow the operations that a call runs piece by piece, as if they were whole."""
        right = op.inputs == call.pieces.takes and op.results == call.pieces.results
        self._expect(right, "it gets or makes other values than its pieces do")
        check_pieces(call)
        before = {*self.memory.variables}
        for each in call.recorded:
            unknown = [name for name in each.inputs if name not in self.memory.variables]
            self._expect(not unknown, f"{each.target_name} reads {', '.join(unknown)}")
            same = self.memory.call(each, each) == self.recording.computes[each.name]
            self._expect(same, f"{each.target_name} does not compute what it did")
        for name in self.memory.variables.keys() - before - {*op.results}:
            del self.memory.variables[name]

    def _with_zeros(self, op: Op, recorded: Op) -> Op:
        """Return the sum over a whole of which only a part is added, and make the other term."""
        whole, part, *place = op.args
        for name in recorded.inputs:
            maker = self.recording.ops.get(name)
            if maker is not None and maker.target is torch.ops.aten.select_backward.default:
                like = replace(maker, args=(part, *place))
                if self.memory.call(like, maker) == self.recording.computes[name]:
                    sum_op = WRITES_OVER[recorded.target]
                    return replace(op, target=sum_op, args=(whole, Ref(name)))
        raise InvalidGraphError(
            f"wrong program at {self.where}: it adds no part that was recorded."
        )

    def _without_dims(self, op: Op, recorded: Op) -> Op:
        """Return the view that was recorded of a sum that kept its dimensions, and make the sum."""
        view = self.recording.ops[op.results[0]]
        like = replace(op, args=(*op.args, True), results=recorded.results)
        same = self.memory.call(like, recorded) == self.recording.computes[recorded.name]
        self._expect(same, "it does not sum what was recorded")
        kept, seen = (self.graph.infos[o.results[0]] for o in (recorded, view))
        dims = [d for d in range(len(kept.shape)) if d - len(kept.shape) not in op.args[1]]
        left = [d for d in dims if d not in op.args[1]]
        shape = tuple(kept.shape[d] for d in left)
        strides = tuple(kept.stride[d] for d in left)
        right = (shape, strides) == (seen.shape, seen.stride) and len(op.args) == 2
        self._expect(right, f"'{op.results[0]}' is no such sum")
        return view

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._expect(name in self.alive, f"'{name}' is not there{self._who_dropped(name)}")
            self._expect(name not in self.externals, f"'{name}' is not the program's to drop")
            self._right(self.moved.drop(name))
            self.alive.remove(name)
            self.gone[name] = self.where

    def _give(self, gradients: Sequence[tuple[str, str]]) -> None:
        for leaf, value in gradients:
            if not value:
                continue
            self._take(leaf, value)
            self.given[self.memory.variables[value].storage] = leaf
            first = self.firsts.pop(leaf, None if leaf in self.sums else value)
            self._expect(first == value, f"it is not '{first}' that '{leaf}' gets first")

    def _pass(self, output: str, parts: Sequence[tuple[str, str]], whole: str) -> None:
        """Follow what hands over parts of the gradient of an output, and may receive the whole."""
        waiting = self.passing.get(output, [])
        for to, value in parts:
            right = to == output and bool(waiting) and isinstance(waiting[0].target, GradientPart)
            self._expect(right, f"'{value}' is no part of what '{output}' gets")
            recorded = waiting.pop(0)
            op = replace(recorded, args=(*recorded.args[:-1], Ref(value)))
            self._same(op, recorded)
            self.given[self.memory.variables[value].storage] = output
        if whole:
            right = bool(waiting) and waiting[0].name == whole
            self._expect(right, f"'{whole}' is not what '{output}' gets, or not all of it")
            recorded = waiting.pop(0)
            self._same(recorded, recorded)
            self.given[self.memory.variables[whole].storage] = output

    def _same(self, op: Op, recorded: Op) -> None:
        computes = self.memory.call(op, recorded) == self.recording.computes[recorded.name]
        self._expect(computes, "it does not hand over what it did when it was recorded")

    def _take(self, leaf: str, value: str) -> None:
        found = self.memory.seen(value)
        expected = self.missing.get(leaf, [])
        right = bool(expected) and expected.pop(0) == found
        self._expect(right, f"'{value}' is not the next gradient of '{leaf}'")

    def _add(self, leaf: str) -> None:
        handed_over = leaf in self.sums and leaf not in self.firsts
        self._expect(handed_over, f"nothing of '{leaf}' was handed over")
        storage, terms = self.sums[leaf]
        others = storage in self.outside or self.given[storage] != leaf
        readers = [n for n in self.alive if self.memory.variables[n].storage == storage]
        self._expect(not others and not readers, f"the sum of '{leaf}' is not autograd's alone")
        self.sums[leaf] = storage, terms + 1

    def _end_sums(self, ends: Sequence[tuple[str, int]]) -> None:
        for leaf, added in ends:
            _, terms = self.sums.pop(leaf, (0, -1))
            self._expect(terms == added, f"{terms} gradients of '{leaf}' were added, not {added}")

    def _who_dropped(self, name: str) -> str:
        return f": it was dropped by {self.gone[name]}" if name in self.gone else ""


def _reads(statement: Statement) -> set[str]:
    match statement:
        case Call(op):
            return {*op.inputs, *op.writes}
        case Copy(_, source):
            return {source}
        case Draw(name, "put back") | Moving(name):
            return {name}
        case MoveOut(_, source):
            return {source, "moving"}
        case Give(_, gradients, _):
            return {value for _, value in gradients if value}
        case Sum(_, _, value):
            return {value}
    return set()


def _makes(statement: Statement) -> set[str]:
    match statement:
        case Call(op):
            return {name for name in op.results if name}
        case Copy(name, _) | Draw(name, "keep") | MoveOut(name):
            return {name}
        case TakeArena():
            return {"moving"}
        case Give() if statement.receives:
            return {statement.receives}
    return set()


def _free(statements: Sequence[Statement]) -> set[str]:
    """Return what the statements read before they make it."""
    needed: set[str] = set()
    for statement in reversed(statements):
        needed = (needed - _makes(statement)) | _reads(statement)
    return needed


def _needed_at_part_ends(program: StepProgram) -> tuple[list[set[str]], list[set[str]]]:
    """Return what is read after each part of the forward, and of the backward."""
    halves: list[list[set[str]]] = []
    needed: set[str] = set()
    for statements in (program.backward, program.forward):
        if statements is program.forward:
            needed |= set(program.outputs)
        ends = [set(needed)]
        for index in range(len(statements) - 1, -1, -1):
            statement = statements[index]
            needed = (needed - _makes(statement)) | _reads(statement)
            if isinstance(statement, Begin) and index:
                ends.append(set(needed))
        halves.append(ends[::-1])
    return halves[1], halves[0]


def _words(statement: Statement) -> str:
    match statement:
        case Begin(kind, node, again):
            return f"{kind}{node}{' again' if again else ''}"
        case Call(op):
            return str(op)
        case Drop(names):
            return f"drop {', '.join(names)}"
        case Copy(name, source):
            return f"{name} = copy of {source}"
        case Draw(name, kind):
            return f"{kind} the random state {name}"
        case Give(_, gradients, _):
            return f"give {', '.join(f'{value} to {leaf}' for leaf, value in gradients)}"
        case TakeArena(size_bytes):
            return f"take an arena of {size_bytes} bytes"
        case MoveOut(name, source):
            return f"{name} = {source}, moved out"
        case Moving(name, kind):
            return f"{name}: {kind}"
        case Sum(kind, leaf, value):
            return f"sum of {leaf}: {kind} {value}"
