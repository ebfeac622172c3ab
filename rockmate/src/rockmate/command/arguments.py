"""The arguments of the command line."""

from __future__ import annotations

import argparse

from rockmate.whole_step.optimizers import OPTIMIZERS

_FACTORY = (
    "module:factory, where the factory returns a model and a sample: `def gpt2(): return model, "
    "(ids, targets)`; the module is found from the current folder"
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    whole = argparse.ArgumentParser(
        prog="rockmate", description="Train PyTorch networks inside a memory budget."
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    estimate = commands.add_parser(
        "estimate", help="say what a training step will take, without running it"
    )
    estimate.add_argument("factory", help=_FACTORY)
    estimate.add_argument("--optimizer", default="adamw", choices=list(OPTIMIZERS))
    estimate.add_argument("--device", help="where the step is to run: cpu, cuda:0")
    estimate.add_argument("--points", type=int, default=4, help="budgets on the curve")
    estimate.add_argument(
        "--cost", default="flops", help="flops, or a file of plans or costs whose times count"
    )
    estimate.add_argument(
        "--meta", action="store_true", help="make the model on the device meta, without memory"
    )

    plan = commands.add_parser("plan", help="plan a model, and save the plan")
    plan.add_argument("factory", help=_FACTORY)
    plan.add_argument("budget", help="bytes, text such as 2GiB, or a share such as 50%%")
    plan.add_argument(
        "--memory",
        action="store_true",
        help="the budget is the memory of a whole step, as memory= is (24GB, or: device)",
    )
    plan.add_argument(
        "--optimizer", default="adamw", choices=list(OPTIMIZERS), help="what --memory counts"
    )
    plan.add_argument("--out", help="file to write the plan to")
    plan.add_argument("--effort", default="fast", help="fast, balanced, best")
    plan.add_argument("--cost", default="measured", choices=["measured", "flops"])

    show = commands.add_parser("show", help="print the plans of a file")
    show.add_argument("file", help="file that rk.save_plan wrote")

    report = commands.add_parser("report", help="write a page about a plan, for a browser")
    report.add_argument("file", help="file that rk.save_plan wrote")
    report.add_argument("--out", required=True, help="page to write")

    compare = commands.add_parser("compare", help="say how two plans differ")
    compare.add_argument("first", help="file that rk.save_plan wrote")
    compare.add_argument("second", help="file that rk.save_plan wrote")

    for command in (estimate, plan, show, report, compare):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return whole
