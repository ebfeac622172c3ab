"""Planners: from a problem and a budget to a plan."""

from rockmate.planners.effort import EFFORTS
from rockmate.planners.minimum import minimum_peak
from rockmate.planners.portfolio import PLANNERS, plan

__all__ = ["EFFORTS", "PLANNERS", "minimum_peak", "plan"]
