"""Try rkgb on many modules and write the table of what works into its README.

$ python -m graphs.breadth                     # everything: minutes; rewrites the table
$ python -m graphs.breadth --only vision       # one group, printed only
$ python -m graphs.breadth --only text --match Bert

Every case is run in train mode on the CPU: the simplified graph must return the module's bits and
leave its random state and buffers, and its nodes, run backward one by one after a recomputation,
must give autograd's gradients bit for bit. `refused` is an error that rkgb raises on purpose;
anything else is `wrong` and a bug.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

import rkgb
from graphs.breadth_cases import GROUPS, BreadthCase
from oracles.gradients import assert_same_gradients, gradients_of_module
from reports.readme import write_part
from rkgb.elements import same_bits
from rkgb.published.check import assert_same_as_module


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one case."""

    case: BreadthCase
    status: Literal["works", "refused", "wrong", "not tried"]
    message: str = ""


def check(case: BreadthCase) -> Finding:
    """Build the graphs of one case and hold them against the module."""
    torch.manual_seed(0)
    try:
        model, args, kwargs = case.build()
    except Exception as error:
        return Finding(case, "not tried", f"building it raises {_named(error)}")
    try:
        bg = rkgb.Btools.make_B(model, args, kwargs=kwargs)
        sg = rkgb.Stools.D_to_S(rkgb.Dtools.B_to_D(bg, model, args, kwargs=kwargs))
    except rkgb.RkgbError as error:
        return Finding(case, "refused", str(error))
    except Exception as error:
        return Finding(case, "wrong", _named(error))
    try:
        reason = _eager_problem(model, args, kwargs)
    except Exception as error:  # eager itself fails: nothing to compare with
        reason = f"eager raises {_named(error)}"
    if reason:
        return Finding(case, "not tried", reason)
    try:
        assert_same_as_module(sg, model, args, kwargs=kwargs)
        assert_same_gradients(sg, model, args, kwargs=kwargs)
    except rkgb.RkgbError as error:
        return Finding(case, "refused", str(error))
    except Exception as error:
        return Finding(case, "wrong", _named(error))
    return Finding(case, "works")


def _eager_problem(model: Any, args: Any, kwargs: Any) -> str:
    """Return why eager cannot serve as the reference, or nothing when it can."""
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
        leaves = pytree.tree_map_only(torch.Tensor, _copy, (args, kwargs))
        results = pytree.tree_leaves(model(*leaves[0], **leaves[1]))
        gradients = gradients_of_module(model, leaves[0], kwargs=leaves[1])
        runs.append([*results, *gradients])
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
    same = all(same_bits(a, b) for a, b in zip(*runs, strict=True))
    return "" if same else "two eager runs of it differ"


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _named(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def run(cases: Iterable[BreadthCase]) -> Iterator[Finding]:
    """Check the cases one after the other and report each as it ends."""
    for case in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = check(case)
        print(f"{outcome.status:9} {case.group:15} {case.name}  {outcome.message}", flush=True)
        yield outcome


def line(outcome: Finding) -> str:
    """Return the row of the table that a case which does not work gets."""
    text = " ".join(outcome.message.replace("|", "\\|").split())
    return f"| {outcome.case.title} | {outcome.status} | {text} |"


def table(outcomes: list[Finding]) -> str:
    """Return the Markdown that goes into the README."""
    stamp = f"Tried with torch {torch.__version__.split('+')[0]}"
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        stamp += f" and transformers {transformers.__version__}"
    lines = [f"{stamp}, CPU, train mode, small configurations; in numbers of cases:", ""]
    lines += ["| group | works | refused | wrong | not tried |", "| --- | --- | --- | --- | --- |"]
    groups = list(dict.fromkeys(o.case.group for o in outcomes))
    for group in groups:
        mine = [o for o in outcomes if o.case.group == group]
        counts = [
            sum(o.status == s for o in mine) for s in ("works", "refused", "wrong", "not tried")
        ]
        lines.append(f"| {group} | {' | '.join(map(str, counts))} |")
    lines += ["", "What works:"]
    for group in groups:
        mine = [o for o in outcomes if o.case.group == group]
        bad = {o.case.title for o in mine if o.status != "works"}
        titles = {o.case.title: o.case.title in bad for o in mine if o.status == "works"}
        shown = "; ".join(f"{title} (partly)" if part else title for title, part in titles.items())
        lines += ["", f"**{group}**: {shown}."]
    rest = [o for o in outcomes if o.status != "works"]
    lines += ["", "What does not work, with the message that rkgb gives:", ""]
    lines += ["| module | | message |", "| --- | --- | --- |"]
    lines += list(dict.fromkeys(line(outcome) for outcome in rest))
    return "\n".join(lines)


def main() -> int:
    """Run what was asked for; rewrite the README only after a run of everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*GROUPS], help="one group, without writing the README")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    # With more threads index_put adds in any order, and plain PyTorch differs from itself.
    torch.set_num_threads(1)
    cases = [
        case
        for group, make in GROUPS.items()
        if options.only in (None, group)
        for case in make()
        if options.match in case.name
    ]
    outcomes = list(run(cases))
    if options.only is None and not options.match:
        write_part("breadth", table(outcomes))
    return int(any(outcome.status == "wrong" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
