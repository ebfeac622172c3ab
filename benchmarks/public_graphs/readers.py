"""Readers of the formats in which others publish graphs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import networkx

from public_graphs.graph import Operation, OperationGraph, Result


def read_moccasin(text: str) -> OperationGraph:
    """Read a graph of Moccasin's repository: a training graph of Checkmate, or a random one.

    The order is the file's, or else the one that networkx gives, as in Moccasin's experiments.
    Random graphs have no backward: their head is empty.
    """
    rows = json.loads(text)
    ends = ("source", "target") if "source" in rows["links"][0] else ("0", "1")
    graph = networkx.DiGraph()
    facts = {row.get("id", row["name"]): row for row in rows["nodes"]}
    graph.add_nodes_from(facts)
    graph.add_edges_from(tuple(link[end] for end in ends) for link in rows["links"])
    order = rows["graph"].get("order") or list(networkx.topological_sort(graph))
    backward = [bool(facts[node].get("backward")) for node in order]
    head = backward.index(True) if any(backward) else 0
    if not all(backward[head:]) and head:
        raise ValueError(f"{rows['graph']['name']}: a forward after a backward")
    place = {node: number for number, node in enumerate(order)}
    operations = []
    for node in order:
        row = facts[node]
        operations.append(
            Operation(
                str(row["name"]),
                int(row["cost_cpu"] if "cost_cpu" in row else row["duration"]),
                (Result(int(row["cost_ram"] if "cost_ram" in row else row["out_cost"])),),
                tuple(sorted((place[before], 0) for before in graph.predecessors(node))),
            )
        )
    return OperationGraph(rows["graph"]["name"], tuple(operations), head)


def read_dtr(name: str, lines: Iterable[str]) -> OperationGraph:
    """Read a log of DTR's simulator, as this reads it.

    Constants cost nothing. A view is the tensor that it looks at, and takes no time. A write makes
    a new tensor of the same size. What is not released at the end, and no constant, is kept. The
    head ends where the log notes the backward, or else at the first operation of one.
    """
    log = _Log()
    rows = (json.loads(line) for line in lines if line.strip())
    for row in rows:
        if row["INSTRUCTION"] == "ANNOTATE" and row["ANNOTATION"] == "START":
            break
    for row in rows:
        log.read(row, rows)
    return log.graph(name)


class _Log:
    """What has been read: operations, and which of them made the tensor of each name."""

    def __init__(self) -> None:
        self.operations: list[dict[str, Any]] = []
        self.made: dict[str, tuple[int, int] | None] = {}  # by name; None: a constant
        self.names: dict[tuple[int, int] | None, set[str]] = {}  # those not yet released
        self.size: dict[str, int] = {}
        self.noted: int | None = None  # where the backward begins, by the log
        self.seen: int | None = None  # by the names of operations

    def read(self, row: dict[str, Any], rows: Iterator[dict[str, Any]]) -> None:
        """Read one instruction, and those that belong to it."""
        kind = row["INSTRUCTION"]
        if kind == "CONSTANT":
            self._bind(row["NAME"], None, int(next(rows)["MEMORY"]))
        elif kind in ("COPY", "COPY_FROM"):
            self._release(row["DST"])
            self._bind(row["DST"], self.made[row["SRC"]], self.size[row["SRC"]])
        elif kind == "RELEASE":
            self._release(row["NAME"])
        elif kind == "CALL":
            self._call(row, [(next(rows), next(rows)) for _ in row["RESULT"]])
        elif kind == "MUTATE":
            written = [row["ARGS"][index] for index in row["MUTATE"]]
            self._run(row, written, [self.size[name] for name in written])
        elif kind == "ANNOTATE" and row["ANNOTATION"] == "BACKWARD":
            self.noted = len(self.operations)
        elif kind != "ANNOTATE":
            raise ValueError(f"an unknown instruction: {row}")

    def _call(self, row: dict[str, Any], results: list[tuple[dict[str, Any], ...]]) -> None:
        views = [int(alias["ALIAS"]) for _, alias in results]
        if all(view >= 0 for view in views):
            for name, view in zip(row["RESULT"], views, strict=True):
                looked_at = row["ARGS"][view]
                self._bind(name, self.made[looked_at], self.size[looked_at])
        elif any(view >= 0 for view in views):
            raise ValueError(f"{row['NAME']} gives views and tensors of its own")
        else:
            self._run(row, row["RESULT"], [int(memory["MEMORY"]) for memory, _ in results])

    def _run(self, row: dict[str, Any], names: list[str], sizes: list[int]) -> None:
        place = len(self.operations)
        reads = {made for name in row["ARGS"] if (made := self.made[name]) is not None}
        if self.seen is None and "backward" in row["NAME"]:
            self.seen = place
        row = {"name": f"{row['NAME']}/{place}", "time": int(row["TIME"]), "sizes": sizes}
        self.operations.append({**row, "reads": tuple(sorted(reads))})
        for which, (name, size) in enumerate(zip(names, sizes, strict=True)):
            self._release(name)
            self._bind(name, (place, which), size)

    def _bind(self, name: str, made: tuple[int, int] | None, size_bytes: int) -> None:
        self.made[name], self.size[name] = made, size_bytes
        self.names.setdefault(made, set()).add(name)

    def _release(self, name: str) -> None:
        if name in self.made:
            self.names[self.made[name]].discard(name)

    def graph(self, name: str) -> OperationGraph:
        """Return the graph of all that was read."""
        operations = tuple(
            Operation(
                row["name"],
                row["time"],
                tuple(
                    Result(size, bool(self.names[place, which]))
                    for which, size in enumerate(row["sizes"])
                ),
                row["reads"],
            )
            for place, row in enumerate(self.operations)
        )
        begin = self.seen if self.noted is None else self.noted
        return OperationGraph(name, operations, len(operations) if begin is None else begin)
