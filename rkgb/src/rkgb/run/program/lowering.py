"""Lowering: one step as a list of statements, with calls, copies and drops.

A plan only says in which order forwards F(k) and backwards B(k) run. The forward ends with the
first run of the last node; what runs again before is part of it. The program adds everything that
follows. Recomputed forwards draw the random numbers of the first forward, read buffers as they were
then, and write none. A variable is dropped if nothing reads it before it is made again. Inside
a part, local variables are dropped after their last use. Inputs and results of the part live to its
end, so that its peak does not depend on the plan. Variables that no plan needs after a backward are
dropped within it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rkgb.elements.op import renamed
from rkgb.elements.target import GradientPart, ThroughAutograd, target_of
from rkgb.errors import InvalidGraphError
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode
from rkgb.run.graph.node_storages import dying_in_backward, storages_of
from rkgb.run.program.moves import RootMove, kept_moves, with_moves
from rkgb.run.program.places import Places, Step, ends_of, first_forwards, given_by, waiting_places
from rkgb.run.program.state import copied_for_rerun, rerun_ops, rerun_state, runs_once
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
    TakeArena,
    free_variables,
    made_by,
    read_by,
)


def lower_step(
    sg: SimplifiedGraph,
    steps: Sequence[Step],
    places: Places | None = None,
    moves: Sequence[RootMove] = (),
) -> StepProgram:
    """Return the program of a plan: F of every node in order, and F and B again as the steps say.

    It hands gradients over at `places`; without them, after each B that makes some. `moves` say
    which storages leave the device meanwhile.
    """
    places = waiting_places(sg, steps) if places is None else places
    return _Lowering(sg, steps, places, moves).run()


def lowered_parts(sg: SimplifiedGraph, steps: Sequence[Step]) -> list[list[Statement]]:
    """Return the statements of each step of a plan, for whoever counts what they take.

    What hands a part of an output's gradient to autograd, or takes the whole from it, is a call.
    """
    return _Lowering(sg, steps, waiting_places(sg, steps), ()).parts()


def for_backward_alone(program: StepProgram) -> StepProgram:
    """Return the program of a second forward, whose outputs the user already has.

    Outputs are dropped after their last use, unless the backward reads them.
    """
    idle = set(program.outputs).difference(program.saved, program.externals)
    lines: list[Statement] = []
    for statement in reversed(program.forward):
        uses = dict.fromkeys((*made_by(statement), *read_by(statement)))
        if last := tuple(name for name in uses if name in idle):
            lines.append(Drop(last))
            idle.difference_update(last)
        lines.append(statement)
    return replace(program, forward=tuple(reversed(lines)), outputs=())


def without_idle_steps(sg: SimplifiedGraph, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps of a plan for more gradients, without the ones that `sg` does not need.

    Backwards of nodes without a backward are left out, and recomputations that only these need. At
    every step the live values are a subset, so the plan's budget still holds. A node may have a
    backward only here, if its operations belonged to another node's backward with more gradients.
    It is inserted in order.
    """
    return tuple(step for _, step in _kept_steps(sg, steps))


def moves_without_idle_steps(
    sg: SimplifiedGraph, steps: Sequence[Step], moves: Sequence[RootMove]
) -> tuple[RootMove, ...]:
    """Return the moves of a plan for more gradients, among the steps that `sg` needs."""
    return kept_moves(sg, _kept_steps(sg, steps), moves)


def _kept_steps(sg: SimplifiedGraph, plan: Sequence[Step]) -> list[tuple[float, Step]]:
    """Return the steps that `sg` needs; those of the plan have whole numbers, their places."""
    steps = _with_other_backwards(sg, plan)
    storages = [s for part in storages_of(sg) for s in part]
    reads: dict[Step, set[str]] = defaultdict(set)
    makes: dict[int, set[str]] = defaultdict(set)
    for storage in storages:
        for user in storage.fwd_users:
            reads["F", user].add(storage.root)
        for user in storage.bwd_users:
            reads["B", user].add(storage.root)
        if not storage.is_output:
            makes[storage.producer].add(storage.root)
    needed: set[str] = set()
    kept: list[tuple[float, Step]] = []
    first = first_forwards([step for _, step in steps])
    for is_first, (place, (kind, index)) in zip(reversed(first), reversed(steps), strict=True):
        if kind == "B" and not (sg.nodes[index].backward or sg.nodes[index].hand_overs):
            continue
        if kind == "F" and not is_first:
            if needed.isdisjoint(makes[index]):
                continue
            needed -= makes[index]
        needed |= reads[kind, index]
        kept.append((place, (kind, index)))
    return kept[::-1]


def _with_other_backwards(sg: SimplifiedGraph, steps: Sequence[Step]) -> list[tuple[float, Step]]:
    result: list[tuple[float, Step]] = list(enumerate(steps))
    planned = {index for kind, index in steps if kind == "B"}
    for index in reversed(range(len(sg.nodes))):
        node = sg.nodes[index]
        if index in planned or not (node.backward or node.hand_overs):
            continue
        later = (t for t, (_, (kind, other)) in enumerate(result) if kind == "B" and other < index)
        at = next(later, len(result))
        place = result[at][0] if at < len(result) else len(steps)
        result.insert(at, (math.ceil(place) - 0.5, ("B", index)))
    return result


class _Lowering:
    def __init__(
        self, sg: SimplifiedGraph, steps: Sequence[Step], places: Places, moves: Sequence[RootMove]
    ) -> None:
        self.sg, self.steps, self.places, self.moves = sg, steps, places, moves
        basic = sg.basic
        self.infos = basic.infos
        self.last_forward = {node: t for t, (kind, node) in enumerate(steps) if kind == "F"}
        self.outputs = tuple(sg.output_names)
        self.output_roots = sg.output_roots
        self.tangents = tuple(name for name in basic.tangent_names if name is not None)
        self.is_first = first_forwards(steps)
        self.turn = max((t for t, first in enumerate(self.is_first) if first), default=-1) + 1
        storages = storages_of(sg)
        self.for_others = {s.root for made in storages for s in made if not s.is_phantom}
        self.dying = dying_in_backward(storages)

    def run(self) -> StepProgram:
        lines = [
            _with_gives(index, part)
            for (_, index), part in zip(self.steps, self.parts(), strict=True)
        ]
        externals = self._externals(lines)
        forward = [s for part in lines[: self.turn] for s in part]
        backward = [s for part in lines[self.turn :] for s in part]
        made = dict.fromkeys(externals)
        for statement in forward:
            made.update(dict.fromkeys(made_by(statement)))
        read = free_variables(backward) - set(self.tangents)
        unknown = (free_variables(forward) - set(externals)) | (read - set(made))
        if unknown:
            raise InvalidGraphError(
                f"the plan of {self.sg.basic.model_name} reads '{min(unknown)}', which no "
                "step of it has made or kept."
            )
        return StepProgram(
            forward=tuple(forward),
            backward=tuple(backward),
            externals=externals,
            outputs=self.outputs,
            saved=tuple(name for name in made if name in read),
            tangents=self.tangents,
        )

    def parts(self) -> list[list[Statement]]:
        """Return the statements of each step, with a drop behind the last use of each variable."""
        parts = [self._part(t) for t in range(len(self.steps))]
        self._hand_over(parts)
        if self.moves:
            parts = with_moves(self.sg, self.steps, parts, self.moves)
        return self._with_drops(parts, set(self._externals(parts)))

    # ------------------------------------------------------------------ parts

    def _part(self, t: int) -> list[Statement]:
        kind, index = self.steps[t]
        node = self.sg.nodes[index]
        if kind == "F" and not self.is_first[t] and runs_once(self.sg, node):
            raise InvalidGraphError(
                f"the plan of {self.sg.basic.model_name} runs '{node.name}' again, which "
                "reads memory that the forward writes to and that no copy can stand for."
            )
        if kind == "B":
            return [Begin("B", index), *map(Call, node.backward)]
        if self.is_first[t]:
            ops = node.ops
            if self.last_forward[index] == t:
                ops = tuple(target_of(op).once(op) for op in ops)
            kept = [] if self.last_forward[index] == t else self._kept(index, node)
            return [Begin("F", index), *kept, *map(Call, ops)]
        return [Begin("F", index, again=True), *self._again(t, index, node)]

    def _kept(self, index: int, node: SimplifiedNode) -> list[Statement]:
        """Return statements that save the state for a recomputation of the node."""
        kept: list[Statement] = [Draw(f"random_{index}", "keep")] if node.is_random else []
        return kept + [Copy(f"{n}_of_{index}", n) for n in rerun_state(self.sg, node)]

    def _again(self, t: int, index: int, node: SimplifiedNode) -> list[Statement]:
        ops = rerun_ops(self.sg, node)
        is_last = self.last_forward[index] == t
        if is_last:
            ops = tuple(target_of(op).once(op) for op in ops)
        now: dict[str, str] = {}  # names in this run
        before: list[Statement] = []
        after: list[Statement] = []
        if node.is_random:
            before = [Draw("random_now", "keep"), Draw(f"random_{index}", "put back")]
            after = [Draw("random_now", "put back")]
        changed = {self._root(name) for op in ops for name in op.writes}
        for name, copied in copied_for_rerun(self.sg, node).items():
            now[name] = f"{copied}_of_{index}"
            if self._root(name) in changed and not is_last:
                now[name] = f"{copied}_again"
                if name == copied:
                    before.append(Copy(f"{name}_again", f"{name}_of_{index}"))
        # The user or the module holds the first result; the recomputed one is dropped at once.
        held = self.output_roots | self.sg.written_roots
        for op in ops:
            for name in op.results:
                if name and self._root(name) in held:
                    now[name] = f"{name}_again"
        return [*before, *(Call(renamed(op, lambda n: now.get(n, n))) for op in ops), *after]

    def _externals(self, parts: Sequence[Sequence[Statement]]) -> tuple[str, ...]:
        read = free_variables([s for part in parts for s in part])
        return tuple(n for n in self.sg.basic.externals if n in read)

    def _hand_over(self, parts: list[list[Statement]]) -> None:
        """Add a hand-over for each place, once its gradients are complete."""
        given = given_by(self.sg, self.steps)
        if not given:
            return
        values = {part.edge: part.value for part in given}
        edges = self.sg.basic.edges
        for place, end in zip(self.places, ends_of(given, self.places), strict=True):
            gradients = tuple((edges[edge][0], values.get(edge, "")) for edge in place)
            parts[end].append(Give(self.steps[end][1], gradients, ()))

    # ------------------------------------------------------------------ drops

    def _with_drops(
        self, parts: Sequence[Sequence[Statement]], externals: set[str]
    ) -> list[list[Statement]]:
        """Add a drop after the last use of every variable, going backwards through the program."""
        outputs = set(self.outputs)
        live: set[str] = set()  # read later, before it is made again
        result: list[list[Statement]] = []
        for t in range(len(parts) - 1, -1, -1):
            if t == self.turn - 1:
                live |= outputs
            part = parts[t]
            kind, index = self.steps[t]
            dying = self.dying[index] if kind == "B" else None
            makes = [made_by(statement) for statement in part]
            made = set(itertools.chain.from_iterable(makes))
            late: dict[str, None] = {}
            lines: list[Statement] = []
            gives = 0
            for statement, makes_now in zip(reversed(part), reversed(makes), strict=True):
                reads_now = read_by(statement)
                uses = dict.fromkeys((*makes_now, *reads_now))
                dead = [n for n in uses if n not in live and n not in externals]
                # What is no tensor is dropped one at a time; a hand-over drops its own values.
                own = isinstance(statement, Draw | Give | TakeArena | MoveOut | Moving)
                if not own and not _hands_over(statement):
                    late.update((n, None) for n in dead if self._stays(n, made, dying))
                now = tuple(n for n in dead if n not in late)
                if isinstance(statement, Call):
                    statement, now = _freeing(statement, now)
                if isinstance(statement, Give):
                    lines.append(replace(statement, dropped=now))
                    gives += 1
                else:
                    lines += [Drop(now)] if now else []
                    lines.append(statement)
                live.difference_update(makes_now)
                live.update(reads_now)
            lines.reverse()
            if late:
                lines.insert(len(lines) - gives, Drop(tuple(late)))
            result.append(lines)
        result.reverse()
        return result

    def _stays(self, name: str, made: set[str], dying: frozenset[str] | None) -> bool:
        """Return whether a variable lives to the end of the part with its last use.

        `dying` are the storages that a backward frees under every plan; None in a forward.
        """
        if dying is not None:  # gradients are freed at once
            return name in self.sg.producer and self._root(name) not in dying
        return name not in made or (name in self.infos and self._root(name) in self.for_others)

    def _root(self, name: str) -> str:
        return self.infos[name].alias_of


def _freeing(statement: Call, dead: Sequence[str]) -> tuple[Call, tuple[str, ...]]:
    """Return a call with donated arguments, and the other variables that are dead after it."""
    op = statement.op
    if _hands_over(statement):
        return Call(op, tuple(dead)), ()
    frees = target_of(op).frees
    if not frees:
        return statement, tuple(dead)
    theirs = {name for at, name in enumerate(op.inputs) if at in frees}
    freed = tuple(name for name in dead if name in theirs)
    return Call(op, freed), tuple(name for name in dead if name not in theirs)


def _hands_over(statement: Statement) -> bool:
    return isinstance(statement, Call) and isinstance(statement.op.target, ThroughAutograd)


def _with_gives(node: int, lines: Sequence[Statement]) -> list[Statement]:
    """Return statements that hand over parts of gradients of outputs, and receive the wholes.

    Last parts go where the whole is received. What autograd holds meanwhile is no variable.
    """
    found: list[Statement] = []
    for statement in lines:
        target = statement.op.target if isinstance(statement, Call) else None
        if not isinstance(statement, Call) or not isinstance(target, ThroughAutograd):
            found.append(statement)
            continue
        op = statement.op
        last = found[-1] if found else None
        if isinstance(last, Give) and last.output == target.root and not last.receives:
            found.pop()
        else:
            last = Give(node, (), (), output=target.root)
        read = {value for _, value in last.gradients}
        if isinstance(target, GradientPart):
            read.add(op.inputs[-1])
            last = replace(last, gradients=(*last.gradients, (target.root, op.inputs[-1])))
        else:
            read.add(op.name)
            last = replace(last, receives=op.name)
        dropped = tuple(name for name in statement.frees if name in read)
        found.append(replace(last, dropped=(*last.dropped, *dropped)))
    return found
