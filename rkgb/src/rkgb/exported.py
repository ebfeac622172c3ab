"""Read what `torch.export` made: flat operations, with the regions that it wraps entered.

Sizes and values that depend on data are refused here, where their operation is known by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from rkgb.as_eager import MODE, Mode
from rkgb.autocast_cache import Scope, share_casts
from rkgb.errors import DataDependentError, TraceError, UnsupportedOpError
from rkgb.op import Autocast, Op, Ref

_SET_GRAD = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
_TORCH_DIR = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Trace:
    """A captured forward: flat assignments and where every name in them comes from."""

    ops: tuple[Op, ...]
    parameters: Mapping[str, str]  # value name -> name in model.named_parameters()
    buffers: Mapping[str, str]  # value name -> name in model.named_buffers()
    constants: Mapping[str, Tensor]  # value name -> tensor that belongs to the graph itself
    inputs: tuple[str | None, ...]  # one per leaf of (args, kwargs); None where it is no tensor
    input_spec: pytree.TreeSpec
    outputs: tuple[Any, ...]  # one per leaf of the result: Ref, or the constant itself
    output_spec: pytree.TreeSpec


@dataclass
class Reader:
    """Turns an exported program into flat operations, entering the regions export makes."""

    program: Any
    model: nn.Module
    ambient: Autocast | None
    ops: list[Op] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    scopes: list[Scope | None] = field(default_factory=list)  # one per operation

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
        graph: fx.Graph = self.program.graph_module.graph
        specs = self.program.graph_signature.input_specs
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        env: dict[fx.Node, Any] = {}
        parameters: dict[str, str] = {}
        buffers: dict[str, str] = {}
        constants: dict[str, Tensor] = {}
        inputs: list[str | None] = []
        for spec, node in zip(specs, placeholders, strict=True):
            kind = spec.kind.name
            target = (spec.target or "").removeprefix("model.")
            name = self._fresh(node.name)
            env[node] = Ref(name)
            if kind == "PARAMETER":
                parameters[name] = target
            elif kind == "BUFFER":
                buffers[name] = target
            elif kind == "CONSTANT_TENSOR":
                constants[name] = self.program.constants[spec.target]
            elif kind == "USER_INPUT":
                inputs.append(name)
            else:
                user = next(iter(node.users), node)
                where = f"({_module_path(user) or 'root'}, {_source(user)})"
                value = self.program.constants.get(spec.target)
                raise UnsupportedOpError(
                    f"cannot place '{_name_of(user.target)}' {where}: it takes an object of type "
                    f"{type(value).__name__} that is no tensor, and a graph cannot keep what that "
                    "object remembers. Keep that part outside the wrapped module.",
                    op=_name_of(user.target),
                    module_path=_module_path(user),
                    source=_source(user),
                )
        leaves, input_spec = pytree.tree_flatten((args, dict(kwargs)))
        if len(leaves) != len(inputs):
            raise TraceError(
                f"cannot capture {type(self.model).__name__}: {len(leaves)} inputs were given and "
                f"the graph takes {len(inputs)}."
            )
        names = tuple(
            name if isinstance(leaf, Tensor) else None
            for name, leaf in zip(inputs, leaves, strict=True)
        )
        result = self._walk(self.program.graph_module, env, constants, True, self.ambient, "")
        used = {name for op in self.ops for name in op.inputs}
        own = dict(self.model.named_parameters(remove_duplicate=False))
        return Trace(
            ops=share_casts(self.ops, self.scopes, {k: own[v] for k, v in parameters.items()}),
            parameters=parameters,
            buffers=buffers,
            constants={k: v for k, v in constants.items() if k in used or Ref(k) in result},
            inputs=names,
            input_spec=input_spec,
            outputs=tuple(result),
            output_spec=self.program.call_spec.out_spec,
        )

    def _fresh(self, name: str) -> str:
        base, count = name, 1
        while name in self.taken:
            name, count = f"{base}_{count}", count + 1
        self.taken.add(name)
        return name

    def _walk(
        self,
        module: fx.GraphModule,
        env: dict[fx.Node, Any],
        constants: dict[str, Tensor],
        grad_enabled: bool,
        autocast: Autocast | None,
        outer_path: str,
    ) -> list[Any]:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                result = fx.map_arg(node.args[0], lambda n: env[n])
                return list(result) if isinstance(result, (tuple, list)) else [result]
            if node.op == "get_attr":
                value = operator.attrgetter(node.target)(module)
                if isinstance(value, Tensor):
                    name = self._fresh(node.name)
                    constants[name] = value
                    env[node] = Ref(name)
                else:
                    env[node] = value
                continue
            target: Callable[..., Any] = node.target
            call_args = fx.map_arg(node.args, lambda n: env[n])
            call_kwargs = fx.map_arg(node.kwargs, lambda n: env[n])
            op_name = _name_of(target)
            if op_name in _CHECKS:
                continue
            path = _module_path(node) or outer_path
            if op_name in (_SET_GRAD, _AUTOCAST):
                if op_name == _SET_GRAD:
                    enabled, inner, *rest = call_args
                    region: tuple[bool, Autocast | None] = (enabled, autocast)
                else:
                    device, dtype, enabled, _cache, inner, *rest = call_args
                    region = (grad_enabled, Autocast(device, dtype, enabled))
                holders = [n for n in inner.graph.nodes if n.op == "placeholder"]
                env[node] = self._walk(
                    inner, dict(zip(holders, rest, strict=True)), constants, *region, path
                )
                continue
            if target is operator.getitem and isinstance(call_args[0], list):
                env[node] = call_args[0][call_args[1]]  # result of a region, already flattened
                continue
            if op_name == "item" and not node.users and node.meta.get("val") is None:
                continue  # of a tensor made from numbers alone: export has put in the number
            mode = _mode(node)
            source = _source(node)
            self._refuse_symbols(node, op_name, path, source)
            if mode is not None and mode.grad_enabled and not grad_enabled:
                raise UnsupportedOpError(
                    f"cannot place '{op_name}' ({path or 'root'}, {source}): regions with and "
                    "without gradient are nested in a way that a capture loses. Do not nest "
                    "torch.enable_grad and torch.autocast inside torch.no_grad.",
                    op=op_name,
                    module_path=path,
                    source=source,
                )
            name = self._fresh(node.name)
            env[node] = Ref(name)
            self.scopes.append(None if mode is None else Scope(mode[1], mode[2]))
            self.ops.append(
                Op(
                    name=name,
                    target=target,
                    args=tuple(call_args),
                    kwargs=dict(call_kwargs),
                    module_path=path,
                    source=source,
                    grad_enabled=grad_enabled and (mode is None or mode.grad_enabled),
                    autocast=autocast,
                )
            )
        raise AssertionError("a graph always ends in an output node")

    def _refuse_symbols(self, node: fx.Node, op_name: str, path: str, source: str) -> None:
        for value in pytree.tree_leaves(node.meta.get("val")):
            symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) or (
                isinstance(value, Tensor)
                and any(isinstance(size, torch.SymInt) for size in value.shape)
            )
            if symbolic:
                raise DataDependentError(
                    f"cannot capture {type(self.model).__name__}: the result of '{op_name}' "
                    f"({path or 'root'}, {source}) has a size or value that depends on the data, "
                    "so its memory cannot be bounded. Use masks of fixed size, or keep that part "
                    "outside the wrapped module."
                )


def _name_of(target: Any) -> str:
    name = getattr(target, "__name__", str(target))
    return name.split(".")[0] if not isinstance(target, torch._ops.HigherOrderOperator) else name


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    path = str(paths[-1]) if paths else ""
    return path.removeprefix("model").removeprefix(".")


def _mode(node: fx.Node) -> Mode | None:
    return (node.meta.get("custom") or {}).get(MODE)


def _source(node: fx.Node) -> str:
    """Return 'file.py:12' of the user's line, the innermost one that is not inside torch."""
    mode = _mode(node)
    if mode is not None and mode.source:
        return mode.source
    trace = node.meta.get("stack_trace") or ""
    found = ""
    last = ""
    for line in trace.splitlines():
        line = line.strip()
        if not line.startswith('File "'):
            continue
        filename, number = line[6:].split('", line ')
        where = f"{Path(filename).name}:{number.split(',')[0]}"
        last = where
        if not filename.startswith((_TORCH_DIR, _HERE)):
            found = where
    return found or last
