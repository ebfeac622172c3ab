"""Graphs as JSON: enough to print, draw, cut, plan with and, given the model, run them again.

Operators are written by name and looked up in torch when read; tensors that belong to the graph are
written with their bytes. A file from another version of torch is read as long as it has the
operators.
"""

from __future__ import annotations

import base64
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rkgb.basic import BasicGraph
from rkgb.dataflow import DataFlowGraph, DataFlowNode
from rkgb.errors import InvalidGraphError
from rkgb.inspect_op import Cost, NodeFacts, StorageFacts
from rkgb.op import Autocast, Op, Ref
from rkgb.simplified import SimplifiedGraph, SimplifiedNode
from rkgb.tensor_info import TensorInfo

FORMAT = "rkgb graphs 1"

_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def encode(value: Any) -> Any:
    """Return `value`, an argument of an operation, as JSON: what JSON lacks becomes a tagged dict.

    Raises:
        InvalidGraphError: a value of this type has no place in a file.
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
    if isinstance(value, slice):
        return {"slice": [encode(v) for v in (value.start, value.stop, value.step)]}
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
    "slice": lambda v: slice(*(decode(item) for item in v)),
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
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(row["shape"]).clone()


def _target_name(target: Any) -> str:
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
    region = op.autocast
    return {
        "name": op.name,
        "target": _target_name(op.target),
        "args": encode(op.args),
        "kwargs": encode(op.kwargs),
        "module_path": op.module_path,
        "source": op.source,
        "grad_enabled": op.grad_enabled,
        "autocast": None
        if region is None
        else [region.device, encode(region.dtype), region.enabled],
    }


def _op_from_json(row: Mapping[str, Any]) -> Op:
    region = row["autocast"]
    return Op(
        name=row["name"],
        target=_target_of(row["target"]),
        args=decode(row["args"]),
        kwargs=decode(row["kwargs"]),
        module_path=row["module_path"],
        source=row["source"],
        grad_enabled=row["grad_enabled"],
        autocast=None if region is None else Autocast(region[0], decode(region[1]), region[2]),
    )


def _basic_to_json(bg: BasicGraph) -> dict[str, Any]:
    return {
        "model_name": bg.model_name,
        "ops": [_op_to_json(op) for op in bg.ops],
        "parameters": dict(bg.parameters),
        "buffers": dict(bg.buffers),
        "constants": {name: _tensor_to_json(t) for name, t in bg.constants.items()},
        "inputs": list(bg.inputs),
        "input_spec": pytree.treespec_dumps(bg.input_spec),
        "outputs": encode(bg.outputs),
        "output_spec": pytree.treespec_dumps(bg.output_spec),
    }


def _basic_from_json(row: Mapping[str, Any]) -> BasicGraph:
    return BasicGraph(
        ops=tuple(_op_from_json(op) for op in row["ops"]),
        parameters=row["parameters"],
        buffers=row["buffers"],
        constants={name: _tensor_from_json(t) for name, t in row["constants"].items()},
        inputs=tuple(row["inputs"]),
        input_spec=pytree.treespec_loads(row["input_spec"]),
        outputs=decode(row["outputs"]),
        output_spec=pytree.treespec_loads(row["output_spec"]),
        model_name=row["model_name"],
    )


def _info_to_json(info: TensorInfo) -> dict[str, Any]:
    return {**asdict(info), "dtype": encode(info.dtype)}


def _info_from_json(row: Mapping[str, Any]) -> TensorInfo:
    shape, stride = tuple(row["shape"]), tuple(row["stride"])
    return TensorInfo(**{**row, "dtype": decode(row["dtype"]), "shape": shape, "stride": stride})


def graph_to_json(sg: SimplifiedGraph) -> dict[str, Any]:
    """Return S with the D and B that it was made from."""
    dg = sg.dataflow
    return {
        "basic": _basic_to_json(dg.basic),
        "dataflow": [
            {**asdict(node), "op": None} for node in dg.nodes
        ],  # the operations are those of `basic`, in its order
        "infos": {name: _info_to_json(info) for name, info in dg.infos.items()},
        "simplified": [
            {
                **{name: getattr(node, name) for name in _NODE_FIELDS},
                "ops": [_op_to_json(op) for op in node.ops],
            }
            for node in sg.nodes
        ],
        "output_names": list(sg.output_names),
        "outputs": encode(sg.outputs),
    }


_NODE_FIELDS = (
    *("name", "positions", "inputs", "externals", "outputs", "deps", "is_random"),
    "written_buffers",
)


def graph_from_json(row: Mapping[str, Any]) -> SimplifiedGraph:
    """Read what `graph_to_json` wrote."""
    basic = _basic_from_json(row["basic"])
    nodes = tuple(
        DataFlowNode(
            op=op,
            deps=tuple(node["deps"]),
            order_deps=tuple(node["order_deps"]),
            is_random=node["is_random"],
            written=tuple(node["written"]),
            same_as=node["same_as"],
        )
        for op, node in zip(basic.ops, row["dataflow"], strict=True)
    )
    infos = {name: _info_from_json(info) for name, info in row["infos"].items()}
    simplified = tuple(
        SimplifiedNode(**{**_tuples(node), "ops": tuple(_op_from_json(op) for op in node["ops"])})
        for node in row["simplified"]
    )
    return SimplifiedGraph(
        DataFlowGraph(basic, nodes, infos),
        simplified,
        tuple(row["output_names"]),
        decode(row["outputs"]),
    )


def facts_from_json(row: Mapping[str, Any]) -> NodeFacts:
    """Read what `dataclasses.asdict` made of the facts of a node."""
    storages = tuple(StorageFacts(tuple(s["names"]), s["size_bytes"]) for s in row["storages"])
    return NodeFacts(**{**_tuples(row), "cost": Cost(**row["cost"]), "storages": storages})


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
