"""Which nodes can be compiled, and which neighbours become one piece.

A piece is `light* heavy+ epilogue*`: light nodes that lead to a matrix product, all products of
their result, and what is added to these. The values between two such pieces are those that a
min-cut would save anyway: results of linear layers and of attention, and the residual. Merging
neighbours in execution order makes no cycle. A waiting node makes none either, because it moves
only behind products and sums that do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from rkgb.elements.op import BATCH_NORMS, VIEW_NAMES, Op
from rkgb.elements.tensor_info import TensorInfo
from rkgb.graphs.simplified import SimplifiedGraph, SimplifiedNode
from rkgb.graphs.uses import roots_of

_HEAVY = frozenset(
    (
        *("addmm", "mm", "bmm", "baddbmm", "convolution"),
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)
_EPILOGUE = frozenset(("add", "mul", "sub"))
# Besides views and elementwise operations: those that always add in the same order.
_KNOWN = frozenset(
    (
        *_HEAVY,
        *("convolution_backward", "_scaled_dot_product_flash_attention_for_cpu_backward"),
        *("native_layer_norm", "native_layer_norm_backward"),
        *("_fused_rms_norm", "_fused_rms_norm_backward"),
        *("native_group_norm", "native_group_norm_backward"),
        *("native_batch_norm", "native_batch_norm_backward"),
        *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
        *("sum", "mean", "var", "var_mean", "cat", "stack", "clone", "_to_copy", "copy"),
        *("empty_like", "zeros_like", "ones_like", "zeros", "ones", "full", "full_like"),
        *("nll_loss_forward", "nll_loss_backward"),  # one class each: no sums meet
        *("nll_loss2d_forward", "nll_loss2d_backward"),
        *("mse_loss", "mse_loss_backward", "select_backward", "slice_backward", "constant_pad_nd"),
        *("split_with_sizes_copy", "new_zeros", "reshape"),
        *("max_pool2d_with_indices", "max_pool2d_with_indices_backward"),  # small windows: below
        *("avg_pool2d", "avg_pool2d_backward"),
    )
)
# Positions of their windows. Inductor leaves larger ones to kernels that may add in any order.
_POOLS = {"max_pool2d_with_indices": 1, "avg_pool2d": 1}
_POOLS |= {f"{name}_backward": place + 1 for name, place in _POOLS.items()}
_LARGEST_WINDOW = 25
# Position of the axis of classes, and of its input. Eager handles many pixels at once. Inductor
# handles one after the other if there are few classes, because it unrolls them.
_OVER_CLASSES = {
    **{"_softmax": 0, "_softmax_backward_data": 0, "_log_softmax": 0},
    **{"_log_softmax_backward_data": 0, "nll_loss2d_forward": 0, "nll_loss2d_backward": 1},
}
_FEW_CLASSES = 8  # inductor's bound for unrolling
_NOT_VIEWS = frozenset(("as_strided", "empty_strided", "real", "imag", "view_as_real"))
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_effect(op: Op, sg: SimplifiedGraph) -> bool:
    """Return whether an operation only updates a buffer from resident values, like a counter."""
    externals = sg.basic.externals
    infos = sg.infos
    return (
        bool(op.writes)
        and op.target_name not in BATCH_NORMS
        and all(infos[name].alias_of in externals for name in op.writes)
        and all(name in externals for name in op.inputs)
        and all(infos[name].alias_of in externals for name in op.results if name)
    )


def refusal(node: SimplifiedNode, sg: SimplifiedGraph) -> str:
    """Return why a node is not compiled; '' if it may be."""
    infos = sg.infos
    if not any(infos[name].requires_grad for op in node.ops for name in op.results if name):
        return "makes nothing that a gradient reaches"
    for op in (*node.ops, *node.backward):
        if is_effect(op, sg):
            continue
        why = _refusal_of(op, sg)
        if why:
            return f"{op.target_name} {why}"
    return ""


def _refusal_of(op: Op, sg: SimplifiedGraph) -> str:
    infos, basic = sg.infos, sg.basic
    if why := _never_compiled(op, infos):
        return why
    home, outside = sg.producer, set(basic.externals)
    for value in op.writes:
        root = infos[value].alias_of
        if root in outside and op.target_name not in BATCH_NORMS:
            return "writes to what the module was given"
        if root in home and op in basic.backward:
            return "writes in the backward to what the forward has made"
    return ""


def _never_compiled(op: Op, infos: Mapping[str, TensorInfo]) -> str:
    """Return why an operation is compiled nowhere; '' if it may be."""
    if getattr(op.target, "namespace", "") != "aten":
        return "is no operation of torch's own"
    if op.is_random:
        return "draws random numbers"
    if op.flags:
        return "runs under flags of its own"
    tags = getattr(op.target, "tags", ())
    name = op.target_name
    plain = (name in VIEW_NAMES and name not in _NOT_VIEWS) or torch.Tag.pointwise in tags
    if not (plain or name in _KNOWN):
        return "is not among those whose compiled form is known to repeat its bits"
    if name in _POOLS and not _takes_small_windows(op):
        return f"takes windows of more than {_LARGEST_WINDOW} elements, or with gaps"
    if name in _OVER_CLASSES and _has_few_classes(op, infos):
        return f"is faster as it is, over {_FEW_CLASSES} classes or less of many pixels"
    for value in (*op.inputs, *filter(None, op.results)):
        info = infos[value]
        if info.is_conj or info.dtype not in (*_TYPES, *_INTEGERS):
            return f"takes or makes {info.dtype}"
        if info.is_on_host:
            return "takes or makes what lies on the host"
    return ""


def is_product(op: Op) -> bool:
    """Return whether an operation is a product, a convolution or attention, or a backward."""
    return op.target_name.removesuffix("_backward") in _HEAVY


def is_light(op: Op, infos: Mapping[str, TensorInfo]) -> bool:
    """Return whether an operation can be compiled and is no product."""
    return not (is_product(op) or op.writes or _never_compiled(op, infos))


def _takes_small_windows(op: Op) -> bool:
    place = _POOLS[op.target_name]
    size = op.args[place]
    dilation = op.args[place + 3 : place + 4] if "max" in op.target_name else ()
    count = math.prod(size) if len(size) > 1 else size[0] ** 2
    return count <= _LARGEST_WINDOW and all(n == 1 for sizes in dilation for n in sizes)


def _has_few_classes(op: Op, infos: Mapping[str, TensorInfo]) -> bool:
    """Return whether an operation runs over a short axis that is not the innermost."""
    info = infos[op.args[_OVER_CLASSES[op.target_name]].name]
    place = {"_softmax": 1, "_log_softmax": 1}.get(op.target_name, 2)
    axis = 1 if op.target_name.startswith("nll") else op.args[place] % len(info.shape)
    return 1 < info.shape[axis] <= _FEW_CLASSES and math.prod(info.shape[axis + 1 :]) > 1


def is_heavy(node: SimplifiedNode) -> bool:
    """Return whether a node has a matrix product, a convolution or attention."""
    return any(op.target_name in _HEAVY for op in node.ops)


def runs_of(sg: SimplifiedGraph, but: Collection[int] = ()) -> list[tuple[int, ...]]:
    """Return the runs of nodes to compile, in order, without the nodes of `but`."""
    runs = _Runs(sg)
    for index, node in enumerate(sg.nodes):
        if index in but or refusal(node, sg):
            runs.end()
            runs.end()  # the waiting nodes
        elif is_heavy(node):
            runs.add_product(index)
        else:
            runs.add(index)
    runs.end()
    runs.end()
    return runs.found


class _Runs:
    """The run that is being assembled, and light nodes behind it that wait for their product.

    Example: in a gated MLP, down(silu(gate) * up), the silu was recorded before the product `up`.
    It waits for `down`. So gate and up form one run, whose results are saved, and the light nodes
    are recomputed in the backward of `down`.
    """

    def __init__(self, sg: SimplifiedGraph) -> None:
        self.sg = sg
        self.found: list[tuple[int, ...]] = []
        self.current: list[int] = []
        self.light: set[int] = set()  # of the current run, before its product
        self.waiting: list[int] = []

    def end(self) -> None:
        """End the current run; the waiting nodes begin the next."""
        if any(self.sg.nodes[index].backward for index in self.current):
            self.found.append(tuple(self.current))
        self.current, self.waiting, self.light = self.waiting, [], {*self.waiting}

    def add_product(self, index: int) -> None:
        """Add a node with a product: to products of the same input, or behind its light nodes."""
        deps = {*self.sg.nodes[index].deps}
        if self._has_product():
            own = deps.intersection(self.current)
            if own and own <= self.light and self._can_be_now(self.sg.nodes[index]):
                self.current.append(index)
                return
            self.end()
        needed = self._leading_to(deps)
        self.waiting = [i for i in self.current if i not in needed]
        self.current = [*(i for i in self.current if i in needed), index]
        self.light = needed

    def add(self, index: int) -> None:
        """Add a node without a product."""
        node = self.sg.nodes[index]
        if not self._has_product():
            self.light.add(index)
            self.current.append(index)
        elif _is_epilogue(node, self.sg) and self._can_be_now(node) and self._reads_alone(index):
            self.current.append(index)
        else:
            self.waiting.append(index)

    def _can_be_now(self, node: SimplifiedNode) -> bool:
        """Return whether a node depends on the current run and on no waiting node."""
        deps = {*node.deps}
        return deps.isdisjoint(self.waiting) and not deps.isdisjoint(self.current)

    def _reads_alone(self, index: int) -> bool:
        """Return whether a node is the only reader of the products that it reads."""
        infos, nodes, readers = self.sg.infos, self.sg.nodes, self.sg.uses.readers
        read = roots_of(infos, nodes[index].inputs)
        return all(
            at.part in (maker, index)
            for maker in self.current
            if maker not in self.light
            for name in nodes[maker].outputs
            if infos[name].alias_of in read
            for at in readers.get(name, ())
        )

    def _has_product(self) -> bool:
        return len(self.current) > len(self.light)

    def _leading_to(self, deps: set[int]) -> set[int]:
        """Return the nodes of the current run that `deps` lead to; the run has only light ones."""
        needed: set[int] = set()
        for index in reversed(self.current):
            if index in deps:
                needed.add(index)
                deps = deps.union(self.sg.nodes[index].deps)
        return needed


def _is_epilogue(node: SimplifiedNode, sg: SimplifiedGraph) -> bool:
    """Return whether a node can follow a product: a sum, whose backward reads nothing.

    A product of two activations cannot: its backward saves both, and recomputes the product.
    """
    infos, outside = sg.infos, sg.basic.externals

    def is_gated(op: Op) -> bool:
        wanting = [n for n in op.inputs if infos[n].requires_grad and n not in outside]
        return op.target_name == "mul" and len(wanting) > 1

    known = (op.target_name in _EPILOGUE or op.target_name in VIEW_NAMES for op in node.ops)
    return all(known) and not any(map(is_gated, node.ops))
