"""The identity of a recorded step, in a file and between processes.

A digest covers everything on which a plan depends: operations, sizes, data flow. It excludes what
differs between equal steps: device indices, addresses and autograd's counters. So two processes
that record the same step on two GPUs get the same digest.
"""

from __future__ import annotations

import hashlib
import inspect
import platform
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import CodeType
from typing import Any

import torch
from torch import nn

from rkgb.costs import op_key
from rkgb.elements import Op
from rkgb.engine import device_of, operations
from rkgb.graphs import BasicGraph
from rkgb.run import RunnableGraph
from rkgb.torch_api import named_kernel_flags, placed_parameters
from rockmate.arguments import Call
from rockmate.files.differences import of_mappings
from rockmate.files.plan_file import PlanFile
from rockmate.guards.input_signature import ambient, in_order, key_of
from rockmate.settings import Terms

_PLACE = re.compile(r"(?<=cuda):\d+|(?<=type='cuda'), index=\d+| at 0x[0-9a-f]+")
_NUMBERED = re.compile(r"(c_output)_\d+")  # returned constants have addresses in their names


def kind_digest(key: str) -> str:
    """Return the name of a kind of operation in a file."""
    return _digest([key])[:20]


def recording_digest(recorded: RunnableGraph) -> str:
    """Return the digest of a recorded step."""
    return _digest(_lines(recorded))


def input_texts(basic: BasicGraph) -> tuple[str, ...]:
    """Return the tensor inputs of a recording in words."""
    found = []
    for name in basic.inputs:
        if name is None:
            found.append("no tensor")
            continue
        info = basic.infos[name]
        text = f"{str(info.dtype).removeprefix('torch.')}{list(info.shape)}"
        if info.stride != torch.empty(info.shape, device="meta").stride():
            text += f" with strides {list(info.stride)}"
        found.append(text + (" requiring a gradient" if info.requires_grad else ""))
    return tuple(found)


def made_with(device: torch.device) -> dict[str, str]:
    """Return versions, device, device settings and flags that choose kernels, by name.

    If one of them differs, kernels, workspaces or times may differ.
    """
    found = device_of(device)
    name = found.name
    if device.type == "cpu":
        name = f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    return {
        "rockmate": _version(),
        "torch": torch.__version__,
        "device": name,
        "threads": str(torch.get_num_threads()),
        **found.environment,
        **named_kernel_flags(),
    }


def elsewhere(file: PlanFile, model: str, device: torch.device) -> list[str]:
    """Say how a file's model, versions, device and flags differ from those here."""
    named = of_mappings({"model": file.model}, {"model": model})
    return named + of_mappings(file.made_with, made_with(device))


def in_short(made_with: Mapping[str, str], inputs: Sequence[str]) -> dict[str, str]:
    """Return versions and device for a reader, and the shapes of the inputs."""
    told = [name for name in ("rockmate", "torch", "device", "threads") if name in made_with]
    return {**{name: made_with[name] for name in told}, "inputs": "; ".join(inputs)}


def facts_of_calls(model: nn.Module, *calls: Call) -> tuple[Hashable, ...]:
    """Return what a recording of these calls depends on, beside the class of the module."""
    tensors = ((n, t.shape, t.dtype, t.requires_grad) for n, t in placed_parameters(model))
    inputs = (key_of(args, in_order(kwargs))[1] for args, kwargs in calls)
    return tuple(tensors), tuple(inputs), ambient()


def cache_key(recording: str, model: nn.Module, device: torch.device, settings: Terms) -> str:
    """Return the key of a plan in the cache: everything on which it and its self-test depend."""
    choices = {
        name: value
        for name, value in vars(settings).items()
        if name not in ("progress", "max_plans", "plan", "cache", "share", "check_every")
    }
    rows = [recording, repr(sorted(made_with(device).items())), repr(sorted(choices.items()))]
    return _digest([*rows, *_code_of(model)])


def _version() -> str:
    try:
        return version("rockmate")
    except PackageNotFoundError:
        return "not installed"


def _digest(lines: Iterable[str]) -> str:
    found = hashlib.sha256()
    for line in lines:
        found.update(_NUMBERED.sub(r"\1", _PLACE.sub("", line)).encode(errors="replace"))
        found.update(b"\n")
    return found.hexdigest()


def _lines(recorded: RunnableGraph) -> Iterator[str]:
    basic = recorded.graph.basic
    infos = basic.infos
    yield f"{basic.model_name} {basic.opaque} {basic.kind} {basic.output_spec}"
    yield f"{basic.inputs} {basic.outputs!r} {basic.roots} {basic.tangent_names}"
    yield repr([type(effect).__name__ for effect in basic.effects])
    for op in operations(recorded.graph):
        yield f"{op_key(op, infos)} {_wiring(op)}"
    for node in recorded.graph.nodes:
        yield f"{node.name} {node.module_path} {node.inputs} {node.outputs} {node.deps}"
        yield repr([(h.leaf, h.value) for h in node.hand_overs])
    for name in (*basic.externals, *recorded.graph.producer):
        info = infos[name]
        yield f"{name} {info.alias_of} {info.storage_bytes} {info.offset} {info.requires_grad}"


def _wiring(op: Op) -> str:
    return f"{op.inputs} {op.results} {op.writes} {op.is_random}"


def _code_of(model: nn.Module) -> Iterator[str]:
    """Yield the code of the forwards, because the self-test holds only for the same code."""
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        forward: Any = inspect.unwrap(kind.forward)
        code = getattr(forward, "__code__", None)
        yield f"{kind.__module__}.{kind.__qualname__}"
        if code is not None:
            yield from _parts(code)


def _parts(code: CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names}"
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _parts(value)
        elif not isinstance(value, frozenset):  # its order differs between processes
            yield repr(value)
