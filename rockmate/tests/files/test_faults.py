"""A process that dies takes no file with it, and keeps nobody waiting; the next start works."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rockmate
from oracles.training import eager_copy
from rockmate.blockwise import kinds
from rockmate.files.plan_file import PlanFile
from runs.planned import wrap
from zoo.nets import TinyGPT, tokens

PATIENCE_S = 8  # of the process group


def _sharded() -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = TinyGPT(layers=2, width=16, vocab=40, length=16)
    for block in model.blocks:
        fully_shard(block)
    ids, targets = tokens(2, 16, 40)
    return fully_shard(model), (ids, targets)


def _dies(*_: Any, **__: Any) -> Any:
    os._exit(9)


def _dies_in(where: str, rank: int, folder: Path) -> None:
    if where == "front of it all":
        net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        if rank:
            Path(folder / "gone").touch()
            _dies()
        wrap(net, torch.randn(32, 16), 0.7)
        return
    model, sample = _sharded()
    if where == "planning" and rank:
        kinds.module_options = _dies
    plan = rockmate.apply_to_blocks(model, sample, 0.8, cost="flops", compare=False)
    if where == "a save" and rank == 0:
        plan.save_plan(folder / "old.json")
        os.fsync = _dies
        plan.save_plan(folder / "old.json")
    if where == "a step" and rank:
        model.blocks[0].register_forward_hook(_dies)
    for _ in range(3):
        model(*sample).backward()


def _start(rank: int, store: str, where: str, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["ROCKMATE_CACHE"] = "off"
    torch.distributed.init_process_group(
        *("gloo", f"file://{store}", timedelta(seconds=PATIENCE_S)), rank=rank, world_size=2
    )
    _dies_in(where, rank, Path(folder))
    sys.stdout.flush()
    os._exit(0)


def _both(where: str, folder: Path, store: str) -> list[tuple[int, str]]:
    code = "import runpy, sys; path, rank, *rest = sys.argv[1:]; "
    code += "runpy.run_path(path)['_start'](int(rank), *rest)"
    command = [sys.executable, "-W", "ignore", "-c", code, __file__]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder / store), where, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:  # far more than the group waits, far less than for ever
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, text) for p, text in zip(processes, outputs, strict=True)]


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["planning", "a step", "a save"])
def test_the_others_end_with_an_error(where: str, tmp_path: Path) -> None:
    found = _both(where, tmp_path, "store")
    dead = 0 if where == "a save" else 1
    assert found[dead][0] == 9, found[dead][1]
    code, text = found[1 - dead]
    assert code == 1, text
    assert "Error" in text
    if where == "a save":  # the file of before is whole
        from rockmate.files.plan_file import PlanFile

        assert PlanFile.load(tmp_path / "old.json", by_blocks=True).blocks
    if where == "planning":  # the next start works
        assert [code for code, _ in _both("nothing", tmp_path, "again")] == [0, 0]


@pytest.mark.nightly
def test_a_rank_that_never_comes_is_not_waited_for(tmp_path: Path) -> None:
    """It may have no such module, as a stage of a pipeline; collectives notice that it is gone."""
    (code, text), (gone, _) = _both("front of it all", tmp_path, "store")
    assert (code, gone) == (0, 9), text
    assert "does not wait for rank 1 any more" in text


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_file_is_whole_or_not_there(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours: Any = wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8), 1.0)
    where = tmp_path / "net.plan.json"
    ours.save_plan(where)
    before = where.read_bytes()

    class KilledError(BaseException):
        pass

    def killed(*_: Any) -> Any:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync", killed) if step == "fsync" else (Path, "replace", killed)))
        with pytest.raises(KilledError):
            ours.save_plan(where)
        with pytest.raises(KilledError):
            ours.save_plan(tmp_path / "new.plan.json")
    assert where.read_bytes() == before
    assert PlanFile.load(where).plans
    assert not (tmp_path / "new.plan.json").exists()


def _trains_again(folder: str) -> None:
    """Run by torchrun, which starts both processes anew once the second has died."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = torch.distributed.get_rank()
    path = Path(folder) / "blocks.json"
    is_first_start = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0
    model, sample = _sharded()
    if is_first_start:
        plan = rockmate.apply_to_blocks(model, sample, 0.8, cost="flops", compare=False)
        if rank == 0:
            plan.save_plan(path)
        torch.distributed.barrier()
    else:
        kinds.module_options = _dies  # nothing is searched
        plan = rockmate.apply_to_blocks(model, sample, 0.8, plan=path)
    if is_first_start and rank:
        _dies()
    model(*sample).backward()
    if not is_first_start:
        (Path(folder) / f"done{rank}").write_text(str([row.kept_bytes for row in plan.rows]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)


@pytest.mark.nightly
def test_a_restarted_rank_gets_the_plan_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import runpy; runpy.run_path({__file__!r})['_trains_again']({str(tmp_path)!r})"
    )
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.2"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    texts = [(tmp_path / f"done{rank}").read_text() for rank in range(2)]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_plan_of_blocks_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: Any = TinyGPT(layers=2, width=16, vocab=40, length=16)
    twin, other = eager_copy(model), TinyGPT(layers=3, width=16, vocab=40, length=16)
    sample = tokens(2, 16, 40)
    options: dict[str, Any] = {"compare": False}
    plan = rockmate.apply_to_blocks(model, sample, 0.8, cost="flops", **options)
    plan.save_plan(where := tmp_path / "blocks.json")
    rockmate.remove(model)
    monkeypatch.setattr(kinds, "module_options", None)  # nothing is searched
    again = rockmate.apply_to_blocks(model, sample, 0.8, plan=where, **options)
    assert again.rows == plan.rows
    assert again.measured_peak_bytes <= again.budget_bytes == plan.budget_bytes
    torch.manual_seed(1)
    model(*sample).backward()
    torch.manual_seed(1)
    twin(*sample).backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]
    with pytest.raises(rockmate.PlanMismatchError, match="blocks"):
        rockmate.apply_to_blocks(other, sample, 0.8, plan=where, **options)
    rockmate.remove(model)
    with pytest.raises(rockmate.PlanMismatchError, match="the budget is 1000"):
        rockmate.apply_to_blocks(model, sample, 1000, plan=where, **options)
    where.write_text(where.read_text().replace('"option":', '"option": '))
    where.write_text(where.read_text()[:-40])
    with pytest.raises(rockmate.PlanFileError):
        rockmate.apply_to_blocks(model, sample, 0.8, plan=where, **options)
