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
    "torch/nn/modules/transformer.py": "say whether the mask is causal: pass is_causal "
    "(tgt_is_causal, src_is_causal, memory_is_causal), so that the mask is not looked at",
    "torch/nn/modules/batchnorm.py": "give momentum a number",
    "masking_utils.py": "pass the mask with 4 dimensions (batch, 1, length, length), which is not "
    "looked at; decoders also do without looking with attn_implementation='eager'",
}
_USUAL_HINT = (
    "use torch.where or torch.cond, pass numbers as arguments, or keep that part outside the "
    "wrapped module"
)


def explained(
    model: nn.Module,
    name: str,
    error: Exception,
    leaves: Sequence[Any] = (),
    *,
    module_path: str | None,
) -> TraceError:
    """Return the error to raise for a step that raised `error`, called with these `leaves`."""
    where = where_raised(model, error)
    if isinstance(error, NotRecordedError):
        found = f"its forward {error.found}"
        return SideEffectError.to_capture(name, error.do, found, where, module_path=module_path)
    if isinstance(error, ReadsDataError):
        place = f"in the backward {error.backward}" if error.backward else where
        hint = next((hint for file, hint in _HINTS.items() if file in where), _USUAL_HINT)
        return DataDependentError.to_capture(
            name,
            hint,
            f"{error.what} depends on the data, the values of tensors, which a recording would "
            "freeze",
            place,
            module_path=module_path,
        )
    text = str(error).strip()
    first = text.splitlines()[0].rstrip(".") if text else "(no message)"
    do, sample = _about(leaves)
    raised = f"{sample}its forward or backward raised {type(error).__name__}: {first}"
    return TraceError.to_capture(name, do, raised, where, module_path=module_path)


def _about(leaves: Sequence[Any]) -> tuple[str, str]:
    """Return what to do for a step with these `leaves` not to fail, and what is odd about them."""
    if not leaves or any(isinstance(leaf, Tensor) for leaf in leaves):
        return (
            "give the sample as your training loop calls it: a tensor, a tuple of arguments, or a "
            "dict of keyword arguments; if it fails when called so without Rockmate, mend that "
            "first",
            "",
        )
    odd = leaves[0]
    if type(odd).__module__.partition(".")[0] == "numpy":
        return "give torch.from_numpy(sample) as the sample", "the sample is a numpy array, and "
    if isinstance(odd, (str, bytes)):
        return (
            "give as the sample what the tokenizer makes of the text",
            "the sample is text, and ",
        )
    return (
        "give as the sample what it is called with, such as a tensor",
        f"the sample holds no tensor but {type(odd).__name__}, and ",
    )
