"""Many cases in two processes, until a time or a number of cases is over.

A process that dies or hangs ends one case; another process takes its place.
"""

from __future__ import annotations

import collections
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from fuzz.case import Case
from fuzz.drawing import draw_case
from fuzz.judging import Choice, Verdict, judge
from fuzz.script import script_of, source_of
from fuzz.shrinking import shrink

MOST_SECONDS = 60.0  # for a case, and for making it small


@dataclass
class Found:
    """A wrong verdict: how often, where first, and a short script that shows it."""

    verdict: Verdict
    seed: int
    count: int = 1
    script: str = ""


@dataclass
class Tally:
    """What a search has seen so far."""

    seconds: float = 0.0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)
    found: dict[str, Found] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)  # cases that plain PyTorch cannot run

    @property
    def cases(self) -> int:
        """How many cases have come to an end."""
        return sum(self.kinds.values())


def verdict_of(case: Case, name: str = "case.py") -> Verdict:
    """Run one case."""
    choice = Choice(case.budget, case.planner, case.how, case.self_test)
    return judge(source_of(case), choice, name)


def small_script(case: Case, verdict: Verdict, seed: int, *, seconds: float = MOST_SECONDS) -> str:
    """Return a script of the smallest case that gives a verdict of the same signature."""

    def shows(smaller: Case) -> bool:
        try:
            found = verdict_of(smaller)
        except Exception:
            return False
        return found.kind == verdict.kind and found.signature == verdict.signature

    small = shrink(case, shows, seconds=seconds)
    final = verdict_of(small)
    return script_of(small, f"{final}\n\nFound by seed {seed}.")


def search(
    *,
    seed: int,
    minutes: float | None = None,
    cases: int | None = None,
    processes: int = 2,
    shrinks: bool = True,
    tell: Callable[[Found], None] = lambda found: None,
) -> Tally:
    """Run the cases of the seeds from `seed` on; each signature is shrunk where it is met first."""
    tally, begin, next_seed = Tally(), time.monotonic(), seed
    workers = [_Worker() for _ in range(processes)]

    def is_over() -> bool:
        late = minutes is not None and time.monotonic() - begin > 60 * minutes
        return late or (cases is not None and next_seed - seed >= cases)

    try:
        while True:
            for worker in workers:
                if not worker.is_busy and not is_over():
                    worker.give(("case", next_seed, None))
                    next_seed += 1
            busy = [worker for worker in workers if worker.is_busy]
            if not busy:
                break
            for worker in _answered(busy):
                answer = worker.take()
                found = _counted(tally, answer, worker.task[1])
                if found is None:
                    continue
                if worker.task[0] == "case" and shrinks and answer[0] == "verdict":
                    worker.give(("shrink", found.seed, found.verdict))
                    continue
                tell(found)
    finally:
        for worker in workers:
            worker.end()
    tally.seconds = time.monotonic() - begin
    return tally


def _counted(tally: Tally, answer: tuple[str, Any], seed: int) -> Found | None:
    """Add an answer to the tally; return what it has found, if it is new or its script is."""
    what, value = answer
    if what == "script":
        signature, script = value
        tally.found[signature].script = script
        return tally.found[signature]
    if what == "broken":
        tally.kinds["broken"] += 1
        tally.broken.append(f"seed {seed}: {value}")
        return None
    verdict = value
    tally.kinds[verdict.kind] += 1
    if verdict.kind == "refused":
        tally.refusals[verdict.signature] += 1
    if not verdict.is_wrong:
        return None
    known = tally.found.get(verdict.signature)
    if known is not None:
        known.count += 1
        return None
    tally.found[verdict.signature] = Found(verdict, seed)
    return tally.found[verdict.signature]


# ------------------------------------------------------------------------------- processes


class _Worker:
    """A process that answers one question at a time."""

    def __init__(self) -> None:
        self.task: tuple[str, int, Verdict | None] = ("", 0, None)
        self.is_busy = False
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, task: tuple[str, int, Verdict | None]) -> None:
        self.task, self.is_busy = task, True
        self.limit = time.monotonic() + (3 if task[0] == "shrink" else 1) * MOST_SECONDS
        self.pipe.send(task)

    def take(self) -> tuple[str, Any]:
        """Return the answer; of a process that has died or is late, that it has."""
        self.is_busy = False
        try:
            if self.pipe.poll():
                answer: tuple[str, Any] = self.pipe.recv()
                return answer
            why = f"no answer after {MOST_SECONDS:.0f} s"
        except EOFError:
            why = "the process died"
        self.process.kill()
        self.process.join()
        why += f" (exit code {self.process.exitcode})"
        self._start()
        if self.task[0] == "shrink":
            assert self.task[2] is not None
            return "script", (self.task[2].signature, f"# not shrunk: {why}\n")
        return "died", Verdict("raw error", "?", why, why.split(" (")[0])

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _answered(busy: list[_Worker]) -> list[_Worker]:
    ready = wait([worker.pipe for worker in busy], timeout=1.0)
    now = time.monotonic()
    return [worker for worker in busy if worker.pipe in ready or now > worker.limit]


def _work(pipe: Connection) -> None:
    """Answer until the other end is gone."""
    while True:
        try:
            task, seed, verdict = pipe.recv()
        except EOFError:
            return
        case = draw_case(seed)
        if task == "shrink":
            assert verdict is not None
            pipe.send(("script", (verdict.signature, small_script(case, verdict, seed))))
            continue
        try:
            pipe.send(("verdict", verdict_of(case, f"case{seed}.py")))
        except Exception as error:
            pipe.send(("broken", f"{type(error).__name__}: {error}"))
