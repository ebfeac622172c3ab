"""Public functions for planning without a module: problems, planners, solvers and the simulator.

problem = rk.plan.problem                              # or Problem.from_json(text)
found = plan(problem, budget_bytes, effort="fast")     # a Plan, or InfeasibleBudgetError
simulate(problem, found.steps, found.moves).peak_bytes # by the exact simulator

Modules with separate plans within one budget, as in `apply_to_blocks`:
options = module_options(problem)                      # of one module
choose(StepMemory(calls, ...), budget_bytes)           # a Choice for all calls, or None
"""

from rockmate.options.module_choice import (
    Choice,
    ModuleCall,
    StepMemory,
    choose,
    peak_of,
    smallest_budget,
)
from rockmate.options.options import BlockOption, Grid
from rockmate.planners.chain import chain_model
from rockmate.planners.module_options import module_options
from rockmate.planners.portfolio import plan
from rockmate.problems.link import Link
from rockmate.problems.problem import Node, Problem, Storage
from rockmate.progress import stopwatch
from rockmate.schedules.baselines import best_segments, no_recomputation
from rockmate.schedules.moves import Move
from rockmate.schedules.plan import Plan, make_plan
from rockmate.schedules.simulate import Timeline, simulate
from rockmate.schedules.steps import Step, Steps
from rockmate.settings import parse_budget
from rockmate.solvers import block_solver, solve_whole
from rockmate.solvers.bound import lower_bound
from rockmate.solvers.ilp import solve_ilp

__all__ = [
    "BlockOption",
    "Choice",
    "Grid",
    "Link",
    "ModuleCall",
    "Move",
    "Node",
    "Plan",
    "Problem",
    "Step",
    "StepMemory",
    "Steps",
    "Storage",
    "Timeline",
    "best_segments",
    "block_solver",
    "chain_model",
    "choose",
    "lower_bound",
    "make_plan",
    "module_options",
    "no_recomputation",
    "parse_budget",
    "peak_of",
    "plan",
    "simulate",
    "smallest_budget",
    "solve_ilp",
    "solve_whole",
    "stopwatch",
]
