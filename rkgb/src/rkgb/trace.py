"""Capture a module with `torch.export`; only this and `exported.py` touch unstable tracing API.

Non-strict export runs the user's Python once on fake tensors and gives the training graph: linear,
batch_norm, dropout and attention stay whole, in-place operations stay in place. What an export
silently freezes or drops is looked for here and refused: printing, Python random numbers, changed
attributes, custom `autograd.Function`s, values that depend on data.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from rkgb.as_eager import NotCapturedError, as_eager
from rkgb.effects import KeptState, Printed, no_seeding, plain_attributes, refuse_new_buffers
from rkgb.errors import DataDependentError, SideEffectError, TraceError, UnsupportedOpError
from rkgb.exported import Reader, Trace
from rkgb.op import Autocast
from rkgb.refusals import (
    refuse_backward_hooks,
    refuse_lazy_modules,
    where_called,
    where_raised,
)

__all__ = ["Trace", "capture", "plain_attributes"]

_LOGGERS = ("torch.export", "torch.fx", "torch._export", "torch._subclasses")
# Branches on data in other people's code, and how their users can avoid them.
_HINTS = {
    "torch/nn/modules/transformer.py": "Say whether the mask is causal: pass is_causal "
    "(tgt_is_causal, src_is_causal, memory_is_causal), so that the mask is not looked at.",
    "torch/nn/modules/batchnorm.py": "Give momentum a number.",
    "masking_utils.py": "Pass the mask with 4 dimensions (batch, 1, length, length), which is not "
    "looked at; decoders also do without looking with attn_implementation='eager'.",
}


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
    return Reader(program, model, _ambient_autocast(model, (args, kwargs))).read(args, kwargs)


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
