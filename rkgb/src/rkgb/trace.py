"""Capture a module with `torch.export`; the only file that touches unstable tracing API.

Non-strict export runs the user's Python once on fake tensors and gives the training graph: linear,
batch_norm, dropout and attention stay whole, in-place operations stay in place. What an export
silently freezes or drops is looked for here and refused: printing, Python random numbers, changed
attributes, custom `autograd.Function`s, values that depend on data.
"""

from __future__ import annotations

import contextlib
import io
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from rkgb.as_eager import MODE, Mode, NotCapturedError, as_eager
from rkgb.autocast_cache import Scope, share_casts
from rkgb.effects import KeptState, Printed, no_seeding, plain_attributes, refuse_new_buffers
from rkgb.errors import DataDependentError, SideEffectError, TraceError, UnsupportedOpError
from rkgb.op import Autocast, Op, Ref
from rkgb.refusals import (
    refuse_backward_hooks,
    refuse_lazy_modules,
    where_called,
    where_raised,
)

__all__ = ["Trace", "capture", "plain_attributes"]

_SET_GRAD = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
_LOGGERS = ("torch.export", "torch.fx", "torch._export", "torch._subclasses")
# Branches on data in other people's code, and how their users can avoid them.
_HINTS = {
    "torch/nn/modules/transformer.py": "Say whether the mask is causal: pass is_causal "
    "(tgt_is_causal, src_is_causal, memory_is_causal), so that the mask is not looked at.",
    "torch/nn/modules/batchnorm.py": "Give momentum a number.",
    "masking_utils.py": "Pass the mask with 4 dimensions (batch, 1, length, length), which is not "
    "looked at; decoders also do without looking with attn_implementation='eager'.",
}
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


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
    """Return the trace of `model(*args, **kwargs)` in the mode the model is in.

    Raises:
        DataDependentError: control flow, a size or a Python number depends on the input's values.
        SideEffectError: the forward prints, draws Python random numbers, or changes attributes.
        UnsupportedOpError: the forward calls a custom `autograd.Function`.
        TraceError: anything else that stops the capture; the cause is chained.
    """
    refuse_lazy_modules(model)
    _refuse_hidden_leaves(model)
    refuse_backward_hooks(model)
    args, kwargs = pytree.tree_map_only(Tensor, _distinct, (args, dict(kwargs)))
    probe = _Probe(model)
    printed = Printed(model)
    before = KeptState(model)
    try:
        with contextlib.redirect_stdout(printed), _quiet(), preserve_node_meta():
            program = torch.export.export(probe, args, kwargs, strict=False)
    except (SideEffectError, UnsupportedOpError):
        raise
    except Exception as error:
        raise _explained(model, error) from error
    finally:
        before.restore()
    printed.refuse()
    return _Reader(program, model, _ambient_autocast(model, (args, kwargs))).read(args, kwargs)


def _ambient_autocast(model: nn.Module, sample: Any) -> Autocast | None:
    """Return the autocast region that the capture runs in.

    The capture records operations as they are before autocast looks at them, so the region must be
    entered again wherever they run.
    """
    tensors = [*model.parameters(), *(x for x in pytree.tree_leaves(sample) if _is_tensor(x))]
    kind = tensors[0].device.type if tensors else "cpu"
    if not torch.is_autocast_enabled(kind):
        return None
    return Autocast(kind, torch.get_autocast_dtype(kind), True)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _distinct(tensor: Tensor) -> Tensor:
    # Export merges inputs that are one object (`labels=ids`), and the next step may pass two.
    return tensor.detach().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # Export reports its own internals through warnings and loggers; what matters is raised.
    import logging

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _Probe(nn.Module):
    """Runs the model inside the export and looks at what the export itself does not check."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training  # and not self.train(): that would reach into the model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = KeptState(self.model)
        buffers = dict(self.model.named_buffers(remove_duplicate=False))

        def run() -> Any:
            with as_eager(), no_seeding():
                return self.model(*args, **kwargs)

        result = run()
        refuse_new_buffers(self.model, buffers, run)
        before.refuse_changes(run)
        _refuse_custom_functions(self.model, result, run)
        return result


def _refuse_hidden_leaves(model: nn.Module) -> None:
    # A tensor attribute that requires a gradient but is no parameter would silently get none.
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise UnsupportedOpError(
                    f"cannot capture {type(model).__name__}: attribute '{name}' of module "
                    f"'{path or '(root)'}' is a tensor that requires a gradient but is no "
                    "parameter. Make it an nn.Parameter, or a buffer without gradient.",
                    op=name,
                    module_path=path,
                    source="",
                )


def _refuse_custom_functions(
    model: nn.Module, result: Any, run_again: Callable[[], object]
) -> None:
    """Find custom backward nodes; export keeps their forward and silently loses their backward."""
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
    stack = [t.grad_fn for t in leaves if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if isinstance(node, BackwardCFunction):
            forward_cls = getattr(type(node), "_forward_cls", type(node))
            name = forward_cls.__name__
            path, source = where_called(model, forward_cls, run_again)
            raise UnsupportedOpError(
                f"cannot capture {type(model).__name__}: module '{path or '(root)'}' calls the "
                f"custom autograd.Function '{name}' at {source}, whose backward a captured graph "
                "would lose, so gradients would be wrong. Write it with differentiable torch "
                "operations, or keep that part outside the wrapped module.",
                op=name,
                module_path=path,
                source=source,
            )
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


def _explained(model: nn.Module, error: Exception) -> TraceError:
    kinds = {cls.__name__ for cls in type(error).__mro__}
    where = where_raised(model, error)
    name = type(model).__name__
    text = str(error).strip()
    hint = next((hint for file, hint in _HINTS.items() if file in where), None)
    if isinstance(error, NotCapturedError):
        return SideEffectError(f"cannot capture {name}: its forward {error} (at {where}).")
    if "GuardOnDataDependentSymNode" in kinds or "data-dependent" in text.lower():
        return DataDependentError(
            f"cannot capture {name}: control flow depends on the values of a tensor at {where}. "
            "A captured graph would freeze one branch. "
            + (hint or "Use torch.where or torch.cond, or keep it outside the wrapped module.")
        )
    if "FakeTensor" in text:
        return DataDependentError(
            f"cannot capture {name}: a Python number is taken from the values of a tensor at "
            f"{where}. A captured graph would freeze it, or not know how large results are. Keep "
            "that part outside the wrapped module, or pass the number as an argument."
        )
    if "DynamicOutputShapeException" in kinds:
        return DataDependentError(
            f"cannot capture {name}: the size of what {error} returns depends on the data "
            f"at {where}, so its memory cannot be bounded. Keep it outside the wrapped module."
        )
    first = text.splitlines()[0].rstrip(".") if text else "(no message)"
    return TraceError(
        f"cannot capture {name}: its forward raised {type(error).__name__} at {where}: {first}. If "
        "it runs without rkgb, an operation of that line does not work on tensors without data, "
        "which a capture uses."
    )


@dataclass
class _Reader:
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
