"""`apply_to_blocks`: plan every block of a model in place, within one budget for the whole step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rkgb import RkgbError
from rkgb.elements import is_inside_any
from rockmate.arguments import Arguments, Call, called_with, refuse_no_module
from rockmate.blockwise.loss_outside import LossOfBlocks, Within
from rockmate.blockwise.planning import BlockPlanner
from rockmate.blockwise.recorded import RecordedBlocks
from rockmate.blockwise.rehearsal import find_what_changes, largest_first
from rockmate.blockwise.report import BlocksPlan, ChosenBlocks, report_of
from rockmate.blockwise.saved_blocks import as_saved, shared_file, with_file
from rockmate.blockwise.team import Team
from rockmate.errors import (
    ArgumentsError,
    InfeasibleBudgetError,
    PlanMismatchError,
    RockmateError,
    UnsupportedModuleError,
)
from rockmate.files.cache_folder import CacheFolder
from rockmate.files.plan_file import PlanFile
from rockmate.guards.module_watch import without_hooks
from rockmate.guards.sharded import class_name, device_of_parameters, own_class, refuse_engines
from rockmate.in_place import remove
from rockmate.module import Rockmate, dressed, plain_view
from rockmate.progress import Phases
from rockmate.requests.identity import cache_key, facts_of_calls
from rockmate.requests.request import Request
from rockmate.requests.sources import planned_for
from rockmate.runtime.plain import plain
from rockmate.settings import Terms, parse_budget

_log = logging.getLogger("rockmate")
AUTO = "auto"
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NOT_BY_BLOCKS = {"compile": "blocks that inductor has compiled have no options to choose among"}


@dataclass(frozen=True, eq=False)
class ToBlocks(Arguments):
    """What `apply_to_blocks` takes."""

    _: KW_ONLY
    blocks: str | Sequence[str] = AUTO
    in_flight: int = 1
    compare: bool = True
    process_group: Any = None

    def __post_init__(self) -> None:
        """Leave it to `check`: all processes refuse what one of them is given."""

    def check(self, team: Team) -> None:
        """Refuse arguments that cannot be planned by blocks, before anything is run.

        Raises:
            ValueError, UnsupportedModuleError: the text says what, and why.
        """
        super().__post_init__()
        self.check_in_place("rockmate.apply_to_blocks")
        self.refuse("apply_to_blocks", _NOT_BY_BLOCKS)
        if not self.share and team.groups:
            raise ArgumentsError(
                "apply_to_blocks takes no share=False where processes share the model: their "
                "collectives would run in other orders. Leave it out."
            )
        if self.in_flight < 1:
            raise ArgumentsError(
                f"in_flight {self.in_flight} is no number of forwards; give 1 or more."
            )
        for path, module in self.model.named_modules():
            if getattr(module, "gradient_checkpointing", False) is True:
                raise UnsupportedModuleError(
                    f"gradient checkpointing is on in '{path or '(root)'}', which would run "
                    "planned blocks again. Turn it off "
                    "(model.gradient_checkpointing_disable()): the plan decides what is recomputed."
                )


@called_with(ToBlocks)
def apply_to_blocks(given: ToBlocks) -> BlocksPlan:
    """Plan the blocks of `model` in place, each separately, all within one budget.

    A block saves what its option says, and recomputes the rest in its own backward. So code that
    works on modules works as before: hooks on blocks and on the modules around them, `fully_shard`
    on every layer (before or after), stages of a pipeline. The options are chosen together, for the
    least extra time. As in `Rockmate`, the budget limits the whole step of `model`; parameters and
    gradients that FSDP gathers temporarily are included. Code between the blocks runs unchanged.

    Planning runs the whole step several times, in all processes that share the model, and undoes
    its effects. `remove(model)` removes the plans.

    Further keywords are the fields of `Settings`. `opaque` names submodules by their paths in
    `model`; a block among them is not planned.

    Args:
        model: the module, in train mode. It may be sharded by `fully_shard`, on every block.
        sample: as for `Rockmate`; all processes give samples of one kind.
        kwargs: as for `Rockmate`.
        samples: more samples to plan for. Options are chosen for the one with the largest plain
            step; a step of each other one is checked against the budget.
        budget: as for `Rockmate`; a fraction is one of the peak if every block keeps everything.
        memory: as for `Rockmate`, with an `optimizer`.
        optimizer: as for `Rockmate`.
        blocks: "auto" for the outermost layers that repeat in a list or sequence, or a list of
            paths and names of classes. Each block is called once in a step.
        in_flight: number of forwards before the first one's backward, as in pipelines (GPipe: all
            micro-batches; 1F1B: the stages from this one on). All are counted.
        process_group: processes that plan together, if this does not follow from parameters on a
            device mesh.
        plan: path of a file from `save_plan` of a plan of blocks. Then nothing is searched or
            timed, but a step is measured. Only the first process needs the file.
        compare: plan the whole model too, to report the cost of planning by blocks.

    Returns:
        The plan, which can be printed: budget, peaks, extra time, and what each block keeps.

    Example:
        >>> plan = rockmate.apply_to_blocks(model, x, "2GiB")
        >>> for layer in model.layers:
        ...     fully_shard(layer)
        >>> model(x).sum().backward()  # within 2 GiB

    Raises:
        PlanFileError, PlanMismatchError: `plan` is no such file, or is for another model, device or
            version.
        InfeasibleBudgetError: no choice fits; `.minimum_bytes` is the smallest budget that does.
        RockmateError, rkgb.RkgbError: a block cannot be run exactly. The model is not changed.

    If several processes plan together, all raise the same error. Processes that wait in a
    collective raise it when the collective times out.
    """
    model = given.model
    _refuse_model(model)
    name, device = class_name(model), device_of_parameters(model)
    team = Team.of(model, given.process_group)
    with team.together():
        given.check(team)
        calls = given.calls()
    terms = replace(
        given.terms(),
        budget=_PLACEHOLDER,
        whole_step=None,
        reserve=0,
        plan=None,
        progress=False,  # one bar for all
        share=False,  # the processes agree on the options; a block may be planned in a forward
        cache=False,  # the options of a block are no plan
    )
    remove(model)
    with team.together():
        found = _blocks_of(model, given.blocks)
    found = {p: b for p, b in found.items() if not is_inside_any(p, terms.opaque)}
    if not team.groups:  # sharded models count on a backward after each forward
        find_what_changes(model, calls, device)
    calls = largest_first(model, calls, team, device)
    with team.together():
        given, within = _within(given, calls)
    about = tuple(found), given.in_flight, given.compare, team.size
    facts = repr((facts_of_calls(model, *calls), about))
    key = cache_key(facts, model, device, given.terms())
    shared = partial(shared_file, team=team, model=name, device=device)
    planned = partial(_planned, given, terms, team, found, calls, within)
    try:
        return _kept_or_made(given, key, shared, planned, is_first=team.is_first)
    except InfeasibleBudgetError as error:
        if within is None:
            raise
        raise within.memory.refusal(error) from error


def _within(given: ToBlocks, calls: Sequence[Call]) -> tuple[ToBlocks, Within | None]:
    """Return the arguments with a budget; with `memory`, what the most demanding call leaves."""
    whole = given.terms().whole_step
    if whole is None:
        return given, None
    within = Within.of(whole, given.model, calls, given.in_flight)
    budget = within.budget_bytes
    return replace(given, budget=budget, memory=None, optimizer=None, reserve=0), within


def _kept_or_made(
    given: ToBlocks,
    key: str,
    shared: Callable[[Callable[[], PlanFile | None]], PlanFile | None],
    planned: Callable[[PlanFile | None], BlocksPlan],
    *,
    is_first: bool,
) -> BlocksPlan:
    """Plan as a given or cached file says, or else anew; the first process reads and writes."""
    path, folder = given.plan, CacheFolder.chosen(given.cache)
    if path is not None:
        return planned(shared(lambda: PlanFile.load(path, by_blocks=True)))
    kept = shared(lambda: None if folder is None else folder.get(key))
    if kept is not None:
        try:
            return planned(kept)
        except PlanMismatchError as error:
            _log.info("the plan of blocks in the cache is not used: %s", error)
    made = planned(None)
    if folder is not None and is_first and made.file is not None:
        folder.put(key, made.file)
    return made


def _planned(
    given: ToBlocks,
    terms: Terms,
    team: Team,
    found: Mapping[str, nn.Module],
    calls: Sequence[Call],
    within: Within | None,
    file: PlanFile | None,
) -> BlocksPlan:
    """Plan blocks as a file says, or anew, and install the plans."""
    model, saved = given.model, None if file is None else file.blocks
    if saved is not None:
        terms = replace(terms, cost="flops")  # the times are in the file
    if file is not None and file.loss is not None and within and within.awaits_loss:
        within = within.after(file.loss)
        given = replace(given, budget=within.budget_bytes)
    assert given.budget is not None
    amount, fraction = parse_budget(given.budget)
    views = {path: plain_view(block) for path, block in found.items()}
    phases = Phases({"blocks": 2, "free plan": 1}, show=given.progress)
    blocks = RecordedBlocks(
        *(model, views, terms), team=team, in_flight=given.in_flight, saved=saved, note=phases.note
    )
    planner = BlockPlanner(blocks)
    reported = partial(report_of, in_flight=given.in_flight, reserve=given.reserve)
    loss_bytes = within.memory.loss_bytes if within and within.awaits_loss else 0

    def room(keeping_all: int) -> int:
        asked = int(fraction * keeping_all) if fraction is not None else amount
        if saved is not None and fraction is not None:
            asked = saved.budget_bytes  # of the first start
        assert asked is not None
        return asked - given.reserve

    with phases:
        with phases.phase("blocks"):
            chosen = _put_on(found, lambda: planner.plan(calls, room, loss_bytes))
        made = reported(chosen)
        if file is not None and saved is not None:
            made = as_saved(made, file, saved)
        elif given.compare:
            terms = replace(terms, budget=chosen.budget_bytes, self_test=False)
            with phases.phase("free plan"):
                made = _compared(model, calls[0], made, terms)
        else:
            made = replace(made, why_no_free_plan="compare=False")
    if made.file is None:
        made = with_file(made, chosen, model)
    phases.close("planned block by block")
    made = replace(made, seconds=phases.seconds, memory=within.memory if within else None)
    if within is not None and chosen.tested is not None:

        def show(again: ChosenBlocks, now: Within) -> None:
            shown = replace(reported(again), why_no_free_plan="for another budget")
            shown = replace(shown, seconds=made.seconds, memory=now.memory, is_measured=False)
            made.become(with_file(shown, again, model, now.whole.seen))

        LossOfBlocks(within, planner, chosen, show)
    return made


def _put_on(found: Mapping[str, nn.Module], choose: Callable[[], ChosenBlocks]) -> ChosenBlocks:
    """Install the chosen forwards in the blocks; after an error, the blocks are restored."""
    with torch.inference_mode(False), torch.enable_grad():
        for block in found.values():
            dressed(block, _Nothing())  # type: ignore[arg-type]
        try:
            chosen = choose()
        except BaseException:
            for block in found.values():
                remove(block)
            raise
    for path, block in found.items():
        if path in chosen.forwards:
            vars(block)["_rockmate"] = chosen.forwards[path]
        else:  # not called, or not trained
            remove(block)
    return chosen


_PLACEHOLDER = 1  # every block gets its own budget


class _Nothing:
    """The forward of a block before planning."""

    forward = None
    table = None


def _refuse_model(model: nn.Module) -> None:
    refuse_no_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModuleError(
            f"a {type(model).__name__} was given where a torch.nn.Module written in Python is "
            "needed. Put it into the forward of one."
        )
    if isinstance(model, Rockmate):
        raise UnsupportedModuleError(
            f"this {type(model).__name__} is planned as a whole already. Take that off first: "
            "model = rockmate.remove(model)."
        )
    refuse_engines(model)


def _compared(model: nn.Module, call: Call, plan: BlocksPlan, terms: Terms) -> BlocksPlan:
    """Return the plan, with the extra time of a plan of the whole model in the same budget."""
    if plan.in_flight > 1:
        return replace(plan, why_no_free_plan="with forwards in flight there is none")
    if any(own_class(type(module)) is not type(module) for module in model.modules()):
        return replace(plan, why_no_free_plan="a sharded model is not recorded as a whole")
    try:
        with plain(), torch.inference_mode(False), torch.enable_grad():
            bare = without_hooks(model, type(model))
            free = planned_for(Request.of(bare, call, terms)).plan
    except (RockmateError, RkgbError) as error:
        return replace(plan, why_no_free_plan=str(error))
    return replace(plan, free_overhead_ms=free.overhead_ms, why_no_free_plan="")


def _blocks_of(model: nn.Module, asked: str | Sequence[str]) -> Mapping[str, nn.Module]:
    """Return the blocks by their paths.

    `asked` is "auto" for the outermost repeated layers, or paths and names of classes.

    Raises:
        UnsupportedModuleError: there are none, a name is unknown, or one block lies in another.
    """
    if asked == AUTO:
        found = _repeated(model, 2) or _repeated(model, 1)
        if not found:
            raise UnsupportedModuleError(
                f"{type(model).__name__} has no list of layers of one class with modules inside, "
                "so that its blocks must be named: blocks=['encoder.layer1', 'TransformerLayer'] "
                "(paths, or names of classes)."
            )
        return found
    names = [asked] if isinstance(asked, str) else list(asked)
    modules = dict(model.named_modules())
    found = {}
    for name in names:
        of_class = {p: m for p, m in modules.items() if p and class_name(m) == name}
        if name in modules and name:
            of_class[name] = modules[name]
        if not of_class:
            raise UnsupportedModuleError(
                f"{type(model).__name__} has no submodule at the path '{name}', and none of a "
                "class of that name; give paths as model.named_modules() does."
            )
        found.update(of_class)
    for path in found:
        outer = [other for other in found if other != path and path.startswith(f"{other}.")]
        if outer:
            raise UnsupportedModuleError(
                f"the block '{path}' lies inside the block '{outer[0]}'. Name one of the two."
            )
    return {path: module for path, module in modules.items() if path in found}


def _repeated(model: nn.Module, least: int) -> dict[str, nn.Module]:
    """Return layers with submodules whose class occurs at least `least` times in one container.

    A stage of a pipeline may have a single layer, alone in its container.
    """
    found: dict[str, nn.Module] = {}

    def look(path: str, module: nn.Module) -> None:
        children = dict(module.named_children())
        counts = Counter(map(class_name, children.values()))
        for name, child in children.items():
            where = f"{path}.{name}" if path else name
            has_parts = any(True for _ in child.children())
            trains = any(True for _ in child.parameters())
            alike = counts[class_name(child)]
            is_list = isinstance(module, _CONTAINERS)
            is_layer = is_list and alike >= least and (alike > 1 or len(children) == 1)
            if is_layer and has_parts and trains and not isinstance(child, nn.ModuleList):
                found[where] = child
            else:
                look(where, child)

    look("", model)
    return found
