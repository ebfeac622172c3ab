"""Graphs as JSON, complete enough to print, draw, cut, plan and, given the model, run them.

Operators are written by name and looked up in torch when the file is read. Tensors that belong to
the graph are written with their bytes. A file from another version of torch can be read if this
version has its operators.
"""

from __future__ import annotations

import base64
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor

from rkgb.elements.op import Op, Ref
from rkgb.elements.target import GradientCut, GradientPart
from rkgb.elements.tensor_info import TensorInfo
from rkgb.elements.trees import Structure
from rkgb.errors import InvalidGraphError
from rkgb.graphs.basic import BackwardKind, BasicGraph, Flow, HandOver
from rkgb.torch_api.private.tables import pytree

FORMAT = "rkgb graphs 5"

_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
# The data types that a file holds, by name; nothing else is made when it is read.
_KINDS = (BackwardKind, BasicGraph, Flow, GradientCut, GradientPart, HandOver, Op, TensorInfo)
_DATA: Mapping[str, type] = {kind.__name__: kind for kind in _KINDS}
# What a graph in a file does without: guards, effects on the model, and measurements.
_LEFT_OUT = frozenset(("opaque", "effects", "reads", "numbers", "metered", "sources"))


def encode(value: Any) -> Any:
    """Return a part of a graph as JSON; types that JSON lacks become tagged dicts.

    Raises:
        InvalidGraphError: values of this type cannot be written.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[key, encode(item)] for key, item in value.items()]}
    if isinstance(value, _TORCH_CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, Tensor):
        return {"tensor": _tensor_to_json(value)}
    if isinstance(value, Structure):
        return {"structure": _structure_to_json(value)}
    if isinstance(value, _KINDS):
        names = [f.name for f in fields(value) if f.init and f.name not in _LEFT_OUT]
        return {type(value).__name__: {name: encode(getattr(value, name)) for name in names}}
    if callable(value):
        return {"operator": _name_of(value)}
    raise InvalidGraphError(
        f"cannot write a {type(value).__name__} ({value!r}) into a file of graphs: only numbers, "
        "strings, containers of them and tensors can be written."
    )


def decode(tree: Any) -> Any:
    """Read what `encode` wrote.

    Raises:
        InvalidGraphError: it has an operator that this torch does not know.
    """
    if isinstance(tree, list):
        return [decode(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((tag, value),) = tree.items()
    if tag in _DATA:
        return _DATA[tag](**{name: decode(item) for name, item in value.items()})
    return _DECODERS[tag](value)


def _tensor_to_json(tensor: Tensor) -> dict[str, Any]:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "device": str(tensor.device),
        "data": base64.b64encode(data).decode("ascii"),
    }


def _tensor_from_json(row: Mapping[str, Any]) -> Tensor:
    dtype = getattr(torch, row["dtype"])
    data = bytearray(base64.b64decode(row["data"]))
    flat = (
        torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    )
    place = torch.device(row["device"])
    absent = place.type == "cuda" and not torch.cuda.is_available()
    return flat.reshape(row["shape"]).clone().to("cpu" if absent else place)


def _name_of(target: Any) -> str:
    """Return the name of an operator.

    Raises:
        InvalidGraphError: it has none.
    """
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    if module in ("_operator", "operator") and getattr(operator, name, None) is target:
        return f"operator.{name}"
    raise InvalidGraphError(
        f"cannot write the operation {target!r} into a file of graphs: only operators that are "
        "registered with torch have a name that another process knows."
    )


def _operator(name: str) -> Callable[..., Any]:
    try:
        if name.startswith("operator."):
            found: Any = getattr(operator, name.removeprefix("operator."))
        else:
            found = operator.attrgetter(name)(torch.ops)
    except AttributeError as error:
        raise InvalidGraphError(
            f"the file holds the operator '{name}', which torch {torch.__version__} does not know. "
            "Import the library that registers it first, or write the file again."
        ) from error
    return cast(Callable[..., Any], found)


def _structure_to_json(structure: Structure) -> str:
    """Return a structure of tuples, lists and dicts as text; other types are refused."""
    if any(part is not None for part in structure.inner):
        raise InvalidGraphError(
            f"the graph takes or returns {structure}, an object whose type a file cannot hold."
        )
    return pytree.treespec_dumps(structure.spec)


def _structure_from_json(text: str) -> Structure:
    spec = pytree.treespec_loads(text)
    return Structure(spec, (None,) * spec.num_leaves)


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda v: complex(*v),
    "ref": Ref,
    "tuple": lambda v: tuple(decode(item) for item in v),
    "dict": lambda v: {key: decode(item) for key, item in v},
    "torch": lambda v: getattr(torch, v),
    "device": torch.device,
    "tensor": _tensor_from_json,
    "structure": _structure_from_json,
    "operator": _operator,
}
