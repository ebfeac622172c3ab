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

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rockmate.integrations.hugging_face import RockmateArguments, RockmateCallback
    from rockmate.integrations.lightning import LightningCallback
    from rockmate.integrations.names import register_with_accelerate

__all__ = [
    "LightningCallback",
    "RockmateArguments",
    "RockmateCallback",
    "register_with_accelerate",
]


def __getattr__(name: str) -> Any:
    if name in ("RockmateArguments", "RockmateCallback"):
        from rockmate.integrations import hugging_face

        return getattr(hugging_face, name)
    if name == "LightningCallback":
        from rockmate.integrations.lightning import LightningCallback

        return LightningCallback
    if name == "register_with_accelerate":
        from rockmate.integrations.names import register_with_accelerate

        return register_with_accelerate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
