"""Refuses calls in a forward that are no operations, and that a recording would lose.

Values are passed to numpy or Python without an operation. Hooks and inner backwards are calls of
autograd, which a recording below it does not see.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from rkgb.errors import NoStepError, NotRecordedError, ReadsDataError
from rkgb.graphs.basic import ambient_autocast
from rkgb.guards.owners import is_users
from rkgb.recording.facts import TensorFacts, name_of_function, running
from rkgb.recording.numbers import NumberTrace
from rkgb.recording.recorder import Recorder
from rkgb.torch_api.compiled_code import BRANCHES, uncompiled
from rkgb.torch_api.patches import Patches
from rkgb.torch_api.private.tables import pytree
from rkgb.torch_api.private_names import called_of

called_of(
    *(torch.autograd, ["backward"], torch.ones((), requires_grad=True, device="cpu").backward),
    "to see a backward inside of a forward",
)
_OLDER_SURROUNDINGS = "_checkpoint_without_reentrant_generator"  # until torch 2.13
_MODES_BY_HAND = (
    *("set_autocast_enabled", "set_autocast_cpu_enabled", "set_autocast_gpu_enabled"),
    *("set_flush_denormal", "set_default_device"),
)
_SEEDING = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state")
_WITHOUT_OPERATION: dict[Any, str] = {
    Tensor.data.__set__: "gives a tensor other memory (tensor.data = ...)",  # type: ignore[attr-defined]
    Tensor.retain_grad: "keeps the gradient of what it computes, which would not come",
}
# Calls that a recording would not repeat, with advice.
_OUTSIDE = "keep that part outside the wrapped module"
_NOT_RECORDED = {
    "register_hook": (
        "registers a hook on a tensor, which would not be called",
        "put the hook on a parameter, outside of forward",
    ),
    "grad": ("calls torch.autograd.grad", _OUTSIDE),
    "backward": ("calls backward", _OUTSIDE),
}
# Functions that take numbers out of their arguments by themselves, and show no operation for that.
# Where they lie: by place, and by name. A recurrent net has them for packed sequences only.
_READ_INSIDE: dict[str, tuple[tuple[int, str], ...]] = {
    **dict.fromkeys(("gru", "lstm", "rnn_tanh", "rnn_relu"), ((1, "batch_sizes"),)),
    "_pack_padded_sequence": ((1, "lengths"),),
    "_pad_packed_sequence": ((1, "batch_sizes"),),
    "ctc_loss": ((2, "input_lengths"), (3, "target_lengths")),
    "tensor_split": ((1, "indices_or_sections"), (1, "tensor_indices_or_sections")),
}
# Torch computes them otherwise while a mode watches operations, and a recording is one: where the
# weights of a loss are summed without those of ignored targets, in a backward that looks for zeros,
# and where the gradient of a filling value is summed.
_OTHERWISE_WATCHED = ("cross_entropy", "cross_entropy_loss", "prod", "masked_fill", "masked_fill_")
# They hand values to Python or to other libraries without any operation.
_READS = ("numpy", "__array__", "tolist", "__dlpack__", "data_ptr")


class CallWatch(TorchFunctionMode):
    """While active, refuses calls that a recording would lose."""

    def __init__(self, recorder: Recorder, facts: TensorFacts) -> None:
        super().__init__()
        self.recorder, self.facts = recorder, facts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = running(func)
        name = name_of_function(func)
        if self.recorder.is_paused:
            return func(*args, **(kwargs or {}))
        if (answer := self.facts.answer(func, args)) is not None:
            return answer[0]
        if func in _WITHOUT_OPERATION:
            raise NotRecordedError(_WITHOUT_OPERATION[func])
        if name in _NOT_RECORDED and getattr(func, "__module__", "").startswith("torch"):
            raise NotRecordedError(*_NOT_RECORDED[name])
        if name == "bilinear" and ambient_autocast() is not None:
            raise NotRecordedError("computes a bilinear form, which autocast casts inside")
        if name in _OTHERWISE_WATCHED and _is_other_watched(name, args, kwargs or {}):
            raise NotRecordedError(
                f"calls {name}, which torch computes otherwise while anything watches it"
            )
        for place, keyword in _READ_INSIDE.get(name, ()):
            given = args[place] if place < len(args) else (kwargs or {}).get(keyword)
            if isinstance(given, Tensor) and not given.is_floating_point():
                self.recorder.read_content(given, name)
        if any(kind.__name__ == "NestedTensor" for kind in types):
            raise NotRecordedError("computes with nested tensors, whose sizes are values")
        if self.recorder.numbers is not None:
            return self._with_numbers(self.recorder.numbers, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _with_numbers(
        self,
        numbers: NumberTrace,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a function of torch with plain numbers, and note them for its operations."""
        found: list[int] = []
        plain_args, plain_kwargs = numbers.plain(tuple(args), found), numbers.plain(kwargs, found)
        if not found:
            return func(*args, **kwargs)
        numbers.check(func, args, kwargs, len(found))
        with self.recorder.taking(found):
            return func(*plain_args, **plain_kwargs)


def _is_other_watched(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call has other last bits where a mode watches it."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if name == "prod":
        return torch.is_grad_enabled() and any(t.requires_grad and t.dim() for t in tensors)
    if name.startswith("masked_fill"):
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors[2:])
    # Scores, targets and weights of classes; the last number is how far targets are smoothed.
    numbers = [value for value in args if isinstance(value, float)]
    smoothing = kwargs.get("label_smoothing", numbers[-1] if numbers else 0.0)
    reduction = kwargs.get("reduction", "mean")
    return len(tensors) > 2 and bool(smoothing) and reduction in ("mean", 1)


def no_reading(recorder: Recorder) -> Patches:
    """While active, reads of values outside torch are refused or guarded, except for constants.

    This is not a mode, because autograd leaves modes while it runs a backward.
    """

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            recorder.read_content(tensor, name)
            return original(tensor, *args, **kwargs)

        return read

    return recorder.patched(
        [(Tensor, name, watched(name, getattr(Tensor, name))) for name in _READS]
    )


def no_backward_inside(recorder: Recorder, roots: Sequence[Tensor]) -> Patches:
    """While active, autograd may run only for `roots`; modes do not see calls of a backward."""

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            # Each mode, such as torch.device(...), calls this again with a tuple of the roots.
            if args and isinstance(args[0], (list, tuple)) and _same_objects(args[0], roots):
                return original(*args, **kwargs)
            raise NotRecordedError("has a backward that calls autograd")

        return refuse

    names = ("backward", "grad")
    return recorder.patched(
        [(torch.autograd, name, refusing(getattr(torch.autograd, name))) for name in names]
    )


def _same_objects(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def refused_calls(recorder: Recorder) -> Patches:
    """While active, refuse calls that seed torch, branch on values, or start threads."""

    def refusing(original: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if recorder.is_paused:
                return original(*args, **kwargs)
            raise type(error)(*error.args)

        return refuse

    seeds = NotRecordedError(
        "sets the state of torch's random numbers, which a recording would not do",
        "seed outside of forward",
    )
    branches = ReadsDataError("control flow", "")
    places: list[tuple[Any, str, BaseException]] = [(torch, name, branches) for name in BRANCHES]
    places += [(p, name, seeds) for p in (torch, torch.random, torch.cuda) for name in _SEEDING]
    places.append((torch, "set_default_dtype", NotRecordedError("sets torch's default dtype")))
    elsewhere = NotRecordedError("hands work to another thread or process, where nothing is seen")
    places += [(kind, name, elsewhere) for kind, name in _ways_to_others()]
    # Each gets its own function, because torch's compiler, if it is loaded later, compares them.
    return recorder.patched(
        [(p, n, refusing(getattr(p, n), error)) for p, n, error in places if hasattr(p, n)]
    )


def refused_modes(name: str) -> Patches:
    """While active, refuse calls of the user's that set what parts that run whole do not leave.

    By hand, autocast also keeps casts from one step to the next, which no part of a step can do.
    """

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if is_users(sys._getframe(2).f_globals.get("__name__")):
                raise sets_by_hand(name, f"torch.{original.__name__}")
            return original(*args, **kwargs)

        return refuse

    found = [n for n in _MODES_BY_HAND if hasattr(torch, n)]
    return Patches([(torch, n, refusing(getattr(torch, n))) for n in found])


def sets_by_hand(name: str, what: str) -> NoStepError:
    """Return the error for a model of this name that sets what no step would set."""
    return NoStepError.to_capture(
        name,
        "use a `with` statement (torch.autocast, torch.no_grad), or set it outside of forward",
        f"its forward sets {what} for all that runs later, which no step would do",
    )


def _ways_to_others() -> Iterator[tuple[type, str]]:
    """Yield the calls that start threads or processes: a recording sees only its own thread."""
    # Not at the top: importing rkgb would load both.
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing.pool import Pool

    yield threading.Thread, "start"
    yield ThreadPoolExecutor, "submit"
    yield ProcessPoolExecutor, "submit"
    yield from ((Pool, name) for name in ("apply_async", "_map_async", "imap", "imap_unordered"))
    yield from ((queue.Queue, name) for name in ("put", "get"))


# Called with whether the checkpoint keeps the random state for its second run.
Around = Callable[[bool], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def as_written(around: Around = contextlib.nullcontext) -> Iterator[None]:
    """While active, the user's code runs as written: without compilation and checkpointing."""
    with uncompiled(), transparent_checkpoints(around):
        yield


@contextlib.contextmanager
def transparent_checkpoints(around: Around = contextlib.nullcontext) -> Iterator[None]:
    """While active, `torch.utils.checkpoint` only calls its function: the plan decides.

    Each call runs in `around(...)`. A reentrant checkpoint without an input that requires a
    gradient gives no gradient, here too.
    """

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        wants = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        with around(preserve), torch.set_grad_enabled(wants and torch.is_grad_enabled()):
            return function(*args)

    # Its first call would load torch's compiler, only to disable it.
    plain = getattr(torch_checkpoint.checkpoint, "__wrapped__", None)
    loads = plain is not None and not hasattr(plain, "__dynamo_disable")
    if loads:
        setattr(plain, "__dynamo_disable", plain)
    try:
        with Patches(
            [
                (torch_checkpoint.CheckpointFunction, "apply", apply),
                (
                    *(torch_checkpoint, _surroundings_of_checkpoints()),
                    functools.partial(_surroundings, around),
                ),
            ]
        ):
            yield
    finally:
        if loads:
            delattr(plain, "__dynamo_disable")


def _surroundings(
    around: Around, _function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Iterator[None]:
    """Stand in for what torch does around the function of a checkpoint."""
    # Torch 2.14 gives it by name, after the function's arguments; older ones give it first.
    with around(kwargs["preserve_rng_state"] if "preserve_rng_state" in kwargs else args[0]):
        yield


@functools.cache
def _surroundings_of_checkpoints() -> str:
    """Return the name of the generator that this torch uses in a checkpoint.

    Raises:
        TraceError: it calls none that is known, or reentrant ones run no Function.
    """
    feature = "to record a step with torch.utils.checkpoint inside"

    def checkpoint(*, reentrant: bool) -> None:
        torch_checkpoint.checkpoint(int, use_reentrant=reentrant)

    called_of(
        *(torch_checkpoint.CheckpointFunction, ["apply"]),
        functools.partial(checkpoint, reentrant=True),
        feature,
    )
    names = ("_checkpoint_without_reentrant_generator_impl", _OLDER_SURROUNDINGS)
    once = functools.partial(checkpoint, reentrant=False)
    nothing = functools.partial(_surroundings, contextlib.nullcontext)
    return called_of(torch_checkpoint, names, once, feature, nothing)


@contextlib.contextmanager
def no_idle_looks() -> Iterator[None]:
    """While active, transformers does not read values only to give a warning."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    name = "warn_if_padding_and_no_attention_mask"
    if getattr(base, name, None) is None:
        yield
        return
    with Patches([(base, name, lambda *_args, **_kwargs: None)]):
        yield


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves of a tree, each object once."""
    leaves = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return list({id(leaf): leaf for leaf in leaves}.values())
