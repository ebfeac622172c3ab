"""The arguments of one call, flattened once for all later stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.device.chosen import device_of
from rkgb.elements.trees import Structure, UnknownTreeError, flatten
from rkgb.errors import TraceError
from rkgb.torch_api.private.flags import is_cast_anew
from rkgb.torch_api.tensor_facts import placed_parameters, standing_for

_ATTRIBUTE = "~"  # first character of keywords that no forward can have
_ABSENT = object()  # in place of an attribute that a module does not have


def attribute_keyword(path: str, name: str) -> str:
    """Return the keyword for a number that is an attribute of a submodule.

    A sample holds such numbers beside the arguments; the forward does not get the keyword.
    """
    return f"{_ATTRIBUTE}{path}{_ATTRIBUTE}{name}"


def attribute_of(keyword: str) -> tuple[str, str] | None:
    """Return path and name of the attribute of such a keyword; None for a plain keyword.

    Examples:
        >>> attribute_of(attribute_keyword("layer.0", "scale"))
        ('layer.0', 'scale')
    """
    if not keyword.startswith(_ATTRIBUTE):
        return None
    path, _, name = keyword[1:].rpartition(_ATTRIBUTE)
    return path, name


def own_copy(leaf: Any) -> Any:
    """Return a copy of a tensor that a run may write to; any other value unchanged."""
    if not isinstance(leaf, Tensor):
        return leaf
    return standing_for(leaf.detach().clone().requires_grad_(leaf.requires_grad), leaf)


@dataclass(frozen=True)
class Sample:
    """What a module is called with, and the device that the step is on.

    Beside CUDA there may be tensors on the CPU: lengths of packed sequences, time steps, numbers,
    and whatever the forward moves itself.

    The keywords may include attributes of the module that are numbers (`attribute_keyword`).

    Examples:
        >>> sample = Sample.of(nn.Linear(2, 3), torch.ones(4, 2))
        >>> sample.args, sample.device
        ((tensor(...),), device(type='cpu'))
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: tuple[Any, ...]  # of (args, kwargs)
    structure: Structure
    device: torch.device

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Any,
        kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> Sample:
        """Read a sample given as a tensor, a tuple of arguments, or a dict of keywords.

        Raises:
            TraceError: model and sample are on several GPUs, or not on the device asked for; or an
                argument holds tensors in a way that cannot be taken apart.
        """
        args, keywords = bind_inputs(inputs, kwargs)
        try:
            leaves, structure = flatten((args, keywords))
        except UnknownTreeError as error:
            raise TraceError(
                f"cannot read the arguments of {type(model).__name__}: {error}. Pass its tensors "
                "in tuples, lists, dicts or simple objects."
            ) from None
        if any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves):
            raise TraceError(
                f"cannot record {type(model).__name__} on a nested tensor, whose sizes are values. "
                "Pass its rows, or its values and offsets, and make it inside of forward."
            )
        buffers = [(f"buffer '{name}'", buffer) for name, buffer in model.named_buffers()]
        inputs = [(f"argument {k}", leaf) for k, leaf in enumerate(leaves)]
        for what, tensor in (*inputs, *buffers):
            if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
                raise TraceError(
                    f"cannot record {type(model).__name__}: {what} is sparse. Use its indices and "
                    "values, and make the sparse tensor inside of forward."
                )
        place = check_device(model, leaves, device)
        return cls(args, keywords, tuple(leaves), structure, place)

    def with_leaves(self, leaves: tuple[Any, ...]) -> Sample:
        """Return the sample with other leaves."""
        args, kwargs = self.structure.unflatten(leaves)
        return Sample(args, kwargs, leaves, self.structure, self.device)

    def detached(self) -> Sample:
        """Return the sample with each tensor replaced by a new leaf on the same memory.

        A tensor that is given twice remains one object. Autocast treats a new leaf like its tensor.
        """
        made: dict[int, Tensor] = {}

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            key = id(value)
            if key not in made:
                new = value.detach()
                if is_cast_anew(value):
                    with torch.no_grad():
                        new = new.view_as(new)
                made[key] = standing_for(new.requires_grad_(value.requires_grad), value)
            return made[key]

        return self.with_leaves(tuple(map(leaf, self.leaves)))

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments that the forward gets."""
        return {name: v for name, v in self.kwargs.items() if attribute_of(name) is None}

    @property
    def attributes(self) -> dict[str, Any]:
        """The keyword arguments that stand for attributes."""
        return {name: v for name, v in self.kwargs.items() if attribute_of(name) is not None}

    def set_attributes(self, model: nn.Module) -> None:
        """Set the sample's attributes on a module."""
        for keyword, value in self.attributes.items():
            path, name = attribute_of(keyword) or ("", "")
            vars(model.get_submodule(path))[name] = value

    @contextlib.contextmanager
    def keeping_attributes(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Restore afterwards what the models have now in place of the sample's attributes."""
        names = [attribute_of(keyword) or ("", "") for keyword in self.attributes]
        held = [(vars(model.get_submodule(path)), name) for model in models for path, name in names]
        before = [(attributes, name, attributes.get(name, _ABSENT)) for attributes, name in held]
        try:
            yield
        finally:
            for attributes, name, value in before:
                if value is _ABSENT:
                    attributes.pop(name, None)
                else:
                    attributes[name] = value

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


def bind_inputs(
    inputs: Any, kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) for a sample given as a tensor, a tuple of arguments or a dict."""
    keywords = dict(kwargs or {})
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        return (), {**inputs, **keywords}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), keywords
    return (inputs,), keywords


def check_device(
    model: nn.Module, leaves: Sequence[Any], device: torch.device | str | None
) -> torch.device:
    """Return the device that the model and the sample are on: where one is, the GPU.

    Raises:
        TraceError: they are on several, or not on the `device` that was asked for.
        UnsupportedDeviceError: it is neither a CPU nor CUDA.
    """
    found: dict[torch.device, str] = {}
    for name, tensor in [*placed_parameters(model), *model.named_buffers()]:
        found.setdefault(tensor.device, f"'{name}' of the model")
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            found.setdefault(leaf.device, f"tensor {index} of the sample")
    only = counted_device(found)
    device_of(only)  # refuses devices that nothing is known about
    asked = only if device is None else torch.device(device)
    if asked.type != only.type or asked.index not in (None, only.index):
        raise TraceError(
            f"device {asked} was asked for, and the model and sample are on {only}. "
            "Move them with .to(device) first."
        )
    return only


def counted_device(found: Mapping[torch.device, str]) -> torch.device:
    """Return the device whose memory a step is about, of those where something was found.

    Raises:
        TraceError: there are several; it says what was found on each.
    """
    others = [where for where in found if where.type != "cpu"]
    if len(found) < 2 or (len(others) == 1 and others[0].type == "cuda"):
        return others[0] if others else torch.device("cpu")
    places = " and ".join(f"{what} on {where}" for where, what in found.items())
    raise TraceError(
        "a step must be on one device, or on one GPU with tensors on the CPU beside it, and found "
        f"{places}. Move model and sample to one device, a whole model to each GPU (DDP, FSDP2); "
        "or plan what is on each by itself: rockmate.apply(model.part, budget=...)."
    )
