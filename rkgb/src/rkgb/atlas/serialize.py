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
from dataclasses import asdict, fields
from typing import Any, cast

import torch
from torch import Tensor

from rkgb.elements.cut import GradientCut, GradientPart
from rkgb.elements.op import Op, Ref
from rkgb.elements.tensor_info import TensorInfo
from rkgb.elements.trees import Structure
from rkgb.errors import InvalidGraphError
from rkgb.graphs.basic import BackwardKind, BasicGraph, Flow, HandOver
from rkgb.torch_api.private.tables import pytree

FORMAT = "rkgb graphs 4"

_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def encode(value: Any) -> Any:
    """Return an argument of an operation as JSON; types that JSON lacks become tagged dicts.

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
    raise InvalidGraphError(
        f"cannot write a {type(value).__name__} ({value!r}) into a file of graphs: only numbers, "
        "strings, containers of them and tensors can be written."
    )


def decode(tree: Any) -> Any:
    """Read what `encode` wrote."""
    if isinstance(tree, list):
        return [decode(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((tag, value),) = tree.items()
    return _DECODERS[tag](value)


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda v: complex(*v),
    "ref": Ref,
    "tuple": lambda v: tuple(decode(item) for item in v),
    "dict": lambda v: {key: decode(item) for key, item in v},
    "torch": lambda v: getattr(torch, v),
    "device": torch.device,
    "tensor": lambda v: _tensor_from_json(v),
}


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


def _target_name(target: Any) -> str:
    if isinstance(target, GradientPart):
        return f"{'part and outside' if target.from_outside else 'part'}:{target.root}"
    if isinstance(target, GradientCut):
        return f"{'cut and outside' if target.from_outside else 'cut'}:{target.root}"
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    if module in ("_operator", "operator") and getattr(operator, name, None) is target:
        return f"operator.{name}"
    raise InvalidGraphError(
        f"cannot write the operation {target!r} into a file of graphs: only operators that are "
        "registered with torch have a name that another process knows."
    )


def _target_of(name: str) -> Callable[..., Any]:
    kind, _, root = name.partition(":")
    if kind.startswith("part"):
        return GradientPart(root, from_outside=kind != "part")
    if kind.startswith("cut"):
        return GradientCut(root, from_outside=kind != "cut")
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


def _op_to_json(op: Op) -> dict[str, Any]:
    row = {field.name: getattr(op, field.name) for field in fields(op) if field.init}
    return {
        **row,
        "target": _target_name(op.target),
        "args": encode(op.args),
        "kwargs": encode(op.kwargs),
        "results": list(op.results),
        "writes": list(op.writes),
        "flags": encode(op.flags),
    }


def _op_from_json(row: Mapping[str, Any]) -> Op:
    return Op(
        **{
            **row,
            "target": _target_of(row["target"]),
            "args": decode(row["args"]),
            "kwargs": decode(row["kwargs"]),
            "results": tuple(row["results"]),
            "writes": tuple(row["writes"]),
            "flags": decode(row["flags"]),
        }
    )


def basic_to_json(bg: BasicGraph) -> dict[str, Any]:
    """Return a recorded step; the other graphs follow from it."""
    return {
        "model_name": bg.model_name,
        "device": str(bg.device),
        "ops": [_op_to_json(op) for op in bg.ops],
        "backward": [_op_to_json(op) for op in bg.backward],
        "hand_overs": [[h.leaf, h.value, h.sequence_nr] for h in bg.hand_overs],
        "leaf_edges": [list(edge) for edge in bg.leaf_edges],
        "parameters": dict(bg.parameters),
        "buffers": dict(bg.buffers),
        "constants": {name: _tensor_to_json(t) for name, t in bg.constants.items()},
        "inputs": list(bg.inputs),
        "input_spec": _structure_to_json(bg.input_spec),
        "outputs": encode(bg.outputs),
        "output_spec": _structure_to_json(bg.output_spec),
        "infos": {name: _info_to_json(info) for name, info in bg.infos.items()},
        "roots": list(bg.roots),
        "tangents": encode(bg.kind.tangents),
        "backward_autocast": encode(bg.kind.autocast),
        "outside": encode(bg.kind.outside),
        "tangent_names": list(bg.tangent_names),
        "flows": [[list(flow.reaches), flow.uses] for flow in bg.flows],
    }


def basic_from_json(row: Mapping[str, Any]) -> BasicGraph:
    """Read what `basic_to_json` wrote.

    Raises:
        InvalidGraphError: it has an operator that this torch does not know.
    """
    return BasicGraph(
        ops=tuple(_op_from_json(op) for op in row["ops"]),
        backward=tuple(_op_from_json(op) for op in row["backward"]),
        hand_overs=tuple(HandOver(*given) for given in row["hand_overs"]),
        leaf_edges=tuple((leaf, number) for leaf, number in row.get("leaf_edges", ())),
        parameters=row["parameters"],
        buffers=row["buffers"],
        constants={name: _tensor_from_json(t) for name, t in row["constants"].items()},
        inputs=tuple(row["inputs"]),
        input_spec=_structure_from_json(row["input_spec"]),
        outputs=decode(row["outputs"]),
        output_spec=_structure_from_json(row["output_spec"]),
        infos={name: _info_from_json(info) for name, info in row["infos"].items()},
        roots=tuple(row["roots"]),
        kind=BackwardKind(
            *map(decode, (row["tangents"], row["backward_autocast"], row["outside"]))
        ),
        tangent_names=tuple(row["tangent_names"]),
        flows=tuple(Flow(tuple(reaches), uses) for reaches, uses in row["flows"]),
        device=torch.device(row["device"]),
        model_name=row["model_name"],
    )


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


def _info_to_json(info: TensorInfo) -> dict[str, Any]:
    return {**asdict(info), "dtype": encode(info.dtype)}


def _info_from_json(row: Mapping[str, Any]) -> TensorInfo:
    shape, stride = tuple(row["shape"]), tuple(row["stride"])
    return TensorInfo(**{**row, "dtype": decode(row["dtype"]), "shape": shape, "stride": stride})
