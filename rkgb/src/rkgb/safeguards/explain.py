"""Errors that stop a recording, with the place in the user's code and advice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from rkgb.errors import (
    DataDependentError,
    NotRecordedError,
    ReadsDataError,
    SideEffectError,
    TraceError,
)
from rkgb.safeguards.refusals import where_raised

# Known data dependence in libraries, with advice.
_HINTS = {
    "torch/nn/modules/transformer.py": "Say whether the mask is causal: pass is_causal "
    "(tgt_is_causal, src_is_causal, memory_is_causal), so that the mask is not looked at.",
    "torch/nn/modules/batchnorm.py": "Give momentum a number.",
    "masking_utils.py": "Pass the mask with 4 dimensions (batch, 1, length, length), which is not "
    "looked at; decoders also do without looking with attn_implementation='eager'.",
}
_USUAL_HINT = (
    "Use torch.where or torch.cond, pass numbers as arguments, or keep that part outside the "
    "wrapped module."
)

_NEXT = (
    "Give the sample as your training loop calls the model: a tensor, a tuple of arguments, or a "
    "dict of keyword arguments. If the model itself raises this when called so, that comes first."
)


def explained(
    model: nn.Module, name: str, error: Exception, leaves: Sequence[Any] = ()
) -> TraceError:
    """Return the error to raise for a step that raised `error`, called with these `leaves`."""
    where = where_raised(model, error)
    if isinstance(error, NotRecordedError):
        return SideEffectError(f"cannot capture {name}: its forward {error} (at {where}).")
    if isinstance(error, ReadsDataError):
        place = f"in the backward {error.backward}" if error.backward else f"at {where}"
        hint = next((hint for file, hint in _HINTS.items() if file in where), _USUAL_HINT)
        return DataDependentError(
            f"cannot capture {name}: {error.what} depends on the data, the values of tensors, "
            f"{place}. A recording would freeze it. {hint}"
        )
    text = str(error).strip()
    first = text.splitlines()[0].rstrip(".") if text else "(no message)"
    return TraceError(
        f"cannot capture {name}: {_advice(model, leaves)}its forward or backward raised "
        f"{type(error).__name__} at {where}: {first}. {_NEXT}"
    )


def _advice(model: nn.Module, leaves: Sequence[Any]) -> str:
    """Return advice about the sample, if it holds no tensor."""
    if not leaves or any(isinstance(leaf, Tensor) for leaf in leaves):
        return ""
    odd = leaves[0]
    call = f"the sample must be what {type(model).__name__} is called with"
    if type(odd).__module__.partition(".")[0] == "numpy":
        return f"{call}, and is a numpy array. Give torch.from_numpy(sample): "
    if isinstance(odd, (str, bytes)):
        return f"{call}, and is text. Give what the tokenizer makes of it: "
    return f"{call}, such as a tensor, and holds only {type(odd).__name__}: "
