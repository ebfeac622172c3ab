"""The public door to planning without a module: problems, planners, solvers and the simulator.

problem = rk.plan.problem                              # or Problem.from_json(text)
found = plan(problem, budget_bytes, effort="fast")     # a Plan, or InfeasibleBudgetError
simulate(problem, found.steps).peak_bytes              # by the exact simulator
"""

from rockmate.options.options import Grid
from rockmate.planners.chain import chain_model
from rockmate.planners.portfolio import plan
from rockmate.problems.problem import Node, Problem, Storage
from rockmate.progress import stopwatch
from rockmate.schedules.baselines import best_segments, no_recomputation
from rockmate.schedules.plan import Plan, make_plan
from rockmate.schedules.simulate import Timeline, simulate
from rockmate.schedules.steps import Step, Steps
from rockmate.settings import parse_budget
from rockmate.solvers import block_solver, solve_whole
from rockmate.solvers.bound import lower_bound
from rockmate.solvers.ilp import solve_ilp

__all__ = [
    "Grid",
    "Node",
    "Plan",
    "Problem",
    "Step",
    "Steps",
    "Storage",
    "Timeline",
    "best_segments",
    "block_solver",
    "chain_model",
    "lower_bound",
    "make_plan",
    "no_recomputation",
    "parse_budget",
    "plan",
    "simulate",
    "solve_ilp",
    "solve_whole",
    "stopwatch",
]
