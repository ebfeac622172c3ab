"""Planners: from a problem and a budget to a plan."""

from rockmate.planners.minimum import minimum_peak
from rockmate.planners.portfolio import EFFORTS, PLANNERS, plan

__all__ = ["EFFORTS", "PLANNERS", "minimum_peak", "plan"]
