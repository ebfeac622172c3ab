"""Compile a joint: partition it, let inductor compile both halves, and look at what they return.

Where inductor puts what it saves is its own choice. So the forward is run once, on stand-ins, and
the backward compiled for what has come out. Both are run, and what they return is compared with the
recording: what others were recorded to read must be there in the same shape and order.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from rkgb.compiled.pieces.joint import Joint
from rkgb.elements.compiled_call import CompiledCall
from rkgb.elements.tensor_info import TensorInfo, storage_bytes, storage_id
from rkgb.graphs.basic import autocast_as
from rkgb.run.stand_ins import StandIns
from rkgb.torch_api.flop_formulas import EXTRA_FLOP_FORMULAS
from rkgb.torch_api.torch_private import (
    compiled_by_inductor,
    fake_tensors,
    partitioned,
    straight_to_kernels,
    traced_for_inductor,
    under_inductor,
)

# How inductor compiles, whatever the process has set: checks on, strides kept, nothing captured.
_OPTIONS = {
    **{"size_asserts": True, "fallback_random": True, "keep_output_stride": True},
    **{"triton.cudagraphs": False, "cpp_wrapper": False, "freezing": False},
    **{"fx_graph_cache": True},
}
Kind = Literal["primal", "tangent", "result", "gradient"]
Place = tuple[Kind, int]  # a value that comes in, or is made


class NotCompiledError(Exception):
    """A piece stays as it was recorded; the text says why."""


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a half returns: how it lies in memory, and in whose storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int
    home: Place  # the first value that lies there

    def info(self, alias_of: str, requires_grad: bool, is_on_host: bool) -> TensorInfo:
        """Return the facts about a value of this form."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return TensorInfo(
            *(self.shape, self.dtype, self.stride, requires_grad, alias_of),
            *(size, self.storage_bytes, self.offset, is_on_host),
        )


@dataclass(frozen=True)
class CompiledClass:
    """Both halves of a piece; values are numbered as in its joint.

    Results of the forward are those of the joint, then its statistics, then what is saved.
    """

    forward: CompiledCall
    backward: CompiledCall
    takes: tuple[int, ...]  # primals
    results: tuple[Made, ...]
    takes_back: tuple[Place, ...]
    gradients: tuple[Made, ...]
    keeps_more: bool = False  # than is needed to compute all else again


def compile_joint(
    joint: Joint, device: torch.device, other: CompiledClass | None = None
) -> CompiledClass:
    """Compile one piece for `device`.

    The backward computes norms and what works element by element again, from what is saved anyway.
    With `other`, which does so, it finds kept what inductor thinks is worth it.

    Raises:
        NotCompiledError: inductor cannot, or what it makes does not fit the recording; or it keeps
            no more than `other` does.
    """
    try:
        # Casts were recorded, and warnings are inductor's, about itself.
        with warnings.catch_warnings(), autocast_as(None):
            warnings.simplefilter("ignore")
            return _Compiling(joint, device, other).run()
    except NotCompiledError:
        raise
    except Exception as error:  # whatever tracing, partition, lowering and compilers raise
        text = str(error).strip() or type(error).__name__
        raise NotCompiledError(f"{type(error).__name__}: {text.splitlines()[0][:200]}") from error


class _Compiling:
    def __init__(self, joint: Joint, device: torch.device, other: CompiledClass | None) -> None:
        self.joint, self.device, self.other = joint, device, other
        self.count = len(joint.results) + 2 * len(joint.statistics)
        self.name = max(joint.forward, key=lambda op: _is_heavy(op.target)).target_name

    def run(self) -> CompiledClass:
        joint = self.joint
        if not joint.results or not joint.gradients:
            raise NotCompiledError("nobody reads what it makes")
        mode = fake_tensors()
        with mode:
            primals = [self._like(joint.infos[name]) for name in joint.primals]
            tangents = [self._like(joint.infos[name]) for name in joint.tangents]
        graph = traced_for_inductor(mode, joint.run, primals, tangents)
        places: dict[str, Place] = {}
        for place, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            behind = place - len(primals)
            places[node.name] = ("primal", place) if behind < 0 else ("tangent", behind)
        static = [i for i, name in enumerate(joint.primals) if name in joint.static]
        with under_inductor(mode, _OPTIONS):
            forward, backward = partitioned(
                *(graph, [*primals, *tangents], self.count, static, _is_heavy),
                rebuilds=self.other is None,
            )
            halves = _Halves(forward, backward, self.count, places)
            if self.other is not None and not halves.keeps_more(self.other):
                raise NotCompiledError("keeps no more")
            takes = tuple(places[n.name][1] for n in halves.inputs(forward))
            resident = [at for at, taken in enumerate(takes) if taken in static]
            run = compiled_by_inductor(
                forward, _values(forward), resident, len(joint.results), "forward"
            )
            stand_ins = StandIns(joint.infos, self.device, {})
            given = [stand_ins[name] for name in joint.primals]
            made = _called(run, [given[place] for place in takes])
            for node, (kind, at) in zip(halves.inputs(backward), halves.takes_back, strict=True):
                if kind == "result":
                    with mode:
                        node.meta["val"] = self._restrided(made[at])
            run_back = compiled_by_inductor(
                backward, _values(backward), (), len(joint.gradients), "backward"
            )
        arrived = [stand_ins[name] for name in joint.tangents]
        known: dict[str, list[Tensor]] = {"primal": given, "tangent": arrived, "result": made}
        gradients = _called(run_back, [known[kind][at] for kind, at in halves.takes_back])
        owners: dict[int, Place] = {}
        _described(given, owners, "primal")
        _described(arrived, owners, "tangent")
        results = _described(made, owners, "result")
        found = _described(gradients, owners, "gradient")
        check_form(joint, joint.results, results)
        check_form(joint, joint.gradients, found)
        digest = joint.digest + ("" if self.other is None else "_keeping")
        return CompiledClass(
            forward=CompiledCall(run, f"compiled_{self.name}", digest, "forward", _flops(forward)),
            backward=CompiledCall(
                *(run_back, f"compiled_{self.name}_backward", digest, "backward"), _flops(backward)
            ),
            takes=takes,
            results=results,
            takes_back=halves.takes_back,
            gradients=found,
            keeps_more=self.other is not None,
        )

    def _like(self, info: TensorInfo) -> Tensor:
        return torch.empty_strided(info.shape, info.stride, dtype=info.dtype, device=self.device)

    def _restrided(self, tensor: Tensor) -> Tensor:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
        )


def check_form(joint: Joint, names: Sequence[str], made: Sequence[Made]) -> None:
    """Compare how results or gradients of a joint lie in memory with what was recorded.

    Raises:
        NotCompiledError: what others were recorded to read is not there.
    """
    infos = joint.infos
    homes: dict[str, Place] = {}  # recorded storage -> where it lies now
    for at, name in enumerate(joint.primals):
        homes.setdefault(infos[name].alias_of, ("primal", at))
    for at, name in enumerate(joint.tangents):
        homes.setdefault(infos[name].alias_of, ("tangent", at))
    for name, found in zip(names, made, strict=False):
        info = infos[name]
        theirs = (info.shape, info.dtype, _plain(info.shape, info.stride))
        ours = (found.shape, found.dtype, _plain(found.shape, found.stride))
        if theirs != ours:
            raise NotCompiledError(f"'{name}' lies in memory as {ours}, not as {theirs}")
        if _root_of(joint, found.home) != info.alias_of:
            raise NotCompiledError(f"'{name}' shares memory with what was recorded apart")
        home = homes.setdefault(info.alias_of, found.home)
        if _are_apart(home, found.home) and info.alias_of in joint.written:
            raise NotCompiledError(f"'{name}' has memory of its own, and others write to it")


def _are_apart(one: Place, other: Place) -> bool:
    incoming = ("primal", "tangent")
    return one != other and not (one[0] in incoming and other[0] in incoming)


def _root_of(joint: Joint, place: Place) -> str:
    kind, at = place
    names = {
        **{"primal": joint.primals, "tangent": joint.tangents},
        **{"result": joint.results, "gradient": joint.gradients},
    }[kind]
    return joint.infos[names[at]].alias_of if at < len(names) else ""


class _Halves:
    """Both graphs of a partition, brought to what is needed: what comes in by itself is not saved.

    A view of what comes in is made again in the backward: what is saved is then the tensor itself,
    whose content is watched.
    """

    def __init__(
        self, forward: Any, backward: Any, count: int, places: Mapping[str, Place]
    ) -> None:
        self.places, self.count = places, count
        (output,) = forward.graph.find_nodes(op="output")
        outputs = list(output.args[0])
        results, saved = outputs[:count], outputs[count:]
        behind = {node.name: node for node in self.inputs(backward)}
        for node in saved:
            if node.op != "placeholder" and _views_of_input(node) and node not in results:
                _rebuild_views(node, behind, backward.graph)
        saved = [n for n in saved if n.op != "placeholder" and behind[n.name].users]
        own = [n for n in dict.fromkeys(saved) if n not in results]
        self.kept_bytes = sum(storage_bytes(node.meta["val"]) for node in own)
        output.args = ((*results, *own),)
        at = {node.name: place for place, node in reversed([*enumerate((*results, *own))])}
        for graph in (forward, backward):
            for node in self.inputs(graph):
                if not node.users:
                    graph.graph.erase_node(node)
            graph.graph.eliminate_dead_code()
            graph.recompile()
        self.takes_back: tuple[Place, ...] = tuple(
            places[n.name] if n.name in places else ("result", at[n.name])
            for n in self.inputs(backward)
        )

    def keeps_more(self, other: CompiledClass) -> bool:
        """Whether another partition keeps less from the forward to the backward."""
        return self.kept_bytes > sum(m.storage_bytes for m in other.results[self.count :])

    def inputs(self, graph: Any) -> list[Any]:
        """Return the placeholders of a graph."""
        return list(graph.graph.find_nodes(op="placeholder"))


def _views_of_input(node: Any) -> list[Any]:
    """Return the chain of views from an input to `node`, the input first; nothing if none."""
    chain = [node]
    while chain[0].op == "call_function":
        source = chain[0].args[0] if chain[0].args else None
        if not getattr(chain[0].target, "is_view", False) or len(chain[0].all_input_nodes) != 1:
            return []
        chain.insert(0, source)
    return chain if chain[0].op == "placeholder" else []


def _rebuild_views(node: Any, behind: dict[str, Any], graph: Any) -> None:
    first, *views = _views_of_input(node)
    old = behind[node.name]
    if first.name not in behind:
        with graph.inserting_before(next(iter(graph.nodes))):
            behind[first.name] = graph.placeholder(first.name)
            behind[first.name].meta = dict(first.meta)
    places = {first: behind[first.name]}
    last = graph.find_nodes(op="placeholder")[-1]
    for view in views:
        with graph.inserting_after(last):
            places[view] = last = graph.node_copy(view, places.__getitem__)
    old.replace_all_uses_with(places[node])


def _called(run: Any, tensors: list[Tensor]) -> list[Tensor]:
    with torch.no_grad(), straight_to_kernels():
        return list(run(tensors))


def _described(tensors: Sequence[Tensor], owners: dict[int, Place], kind: Kind) -> tuple[Made, ...]:
    """Return how tensors lie in memory; `owners` says whose each storage is, and learns it."""
    return tuple(
        Made(
            *(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())),
            *(tensor.dtype, storage_bytes(tensor)),
            owners.setdefault(storage_id(tensor), (kind, at)),
        )
        for at, tensor in enumerate(tensors)
    )


def _plain(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(0 if n <= 1 else step for n, step in zip(shape, strides, strict=True))


def _values(graph: Any) -> list[Tensor]:
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


def _is_heavy(target: Any) -> bool:
    packet = getattr(target, "overloadpacket", None)
    return packet in flop_registry or packet in EXTRA_FLOP_FORMULAS


def _flops(graph: Any) -> int:
    """Count the FLOPs of a graph by torch's formulas, which take shapes."""
    total = 0
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        packet = getattr(node.target, "overloadpacket", None)
        args = [getattr(arg, "meta", {}).get("val", arg) for arg in node.args]
        if packet in EXTRA_FLOP_FORMULAS:
            shapes = [arg.shape for arg in args if isinstance(arg, Tensor)]
            total += EXTRA_FLOP_FORMULAS[packet](*shapes)
        elif packet in flop_registry:
            total += int(flop_registry[packet](*args, **node.kwargs, out_val=node.meta["val"]))
    return total
