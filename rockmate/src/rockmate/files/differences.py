"""Why a plan from a file does not fit: differences of versions, inputs, or network, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rockmate.problems.problem import Node, Problem
from rockmate.schedules.report import format_bytes

_MOST = 6  # differences that are listed


def of_mappings(saved: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Say which entries differ: `torch: 2.12.0 in the file, 2.13.0 here`."""
    return [
        f"{name}: {saved.get(name, 'nothing')} in the file, {here.get(name, 'nothing')} here"
        for name in dict.fromkeys((*saved, *here))
        if saved.get(name) != here.get(name)
    ]


def of_inputs(saved: Sequence[str], here: Sequence[str]) -> list[str]:
    """Say which inputs differ, in shape, type, strides or value."""
    if len(saved) != len(here):
        return [f"{len(saved)} inputs in the file, {len(here)} here"]
    pairs = zip(saved, here, strict=True)
    return [
        f"input {place}: {a} in the file, {b} here" for place, (a, b) in enumerate(pairs) if a != b
    ]


def of_problems(saved: Problem, here: Problem) -> list[str]:
    """Say how two networks differ in structure and bytes; times are left out."""
    if saved.fingerprint == here.fingerprint:
        return []
    found: list[str] = []
    if len(saved.nodes) != len(here.nodes):
        found.append(f"{len(saved.nodes)} operations in the file, {len(here.nodes)} here")
    for row in _of_nodes(saved, here):
        if len(found) == _MOST:
            found.append("and more")
            break
        found.append(row)
    return found or ["the structure of the network"]


def _of_nodes(saved: Problem, here: Problem) -> Iterator[str]:
    for k, (a, b) in enumerate(zip(saved.nodes, here.nodes, strict=False)):
        if (a.op, a.module_path, a.name) != (b.op, b.module_path, b.name):
            yield f"operation {k}: {_told(a)} in the file, {_told(b)} here"
            return  # the rest differs as well
        for what, ours, theirs in (
            ("makes", _made_bytes(saved, k), _made_bytes(here, k)),
            ("needs in its forward", a.fwd_peak_bytes, b.fwd_peak_bytes),
            ("needs in its backward", a.bwd_peak_bytes, b.bwd_peak_bytes),
            ("finds gradients of", a.grads_before_bytes, b.grads_before_bytes),
        ):
            if ours != theirs:
                yield (
                    f"operation {k}, {_told(a)}, {what} {format_bytes(ours)} in the file, "
                    f"{format_bytes(theirs)} here"
                )
                break


def _made_bytes(problem: Problem, k: int) -> int:
    return problem.bytes_of(problem.product_masks[k])


def _told(node: Node) -> str:
    return f"{node.op or node.name} of {node.module_path or '(root)'}"
