"""Records a step in less memory than it takes: within a limit, or without any.

Without memory, tensors have no content, and nothing is computed. Kernels are chosen as for real
tensors on the same device. Reads of values by Python and sizes that depend on data are refused. A
kernel that may draw random numbers is assumed to do so.

In any recording, the content of saved tensors may be given up at once. New memory of the same
layout replaces a saved tensor when the backward needs it. Kernels do not depend on the content. So
a step can be recorded whose activations would not fit. Only small tensors, integers and booleans
keep their content, because indices must be valid.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rkgb.elements.tensor_info import storage_id
from rkgb.errors import RkgbError
from rkgb.graphs.basic import BasicGraph
from rkgb.recording.kernels import tensors_returned
from rkgb.recording.recorder import Recorder
from rkgb.recording.repeated import Blanks, strided_bytes
from rkgb.torch_api.private.modes import ASKS_GEOMETRY, DispatchMode, asks_content, with_content
from rkgb.torch_api.private.tables import pytree

_MOST_BYTES = 64 << 20  # limit of the arguments of a kernel that is called for its results' sizes


class SizeRecorder(Recorder):
    """Records operations on tensors without content."""

    def __init__(
        self, held_bytes: dict[str, int], known: BasicGraph | None, *args: Any, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.held_bytes = held_bytes  # of plain PyTorch after each operation, by its name
        self._known = known  # a recording of the same step
        self._live = LiveStorages()
        self._outside: list[Tensor] = []  # kept alive, so that ids of storages stay unique

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if str(func.__name__).split(".")[0] in ASKS_GEOMETRY:
            return func(*args, **kwargs)
        try:
            result = super().run(func, args, kwargs)
        except Exception as error:
            if not asks_content(error):
                raise
            raise self.reads_data("a number or a size that Python reads") from error
        if not self.is_paused:
            self._weigh(result)
        return result

    def add_external(self, name: str, tensor: Tensor, kind: str) -> str:
        """Name a tensor that exists before the step; its memory is not the step's."""
        self._outside.append(tensor)
        self._live.leave_out(tensor)
        name = super().add_external(name, tensor, kind)
        if kind == "constant":  # only constants have content
            self.known.add(name)
        return name

    def _weigh(self, result: Any) -> None:
        """Store the bytes that are held now: live storages, each once."""
        for tensor in tensors_returned(result)[0] or ():
            if tensor is not None:
                storage = tensor.untyped_storage()
                self._live.count(storage, storage.nbytes())
        ops = self.backward if self.in_backward else self.forward
        if ops:
            held = self._live.now_bytes
            self.held_bytes[ops[-1].name] = max(held, self.held_bytes.get(ops[-1].name, 0))

    def read_content(self, tensor: Tensor, what: str) -> None:
        """Refuse reads of values, except for values made from numbers."""
        if not self.is_paused and not self.knows_value_of(tensor):
            raise self.reads_data(f"control flow or what '{what}' gives")

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        tensors, many = tensors_returned(result)
        kept = [t for t in tensors or () if t is not None and t.dtype is torch.uint8]
        if not many or self.in_backward or all(t.numel() for t in kept):
            return result
        return self._with_real_sizes(func, args, kwargs, result)

    def _with_real_sizes(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """Return the result with the real sizes of tensors that the kernel saves.

        Only the kernel knows these sizes, so it is called once on zeros, if they are small. A known
        recording has them, and a look at a step must not take the memory of a kernel.
        """
        if (sizes := self._known_sizes(func)) is not None:
            return _resized(result, sizes)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if sum(t.numel() * t.element_size() for t in given) > _MOST_BYTES:
            return result

        def real(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            shape, stride = value.shape, value.stride()
            made = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
            return made.zero_()

        with with_content():
            found = func(*pytree.tree_map(real, args), **pytree.tree_map(real, dict(kwargs)))
            sizes = [t.numel() if isinstance(t, Tensor) else 0 for t in found]
        return _resized(result, sizes)

    def _known_sizes(self, func: Any) -> list[int] | None:
        """Return the sizes of this call's results in the known recording, if it has this call."""
        ops = () if self._known is None else (*self._known.ops, *self._known.backward)
        op = ops[self.count] if self.count < len(ops) else None
        if self._known is None or op is None or op.target is not func:
            return None
        infos = self._known.infos
        return [math.prod(infos[name].shape) if name else 0 for name in op.results]

    def _snapshots(self, inputs: Sequence[str], writes: Sequence[str]) -> dict[str, Tensor]:
        return {}  # buffers have no content that could change

    def _has_drawn(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if func.namespace != "aten":
            return False
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        # Attention and dropout draw if their probability is not 0, and in training mode.
        never = given.get("dropout_p", given.get("p", 1.0)) == 0
        return not never and given.get("train", True) is not False


def _resized(result: Any, sizes: Sequence[int]) -> Any:
    """Return the results of a kernel with these sizes for the tensors that only it knows."""
    return type(result)(
        t.new_empty(size)
        if isinstance(t, Tensor) and t.dtype is torch.uint8 and not t.numel()
        else t
        for t, size in zip(result, sizes, strict=True)
    )


class TooLargeError(RkgbError):
    """The next operation would exceed the memory limit of the recording."""


class BoundedRecorder(Recorder):
    """Stays within a memory limit, if operations need the bytes of the known step."""

    def __init__(self, needs_bytes: Sequence[int], most_bytes: int, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self.needs_bytes, self.most_bytes = needs_bytes, most_bytes
        self._most_held = 0  # upper bound of the held bytes
        self._next = 0
        self._to_come = 0, 0  # a place, and the bytes that its operation has not allocated yet

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        place = self.count
        if not self.is_paused and self._next <= place < len(self.needs_bytes):
            self._next = place + 1
            self.claim(self.needs_bytes[place])
            self._to_come = place, self.needs_bytes[place]
        return super().run(func, args, kwargs)

    def claim(self, size_bytes: int) -> None:
        """Count memory that is about to be allocated.

        Raises:
            TooLargeError: it would exceed the limit.
        """
        if self._most_held + size_bytes > self.most_bytes:
            place, to_come = self._to_come
            self._most_held = self.held_bytes() + (to_come if place == self.count else 0)
        if self._most_held + size_bytes > self.most_bytes:
            raise TooLargeError
        self._most_held += size_bytes

    def held_bytes(self) -> int:
        """Return the bytes of all live values of the step; stand-ins count separately."""
        outside = {root for root in self.resident if self.kinds.get(root) != "tangent"}
        living = (root for root in self.names.living() if root not in outside)
        return sum(self.infos[root].counted_bytes for root in living)


class LiveStorages:
    """Counts the bytes of storages from when they are first seen until they are freed."""

    def __init__(self) -> None:
        self.now_bytes = self.peak_bytes = 0
        self._live: dict[int, int] = {}

    def leave_out(self, tensor: Tensor) -> None:
        """Never count the storage of a tensor, which its owner keeps alive."""
        self._live.setdefault(storage_id(tensor), 0)

    def count(self, storage: Any, size_bytes: int) -> None:
        """Count so many bytes for a storage, unless it has been seen before."""
        key = storage._cdata
        if key not in self._live:
            self._live[key] = size_bytes
            self.now_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now_bytes -= self._live.pop(key)


class LiveBytes(LiveStorages, DispatchMode):
    """While active, counts the memory of operations' results, on `meta` in place of a device.

    Results on the `device` itself count as well. Python numbers of tensors without content are 1.
    `now_bytes` are held at present above the `known` storages, and those that come as arguments;
    `peak_bytes` is their maximum.
    """

    is_over = False  # it counts no more, wherever it still is
    only_watches = True
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled."""
        return True

    def __init__(
        self, known: Iterable[Tensor], device: torch.device, block_bytes: Callable[[int], int] = int
    ) -> None:
        LiveStorages.__init__(self)
        DispatchMode.__init__(self)
        self._block_bytes = block_bytes
        self._places = ("meta", device.type)
        for tensor in known:
            self.leave_out(tensor)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.is_over:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0 if args[0].is_floating_point() else 1
        for storage in self._storages((args, kwargs)):
            self.count(storage, 0)  # it was there before
        found = func(*args, **kwargs)
        self.see(found)
        return found

    def see(self, values: Any) -> None:
        """Count the tensors among some values, until they are gone."""
        for storage in self._storages(values):
            self.count(storage, self._block_bytes(storage.nbytes()))

    def _storages(self, values: Any) -> Iterator[Any]:
        for value in pytree.tree_leaves(values):
            is_counted = isinstance(value, Tensor) and value.layout is torch.strided
            if is_counted and value.device.type in self._places:
                yield value.untyped_storage()


# Tensors of at most this many elements keep their content: scalars that autograd wraps, scales,
# tables.
_SMALL = 16


@contextlib.contextmanager
def saving(recorder: Recorder) -> Iterator[None]:
    """While active, saved tensors are given up, and later replaced by new memory."""
    blanks = Blanks() if recorder.repeated is None else recorder.repeated.blanks

    def alone(tensor: Tensor, name: str | None) -> Tensor:
        """Return it without its history, which would keep a recording alive that is given up."""
        if tensor.grad_fn is None or type(tensor) is not Tensor:
            return tensor
        with recorder.paused():
            found = tensor.detach()
        if name is not None:
            recorder.names.bind(name, found, storage_id(found))
        return found

    def pack(tensor: Tensor) -> tuple[str | None, int, Tensor | tuple[Any, ...]]:
        small = tensor.numel() <= _SMALL or not (tensor.is_floating_point() or tensor.is_complex())
        name = recorder.name_of(tensor)
        if name is None or small or recorder.is_resident(name) or type(tensor) is not Tensor:
            return name, recorder.count, alone(tensor, name)
        return name, recorder.count, (tensor.size(), tensor.stride(), tensor.dtype)

    def unpack(packed: tuple[str | None, int, Tensor | tuple[Any, ...]]) -> Tensor:
        name, since, content = packed
        if name is not None:  # with hooks, autograd itself does not check versions
            recorder.refuse_overwritten(name, since)
        if isinstance(content, Tensor):
            return content
        assert name is not None
        size, stride, dtype = content
        recorder.claim(strided_bytes(size, stride, dtype))
        with recorder.paused(), torch.no_grad():
            content = blanks.make(size, stride, dtype, recorder.device)
            if recorder.repeated is None:
                blanks.fill(content)
        recorder.names.stand_in(name, content)
        return content

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
