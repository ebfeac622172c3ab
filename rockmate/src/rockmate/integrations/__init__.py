"""A callback for each trainer; a library is imported only if its callback is.

RockmateCallback    Hugging Face `Trainer` and its subclasses, such as TRL's `SFTTrainer`
LightningCallback   Lightning's `Trainer`
dynamo.rockmate     `torch.compile(model, backend="rockmate")`, which finds it by its entry point

Your own loops, timm's and accelerate's need no callback but one line before the loop, and before
`accelerator.prepare`: `rockmate.apply(model, budget="8GB")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rockmate.integrations.hugging_face import RockmateCallback
    from rockmate.integrations.lightning import LightningCallback

__all__ = ["LightningCallback", "RockmateCallback"]


def __getattr__(name: str) -> Any:
    if name == "RockmateCallback":
        from rockmate.integrations.hugging_face import RockmateCallback

        return RockmateCallback
    if name == "LightningCallback":
        from rockmate.integrations.lightning import LightningCallback

        return LightningCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
