"""Record one step of a module: its forward and its backward, operation by operation.

The step is a real one, with eager's own kernels, on the sample's real values. It runs on a copy of
the module whose parameters are new leaves on the same memory, so that nothing of the user's is
touched. What autograd saves is given up at once, and fresh memory of the same shape stands in when
the backward asks for it: kernels do not choose by values, and so a step is recorded whose
activations would not fit. Only small tensors, integers and booleans keep their content, because
indices must be valid.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkgb.basic import (
    BackwardKind,
    BasicGraph,
    HandOver,
    autocast_as,
    bind_inputs,
    check_device,
)
from rkgb.capture.places import Places
from rkgb.capture.recorder import NotRecordedError, ReadsDataError, Recorder
from rkgb.capture.twin import detached_inputs, twin_of
from rkgb.capture.watch import (
    CallWatch,
    no_idle_looks,
    no_reading,
    no_seeding,
    tensors_of,
    transparent_checkpoints,
)
from rkgb.effects import KeptState, Printed, refuse_new_buffers
from rkgb.errors import DataDependentError, RkgbError, SideEffectError, TraceError
from rkgb.op import Ref
from rkgb.refusals import (
    refuse_backward_hooks,
    refuse_compiled_modules,
    refuse_hidden_leaves,
    refuse_lazy_modules,
    where_raised,
)
from rkgb.rng import RngState

# Contents of up to so many elements are kept: scalars that autograd wraps, scales, small tables.
_SMALL = 16
# What depends on data in other people's code, and how their users can avoid it.
_HINTS = {
    "torch/nn/modules/transformer.py": "Say whether the mask is causal: pass is_causal "
    "(tgt_is_causal, src_is_causal, memory_is_causal), so that the mask is not looked at.",
    "torch/nn/modules/batchnorm.py": "Give momentum a number.",
    "masking_utils.py": "Pass the mask with 4 dimensions (batch, 1, length, length), which is not "
    "looked at; decoders also do without looking with attn_implementation='eager'.",
}
_USUAL_HINT = (
    "Use torch.where or torch.cond, pass numbers as arguments, or keep that part outside the "
    "wrapped module."
)
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


def make_B(
    model: nn.Module,
    inputs: Any,
    device: torch.device | str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    kind: BackwardKind | None = None,
) -> BasicGraph:
    """Record `model` on sample `inputs` (a tensor, a tuple of arguments, or a dict of keywords).

    The model is recorded in the mode (train or eval) that it is in, and is not changed. `device`
    is only checked: the model and the inputs must be on it already. See `record` for `kind`.

    Raises:
        TraceError: see `record`; or the devices differ.
    """
    args, keywords = bind_inputs(inputs, kwargs)
    place = check_device(model, (args, keywords), device)
    return record(model, args, keywords, place, kind)


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    kind: BackwardKind | None = None,
) -> BasicGraph:
    """Return the recording of one step of `model(*args, **kwargs)` in the mode the model is in.

    `kind` says how the gradients of the outputs will lie in memory, and in which autocast region
    the backward will run; without it they lie like the outputs, and it runs in none. Buffers,
    attributes, gradients and the random stream are as before afterwards.

    Raises:
        DataDependentError: control flow, a size or a Python number depends on the input's values.
        SideEffectError: the forward prints, draws Python random numbers, or changes attributes.
        TraceError: anything else that stops the recording; the cause is chained.
    """
    refuse_lazy_modules(model)
    refuse_compiled_modules(model)
    refuse_hidden_leaves(model)
    refuse_backward_hooks(model)
    stream = RngState.save(device)
    grad_mode = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(True)
        return _Step(model, args, kwargs, device, keep_content=False).run(kind)
    except ReadsDataError:
        # A backward has looked at a value: with what it really computes it may take its usual way.
        stream.restore()
        return _Step(model, args, kwargs, device, keep_content=True).run(kind)
    finally:
        torch.set_grad_enabled(grad_mode)
        stream.restore()


class _Step:
    """One step on a copy of the module."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device: torch.device,
        *,
        keep_content: bool,
    ) -> None:
        self.model, self.device, self.keep_content = model, device, keep_content
        self.twin = twin_of(model)
        self.args, self.kwargs = detached_inputs((args, dict(kwargs)))
        self.places = Places(self.twin)
        self.recorder = Recorder(type(model).__name__, device, self.places)
        self.leaves: dict[int, str] = {}
        self.hand_overs: list[HandOver] = []
        self.parameters: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        self.inputs: list[str | None] = []
        self._name_externals()

    def run(self, kind: BackwardKind | None) -> BasicGraph:
        printed = Printed(self.twin)
        before = KeptState(self.twin)
        with (
            contextlib.ExitStack() as stack,
            _quiet(),
            contextlib.redirect_stdout(printed),
            no_reading(self.recorder),
            self.recorder,
        ):
            stack.callback(before.restore)  # Python's random numbers, if it is refused
            with self.saving():
                try:
                    result = self._forward()
                except RkgbError:
                    raise
                except Exception as error:
                    raise _explained(self.twin, type(self.model).__name__, error) from error
            printed.refuse()
            outputs, output_spec = pytree.tree_flatten(result)
            del result
            self._refuse_objects(outputs)
            before.refuse_changes(self._call)
            roots = self._roots(outputs)
            names = tuple(self._named(out) for out in outputs)
            root_names = tuple(self.recorder.name_of(root) or "" for root in roots)
            del outputs
            if kind is None:
                kind = BackwardKind(tuple(map(self._usual_strides, roots)))
            tangent_names = self._backward(roots, kind)
        recorder = self.recorder
        wanting = {name: recorder.requires_grad(name) for name in recorder.infos}
        wanting.update(dict.fromkeys(root_names, True))
        return BasicGraph(
            ops=tuple(recorder.forward),
            backward=tuple(recorder.backward),
            hand_overs=tuple(self.hand_overs),
            parameters=self.parameters,
            buffers=self.buffers,
            constants=recorder.constants,
            inputs=tuple(self.inputs),
            input_spec=pytree.tree_flatten((self.args, dict(self.kwargs)))[1],
            outputs=names,
            output_spec=output_spec,
            infos={n: replace(i, requires_grad=wanting[n]) for n, i in recorder.infos.items()},
            roots=root_names,
            kind=kind,
            tangent_names=tangent_names,
            device=self.device,
            model_name=type(self.model).__name__,
        )

    # ------------------------------------------------------------------ names

    def _name_externals(self) -> None:
        add = self.recorder.add_external
        for target, parameter in self.twin.named_parameters(remove_duplicate=False):
            name = add(f"p_{_identifier(target)}", parameter, "parameter")
            self.parameters.setdefault(name, target)
            if parameter.requires_grad:
                self.leaves[id(parameter)] = name
        for target, buffer in self.twin.named_buffers(remove_duplicate=False):
            name = add(f"b_{_identifier(target)}", buffer, "buffer")
            if name not in self.parameters:
                self.buffers.setdefault(name, target)
        for place, leaf in enumerate(pytree.tree_leaves((self.args, dict(self.kwargs)))):
            if not isinstance(leaf, Tensor):
                self.inputs.append(None)
                continue
            # Two inputs may be one object now and two at the next step: each has its own name.
            name = add(f"args_{place}", leaf, "input")
            self.inputs.append(name)
            if leaf.requires_grad:
                self.leaves[id(leaf)] = name

    def _named(self, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        name = self.recorder.name_of(output)
        if name is None:
            name = self.recorder.add_external(f"c_output_{id(output)}", output, "constant")
        return Ref(name)

    # ------------------------------------------------------------------ forward

    def _forward(self) -> Any:
        buffers = dict(self.twin.named_buffers(remove_duplicate=False))
        result = self._call()
        refuse_new_buffers(self.twin, buffers, self._call)
        return result

    def _call(self) -> Any:
        watched, plain = self.places.watching(), transparent_checkpoints()
        with watched, plain, no_idle_looks(), no_seeding(), CallWatch():
            return self.twin(*self.args, **self.kwargs)

    def _refuse_objects(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            if not isinstance(output, (Tensor, *_PLAIN)):
                raise TraceError(
                    f"cannot capture {type(self.model).__name__}: its forward returns an object of "
                    f"type {type(output).__name__}, and a recording cannot make another one with "
                    "the tensors of another step. Return tensors in tuples, lists, dicts or "
                    "dataclasses that torch's pytree knows."
                )

    # ------------------------------------------------------------------ what autograd saves

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While active, what autograd saves is given up; fresh memory stands in for it later."""
        if self.keep_content:
            yield
            return
        recorder = self.recorder

        def pack(tensor: Tensor) -> tuple[str | None, int, Tensor | tuple[Any, ...]]:
            small = tensor.numel() <= _SMALL or not (
                tensor.is_floating_point() or tensor.is_complex()
            )
            name = recorder.name_of(tensor)
            if name is None or small or recorder.is_resident(name) or type(tensor) is not Tensor:
                return name, recorder.count, tensor
            return name, recorder.count, (tensor.size(), tensor.stride(), tensor.dtype)

        def unpack(packed: tuple[str | None, int, Tensor | tuple[Any, ...]]) -> Tensor:
            name, since, content = packed
            if name is not None:  # autograd itself does not look where there are hooks
                recorder.refuse_overwritten(name, since)
            if isinstance(content, Tensor):
                return content
            assert name is not None
            size, stride, dtype = content
            with recorder.paused(), torch.no_grad():
                content = torch.empty_strided(size, stride, dtype=dtype, device=self.device)
                content.fill_(0.5)
            recorder.stand_in(name, content)
            return content

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    # ------------------------------------------------------------------ backward

    def _roots(self, outputs: Sequence[Any]) -> list[Tensor]:
        """Return the outputs that a gradient can flow back from; leaves are handed through."""
        found = [t for t in tensors_of(outputs) if t.requires_grad and t.grad_fn is not None]
        return list({self.recorder.name_of(t): t for t in found}.values())

    def _usual_strides(self, root: Tensor) -> tuple[int, ...]:
        """Return how the gradient lies that an elementwise operation on the output computes."""
        with self.recorder.paused(), torch.no_grad():
            return tuple(torch.empty_like(root, device="meta").stride())

    def _backward(self, roots: list[Tensor], kind: BackwardKind) -> tuple[str | None, ...]:
        recorder = self.recorder
        names: list[str | None] = []
        given: list[Tensor] = []
        for place, (root, strides) in enumerate(zip(roots, kind.tangents, strict=True)):
            if strides is None:
                names.append(None)
                continue
            with recorder.paused(), torch.no_grad():
                content = torch.empty_strided(
                    root.shape, strides, dtype=root.dtype, device=root.device
                )
                (content if 0 not in strides else content.as_strided((), ())).fill_(1)
            names.append(recorder.add_external(f"tangent_{place}", content, "tangent"))
            given.append(content)
        roots[:] = [root for root, name in zip(roots, names, strict=True) if name is not None]
        if roots:
            hooks = self._watch_leaves(roots)
            recorder.in_backward = True
            try:
                with autocast_as(kind.autocast):
                    torch.autograd.backward(roots, given)
            except RkgbError:
                raise
            except Exception as error:
                if not self.keep_content:  # perhaps it has looked at what stands in
                    raise ReadsDataError("what a backward does", recorder.running_node()) from error
                raise _explained(self.twin, type(self.model).__name__, error) from error
            finally:
                recorder.in_backward = False
                for hook in hooks:
                    hook.remove()
        return tuple(names)

    def _watch_leaves(self, roots: Sequence[Tensor]) -> list[Any]:
        """Let each part of a leaf's gradient be noted and dropped where it is made.

        Autograd would add the parts of a leaf that is used more than once; each is handed over by
        itself instead, and autograd adds them at run time, together with those from outside.
        """
        hooks = []
        stack = [root.grad_fn for root in roots]
        seen = set(stack)
        for node in stack:  # grows while it is walked
            edges: dict[int, str] = {}
            for index, (source, _) in enumerate(node.next_functions):  # type: ignore[union-attr]
                if source is None:
                    continue
                variable = getattr(source, "variable", None)
                if variable is not None and id(variable) in self.leaves:
                    edges[index] = self.leaves[id(variable)]
                elif source not in seen:
                    seen.add(source)
                    stack.append(source)
            if edges:
                hooks.append(node.register_hook(self._noting(edges, node._sequence_nr())))  # type: ignore[union-attr]
        return hooks

    def _noting(self, edges: Mapping[int, str], sequence_nr: int) -> Callable[[Any, Any], Any]:
        def note(grad_inputs: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
            for index, leaf in edges.items():
                part = grad_inputs[index]
                if part is None:
                    continue
                value = self.recorder.name_of(part)
                assert value is not None, "a gradient that no operation has made"
                self.hand_overs.append(HandOver(leaf, value, sequence_nr))
            return tuple(None if i in edges else grad for i, grad in enumerate(grad_inputs))

        return note


def _identifier(target: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in target)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _explained(model: nn.Module, name: str, error: Exception) -> TraceError:
    where = where_raised(model, error)
    if isinstance(error, NotRecordedError):
        return SideEffectError(f"cannot capture {name}: its forward {error} (at {where}).")
    if isinstance(error, ReadsDataError):
        place = f"in the backward {error.backward}" if error.backward else f"at {where}"
        hint = next((hint for file, hint in _HINTS.items() if file in where), _USUAL_HINT)
        return DataDependentError(
            f"cannot capture {name}: {error.what} depends on the data, the values of tensors, "
            f"{place}. A recording would freeze it. {hint}"
        )
    text = str(error).strip()
    first = text.splitlines()[0].rstrip(".") if text else "(no message)"
    return TraceError(
        f"cannot capture {name}: its step raised {type(error).__name__} at {where}: {first}."
    )
