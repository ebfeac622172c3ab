"""The table of uses against its definition, on random programs of reads, views and writes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from rkgb.elements.op import Op, Ref
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.uses import At, Before, Part, Uses, before_each, live_ops

Infos = dict[str, TensorInfo]


def _info(root: str) -> TensorInfo:
    return TensorInfo((2,), torch.float32, (1,), False, root, 8, 8)


def _program(seed: int, count: int = 9) -> tuple[list[Op], Infos]:
    """Draw operations that read, look at, write to and make memory, some at random."""
    draw = random.Random(seed)
    infos = {name: _info(name) for name in ("x", "y")}
    ops = []
    for place in range(count):
        read = draw.sample(sorted(infos), draw.randint(0, 2))
        name = f"v{place}"
        kind = draw.choice(("make", "make", "view", "write", "both")) if read else "make"
        read = read[:1] if kind == "view" else read
        results = ["" if kind == "write" else name]
        if kind != "write":
            infos[name] = _info(infos[read[0]].alias_of if kind == "view" else name)
        if kind == "make" and draw.random() < 0.3:
            results.append(f"w{place}")
            infos[results[1]] = _info(results[1])
        writes = (read[0],) if kind in ("write", "both") else ()
        ops.append(
            Op(
                *(name, torch.neg, tuple(map(Ref, read)), {}, tuple(results)),
                is_random=draw.random() < 0.2,
                writes=writes,
            )
        )
    return ops, infos


def _run(ops: Iterable[Op], infos: Infos) -> dict[str, object]:
    """Return what every value is at the end: what its memory holds, as the story of its writes."""
    memory: dict[str, object] = {"x": "x", "y": "y"}
    seen: dict[str, object] = {"x": "x", "y": "y"}
    drawn = 0
    for op in ops:
        drawn += op.is_random
        if any(name not in seen for name in op.inputs):
            continue
        read = tuple(memory[infos[name].alias_of] for name in op.inputs)
        story = (op.name, read, drawn if op.is_random else 0)
        for name in op.writes:
            memory[infos[name].alias_of] = story
        for name in filter(None, op.results):
            root = infos[name].alias_of
            seen[name] = memory[root] = (name, story) if root == name else memory[root]
    return {name: memory[infos[name].alias_of] for name in seen}


def _conflict(first: Op, then: Op, infos: Infos) -> bool:
    def roots(names: Iterable[str]) -> set[str]:
        return {infos[name].alias_of for name in names if name}

    def touched(op: Op) -> set[str]:
        return roots((*op.inputs, *op.results, *op.writes))

    return bool(
        set(first.results) & set(then.inputs)
        or roots(first.writes) & touched(then)
        or touched(first) & roots(then.writes)
        or (first.is_random and then.is_random)
    )


def _closed(before: Sequence[Iterable[int]]) -> list[set[int]]:
    found: list[set[int]] = []
    for direct in before:
        found.append(set(direct).union(*(found[i] for i in direct)))
    return found


@given(seed=st.integers(0, 10**6))
def test_before_are_the_conflicts_and_what_follows_from_them(seed: int) -> None:
    ops, infos = _program(seed)
    before = before_each(infos, ops)
    pairs = [[i for i in range(j) if _conflict(ops[i], op, infos)] for j, op in enumerate(ops)]
    for (data, order), conflicts, op in zip(before, pairs, ops, strict=True):
        assert not data & order
        assert data | order <= set(conflicts)
        assert data == {i for i in conflicts if set(ops[i].results) & set(op.inputs)}
    assert _closed([data | order for data, order in before]) == _closed(pairs)


@given(seed=st.integers(0, 10**6))
def test_every_order_that_keeps_to_it_computes_the_same(seed: int) -> None:
    ops, infos = _program(seed)
    assert _run(_in_another_order(ops, before_each(infos, ops), seed), infos) == _run(ops, infos)


def _in_another_order(ops: Sequence[Op], before: Sequence[Before], seed: int) -> list[Op]:
    draw, done = random.Random(seed), list[int]()
    while len(done) < len(ops):
        ready = [
            i
            for i, (data, order) in enumerate(before)
            if i not in done and (data | order) <= set(done)
        ]
        done.append(draw.choice(ready))
    return [ops[i] for i in done]


@given(seed=st.integers(0, 10**6))
def test_what_is_live_computes_what_is_needed_and_each_of_it_counts(seed: int) -> None:
    ops, infos = _program(seed)
    ops = [op for op in ops if not op.is_random]  # drawing is what `stays` is for
    ops, needed = _without_lost(ops), random.Random(seed).sample(sorted(infos), 2)
    whole = _run(ops, infos)
    needed = [name for name in needed if name in whole]
    kept = live_ops(infos, ops, needed, lambda _: False)

    def found(places: Iterable[int]) -> list[object]:
        values = _run([ops[i] for i in places], infos)
        return [values.get(name) for name in needed]

    assert found(kept) == [whole[name] for name in needed]
    for place in kept:
        assert found(i for i in kept if i != place) != found(kept)
    assert live_ops(infos, ops, needed, lambda _: True) == list(range(len(ops)))


def _without_lost(ops: Iterable[Op]) -> list[Op]:
    made, kept = {"x", "y"}, []
    for op in ops:
        if made.issuperset(op.inputs):
            made.update(op.results)
            kept.append(op)
    return kept


@given(seed=st.integers(0, 10**6))
def test_the_table_says_who_uses_what(seed: int) -> None:
    ops, infos = _program(seed)
    draw = random.Random(seed)
    cut = draw.randint(0, len(ops))
    taken = [draw.sample(sorted(infos), 1), draw.sample(sorted(infos), 2)]
    parts = [Part(7, ops[:cut], taken[0]), Part(3, ops[cut:], taken[1])]
    uses = Uses(parts, infos)
    # In order: where, what is read, what is written to, what is made.
    lines: list[tuple[At, set[str], set[str], set[str]]] = []
    for part in parts:
        for place, op in enumerate(part.ops):
            made = {name for name in op.results if name}
            lines.append((At(part.index, place), set(op.inputs), set(op.writes), made))
        lines.append((At(part.index, len(part.ops)), set(part.taken), set(), set()))
    for name in infos:
        lying = {other for other, info in infos.items() if info.alias_of == infos[name].alias_of}
        root = infos[name].alias_of
        assert uses.readers.get(name, []) == [at for at, read, _, _ in lines if name in read]
        assert uses.reads.get(root, []) == [at for at, read, _, _ in lines if read & lying]
        assert uses.writes.get(root, []) == [at for at, _, wrote, _ in lines if wrote & lying]
        touching = [at for at, *names in lines if lying.intersection(*[set().union(*names)])]
        assert uses.last.get(root) == (touching[-1] if touching else None)
        assert uses.maker.get(name) == next((at.part for at, *_, m in lines if name in m), None)
        assert [*uses.parts_reading(root)] == [
            part.index
            for part in parts
            if part.index in {at.part for at in uses.reads.get(root, [])}
        ]
