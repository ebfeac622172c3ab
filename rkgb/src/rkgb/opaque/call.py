"""A call of a submodule in the sample's step, and how to run it on other tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.elements.spread import lazy_bits, memory_of, read_lazily
from rkgb.elements.tensor_info import storage_id
from rkgb.elements.trees import Structure, flatten
from rkgb.errors import ChangesArgumentsError, OpaquePieceError
from rkgb.graphs.basic import Region, autocast_as
from rkgb.opaque.inner_graph import InnerGraph
from rkgb.recording.watch import as_written, sets_by_hand
from rkgb.torch_api.private.autograd import back_to_autograd
from rkgb.torch_api.tensor_facts import attributes_of, leaf_of_kind, share_attributes, standing_for

# Torch's own tables of a module, which have been seen to.
_TABLES = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The layout of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    sparse: tuple[int, int] | None = None  # dimensions and entries of a sparse tensor
    is_on_cpu: bool = True  # as one may be beside a step on CUDA
    lazy: tuple[bool, bool] = (False, False)  # whether reads conjugate, and whether they negate

    @classmethod
    def of(cls, tensor: Tensor) -> TensorKind:
        shape, is_on_cpu = tuple(tensor.shape), tensor.device.type == "cpu"
        if tensor.is_sparse:
            entries = (tensor.sparse_dim(), tensor._nnz())
            return cls(shape, (), tensor.dtype, entries, is_on_cpu)
        return cls(shape, tensor.stride(), tensor.dtype, None, is_on_cpu, lazy_bits(tensor))

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def made(self, device: torch.device) -> Tensor:
        """Return some tensor of this kind, in a step on `device`."""
        device = torch.device("cpu") if self.is_on_cpu else device
        if not self.sparse:
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
            return read_lazily(made.fill_(0.5), self.lazy)
        dims, entries = self.sparse
        places = torch.zeros(dims, entries, dtype=torch.int64, device=device)
        values = torch.full((entries, *self.shape[dims:]), 0.5, dtype=self.dtype, device=device)
        return torch.sparse_coo_tensor(places, values, self.shape, device=device)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor is of this kind; how many entries a sparse one has is left open."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            return False
        if self.sparse or tensor.is_sparse or memory_of(tensor) is not tensor:
            return bool(self.sparse) == tensor.is_sparse
        if lazy_bits(tensor) != self.lazy:
            return False
        strides = zip(self.shape, self.stride, tensor.stride(), strict=True)
        return not tensor.numel() or all(n <= 1 or own == its for n, own, its in strides)

    def fitting(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor with this layout, or None if its shape or type differs."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            return None
        if self.sparse or tensor.is_sparse:  # the number of entries may differ
            return tensor
        is_same = lazy_bits(tensor) == self.lazy
        is_same &= tensor.stride() == self.stride or tensor.numel() <= 1
        if is_same or memory_of(tensor) is not tensor:
            return tensor
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=tensor.device)
        return read_lazily(made, self.lazy).copy_(tensor)


@dataclass(frozen=True, slots=True)
class Place:
    """Replaces a tensor among the leaves of a result; a tensor may occur several times."""

    number: int


@dataclass(frozen=True, slots=True)
class Given:
    """Replaces an argument among the leaves of a result: Python may ask `y is x`."""

    number: int


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a submodule in the sample's step."""

    path: str
    kind: str  # name of the module's class
    number: int  # of the call, since a module may be called more than once
    structure: Structure  # of (args, kwargs)
    leaves: tuple[Any, ...]  # plain values; None for tensors
    places: tuple[int, ...]  # positions of the tensors among the leaves
    # Positions where a tensor is given once more, and its number: Python may ask `query is key`.
    again: tuple[tuple[int, int], ...]
    own: tuple[tuple[int, str], ...]  # positions of tensors of the submodule, and their paths
    wanting: tuple[bool, ...]  # whether each tensor requires a gradient
    parameters: tuple[str, ...]  # of the whole model that may get a gradient
    grad_mode: bool
    autocast: Region | None
    function: Any = None  # an autograd Function that is called instead of a submodule
    numbers: tuple[int, ...] = ()  # positions of unspecialised numbers among the leaves
    # Attributes, by path and name, in which it leaves new tensors: these are results
    # too.
    left: tuple[tuple[str, str], ...] = ()
    trainable: frozenset[str] = frozenset()  # parameters of the whole model that wanted gradients

    def __str__(self) -> str:
        return f"'{self.path or '(root)'}' ({self.kind})"

    def is_of_kind(self, other: Call) -> bool:
        """Return whether another call differs only in contents of tensors and plain values."""
        return all(getattr(self, name) == getattr(other, name) for name in _ALIKE)

    def like(self, other: Call, *, but_for_numbers: bool = False) -> bool:
        """Return whether another call differs only in contents of tensors."""
        return self.is_of_kind(other) and all(
            (but_for_numbers and place in self.numbers) or same_plain_value(a, b)
            for place, (a, b) in enumerate(zip(self.leaves, other.leaves, strict=True))
        )

    def serves(self, trainable: Collection[str]) -> bool:
        """Whether what was seen of it holds where just these parameters want gradients.

        What had to want one must; what did not may not, since nobody has seen its gradient.
        """
        return self.trainable.issuperset(trainable) and set(self.parameters) <= set(trainable)

    def own_numbers(self) -> tuple[float, ...]:
        """Return the numbers of the sample's call."""
        return tuple(self.leaves[place] for place in self.numbers)

    def arguments(
        self, model: nn.Module, tensors: Sequence[Tensor], numbers: Sequence[float]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with these tensors and numbers, and those of `model` itself."""
        leaves = list(self.leaves)
        for place, value in zip((*self.places, *self.numbers), (*tensors, *numbers), strict=True):
            leaves[place] = value
        for place, number in self.again:
            leaves[place] = tensors[number]
        for place, name in self.own:
            leaves[place] = _tensor_of(model, name)
        args, kwargs = self.structure.unflatten(leaves)
        return args, kwargs


def _tensor_of(model: nn.Module, name: str) -> Tensor | None:
    path, _, own = name.rpartition(".")
    owner = model.get_submodule(path)
    return owner._parameters[own] if own in owner._parameters else owner._buffers[own]


# What calls of one kind share, beside the function and the plain values.
_ALIKE = (
    *("path", "kind", "number", "structure", "places", "again", "own", "numbers", "wanting"),
    *("grad_mode", "autocast", "function"),
)


def same_plain_value(a: Any, b: Any) -> bool:
    """Whether two plain values are the same, also where a user's class fails to compare them."""
    try:
        return a is b or (type(a) is type(b) and repr(a) == repr(b) and bool(a == b))
    except Exception:  # `__eq__` may raise anything
        return False


def run_call(
    call: Call, model: nn.Module, tensors: Sequence[Tensor], numbers: Sequence[float] | None = None
) -> tuple[Any, InnerGraph, list[Tensor], Any]:
    """Run a submodule on new leaves, with these numbers or those of the sample.

    Returns its result, its graph, the input leaves, and its (args, kwargs) afterwards. The result
    includes the attributes in which it leaves new tensors.
    """
    module = model.get_submodule(call.path)
    inputs_at = {storage_id(t): place for place, t in enumerate(tensors)}
    devices = (tensor.device for tensor in (*tensors, *module.parameters()))
    inner = InnerGraph(call.path, next(devices, torch.device("cpu")), inputs=inputs_at)
    with back_to_autograd(), torch.set_grad_enabled(call.grad_mode), autocast_as(call.autocast):
        inputs = []
        for tensor, wants in zip(tensors, call.wanting, strict=True):
            inputs.append(inner.entering(tensor) if wants else tensor.detach())
            if attributes_of(tensor):  # what is written on it
                standing_for(inputs[-1], tensor)
            if not wants:
                inner.ends.append(None)
        with _own_parameters(model, module, call.parameters, inner.refuse_foreign) as parameters:
            inner.ends += [parameters[name] for name in call.parameters]
            given = call.own_numbers() if numbers is None else numbers
            args, kwargs = call.arguments(model, inputs, given)
            with inner.saving(), as_written(inner.in_checkpoint):
                run = module if call.function is None else call.function.apply
                result = run(*args, **kwargs)
            if torch.is_grad_enabled() != call.grad_mode:
                raise sets_by_hand(f"module {call}", "whether gradients are computed")
    if call.left:
        modules = {path: model.get_submodule(path) for path, _ in call.left}
        result = (result, *[vars(modules[path]).get(name) for path, name in call.left])
    return result, inner, inputs, (args, kwargs)


@contextlib.contextmanager
def _own_parameters(
    model: nn.Module, module: nn.Module, names: Sequence[str], hook: Callable[[Tensor | None], None]
) -> Iterator[Mapping[str, Tensor]]:
    """Replace a module's parameters by new leaves on the same memory.

    The leaves get a `hook`. Hooks on the user's parameters are called once, by the step, and not
    here. If the module gives a leaf other memory, its parameter gets it too.
    """
    wanted = {id(model.get_parameter(name)): name for name in names}
    made: dict[str, Any] = {}
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for part in module.modules():
        for own, parameter in part._parameters.items():
            name = wanted.get(id(parameter))
            if parameter is None or name is None:
                continue
            if name not in made:
                if parameter.is_inference():  # the plain forward may give it other memory first
                    raise OpaquePieceError(
                        f"the memory of parameter '{name}' was made under torch.inference_mode().",
                        module_path=name.rpartition(".")[0],
                    )
                # It may have been frozen between a forward and its recomputation.
                made[name] = leaf_of_kind(parameter, parameter.detach()).requires_grad_()
                share_attributes(made[name], parameter)
                made[name].register_hook(hook)
            replaced.append((part._parameters, own, parameter))
            part._parameters[own] = made[name]
    for name in names:
        made.setdefault(name, model.get_parameter(name))
    leaves = {id(parameter): table[own] for table, own, parameter in replaced}
    parameters = {id(table[own]): parameter for table, own, parameter in replaced}
    try:
        _replace_listed(module, leaves)
        yield made
    finally:
        _replace_listed(module, parameters)
        for table, own, parameter in replaced:
            leaf = table[own]
            if leaf is not parameter and leaf.data_ptr() != parameter.data_ptr():
                parameter.data = leaf.detach()
            table[own] = parameter


def _replace_listed(module: nn.Module, others: Mapping[int, Tensor]) -> None:
    """Replace tensors, by id, where attributes list them too, as those of recurrent layers do."""
    for part in module.modules():
        for attribute, value in [*vars(part).items()]:
            if not isinstance(value, (list, tuple, dict)) or attribute in _TABLES:
                continue
            items = value.items() if isinstance(value, dict) else enumerate(value)
            found = {key: others[id(item)] for key, item in items if id(item) in others}
            if not found:
                continue
            if type(value) is tuple:
                vars(part)[attribute] = tuple(others.get(id(item), item) for item in value)
            elif isinstance(value, (list, dict)):
                for key, other in found.items():
                    value[key] = other


def taken_apart(
    call: Call, result: Any, inputs: Sequence[Tensor]
) -> tuple[list[Any], list[Tensor], Structure]:
    """Return (leaves of a result with `Place` for tensors, its tensors, its structure).

    A tensor that a module returns twice is listed once, and one of its `inputs` not at all, for
    which `Given` stands; a Function has a gradient for each.
    """
    leaves, structure = flatten(result)
    if call.function is None:
        given = {id(tensor): Given(number) for number, tensor in enumerate(inputs)}
        leaves = [given.get(id(leaf), leaf) for leaf in leaves]
    tensors: list[Tensor] = []
    known: dict[int, Place] = {}
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            key = id(leaf) if call.function is None else at
            if key not in known:
                known[key] = Place(len(tensors))
                tensors.append(leaf)
            leaves[at] = known[key]
    return leaves, tensors, structure


def changes_arguments(call: Call) -> ChangesArgumentsError:
    """Return the refusal of a call that changes its arguments."""
    return ChangesArgumentsError(
        f"cannot run module {call} whole: it changes its arguments, which others would see.",
        module_path=call.path,
    )
