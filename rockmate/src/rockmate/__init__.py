"""Rockmate: train a PyTorch module inside a memory budget, bit for bit as without it."""

import gc

_collects = gc.isenabled()
gc.disable()  # each collection walks all objects of torch: a third of the time of this import
try:
    from rockmate.block_by_block import apply_to_blocks
    from rockmate.blockwise.report import BlocksPlan
    from rockmate.errors import (
        ArgumentsError,
        BackwardTwiceError,
        BudgetFormatError,
        ChangedTensorError,
        DoubleBackwardError,
        InfeasibleBudgetError,
        InputMismatchError,
        InvalidPlanError,
        MissingExtraError,
        PlanFileError,
        PlanMismatchError,
        PlanSharingError,
        RockmateError,
        SelfTestError,
        SolverError,
        SolverUnavailableError,
        UnknownChoiceError,
        UnsupportedModuleError,
    )
    from rockmate.estimate import Estimate, LargestBatch, estimate, largest_batch
    from rockmate.in_place import apply, remove
    from rockmate.module import Rockmate
    from rockmate.runtime.plain import plain
    from rockmate.schedules.plan import Plan
    from rockmate.settings import Settings
finally:
    if _collects:
        gc.enable()

__version__ = "3.0.0"

CheckpointedModule = Rockmate  # its other published name

__all__ = [
    "ArgumentsError",
    "BackwardTwiceError",
    "BlocksPlan",
    "BudgetFormatError",
    "ChangedTensorError",
    "CheckpointedModule",
    "DoubleBackwardError",
    "Estimate",
    "InfeasibleBudgetError",
    "InputMismatchError",
    "InvalidPlanError",
    "LargestBatch",
    "MissingExtraError",
    "Plan",
    "PlanFileError",
    "PlanMismatchError",
    "PlanSharingError",
    "Rockmate",
    "RockmateError",
    "SelfTestError",
    "Settings",
    "SolverError",
    "SolverUnavailableError",
    "UnknownChoiceError",
    "UnsupportedModuleError",
    "apply",
    "apply_to_blocks",
    "estimate",
    "largest_batch",
    "plain",
    "remove",
]
