"""Write down every operation of a running step, below autograd, without keeping a tensor alive.

Names hang on live tensor objects by weak references, so what autograd and the user's code free is
freed: the engine then adds gradients in place exactly where it does so without a recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.capture.places import Places
from rkgb.errors import InvalidGraphError, SideEffectError
from rkgb.op import Op, Ref
from rkgb.op_kinds import BATCH_NORMS
from rkgb.rng import RngState
from rkgb.tensor_info import TensorInfo, storage_id
from rkgb.torch_private import current_autograd_node, latest_sequence_nr

_aten = torch.ops.aten
# They return what they get: the same memory, the same geometry.
_IDENTITIES = frozenset((_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default))
# They read no more of their argument than its shape, type and strides. Written down without it, so
# that it need not be alive: (constructor, positions of arguments that remain).
_LIKE = {
    "empty_like": (_aten.empty_strided.default, False),
    "zeros_like": (_aten.zeros.default, False),
    "ones_like": (_aten.ones.default, False),
    "full_like": (_aten.full.default, True),
    "new_empty": (_aten.empty_strided.default, False),
    "new_empty_strided": (_aten.empty_strided.default, False),
    "new_zeros": (_aten.zeros.default, False),
    "new_ones": (_aten.ones.default, False),
    "new_full": (_aten.full.default, True),
}
_DYNAMIC, _RANDOM = torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded
_INDEX = (_aten.index.Tensor, _aten._unsafe_index.Tensor)


class ReadsDataError(Exception):
    """Python or a kernel's size depends on values; `what` does, and in which backward, if any."""

    def __init__(self, what: str, backward: str) -> None:
        super().__init__(what, backward)
        self.what, self.backward = what, backward


class NotRecordedError(Exception):
    """The forward does something that is no operation; the text completes 'its forward …'."""


class Recorder(TorchDispatchMode):
    """While active, appends what runs to `forward` or, once `in_backward`, to `backward`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler, which takes longer than the recording

    def __init__(self, model_name: str, device: torch.device, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model_name, self.device, self.places = model_name, device, places
        self.forward: list[Op] = []
        self.backward: list[Op] = []
        self.infos: dict[str, TensorInfo] = {}
        self.constants: dict[str, Tensor] = {}
        self.in_backward = False
        self._paused = False
        self._names: dict[int, str] = {}
        self._watch: dict[int, weakref.ref[Tensor]] = {}
        self._by_storage: dict[int, dict[int, weakref.ref[Tensor]]] = {}
        self._kinds: dict[str, str] = {}  # 'parameter', 'input', 'buffer' of externals
        self._buffers: dict[str, Tensor] = {}
        self._resident: set[str] = set()  # roots that exist before the step
        self._known: set[str] = set()  # values made from numbers and constants alone
        self._taken: dict[str, int] = {}
        self._wanting: set[str] = set()  # values that were seen to require a gradient
        self._written: dict[
            str, list[tuple[int, str]]
        ] = {}  # storage -> (operation, what it wrote)
        self._random = RngState.save(device)

    # ------------------------------------------------------------------ names

    def add_external(self, name: str, tensor: Tensor, kind: str) -> str:
        """Name a tensor that exists before the step; the caller keeps it alive."""
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        self._taken[name] = 1
        storage = tensor.untyped_storage()
        root = self._alias_of(storage._cdata) or name
        self._define(name, tensor, storage, root)
        self._kinds[name] = kind
        self._resident.add(root)
        if kind == "buffer":
            self._buffers[name] = tensor
        elif kind == "constant":
            self.constants[name] = tensor
            self._known.add(name)
        return name

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor, or of one that is equal to it in memory and geometry."""
        name = self._names.get(id(tensor))
        if name is not None:
            return name
        for key, reference in self._by_storage.get(storage_id(tensor), {}).items():
            other = reference()
            if other is not None and _geometry(other) == _geometry(tensor):
                name = self._names[key]
                self._bind(name, tensor, storage_id(tensor))
                return name
        return None

    def stand_in(self, name: str, tensor: Tensor) -> None:
        """Let `tensor` go by the name of a value whose content has been given up."""
        self._bind(name, tensor, storage_id(tensor))

    def is_resident(self, name: str) -> bool:
        """Whether the value lies in memory that exists before the step."""
        return self.infos[name].alias_of in self._resident

    def requires_grad(self, name: str) -> bool:
        """Whether a gradient was seen to flow to the value."""
        return name in self._wanting

    @property
    def count(self) -> int:
        """How many operations have run."""
        return len(self.forward) + len(self.backward)

    def refuse_overwritten(self, name: str, since: int) -> None:
        """Refuse to hand a saved value to a backward if its memory was written to since.

        Raises:
            InvalidGraphError: it was.
        """
        for place, written in self._written.get(self.infos[name].alias_of, ()):
            if place < since or not self._overlap(name, written):
                continue
            op = (*self.forward, *self.backward)[place]
            raise InvalidGraphError(
                f"cannot capture {self.model_name}: '{op.target_name}' "
                f"({op.module_path or 'root'}, {op.source}) overwrites a tensor that the backward "
                "needs; eager PyTorch refuses this backward too. Replace the in-place operation."
            )

    def _overlap(self, first: str, second: str) -> bool:
        """Whether two values of one storage have an element in common (parts of a split do not)."""
        a, b = self.infos[first], self.infos[second]
        with self.paused(), torch.no_grad():
            elements = torch.zeros(a.storage_bytes // a.dtype.itemsize, dtype=torch.bool)
            elements.as_strided(a.shape, a.stride, a.offset).fill_(True)
            return a.dtype != b.dtype or bool(
                elements.as_strided(b.shape, b.stride, b.offset).any()
            )

    def _fresh(self, base: str) -> str:
        count = self._taken.get(base, 0)
        self._taken[base] = count + 1
        name = f"{base}_{count}" if count else base
        return name if not count or name not in self.infos else self._fresh(base)

    def _define(self, name: str, tensor: Tensor, storage: Any, root: str) -> None:
        self.infos[name] = TensorInfo.of(tensor, root, storage.nbytes())
        self._bind(name, tensor, storage._cdata)

    def _bind(self, name: str, tensor: Tensor, storage: int) -> None:
        key = id(tensor)
        names, watch, table = self._names, self._watch, self._by_storage

        def forget(reference: weakref.ref[Tensor]) -> None:
            if watch.get(key) is reference:
                del watch[key]
                names.pop(key, None)
            group = table.get(storage)
            if group is not None and group.get(key) is reference:
                del group[key]
                if not group:
                    del table[storage]

        names[key] = name
        reference = weakref.ref(tensor, forget)
        watch[key] = reference
        group = table.get(storage)
        if group is None:
            table[storage] = {key: reference}
        else:
            group[key] = reference

    def _alias_of(self, storage: int) -> str | None:
        for key, reference in self._by_storage.get(storage, {}).items():
            if reference() is not None:
                return self.infos[self._names[key]].alias_of
        return None

    # ------------------------------------------------------------------ operations

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While active, operations run unrecorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        traits = _TRAITS.get(func)
        if traits is None:
            traits = _TRAITS[func] = _Traits.of(func)
        if func in _IDENTITIES:
            result = func(*args, **kwargs)
            self._bind(self._name_argument(args[0]), result, storage_id(result))
            return result
        inputs: list[str] = []
        named_args = self._named(args, inputs)
        named_kwargs = self._named(kwargs, inputs)
        known = self._known.issuperset(inputs)
        if traits.is_dynamic and not known:
            self._refuse_dynamic(func, args)
        writes = self._declared_writes(traits, named_args, named_kwargs)
        if writes:
            for name in writes:
                self._written.setdefault(self.infos[name].alias_of, []).append((self.count, name))
        if traits.name in BATCH_NORMS and named_args[5] is True:  # unseen by autograd too
            writes += tuple(v.name for v in named_args[3:5] if isinstance(v, Ref))
        if writes:
            self._refuse_writes(traits.name, writes)
        old = self._snapshots(inputs, writes)
        result = func(*args, **kwargs)
        tensors, many = _tensors(result)
        if tensors is None:
            if known:  # a number made from numbers: no operation of the step
                return result
            raise ReadsDataError("control flow or a Python number", self.running_node())
        is_random = traits.may_be_random and self._moved()
        writes += tuple(n for n, copy in old.items() if not self._unchanged(n, copy))
        results = self._results(traits.name, tensors, bool(inputs))
        if writes:
            self._known.difference_update(writes)
        elif known and not is_random:
            self._known.update(filter(None, results))
        node = current_autograd_node() if self.in_backward else None
        path, source = ("", "") if self.in_backward else self.places.here()
        target: Any = func
        if traits.like is not None and tensors[0] is not None and "out" not in kwargs:
            target, named_args, named_kwargs = _without_shape_reads(
                func, traits.like, named_args, named_kwargs, tensors[0]
            )
        made = Op(
            name=next(filter(None, results), None) or self._fresh(traits.name),
            target=target,
            args=named_args,
            kwargs=named_kwargs,
            results=results,
            returns_many=many,
            module_path=path,
            source=source,
            sequence_nr=latest_sequence_nr() if node is None else int(node._sequence_nr()),
            is_random=is_random,
            writes=writes,
        )
        (self.backward if self.in_backward else self.forward).append(made)
        return result

    def _results(self, base: str, tensors: list[Tensor | None], may_alias: bool) -> tuple[str, ...]:
        results = []
        for tensor in tensors:
            if tensor is None:
                results.append("")
                continue
            name = self._fresh(base)
            storage = tensor.untyped_storage()
            root = self._alias_of(storage._cdata) if may_alias else None
            self._define(name, tensor, storage, root or name)
            results.append(name)
        return tuple(results)

    def _named(self, tree: Any, inputs: list[str]) -> Any:
        if isinstance(tree, Tensor):
            name = self._name_argument(tree)
            inputs.append(name)
            return Ref(name)
        kind = type(tree)
        if kind is tuple:
            return tuple([self._named(value, inputs) for value in tree])
        if kind is list:
            return [self._named(value, inputs) for value in tree]
        if kind is dict:
            return {key: self._named(value, inputs) for key, value in tree.items()}
        return _without_generator(tree) if kind is torch.Generator else tree

    def _name_argument(self, tensor: Tensor) -> str:
        name = self.name_of(tensor)
        if name is None:
            root = self._alias_of(storage_id(tensor))
            if root is not None and root not in self._resident:
                raise NotRecordedError(
                    f"looks at the memory of '{root}' in a way that no operation shows. Use a view "
                    "made by torch's operations"
                )
            name = self.add_external(self._fresh("c_constant"), tensor, "constant")
        if tensor.requires_grad:
            self._wanting.add(name)
        return name

    def _declared_writes(
        self, traits: _Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str, ...]:
        written: list[str] = []
        for position, name in traits.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            values = value if isinstance(value, (list, tuple)) else [value]
            written += [v.name for v in values if isinstance(v, Ref)]
        return tuple(dict.fromkeys(written))

    # ------------------------------------------------------------------ what cannot be seen

    def _snapshots(self, inputs: Sequence[str], writes: Sequence[str]) -> dict[str, Tensor]:
        # A custom kernel may write to buffers although its schema does not say so.
        if self.in_backward or self._buffers.keys().isdisjoint(inputs):
            return {}
        names = [n for n in inputs if n in self._buffers and n not in writes]
        with self.paused(), torch.no_grad():
            return {name: self._buffers[name].clone() for name in names}

    def _unchanged(self, name: str, copy: Tensor) -> bool:
        with self.paused(), torch.no_grad():
            now = self._buffers[name]
            return bool(torch.equal(now, copy) or ((now == copy) | (now != now)).all())

    def _moved(self) -> bool:
        with self.paused():
            now = RngState.save(self.device)
            moved = not now.equals(self._random)
        self._random = now
        return moved

    # ------------------------------------------------------------------ refusals

    def knows_value_of(self, tensor: Tensor) -> bool:
        """Whether the value of the tensor comes from numbers and constants alone."""
        name = self.name_of(tensor)
        return name is None or name in self._known

    def _refuse_dynamic(self, func: Any, args: tuple[Any, ...]) -> None:
        if func in _INDEX and not any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            return
        raise ReadsDataError(f"the size of what '{func}' returns", self.running_node())

    def _refuse_writes(self, what_writes: str, writes: Sequence[str]) -> None:
        for name in writes:
            root = self.infos[name].alias_of
            kind = self._kinds.get(root, "")
            # What autograd makes unseen in a backward is a constant too.
            kept = (
                ("parameter", "input") if self.in_backward else ("parameter", "input", "constant")
            )
            if kind in kept:
                what = "input" if kind == "input" else "parameter or constant"
                path, source = self.places.here()
                raise SideEffectError(
                    f"cannot place '{what_writes}' ({path or 'root'}, {source}): it overwrites "
                    f"the {what} '{root}' of {self.model_name}, which a second run of it would see "
                    "changed. Work on a copy: x = x.clone()."
                )

    def running_node(self) -> str:
        """Return in words which autograd node runs, and for which line of the forward, if any."""
        node = current_autograd_node() if self.in_backward else None
        if node is None:
            return ""
        number = int(node._sequence_nr())
        made = next((op for op in self.forward if op.sequence_nr == number), None)
        place = f" of module '{made.module_path or '(root)'}' ({made.source})" if made else ""
        return f"'{node.name()}'{place}"


def _without_generator(generator: torch.Generator) -> None:
    here: Any = generator  # each call wraps it anew
    own: Any = (torch.default_generator, *torch.cuda.default_generators)
    if here._cdata not in [other._cdata for other in own]:
        raise NotRecordedError(
            "draws random numbers from a torch.Generator of its own, whose state a recording "
            "would not follow. Draw without one, from torch's"
        )


def _without_shape_reads(
    func: Any,
    rule: tuple[Any, bool],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    made: Tensor,
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    target, takes_value = rule
    strided = target is _aten.empty_strided.default
    if not strided and not made.is_contiguous():
        return func, args, kwargs
    new: tuple[Any, ...] = (list(made.shape),)
    if strided:
        new += (list(made.stride()),)
    if takes_value:
        new += (args[-1] if len(args) > 1 else kwargs["fill_value"],)
    return target, new, {"dtype": made.dtype, "device": made.device}


@dataclass(frozen=True, slots=True)
class _Traits:
    """What a kernel's declaration says, read once."""

    name: str
    is_dynamic: bool  # sizes of results depend on values
    may_be_random: bool
    written: tuple[tuple[int, str], ...]  # arguments that it overwrites: position and name
    like: tuple[Any, bool] | None

    @classmethod
    def of(cls, func: Any) -> _Traits:
        tags = func.tags
        name = str(func.__name__).split(".")[0]
        return cls(
            name=name,
            is_dynamic=_DYNAMIC in tags,
            may_be_random=_RANDOM in tags or func.namespace != "aten",
            written=tuple(
                (position, argument.name)
                for position, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ),
            like=_LIKE.get(name) if func.namespace == "aten" else None,
        )


_TRAITS: dict[Any, _Traits] = {}


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _tensors(result: Any) -> tuple[list[Tensor | None] | None, bool]:
    """Return the tensors that an operation returned, None if something else, and whether many."""
    if isinstance(result, Tensor):
        return [result], False
    if result is None:
        return [], False
    if isinstance(result, (tuple, list)) and all(
        isinstance(t, Tensor) or t is None for t in result
    ):
        return list(result), True
    return None, False
