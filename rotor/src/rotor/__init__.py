"""Optimal rematerialization of sequential PyTorch networks within a memory budget."""

from rotor import models, strategies
from rotor.chain import Chain, Option, Stage
from rotor.checkpointable import Checkpointable
from rotor.errors import (
    BackwardError,
    InfeasibleBudgetError,
    InPlaceInputError,
    InvalidChainError,
    InvalidScheduleError,
    MemoryLimitError,
    MemoryLimitFormatError,
    NotMeasuredError,
    NotSequentialError,
    RotorError,
    StageError,
    TableTooLargeError,
)
from rotor.models import densenet, inception, resnet, vgg
from rotor.ops import Backward, ForwardCheckpoint, ForwardEnableGrad, ForwardNoGrad, Op
from rotor.schedule import Schedule
from rotor.simulate import MemoryTimeline, TimelineRow, simulate
from rotor.solver import ScheduleTable, solve, solve_table

__version__ = "0.1.0"

__all__ = [
    "Backward",
    "BackwardError",
    "Chain",
    "Checkpointable",
    "ForwardCheckpoint",
    "ForwardEnableGrad",
    "ForwardNoGrad",
    "InPlaceInputError",
    "InfeasibleBudgetError",
    "InvalidChainError",
    "InvalidScheduleError",
    "MemoryLimitError",
    "MemoryLimitFormatError",
    "MemoryTimeline",
    "NotMeasuredError",
    "NotSequentialError",
    "Op",
    "Option",
    "RotorError",
    "Schedule",
    "ScheduleTable",
    "Stage",
    "StageError",
    "TableTooLargeError",
    "TimelineRow",
    "densenet",
    "inception",
    "models",
    "resnet",
    "simulate",
    "solve",
    "solve_table",
    "strategies",
    "vgg",
]
