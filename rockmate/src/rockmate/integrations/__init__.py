"""A callback for each trainer; a library is imported only if its callback is.

RockmateCallback    Hugging Face `Trainer` and its subclasses, such as TRL's `SFTTrainer`
RockmateArguments   the same from a script's command line, by `HfArgumentParser`
LightningCallback   Lightning's `Trainer`
dynamo.rockmate     `torch.compile(model, backend="rockmate")`, which finds it by its entry point
register_with_accelerate    the same name for accelerate and `TrainingArguments`

Your own loops, timm's and accelerate's need no callback but one line before the loop, and before
`accelerator.prepare`: `rockmate.apply(model, budget="8GB")`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rockmate.integrations.hugging_face import RockmateArguments, RockmateCallback
    from rockmate.integrations.lightning import LightningCallback
    from rockmate.integrations.names import register_with_accelerate

__all__ = ["LightningCallback", "RockmateArguments", "RockmateCallback", "register_with_accelerate"]
_HOMES = {
    "LightningCallback": "lightning",
    "RockmateArguments": "hugging_face",
    "RockmateCallback": "hugging_face",
    "register_with_accelerate": "names",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
