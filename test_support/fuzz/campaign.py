"""Many cases in two processes, until a time or a number of cases is over.

A process that dies or hangs ends one case; another process takes its place.
"""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from fuzz.case import Case
from fuzz.drawing import draw_case
from fuzz.judging import Choice, Verdict, judge
from fuzz.layers import BASES
from fuzz.place import run_on
from fuzz.script import script_of, source_of
from fuzz.shrinking import shrink
from runs.frozen import freeze

MOST_SECONDS = 30.0  # for making a case small; three times as much processor time for an answer
_HANGS_SECONDS = 300.0  # without an answer, and without work or a wish for it


@dataclass
class Found:
    """A wrong verdict: where it was met first, how often, and the smallest case that shows it."""

    verdict: Verdict
    seed: int
    case: Case
    script: str = ""
    count: int = 1

    def __str__(self) -> str:
        with_ = ", ".join(sorted(_needs(self.case))) or "nothing odd"
        return f"{self.count} times, first by seed {self.seed}, with {with_}: {self.verdict}"

    def explains(self, verdict: Verdict, case: Case) -> bool:
        """Whether all that this fault needs is in another case, which ends in the same way."""
        return verdict.kind == self.verdict.kind and _needs(self.case) <= _needs(case)


@dataclass
class Tally:
    """What a search has seen so far."""

    seconds: float = 0.0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)
    found: list[Found] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # cases that plain PyTorch cannot run

    @property
    def cases(self) -> int:
        """How many cases have come to an end."""
        return sum(self.kinds.values())

    def count(self, verdict: Verdict, seed: int) -> bool:
        """Count a verdict; return whether it is wrong and nothing that is known explains it."""
        self.kinds[verdict.kind] += 1
        if verdict.kind == "refused":
            self.refusals[verdict.signature] += 1
        if not verdict.is_wrong:
            return False
        case = draw_case(seed)
        for known in self.found:
            if known.explains(verdict, case):
                known.count += 1
                return False
        return True


def _is_wanted(forms: set[str], without: Collection[str], only: Collection[str]) -> bool:
    return forms.isdisjoint(without) and not (only and forms.isdisjoint(only))


def _needs(case: Case) -> set[str]:
    """Return the forms of a case, but those that are in nearly every one."""
    layers = {layer.form for block in case.network.blocks for layer in block.layers}
    return (layers | {event.form for event in case.events}) - _USUAL


_USUAL = {*BASES.values(), "step", "backward alone"}


def verdict_of(case: Case, name: str = "case.py") -> Verdict:
    """Run one case."""
    choice = Choice(case.budget, case.planner, case.how, case.self_test, case.beside)
    return judge(source_of(case), choice, name)


def found_small(case: Case, verdict: Verdict, seed: int, *, seconds: float = MOST_SECONDS) -> Found:
    """Return the smallest case that ends with a verdict of the same signature."""

    def shows(smaller: Case) -> bool:
        try:
            found = verdict_of(smaller)
        except Exception:  # plain PyTorch cannot run it
            return False
        return found.kind == verdict.kind and found.signature == verdict.signature

    small = shrink(case, shows, seconds=seconds)
    final, again = verdict_of(small), ""
    if not final.is_wrong:
        final, again = verdict, " Another run did not show it."
    return Found(final, seed, small, script_of(small, f"{final}\n\nFound by seed {seed}.{again}"))


def search(
    *,
    seed: int,
    minutes: float | None = None,
    cases: int | None = None,
    processes: int = 2,
    device: str = "cpu",
    without: Collection[str] = (),
    only: Collection[str] = (),
    tell: Callable[[Found], None] = lambda found: None,
) -> Tally:
    """Run the cases of the seeds from `seed` on; what is new is shrunk where it is met.

    Cases with a form of layer or event in `without` are left out: their faults are known. With
    `only`, so are those that have none of these forms.
    """
    tally, begin, next_seed = Tally(), time.monotonic(), seed
    workers = [_Worker(device) for _ in range(processes)]

    def is_over() -> bool:
        late = minutes is not None and time.monotonic() - begin > 60 * minutes
        return late or (cases is not None and next_seed - seed >= cases)

    try:
        while True:
            for worker in workers:
                while not _is_wanted(_needs(draw_case(next_seed)), without, only):
                    next_seed += 1
                if not worker.is_busy and not is_over():
                    worker.give((next_seed, None))
                    next_seed += 1
            busy = [worker for worker in workers if worker.is_busy]
            if not busy:
                break
            for worker in _answered(busy):
                answer, of_seed = worker.take(), worker.task[0]
                if isinstance(answer, str):
                    tally.kinds["broken"] += 1
                    tally.broken.append(f"seed {of_seed}: {answer}")
                elif isinstance(answer, Found):
                    tally.found.append(answer)
                    tell(answer)
                elif tally.count(answer, of_seed):
                    worker.give((of_seed, answer))
    finally:
        for worker in workers:
            worker.end()
    tally.seconds = time.monotonic() - begin
    return tally


# ------------------------------------------------------------------------------- processes


Task = tuple[int, Verdict | None]  # a seed to run, or one to shrink with this verdict
Answer = Verdict | Found | str  # in words where plain PyTorch cannot run the case


class _Worker:
    """A process that answers one question at a time."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.task: Task = (0, None)
        self.is_busy = False
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self._device), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, task: Task) -> None:
        self.task, self.is_busy = task, True
        self.began_processor, _ = self._at_work()
        self.worked, self.worked_until = self.began_processor, time.monotonic()
        self.pipe.send(task)

    @property
    def is_late(self) -> bool:
        """Whether it hangs, or has worked too long: a busy machine makes it slow, and not late."""
        worked, waits_for_processor = self._at_work()
        if waits_for_processor or worked > self.worked:
            self.worked, self.worked_until = worked, time.monotonic()
        hangs = time.monotonic() - self.worked_until > _HANGS_SECONDS
        return hangs or worked - self.began_processor > 3 * MOST_SECONDS

    def _at_work(self) -> tuple[float, bool]:
        """Return the seconds that the process has worked so far, and whether it would if it could.

        Where the system does not say, it has not, and would not.
        """
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return 0.0, False
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "R"

    def take(self) -> Answer:
        """Return the answer; of a process that has died or is late, that it has."""
        self.is_busy = False
        try:
            if self.pipe.poll():
                answer: Answer = self.pipe.recv()
                return answer
            why = "no answer"
        except EOFError:
            why = "the process died"
        self.process.kill()
        self.process.join()
        text = f"{why} (exit code {self.process.exitcode})"
        self._start()
        seed, verdict = self.task
        if verdict is None:
            return Verdict("raw error", "?", text, why)
        case = draw_case(seed)
        return Found(verdict, seed, case, script_of(case, f"{verdict}\n\nSeed {seed}; not shrunk."))

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _answered(busy: list[_Worker]) -> list[_Worker]:
    ready = wait([worker.pipe for worker in busy], timeout=1.0)
    return [worker for worker in busy if worker.pipe in ready or worker.is_late]


def _work(pipe: Connection, device: str) -> None:
    """Answer until the other end is gone."""
    run_on(device)
    for answered in itertools.count():
        try:
            seed, verdict = pipe.recv()
        except EOFError:
            return
        if answered == 1:
            freeze()
        case = draw_case(seed)
        try:
            if verdict is None:
                pipe.send(verdict_of(case, f"case{seed}.py"))
            else:
                pipe.send(found_small(case, verdict, seed))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
