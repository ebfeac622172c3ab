"""Copies in unusual steps: nothing is left behind, nothing waits for ever, and errors are ours."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import multiprocessing
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_cuda.device import fake_cuda
from fake_cuda.queues import FakeQueues
from rkgb.copies import PAGE_BYTES, Copies, Disk, Host, Pinned, copies_for
from rkgb.copies.disk import FileBlock
from rkgb.copies.pinned import PinnedBlock
from rkgb.device.queues import CopyQueues
from rkgb.errors import CopyError, InvalidGraphError, UnsupportedDeviceError
from rkgb.run.program.lowering import lower_step
from runs.moves import Layers, MovingStep, SlowHost, moves_to_the_backward

PLACES = ("host", "disk", "pinned")


def copies_to(place: str, folder: Path) -> Copies:
    draw = random.Random(3)
    if place == "pinned":
        return Pinned(FakeQueues(lambda: draw.random() / 1e3))
    return SlowHost(draw) if place == "host" else Disk(folder)


def moving(copies: Copies) -> MovingStep:
    step = MovingStep(Layers(3), torch.randn(32, 16))
    moves = moves_to_the_backward(step.graph, step.steps)
    step.compile(lower_step(step.graph, step.steps, moves=moves), copies)
    return step


_PLAIN: weakref.WeakKeyDictionary[MovingStep, MovingStep] = weakref.WeakKeyDictionary()


def expected(step: MovingStep) -> list[Tensor]:
    plain = _PLAIN.get(step)
    if plain is None:
        plain = _PLAIN[step] = MovingStep(step.model, step.x)
        plain.compile(lower_step(plain.graph, plain.steps), Host())
    plain.x = step.x
    return plain.gradients(plain.forward()[1])


def assert_right(step: MovingStep, saved: list[Any]) -> None:
    assert all(map(torch.equal, step.gradients(saved), expected(step)))


def open_files() -> int:
    """Return how many files are open, or 0 where the system does not say."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def idle_blocks(copies: Copies) -> int:
    """Return how many blocks wait for a step, once the workers have done what they were given."""
    for _, worker in getattr(copies, "_workers", {}).values():
        worker.submit(int).result()
    gc.collect()
    return len(copies._idle)


@pytest.mark.parametrize("place", PLACES)
def test_forwards_before_a_backward_have_arenas_of_their_own(place: str, tmp_path: Path) -> None:
    copies = copies_to(place, tmp_path)
    step = moving(copies)
    saved = []
    for _ in range(3):
        step.x = torch.randn(32, 16)
        saved.append((step.x, step.forward()[1]))
    for x, kept in (saved[1], saved[0], saved[2]):
        step.x = x
        assert_right(step, kept)
    del kept
    saved.clear()
    assert idle_blocks(copies) == 3
    for _ in range(3):  # and the next steps take those
        assert_right(step, step.forward()[1])
    assert idle_blocks(copies) == 3


@pytest.mark.parametrize("place", PLACES)
def test_a_second_backward_moves_what_its_forward_made(place: str, tmp_path: Path) -> None:
    step = moving(copies_to(place, tmp_path))
    assert_right(step, step.forward()[1])
    outputs, saved = step.forward(again=True)
    assert not outputs
    assert_right(step, saved)


@pytest.mark.parametrize("place", PLACES)
def test_a_forward_without_a_backward_gives_its_arena_back(place: str, tmp_path: Path) -> None:
    copies = copies_to(place, tmp_path)
    step = moving(copies)
    for _ in range(3):
        step.forward()
        assert idle_blocks(copies) == 1
    assert_right(step, step.forward()[1])


@pytest.mark.parametrize("place", PLACES)
def test_a_backward_that_stops_in_the_middle_leaves_nothing(place: str, tmp_path: Path) -> None:
    copies = copies_to(place, tmp_path)
    step = moving(copies)
    outputs, saved = step.forward()
    kept = [weakref.ref(t) for t in saved if isinstance(t, Tensor) and t.shape == step.x.shape]
    running = step.backward(saved, torch.ones_like(step.x))
    next(running)
    outputs.clear()
    with pytest.raises(ZeroDivisionError):
        running.throw(ZeroDivisionError())
    del running
    assert idle_blocks(copies) == 1
    assert [ref() is step.x for ref in kept if ref() is not None] == [True]
    assert_right(step, step.forward()[1])


def test_what_is_copied_lives_until_the_copy_has_ended() -> None:
    """Nobody but the copy holds the storage any more."""
    begin = threading.Event()

    class Late(Host):
        def _run(self, direction: str, held: list[object], offset: int) -> None:
            begin.wait()
            super()._run(direction, held, offset)

    copies = Late()
    arena = copies.arena(PAGE_BYTES)
    source = torch.full((PAGE_BYTES,), 7, dtype=torch.uint8)
    alive = weakref.ref(source.untyped_storage())
    moved = arena.out(source, 0, PAGE_BYTES)
    block: Any = arena.block
    del source, moved, arena
    assert alive() is not None
    assert not copies._idle
    begin.set()
    assert idle_blocks(copies) == 1
    assert bytes(block.pages) == bytes([7]) * PAGE_BYTES
    assert alive() is None


def test_the_memory_of_views_comes_back_with_their_storage() -> None:
    base = torch.arange(64.0)
    views = base[3:9], base.view(8, 8).t(), base
    before = [view.clone() for view in views]
    moved = Host().arena(PAGE_BYTES).out(views[0], 0, 256)
    moved.leave()
    assert base.untyped_storage().nbytes() == 0
    for _ in range(2):  # the second time without a copy out
        moved.back()
        moved.arrive()
        assert all(map(torch.equal, views, before))
        moved.leave()


def test_other_storages_than_planned_are_refused() -> None:
    arena = Host().arena(PAGE_BYTES)
    with pytest.raises(InvalidGraphError, match="found one of 32 bytes"):
        arena.out(torch.zeros(8), 0, 64)
    owned = torch.frombuffer(bytearray(64), dtype=torch.float32)
    with pytest.raises(InvalidGraphError, match="that it cannot"):
        arena.out(owned, 0, 64)


def test_a_larger_arena_serves_smaller_steps_and_a_smaller_one_goes() -> None:
    copies = Host()
    for pages, idle in ((1, 1), (3, 3), (2, 3), (4, 4)):
        arena = copies.arena(pages * PAGE_BYTES)
        del arena
        assert [block.size_bytes for block in copies._idle] == [idle * PAGE_BYTES]


def test_within_a_limit_no_step_takes_more_than_it_asks_for() -> None:
    """A smaller step would take the larger one's block, for which another one were made then."""
    copies = Host()
    copies.is_limited = True
    for pages in ((1, 3), (3, 1), (1, 3), (1, 2)):
        arenas = [copies.arena(count * PAGE_BYTES) for count in pages]
        held = [block.size_bytes for block in (*copies._idle, *(a.block for a in arenas))]
        assert sum(held) == sum(pages) * PAGE_BYTES
        del arenas


@pytest.mark.parametrize("place", PLACES)
def test_no_thread_and_no_file_is_left(place: str, tmp_path: Path) -> None:
    gc.collect()
    before, files = {*threading.enumerate()}, open_files()
    copies: Copies | None = copies_to(place, tmp_path)
    assert copies is not None
    step: MovingStep | None = moving(copies)
    assert step is not None
    assert_right(step, step.forward()[1])
    ours = {*threading.enumerate()} - before
    assert len(ours) == 2
    copies = step = None
    gc.collect()
    for thread in ours:
        thread.join(60)
        assert not thread.is_alive()
    assert open_files() == files
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", PLACES)
def test_threads_share_one_place(place: str, tmp_path: Path) -> None:
    step = moving(copies_to(place, tmp_path))
    right = expected(step)
    found: list[list[Tensor]] = []

    def run() -> None:
        for _ in range(4):
            found.append(step.gradients(step.forward()[1]))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert all(all(map(torch.equal, gradients, right)) for gradients in found)


def _in_fork(step: MovingStep, right: list[Tensor], said: Any) -> None:
    torch.set_num_threads(1)  # its own threads have not come along
    found = step.gradients(step.forward()[1])
    said.put(all(map(torch.equal, found, right)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("place", ["host", "disk"])  # CUDA does not fork
def test_a_forked_process_has_threads_and_arenas_of_its_own(place: str, tmp_path: Path) -> None:
    step = moving(copies_to(place, tmp_path))
    right = expected(step)
    assert_right(step, step.forward()[1])
    context = multiprocessing.get_context("fork")
    said = context.Queue()
    child = context.Process(target=_in_fork, args=(step, right, said))
    child.start()
    for _ in range(4):
        assert_right(step, step.forward()[1])
    assert said.get(timeout=120)
    child.join()
    assert child.exitcode == 0


# ---------------------------------------------------------------------- queues of a device


def test_a_device_with_queues_has_pinned_memory_of_the_exact_size() -> None:
    with fake_cuda() as device:
        copies: Copies | None = copies_for(device.where)
        assert isinstance(copies, Pinned)
        step: MovingStep | None = moving(copies)
        assert step is not None
        _, saved = step.forward()
        assert [*device.queues.pinned.values()] == [step.compiled.program.arena_bytes]
        assert_right(step, saved)
        with pytest.raises(UnsupportedDeviceError, match="Move to the host instead"):
            copies_for(device.where, ".")
        copies = step = None
        gc.collect()
        assert not device.queues.pinned


def test_the_host_never_waits_for_a_copy() -> None:
    """Only the queue that computes does: no copy has begun when all has been given to it."""
    begin, waits = threading.Event(), []

    class Computing:
        def record_event(self) -> Any:
            return FakeQueues.computing.record_event()

        def wait_event(self, event: Any) -> None:
            waits.append(event)  # in its turn, on the device

        def synchronize(self) -> None:
            raise AssertionError("the host waits")

    class Ahead(FakeQueues):
        def current(self) -> Any:
            return computing

    computing = Computing()
    copies = Pinned(Ahead(lambda: float(not begin.wait())))
    arena = copies.arena(2 * PAGE_BYTES)
    tensors = [torch.ones(4), torch.ones(8)]
    moved = [arena.out(t, n * PAGE_BYTES, t.nbytes) for n, t in enumerate(tensors)]
    for move in moved:
        move.arrive()
    assert [event.done() for event in waits] == [False, False]
    begin.set()
    copies._out.synchronize()
    assert [event.done() for event in waits] == [True, True]


def test_memory_that_is_freed_too_early_is_found_out() -> None:
    begin = threading.Event()
    queues = FakeQueues(lambda: float(not begin.wait()))
    target = torch.zeros(8)
    copies = []
    for resized in (True, False):
        queue, source = queues.new(), torch.ones(8)
        queues.copy(queue, target, source)
        if resized:
            source.untyped_storage().resize_(0)
        copies.append(queue)
        del source
    begin.set()
    for queue in copies:
        with pytest.raises(AssertionError, match="freed before it was copied"):
            queue.synchronize()


def test_memory_that_cannot_be_pinned_is_said() -> None:
    class Full(FakeQueues):
        def pin(self, address: int, size_bytes: int) -> None:
            raise RuntimeError("out of memory")

    step = moving(Pinned(Full()))
    with pytest.raises(CopyError, match=r"asked to pin \d+ bytes of the host.*out of memory"):
        step.forward()


class Cuda:
    """The calls of CUDA that pin pages: none may be, and the next kernel is told so again."""

    device, last_error = -1, 0

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert self.device == 1
        self.last_error = 2
        return 2

    def kernel(self, *_: Any, **__: Any) -> None:
        error, self.last_error = self.last_error, 0
        self.check(error)

    def check(self, error: int) -> None:
        if error:
            raise RuntimeError("out of memory")

    @contextlib.contextmanager
    def on(self, where: torch.device) -> Iterator[None]:
        self.device, before = where.index, self.device
        yield
        self.device = before


def test_no_later_kernel_is_told_that_pages_could_not_be_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: cuda)
        patch.setattr(torch.cuda, "check_error", cuda.check)
        patch.setattr(torch.cuda, "device", cuda.on)
        patch.setattr(torch, "zeros", cuda.kernel)
        with pytest.raises(RuntimeError, match="out of memory"):
            CopyQueues(torch.device("cuda", 1)).pin(0, PAGE_BYTES)
    cuda.kernel()


def test_a_forked_process_leaves_pinned_pages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = FakeQueues()
    block: PinnedBlock | None = Pinned(queues).new_block(PAGE_BYTES)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert block is not None
    block = None
    assert queues.pinned


@pytest.mark.parametrize("copies", [Host(), Pinned(FakeQueues())], ids=["host", "pinned"])
def test_more_than_the_host_has_is_said(copies: Copies) -> None:
    with pytest.raises(CopyError, match=rf"asked for {1 << 60} bytes .*Cannot allocate memory"):
        copies.arena(1 << 60)


def test_a_step_that_moves_is_no_part_of_a_captured_graph() -> None:
    class Captured(FakeQueues):
        def is_captured(self) -> bool:
            return True

    step = moving(Pinned(Captured()))
    with pytest.raises(UnsupportedDeviceError, match="captured as a CUDA graph"):
        step.forward()


# ---------------------------------------------------------------------- errors of a disk


def broken(step: MovingStep, run: Callable[[], object], folder: Path) -> str:
    """Return what is said where a step fails, and see that the next one runs."""
    with pytest.raises(CopyError) as caught:
        run()
    assert caught.value.path == str(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CopyError, match="found no such folder"):
        Disk(tmp_path / "nowhere")


def test_a_folder_that_has_gone_is_said_before_anything_moves(tmp_path: Path) -> None:
    folder = tmp_path / "place"
    folder.mkdir()
    step = moving(Disk(folder))
    folder.rmdir()
    assert "No such file or directory" in broken(step, step.forward, folder)
    folder.mkdir()
    assert_right(step, step.forward()[1])


def test_a_full_disk_is_said_before_anything_moves(tmp_path: Path) -> None:
    """The limit is the operating system's: no file may be larger."""
    resource = pytest.importorskip("resource", reason="limits of processes are a matter of POSIX")
    step = moving(Disk(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE_BYTES, hard))
    try:
        text = broken(step, step.forward, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "asked to reserve" in text
    assert "File too large" in text
    assert_right(step, step.forward()[1])


def test_a_file_that_was_cut_is_said_where_its_content_is_needed(tmp_path: Path) -> None:
    step = moving(Disk(tmp_path))
    _, saved = step.forward()
    moved = next(value for value in saved if type(value).__name__ == "Moved")
    block = moved._arena.block
    assert isinstance(block, FileBlock)
    os.truncate(block.file, 0)
    del moved
    text = broken(step, lambda: step.gradients(saved), tmp_path)
    assert "asked to read" in text
    assert "the file ends" in text
    assert_right(step, step.forward()[1])


def test_an_error_while_writing_is_said_before_anything_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = moving(Disk(tmp_path))
    before = [p.clone() for p in step.model.parameters()]
    with monkeypatch.context() as patched:

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        patched.setattr(FileBlock, "write", full)
        text = broken(step, step.forward, tmp_path)
    assert "asked to write" in text
    assert "No space left on device" in text
    assert all(map(torch.equal, step.model.parameters(), before))
    assert_right(step, step.forward()[1])


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="every file goes through the cache here")
@pytest.mark.parametrize("refused_by", ["open", "pwrite"])
def test_a_file_system_without_direct_access_is_written_as_others_are(
    refused_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some refuse it when a file is opened, some when it is written."""
    call, refused = getattr(os, refused_by), []

    def refusing(what: Any, *more: Any) -> int:
        flags = more[0] if refused_by == "open" else fcntl.fcntl(what, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            refused.append(what)
            raise OSError(22, "Invalid argument")
        return int(call(what, *more))

    monkeypatch.setattr(os, refused_by, refusing)
    step = moving(Disk(tmp_path))
    assert_right(step, step.forward()[1])
    assert len(refused) == 1
