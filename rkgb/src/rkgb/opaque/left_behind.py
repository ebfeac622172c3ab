"""Side effects of an opaque call: written parameters, and attributes that hold tensors.

A new tensor in an attribute is a result of the call: the auxiliary loss of a router gets gradients
like a returned tensor, and a running mean takes memory from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.device.rng import RngState
from rkgb.elements.trees import Structure, UnknownTreeError, flatten, holds_tensors
from rkgb.errors import NotRecordedError, SideEffectError
from rkgb.module_state.kept_writes import KeptWrites, ParameterPlaces
from rkgb.module_state.start_of_call import BufferContents, Lent, ModuleState
from rkgb.opaque.call import Call, changes_arguments, run_call, taken_apart
from rkgb.outside.held import OF_MODULE
from rkgb.recording.facts import FactWatch, TensorFacts, refuse_result
from rkgb.torch_api.by_values import noting_calls
from rkgb.torch_api.compiled_code import BRANCHES
from rkgb.torch_api.patches import Patches
from rkgb.torch_api.private.autograd import nodes_from
from rkgb.torch_api.private.flags import without_cast_cache
from rkgb.torch_api.tensor_facts import as_in_a_step, placed_parameters, set_attribute, written_on

_Name = tuple[str, str]  # path of the module, and name of the attribute


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """The observed side effects of a call."""

    written: tuple[str, ...]  # parameters
    moves: bool  # whether one of them gets other memory
    retains: bool  # whether tensors that it makes retain their gradients
    takes_by_values: bool  # whether the workspace of a kernel in it depends on values
    attributes: tuple[_Name, ...] = ()  # in which it leaves new tensors


class Attributes:
    """The attributes of a module and its submodules that hold tensors."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.values: dict[_Name, Any] = {}
        for inner, part in module.named_modules(prefix=path):
            for name, value in vars(part).items():
                if name not in OF_MODULE and not callable(value) and holds_tensors(value):
                    self.values[inner, name] = value
        self._tensors = [t for value in self.values.values() for t in _tensors(value)]

    def new(self, before: Attributes) -> dict[_Name, Structure]:
        """Return the attributes that hold only new tensors, as trees.

        A container that also holds tensors from `before` is no result of the call. Tensors that
        retain their gradients are left out, because these must get them directly.
        """
        known = {id(tensor) for tensor in before._tensors}
        found = {}
        for name, value in self.values.items():
            try:
                leaves, structure = flatten(value)
            except UnknownTreeError:
                continue
            made = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in known]
            if len(made) < len(leaves) or any(t.retains_grad for t in made):
                continue
            if made:
                found[name] = structure
        return found

    def nodes(self, name: _Name) -> set[Any]:
        """Return the autograd nodes that made the tensors in an attribute."""
        return {t.grad_fn for t in _tensors(self.values[name]) if t.grad_fn is not None}

    def goes_back_to(self, name: _Name, nodes: set[Any]) -> bool:
        """Return whether the history of an attribute's tensors contains one of these nodes."""
        return not nodes.isdisjoint(nodes_from([*self.nodes(name)]))


def _tensors(value: Any) -> list[Tensor]:
    try:
        return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
    except UnknownTreeError:
        return []


def left_by(
    call: Call,
    module: nn.Module,
    tensors: Sequence[Tensor],
    twin: nn.Module,
    device: torch.device,
    facts: TensorFacts,
) -> LeftBehind:
    """Run a call and restore the state; return its side effects.

    Raises:
        ChangesArgumentsError: it writes to its arguments, which are restored.
        SideEffectError: it asks a tensor for what only the one that was given can tell.
    """
    stream, state = RngState.save(device), ModuleState(module)
    contents, lent = BufferContents(module), Lent(module)
    own = [(f"argument {place}", tensor) for place, tensor in enumerate(tensors)]
    kept = KeptWrites((*placed_parameters(twin), *own), but=twin.buffers())
    places = ParameterPlaces(twin)
    moved: list[str] = []
    retained: list[None] = []  # an entry for each call
    retain = Tensor.retain_grad

    def retaining(tensor: Tensor) -> None:
        retained.append(None)
        retain(tensor)

    before, left = Attributes(module, call.path), dict[tuple[str, str], Structure]()
    refused = [(torch, name, refuse) for name in BRANCHES if hasattr(torch, name)]
    replaced = [*refused, (Tensor, "retain_grad", retaining)]
    try:
        with (
            as_in_a_step(tensors),  # each run is on others, which stand for them
            kept,
            noting_calls() as called,
            Patches(replaced),
            without_cast_cache(),
            FactWatch(facts, known=False),
        ):
            # On the parameters themselves, to see which of them get other memory.
            bare = replace(call, parameters=())
            try:
                _refuse_other_tensors(bare, twin, tensors)
                first = Attributes(module, call.path)
                left = first.new(before)
                nodes = {name: first.nodes(name) for name in left}
                if left:  # values that grow or are carried over with each call are no results
                    run_call(bare, twin, tensors)
                    now = Attributes(module, call.path)
                    again = now.new(before)
                    left = {
                        name: tree
                        for name, tree in left.items()
                        if again.get(name) == tree and not now.goes_back_to(name, nodes[name])
                    }
            finally:
                moved = places.put_back()
    except NotRecordedError as error:
        raise SideEffectError(
            f"cannot run module {call} whole: it {error.found}. {error.do.capitalize()}.",
            module_path=call.path.rpartition(".")[0],
        ) from error
    except NotImplementedError:  # it may write later
        _refuse_written(call, kept.written, own)
        inside = {id(p) for p in module.parameters()}
        every = placed_parameters(twin)
        inner = tuple(n for n, p in every if id(p) in inside)
        return LeftBehind(inner, bool(moved), bool(retained), bool(called))
    finally:
        lent.end()
        contents.restore()
        state.restore()
        stream.restore()
    _refuse_written(call, kept.written, own)
    written = tuple(dict.fromkeys((*kept.written, *moved)))
    return LeftBehind(written, bool(moved), bool(retained), bool(called), tuple(left))


def _refuse_other_tensors(call: Call, twin: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Run a call; refuse what is written on its tensors, and leaves that it returns.

    Raises:
        ChangesArgumentsError: an attribute of an argument was set.
        NotRecordedError: a result would be another one in a step.
    """
    result, _, inputs, _ = run_call(call, twin, tensors)
    for new, tensor in zip(inputs, tensors, strict=True):
        if set_attribute(written_on(tensor), written_on(new)) is not None:
            raise changes_arguments(call)
    own = {*map(id, (*twin.parameters(), *twin.buffers()))}
    for made in taken_apart(call, result, inputs)[1]:
        if id(made) not in own:
            refuse_result(made)


def _refuse_written(
    call: Call, written: Sequence[str], arguments: Sequence[tuple[str, Tensor]]
) -> None:
    if any(name in written for name, _ in arguments):
        raise changes_arguments(call)


def refuse(*_args: Any, **_kwargs: Any) -> None:
    """Take the place of a function that a trial cannot run."""
    raise NotImplementedError
