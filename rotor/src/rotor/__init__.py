"""Optimal rematerialization of sequential PyTorch networks within a memory budget."""

from rotor import models, strategies
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
from rotor.limit import parse_limit
from rotor.models import densenet, inception, resnet, vgg
from rotor.schedules.chain import Chain, Option, Stage
from rotor.schedules.ops import Backward, ForwardCheckpoint, ForwardEnableGrad, ForwardNoGrad, Op
from rotor.schedules.simulate import MemoryTimeline, Schedule, TimelineRow, simulate
from rotor.solver.table import ScheduleTable, solve, solve_table

__version__ = "3.0.0"

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
    "parse_limit",
    "resnet",
    "simulate",
    "solve",
    "solve_table",
    "strategies",
    "vgg",
]
