"""What a file of a plan block by block holds: the options of each kind of block, and the choice.

    {"rockmate_blocks": 1, "checksum": "…", "content": {"model": …, "kinds": […], "blocks": […]}}

Blocks are recorded anew wherever the file is used, and a whole step is measured: only the search,
and the measurement of times, are spared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike

from rockmate.errors import PlanFileError
from rockmate.files.plan_file import checksum
from rockmate.files.rows import all_finite, from_row, parse, row_of
from rockmate.files.whole import load_text, save_text
from rockmate.schedules.steps import Step

FORMAT = 1  # raised when a file of an older version can no longer be read


@dataclass(frozen=True, slots=True)
class SavedKind:
    """Equal blocks: what their steps take for granted, and their options."""

    nodes: int
    backward_order: tuple[int, ...]
    options: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """One block: its kind and its option, by number, and the times that were measured."""

    path: str
    kind: int
    option: int
    overhead_ms: float
    base_time_ms: float


@dataclass(frozen=True)
class BlocksFile:
    """A plan block by block, and what it was made with."""

    model: str
    made_with: Mapping[str, str]
    kinds: tuple[SavedKind, ...]
    blocks: tuple[SavedBlock, ...]
    budget_bytes: int
    in_flight: int

    def __post_init__(self) -> None:
        for block in self.blocks:
            if not 0 <= block.kind < len(self.kinds):
                raise ValueError(f"'{block.path}' is of a kind that is not there")
            if not 0 <= block.option < len(self.kinds[block.kind].options):
                raise ValueError(f"'{block.path}' has an option that is not there")
            if not all_finite((block.overhead_ms, block.base_time_ms)):
                raise ValueError("a time below zero")
        if not self.blocks or self.budget_bytes < 1 or self.in_flight < 1:
            raise ValueError("there is no plan in it")

    def save(self, path: str | PathLike[str]) -> None:
        """Write the file: all of it, or nothing.

        Raises:
            PlanFileError: it cannot be written.
        """
        content = row_of(self)
        head = {"rockmate_blocks": FORMAT, "checksum": checksum(content)}
        text = json.dumps({**head, "content": content}, separators=(",", ":"))
        save_text(path, text)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> BlocksFile:
        """Read a file.

        Raises:
            PlanFileError: it cannot be read, or is no such file.
        """
        data = parse(load_text(path))
        wanted = {"rockmate_blocks", "checksum", "content"}
        if not isinstance(data, dict) or data.keys() != wanted:
            raise PlanFileError(
                f"{str(path)!r}: expected a file that save_plan of a plan of blocks wrote, found "
                "something else"
            )
        if data["rockmate_blocks"] != FORMAT or data["checksum"] != checksum(data["content"]):
            raise PlanFileError(
                f"{str(path)!r}: of another format, cut or changed since it was written. Save the "
                "plan again"
            )
        return from_row(cls, data["content"], "content")
