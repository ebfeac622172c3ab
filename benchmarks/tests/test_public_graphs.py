"""Other people's graphs: read as written, encoded exactly, and plans checked by another's rules."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from public_graphs import files
from public_graphs.chains import revolve_problem
from public_graphs.encoding import encode
from public_graphs.graph import Operation, OperationGraph, Result
from public_graphs.readers import read_dtr, read_moccasin
from public_graphs.walk import Walk, WalkError, walk
from rockmate.planning import Problem, Step, Steps, no_recomputation, plan, simulate

# Two forwards and three backwards; the first backward is the loss, the last one reads all.
BY_HAND = OperationGraph(
    "by hand",
    (
        Operation("a", 3, (Result(10),)),
        Operation("b", 5, (Result(20),), ((0, 0),)),
        Operation("loss", 1, (Result(1),), ((1, 0),)),
        Operation("b'", 7, (Result(20),), ((1, 0), (2, 0))),
        Operation("a'", 4, (Result(10),), ((0, 0), (3, 0))),
    ),
    head=2,
)


def drawn(seed: int) -> OperationGraph:
    """Return a random graph: several results, kept ones, skips, and a tail that reads anything."""
    draw = random.Random(seed)
    operations: list[Operation] = []
    head = draw.randint(3, 9)
    for place in range(head + draw.randint(3, 9)):
        there = [(p, w) for p, op in enumerate(operations) for w in range(len(op.results))]
        reads = tuple(sorted(draw.sample(there, min(len(there), draw.randint(0, 3)))))
        results = tuple(
            Result(draw.randint(0, 50), draw.random() < 0.15) for _ in range(draw.randint(1, 2))
        )
        operations.append(Operation(f"op{place}", draw.randint(0, 9), results, reads))
    return OperationGraph(f"drawn {seed}", tuple(operations), head)


def any_steps(problem: Problem, draw: random.Random) -> Steps:
    """Return a schedule that runs any forwards again between the backwards."""
    count = len(problem.nodes)
    steps = [Step("F", k) for k in range(count)]
    for node in problem.backward_order:
        steps += [Step("F", draw.randrange(count)) for _ in range(draw.randint(0, 3))]
        steps.append(Step("B", node))
    return tuple(steps)


def test_a_walk_counts_by_hand() -> None:
    # 10, 30, 21 (a is dropped after b), 41, 10 (a again) + 20, 40 with what it makes
    assert walk(BY_HAND, [0, 1, 2, 3, 0, 4]) == Walk(time=23, peak_bytes=41)
    assert walk(BY_HAND, range(5)) == Walk(time=20, peak_bytes=51)


@pytest.mark.parametrize(
    ("sequence", "budget", "word"),
    [
        ([1, 0, 2, 3, 4], None, "b reads a, which never ran"),
        ([0, 1, 2, 3], None, "1 operations never run"),
        ([0, 1, 2, 3, 4], 50, "a peak of 51 bytes, and a budget of 50"),
    ],
)
def test_a_walk_refuses(sequence: list[int], budget: int | None, word: str) -> None:
    with pytest.raises(WalkError, match=word):
        walk(BY_HAND, sequence, budget)


@pytest.mark.parametrize("seed", range(60))
def test_every_schedule_takes_what_the_simulator_says(seed: int) -> None:
    graph = drawn(seed)
    encoding = encode(graph)
    problem = encoding.problem
    assert encoding.sequence(no_recomputation(problem)) == list(range(len(graph.operations)))
    for draw in range(6):
        steps = any_steps(problem, random.Random(draw))
        walked, timeline = walk(graph, encoding.sequence(steps)), simulate(problem, steps)
        assert walked.peak_bytes == timeline.peak_bytes
        extra = (walked.time - graph.time) / max(1, graph.time)
        assert timeline.overhead_ms == pytest.approx(1000 * extra)


def test_a_plan_without_one_of_its_recomputations_is_refused() -> None:
    # A chain whose backwards read all that was made; half of the memory.
    count = 12
    made = (Result(10),)
    operations = [Operation("f", 2, made, ((k - 1, 0),) if k else ()) for k in range(count)]
    for k in reversed(range(count)):
        operations.append(Operation("b", 3, made, ((k, 0), (2 * count - 2 - k, 0))))
    graph = OperationGraph("chain", tuple(operations), count)
    encoding = encode(graph)
    budget = walk(graph, range(2 * count)).peak_bytes // 2
    found: Steps = plan(encoding.problem, budget, effort="fast").steps
    sequence = encoding.sequence(found)
    assert walk(graph, sequence, budget).peak_bytes <= budget
    repeats = [t for t, place in enumerate(sequence) if place in sequence[:t]]
    assert repeats
    for moment in repeats:
        with pytest.raises(WalkError, match="budget"):
            walk(graph, sequence[:moment] + sequence[moment + 1 :], budget)


def test_moccasin_files_are_read_in_their_order() -> None:
    nodes = [
        {"name": "a", "backward": False, "cost_cpu": 3, "cost_ram": 10, "id": 0},
        {"name": "b", "backward": False, "cost_cpu": 5, "cost_ram": 20, "id": 1},
        {"name": "loss", "backward": True, "cost_cpu": 1, "cost_ram": 1, "id": 2},
        {"name": "b'", "backward": True, "cost_cpu": 7, "cost_ram": 20, "id": 3},
        {"name": "a'", "backward": True, "cost_cpu": 4, "cost_ram": 10, "id": 4},
    ]
    ends = [(0, 1), (1, 2), (1, 3), (2, 3), (0, 4), (3, 4)]
    links = [{"source": source, "target": target} for source, target in ends]
    rows = {"graph": {"name": "by hand"}, "nodes": nodes, "links": links}
    assert read_moccasin(json.dumps(rows)) == BY_HAND
    drawn_rows = {
        "graph": {"name": "random", "order": [7, 2]},
        "nodes": [{"name": n, "duration": n, "out_cost": 10 * n, "param_cost": 0} for n in (2, 7)],
        "links": [{"0": 7, "1": 2}],
    }
    operations = (Operation("7", 7, (Result(70),)), Operation("2", 2, (Result(20),), ((0, 0),)))
    assert read_moccasin(json.dumps(drawn_rows)) == OperationGraph("random", operations, 0)


def test_logs_of_dtr_are_read_with_views_writes_and_what_is_released() -> None:
    def made(name: str, size: int, alias: int = -1) -> list[dict[str, object]]:
        memory = {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size)}
        return [memory, {"INSTRUCTION": "ALIAS", "NAME": name, "ALIAS": str(alias)}]

    def call(name: str, args: list[str], results: list[str]) -> dict[str, object]:
        row = {"INSTRUCTION": "CALL", "NAME": name, "ARGS": args, "RESULT": results, "TIME": "2"}
        return dict(row)

    rows: list[dict[str, object]] = [
        {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"},
        {"INSTRUCTION": "CONSTANT", "NAME": "w"},
        {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "100"},
        call("conv", ["w"], ["x", "mask"]),
        *made("x", 10),
        *made("mask", 1),
        call("view", ["x"], ["v"]),
        *made("v", 0, alias=0),
        {"INSTRUCTION": "RELEASE", "NAME": "x"},
        {"INSTRUCTION": "MUTATE", "NAME": "relu_", "ARGS": ["v"], "MUTATE": [0], "TIME": "3"},
        {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"},
        call("back", ["v", "mask", "w"], ["g"]),
        *made("g", 7),
        {"INSTRUCTION": "RELEASE", "NAME": "v"},
        {"INSTRUCTION": "RELEASE", "NAME": "mask"},
    ]
    operations = (
        Operation("conv/0", 2, (Result(10), Result(1))),
        Operation("relu_/1", 3, (Result(10),), ((0, 0),)),
        Operation("back/2", 2, (Result(7, is_kept=True),), ((0, 1), (1, 0))),
    )
    read = read_dtr("log", [json.dumps(row) for row in rows])
    assert read == OperationGraph("log", operations, 2)


@pytest.mark.parametrize(("steps", "slots", "count"), [(10, 3, 25), (20, 4, 59), (100, 12, 295)])
def test_chains_take_as_many_steps_as_revolve(steps: int, slots: int, count: int) -> None:
    problem, budget = revolve_problem(steps, slots)  # counts by checkpoint_schedules 1.0.4
    found = plan(problem, budget, effort="fast", planner="rotor")
    assert steps + found.overhead_ms == count


def test_files_of_others_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(files.NotThereError, match="part of https://github"):
        files.read(tmp_path, files.LOGS)
    (tmp_path / files.LOGS).parent.mkdir(parents=True)
    (tmp_path / files.LOGS).write_bytes(b"another file")
    with pytest.raises(files.NotThereError, match="checksum"):
        files.read(tmp_path, files.LOGS)
