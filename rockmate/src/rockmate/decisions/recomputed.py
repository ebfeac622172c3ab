"""A call of a submodule that keeps only its arguments and is recomputed in its backward.

Autograd's graph is that of the plain call. Saved tensors are dropped; when the first one is needed,
a second run makes them again, also for a backward inside of the forward. That run starts from the
random states, attributes and buffers of the first one, and restores the present ones. Its inputs
must not have changed meanwhile: the versions of parameters, buffers, attributes and arguments are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rkgb import OpaquePieceError
from rkgb.elements import flatten, storage_id
from rkgb.graphs import ambient_autocast, autocast_as
from rkgb.module_state import FirstRun
from rkgb.outside import Readable
from rkgb.recording import transparent_checkpoints
from rkgb.safeguards import without_traces
from rkgb.torch_api import has_saved_hooks
from rockmate.comparison.contents import Contents
from rockmate.errors import ChangedTensorError
from rockmate.runtime.plain import plain

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def run_recomputed(
    view: nn.Module,
    path: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    writes_buffers: bool = False,
    compares: bool = False,
    reads: Iterable[Readable] = (),
) -> Any:
    """Run the forward of `view` so that its backward recomputes it, or plain if that is impossible.

    It is plain too inside of hooks on saved tensors: what they keep is theirs to decide, and a
    checkpoint runs the forward again from the state of that time.

    With `compares`, the backward also compares the contents of what it reads; else only of small
    tensors that are no parameters, and of those that share memory with numpy. The second run finds
    what the Python may read outside of the module as the first one did.
    """
    leaves, structure = flatten((args, dict(kwargs)))
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    usable = all(type(leaf) in _PLAIN for leaf in others) and not has_hooks_inside(view)
    if not usable or has_saved_hooks() or any(t.is_inference() or t.is_sparse for t in tensors):
        return view.forward(*args, **kwargs)
    device = next((t.device for t in (*tensors, *view.parameters())), torch.device("cpu"))
    call = _Call(view, path, structure, leaves, device, writes_buffers, reads)
    if compares:
        call.changed = Contents.kept(call.start.tensors)
    else:
        own = {name: t for name, t in call.start.tensors.items() if not isinstance(t, nn.Parameter)}
        call.changed = Contents.kept_of_few(own)
    with saved_tensors_hooks(call.pack, call.unpack):
        result = view.forward(*args, **kwargs)
    call.is_running = False
    call.made.clear()  # by a backward inside of this forward
    return result


def has_hooks_inside(module: nn.Module) -> bool:
    """Return whether modules inside have hooks, which a second run would call again."""
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks
        for path, part in module.named_modules()
        if path
    )


class _Dropped:
    """Replaces a dropped saved tensor in autograd's graph."""

    __slots__ = ("call", "number")

    def __init__(self, call: _Call, number: int) -> None:
        self.call, self.number = call, number


class _Call:
    """One call, which lives as long as its backward may come."""

    def __init__(
        self,
        view: nn.Module,
        path: str,
        structure: Any,
        leaves: list[Any],
        device: torch.device,
        writes_buffers: bool,
        reads: Iterable[Readable],
    ) -> None:
        self.view, self.path, self.structure, self.leaves = view, path, structure, leaves
        self.autocast = ambient_autocast()
        buffers = [*view.buffers()] if writes_buffers else []
        given = {f"argument {n}": t for n, t in enumerate(leaves) if isinstance(t, Tensor)}
        self.start = FirstRun(view, buffers, reads, given=given, device=device)
        held = (*self.start.tensors.items(), *view.named_buffers())
        self.held = {storage_id(t): name for name, t in reversed(held)}
        self.changed: Callable[[], str] | None = None  # names what has other content
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []  # of the dropped tensors
        self.made: dict[int, tuple[Tensor, int]] = {}
        self.is_running = True

    def pack(self, tensor: Tensor) -> Any:
        """Drop a tensor that autograd saves; arguments and parameters are kept, as they live on."""
        if storage_id(tensor) in self.held:
            return tensor.detach(), tensor._version
        self.kinds.append((tensor.shape, tensor.dtype))
        return _Dropped(self, len(self.kinds) - 1)

    def unpack(self, saved: Any) -> Tensor:
        """Return a saved tensor, recomputed if it was dropped."""
        if not isinstance(saved, _Dropped):
            return self._unchanged(*saved)
        if saved.number not in self.made:
            self._run_again()
        return self._unchanged(*self.made.pop(saved.number))

    def _unchanged(self, tensor: Tensor, version: int) -> Tensor:
        if tensor._version != version:
            inside = f"a tensor of {list(tensor.shape)}"
            self._refuse(self.held.get(storage_id(tensor), inside), "in place")
        return tensor

    def _refuse(self, name: str, how: str) -> NoReturn:
        raise ChangedTensorError(
            f"{name} of '{self.path}', which its backward reads, was changed {how} after its "
            "forward. Change it after backward, or work on a copy (x = x.clone())."
        )

    def _run_again(self) -> None:
        if name := self.start.changed():
            self._refuse(name, "in place")
        if self.changed is not None and (name := self.changed()):
            self._refuse(name, "in a way that PyTorch does not count (through .data or numpy)")
        found: list[tuple[Tensor, int]] = []

        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            kept = tensor.detach(), tensor._version
            if storage_id(tensor) not in self.held:
                found.append(kept)
            return kept

        def unpack(kept: tuple[Tensor, int]) -> Tensor:  # by a backward inside of the forward
            return self._unchanged(*kept)

        args, kwargs = self.structure.unflatten(self.leaves)
        with (
            self.start.as_then(),
            torch.enable_grad(),
            autocast_as(self.autocast),
            plain(),
            transparent_checkpoints(),
            saved_tensors_hooks(pack, unpack),
            without_traces(),
        ):
            self.view.forward(*args, **kwargs)
        kinds = [(t.shape, t.dtype) for t, _ in found]
        if self.is_running:  # so far
            del kinds[len(self.kinds) :]
        if kinds != self.kinds:
            raise OpaquePieceError(
                f"'{self.path}' took another way when it was run again for its backward. It "
                "depends on something that is not restored (a clock, a file, another thread). Make "
                "it depend on its inputs only, or raise the budget.",
                module_path=self.path,
            )
        self.made = dict(enumerate(found))
