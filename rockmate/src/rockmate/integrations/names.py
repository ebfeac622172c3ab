"""Put the backend of `torch.compile` on accelerate's list of names, which is a closed one."""

from __future__ import annotations

from accelerate.utils import DynamoBackend

_NAME = "ROCKMATE"


def register_with_accelerate() -> None:
    """Let accelerate, and so Hugging Face's `Trainer`, take `"rockmate"` as a backend.

    `ROCKMATE_BUDGET` or `ROCKMATE_MEMORY` in the environment is the amount, because neither hands
    options on.

    Examples:
        >>> register_with_accelerate()
        >>> arguments = TrainingArguments(torch_compile=True, torch_compile_backend="rockmate", ...)
        >>> accelerator = Accelerator(dynamo_backend="rockmate")
    """
    if _NAME not in DynamoBackend.__members__:
        member = str.__new__(DynamoBackend, _NAME)
        member._name_ = member._value_ = _NAME
        DynamoBackend._member_map_[_NAME] = member
        DynamoBackend._value2member_map_[_NAME] = member
        DynamoBackend._member_names_.append(_NAME)
