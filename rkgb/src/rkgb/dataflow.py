"""DataFlowGraph (D): the forward as a DAG, one node per assignment, with facts about each value.

Every operation runs once, in order, on the sample's real values: which results share storage with
which inputs, what requires a gradient, what draws random numbers and what writes to a buffer is
observed, not guessed. Values are freed after their last use, parameters and inputs are not copied,
buffers are written to only in copies, and the random stream is put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.basic import BasicGraph, bind_inputs, external_values, run_op
from rkgb.errors import SideEffectError, UnsupportedOpError
from rkgb.op import Op
from rkgb.op_kinds import written_inputs
from rkgb.rng import RngState
from rkgb.tensor_info import TensorInfo, storage_id


@dataclass(frozen=True, slots=True)
class DataFlowNode:
    """One assignment and what it must follow.

    `order_deps` are indices of nodes that must run before it although it reads nothing of theirs:
    readers of memory that it overwrites, and the random operation before it.
    """

    op: Op
    deps: tuple[int, ...]
    order_deps: tuple[int, ...]
    is_random: bool
    written: tuple[str, ...]  # names of the storages it overwrites: values or buffers
    same_as: str | None = None  # the input that it returned unchanged, as the same object


@dataclass(frozen=True)
class DataFlowGraph:
    """The forward as a DAG over single operations, in program order."""

    basic: BasicGraph
    nodes: tuple[DataFlowNode, ...]
    infos: Mapping[str, TensorInfo]  # every tensor value; tuples of tensors are absent

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Index of the node that assigns each name."""
        return {node.op.name: index for index, node in enumerate(self.nodes)}

    def __str__(self) -> str:
        lines = []
        for node in self.nodes:
            info = self.infos.get(node.op.name)
            marks = " random" if node.is_random else ""
            marks += f" writes {', '.join(node.written)}" if node.written else ""
            shares = f" = {info.alias_of}" if info and info.alias_of != node.op.name else ""
            place = f"({node.op.module_path or 'root'}, {node.op.source})"
            lines.append(f"{node.op}  # {info or 'tuple'}{shares}{marks} {place}")
        return "\n".join(lines)


def B_to_D(
    bg: BasicGraph,
    model: nn.Module,
    inputs: Any,
    device: torch.device | str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> DataFlowGraph:
    """Run each operation of `bg` once and return the data-flow graph.

    Raises:
        SideEffectError: the forward writes to one of its inputs or parameters.
    """
    args, keywords = bind_inputs(inputs, kwargs)
    leaves = pytree.tree_leaves((args, keywords))
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    place = torch.device(device) if device is not None else _device_of(model, first)
    state = RngState.save(place)
    try:
        return _Walk(bg, external_values(bg, model, tuple(leaves)), place).run()
    finally:
        state.restore()


def _device_of(model: nn.Module, sample: Tensor | None) -> torch.device:
    parameter = next(model.parameters(), None)
    tensor = parameter if parameter is not None else sample
    return tensor.device if tensor is not None else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one run of one operation showed."""

    is_random: bool
    written: tuple[str, ...]
    same_as: str | None


class _Walk:
    """One run through the operations, with the bookkeeping of what was seen."""

    def __init__(self, bg: BasicGraph, values: Mapping[str, Any], device: torch.device) -> None:
        self.bg = bg
        self.device = device
        self.values: dict[str, Any] = dict(values)
        for name in bg.buffers:
            self.values[name] = self.values[name].clone()
        self.roots: dict[str, Any] = {name: name for name in values}
        self.needs_grad = {
            name: isinstance(v, Tensor) and v.requires_grad for name, v in values.items()
        }
        self.infos = {
            name: TensorInfo.of(v, requires_grad=v.requires_grad, alias_of=name)
            for name, v in values.items()
            if isinstance(v, Tensor)
        }

    def run(self) -> DataFlowGraph:
        ops = self.bg.ops
        last_use = {name: index for index, op in enumerate(ops) for name in op.inputs}
        kept = {*self.bg.output_names, *self.bg.externals}
        rng = RngState.save(self.device)
        observed: list[_Seen] = []
        for index, op in enumerate(ops):
            written = self._written_roots(op)
            snapshot = {
                name: self.values[name].clone() for name in set(op.inputs) & set(self.bg.buffers)
            }
            same_as = self._run_one(op, in_place=bool(written))
            changed = [n for n, old in snapshot.items() if not _same(old, self.values[n])]
            written = tuple(dict.fromkeys((*written, *(self.roots[n] for n in changed))))
            now = RngState.save(self.device)
            is_random = not now.equals(rng)
            rng = now
            observed.append(_Seen(is_random, written, same_as))
            for name in {*op.inputs, op.name}:
                if last_use.get(name, index) <= index and name not in kept:
                    self.values.pop(name, None)
        return DataFlowGraph(self.bg, _linked(ops, observed, self.roots), self.infos)

    def _written_roots(self, op: Op) -> tuple[str, ...]:
        written = []
        for name in written_inputs(op):
            root = self.roots[name]
            owners = [*self.bg.parameters, *self.bg.constants, *(n for n in self.bg.inputs if n)]
            if root in owners:
                what = "input" if root in self.bg.inputs else "parameter or constant"
                raise SideEffectError(
                    f"cannot place '{op.target_name}' ({op.module_path or 'root'}, {op.source}): "
                    f"it overwrites the {what} '{root}' of {self.bg.model_name}, which a second "
                    "run of it would see changed. Work on a copy: x = x.clone()."
                )
            written.append(root)
        return tuple(dict.fromkeys(written))

    def _run_one(self, op: Op, *, in_place: bool) -> str | None:
        names = set(op.inputs)
        with_grad = op.grad_enabled and any(self.needs_grad[name] for name in names)
        if in_place or not with_grad:
            leaves = self.values
            with torch.no_grad():
                result = run_op(op, self.values)
        else:
            leaves = {name: self._leaf(name) for name in names}
            with torch.enable_grad():
                result = run_op(op, leaves)
        by_storage: dict[int, str] = {}
        for name in op.inputs:
            for tensor, root in zip(*self._tensors(name), strict=True):
                by_storage.setdefault(storage_id(tensor), root)
        if isinstance(result, Tensor):
            flag = with_grad if in_place else result.requires_grad
            self._define(op.name, result, by_storage.get(storage_id(result), op.name), flag)
            if in_place and flag:
                self._mark_aliases(self.roots[op.name])
        elif isinstance(result, (tuple, list)) and all(isinstance(t, Tensor) for t in result):
            self.values[op.name] = [t.detach() for t in result]
            self.roots[op.name] = [
                by_storage.get(storage_id(t), f"{op.name}[{i}]") for i, t in enumerate(result)
            ]
            self.needs_grad[op.name] = any(t.requires_grad for t in result)
            for i, t in enumerate(result):
                self.infos[f"{op.name}[{i}]"] = TensorInfo.of(
                    t, requires_grad=t.requires_grad, alias_of=self.roots[op.name][i]
                )
        else:
            raise UnsupportedOpError(
                f"cannot place '{op.target_name}' ({op.module_path or 'root'}, {op.source}): it "
                f"returned {type(result).__name__}, and only tensors and tuples of tensors can be "
                "kept or recomputed. Keep that part outside the wrapped module.",
                op=op.target_name,
                module_path=op.module_path,
                source=op.source,
            )
        return next((name for name in op.inputs if leaves[name] is result), None)

    def _define(self, name: str, tensor: Tensor, root: str, requires_grad: bool) -> None:
        op_source = self._getitem_flag(name)
        flag = requires_grad if op_source is None else op_source
        self.values[name] = tensor.detach()
        self.roots[name] = root
        self.needs_grad[name] = flag
        self.infos[name] = TensorInfo.of(tensor, requires_grad=flag, alias_of=root)

    def _getitem_flag(self, name: str) -> bool | None:
        # Selecting from a tuple runs on detached parts; the part's own flag was recorded.
        op = self._op_by_name.get(name)
        if op is None or op.target_name != "getitem":
            return None
        source, position = op.args
        info = self.infos.get(f"{source.name}[{position}]")
        return None if info is None else info.requires_grad

    @cached_property
    def _op_by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.bg.ops}

    def _leaf(self, name: str) -> Any:
        value = self.values[name]
        if isinstance(value, Tensor) and self.needs_grad[name]:
            return value.detach().requires_grad_()
        return value

    def _tensors(self, name: str) -> tuple[list[Tensor], list[str]]:
        value, root = self.values[name], self.roots[name]
        return (value, root) if isinstance(value, list) else ([value], [root])

    def _mark_aliases(self, root: str) -> None:
        for name, info in list(self.infos.items()):
            op = self._op_by_name.get(name)
            if info.alias_of != root or op is None or op.target_name == "detach":
                continue
            self.needs_grad[name] = True
            self.infos[name] = replace(info, requires_grad=True)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a, b)) or bool(((a == b) | ((a != a) & (b != b))).all())


def _linked(
    ops: Sequence[Op], observed: Sequence[_Seen], roots: Mapping[str, Any]
) -> tuple[DataFlowNode, ...]:
    """Derive every edge: data, overwritten memory, and the order of random operations."""
    producer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}  # storage -> nodes that touched it since its last write
    last_write: dict[str, int] = {}
    last_random: int | None = None
    nodes = []
    for index, (op, seen) in enumerate(zip(ops, observed, strict=True)):
        is_random, written = seen.is_random, seen.written
        order: set[int] = set()
        touched: set[str] = set()
        for name in (*op.inputs, op.name):
            root = roots[name]
            touched.update(root if isinstance(root, list) else [root])
        for storage in touched:
            if storage in last_write:
                order.add(last_write[storage])
        for storage in written:
            order.update(readers.get(storage, ()))
        if is_random:
            if last_random is not None:
                order.add(last_random)
            last_random = index
        deps = sorted({producer[name] for name in op.inputs if name in producer})
        nodes.append(
            DataFlowNode(
                op=op,
                deps=tuple(deps),
                order_deps=tuple(sorted(order - set(deps) - {index})),
                is_random=is_random,
                written=written,
                same_as=seen.same_as,
            )
        )
        producer[op.name] = index
        for storage in sorted(touched):
            readers.setdefault(storage, []).append(index)
        for storage in written:
            last_write[storage] = index
            readers[storage] = [index]
    return tuple(nodes)


def print_D_graph(
    dg: DataFlowGraph,
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
) -> Path | None:
    """Draw one data-flow graph into a file; see `rkgb.print_graph`."""
    from rkgb.render import print_graph

    return print_graph(dg, name, open, render_format)
