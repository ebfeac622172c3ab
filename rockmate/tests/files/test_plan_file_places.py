"""Places where a plan cannot be written or read: refused in our words, and left as they are."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

from rockmate import PlanFileError, Rockmate
from rockmate.files.plan_file import PlanFile
from runs.planned import wrap


@pytest.fixture(scope="module")
def planned() -> Rockmate:
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8), 1.0)


def _make(kind: str, place: Path) -> None:
    if kind == "folder":
        place.mkdir()
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as own:
            own.bind(str(place))
    elif kind == "link to a device":
        place.symlink_to("/dev/null")


@pytest.mark.parametrize("kind", ["folder", "fifo", "socket", "link to a device"])
def test_what_is_no_file_is_left_as_it_is(planned: Rockmate, kind: str, tmp_path: Path) -> None:
    place = tmp_path / "p"
    _make(kind, place)
    before = place.lstat()
    with pytest.raises(PlanFileError, match="no file lies there"):
        planned.save_plan(place)
    after = place.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    with pytest.raises(PlanFileError, match="no file lies there"):
        PlanFile.load(place)  # and does not wait for somebody to write into it
    assert [found.name for found in tmp_path.iterdir()] == ["p"]


def test_a_device_is_not_replaced(planned: Rockmate) -> None:
    with pytest.raises(PlanFileError, match="cannot write"):
        planned.save_plan("/dev/null")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("path", ["a\0b", "no/such/folder/p.json", "x" * 5000])
def test_paths_that_cannot_be_are_refused(planned: Rockmate, path: str) -> None:
    with pytest.raises(PlanFileError, match="cannot write the plan file"):
        planned.save_plan(path)
    with pytest.raises(PlanFileError, match="cannot read the plan file"):
        PlanFile.load(path)


def test_a_link_to_a_file_stays_a_link(planned: Rockmate, tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    planned.save_plan(link)
    assert link.is_symlink()
    assert PlanFile.load(target).to_json() == PlanFile.load(link).to_json()
