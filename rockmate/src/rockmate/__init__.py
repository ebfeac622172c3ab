"""Rockmate: train a PyTorch module inside a memory budget, bit for bit as without it."""

from rockmate.errors import (
    BackwardTwiceError,
    BudgetFormatError,
    ChangedTensorError,
    DoubleBackwardError,
    InfeasibleBudgetError,
    InputMismatchError,
    InvalidPlanError,
    RockmateError,
    SelfTestError,
    SolverError,
    SolverUnavailableError,
    UnknownChoiceError,
    UnsupportedModuleError,
)
from rockmate.module import Rockmate
from rockmate.plan import Plan

__version__ = "0.1.0"

CheckpointedModule = Rockmate  # its other published name

__all__ = [
    "BackwardTwiceError",
    "BudgetFormatError",
    "ChangedTensorError",
    "CheckpointedModule",
    "DoubleBackwardError",
    "InfeasibleBudgetError",
    "InputMismatchError",
    "InvalidPlanError",
    "Plan",
    "Rockmate",
    "RockmateError",
    "SelfTestError",
    "SolverError",
    "SolverUnavailableError",
    "UnknownChoiceError",
    "UnsupportedModuleError",
]
