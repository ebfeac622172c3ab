"""A model of torch's allocator for CUDA: its pools, its blocks, and when it splits one.

From c10/cuda/CUDACachingAllocator.cpp: requests are rounded to 512 bytes; those of at most 1 MiB
are cut from segments of 2 MiB, larger ones from segments of 20 MiB, or of their own size in steps
of 2 MiB from 10 MiB on. The smallest free block that is large enough is taken. What is left of a
small one is split off always, of a large one only if more than 1 MiB is left: so a large tensor may
take up to 1 MiB more than it asked for, and how much depends on the blocks that others have left.
With `expandable_segments` everything is split. One stream, and memory without end.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class AllocatorRules:
    """Sizes by which blocks are cut; smaller ones make large tensors of small networks."""

    block_bytes: int = 512
    small_bytes: int = 1 << 20
    small_segment_bytes: int = 2 << 20
    large_segment_bytes: int = 20 << 20
    own_segment_bytes: int = 10 << 20
    segment_step_bytes: int = 2 << 20
    expandable: bool = False

    @classmethod
    def shrunk(cls, factor: int, *, expandable: bool = False) -> AllocatorRules:
        """Return rules under which tensors behave as ones that are so many times as large."""
        usual = cls()
        return cls(
            small_bytes=usual.small_bytes // factor,
            small_segment_bytes=usual.small_segment_bytes // factor,
            large_segment_bytes=usual.large_segment_bytes // factor,
            own_segment_bytes=usual.own_segment_bytes // factor,
            segment_step_bytes=usual.segment_step_bytes // factor,
            expandable=expandable,
        )


@dataclass(eq=False)
class _Block:
    size: int
    is_small: bool
    is_free: bool = False
    asked: int = 0
    before: _Block | None = None
    behind: _Block | None = None


@dataclass
class CachingAllocator:
    """Hands out blocks, and counts what was asked for and what was handed out."""

    rules: AllocatorRules = field(default_factory=AllocatorRules)
    allocated: int = 0
    asked: int = 0
    reserved: int = 0
    _free: dict[bool, list[_Block]] = field(default_factory=lambda: {True: [], False: []})

    def rounded(self, size: int) -> int:
        """Return what is taken at least for one request."""
        return -(-size // self.rules.block_bytes) * self.rules.block_bytes

    def take(self, asked: int) -> _Block:
        """Hand out a block for a request of so many bytes."""
        rules, size = self.rules, self.rounded(asked)
        is_small = size <= rules.small_bytes
        fitting = [b for b in self._free[is_small] if b.size >= size]
        if fitting:
            block = min(fitting, key=lambda b: b.size)
            self._free[is_small].remove(block)
        else:
            block = _Block(self._segment_bytes(size, is_small), is_small)
            self.reserved += block.size
        left = block.size - size
        splits = is_small or rules.expandable
        if left >= rules.block_bytes if splits else left > rules.small_bytes:
            rest = _Block(left, is_small, True, 0, block, block.behind)
            if rest.behind is not None:
                rest.behind.before = rest
            block.behind, block.size = rest, size
            self._free[is_small].append(rest)
        block.is_free, block.asked = False, asked
        self.allocated += block.size
        self.asked += asked
        return block

    def give(self, block: _Block) -> None:
        """Take a block back, and join it with free neighbours."""
        self.allocated -= block.size
        self.asked -= block.asked
        free = self._free[block.is_small]
        for other in (block.before, block.behind):
            if other is None or not other.is_free:
                continue
            free.remove(other)
            if other is block.before:
                block.before = other.before
                if other.before is not None:
                    other.before.behind = block
            else:
                block.behind = other.behind
                if other.behind is not None:
                    other.behind.before = block
            block.size += other.size
        block.is_free = True
        free.append(block)

    def empty_cache(self) -> None:
        """Give segments back that are free as a whole."""
        for free in self._free.values():
            whole = [b for b in free if b.before is None and b.behind is None]
            self.reserved -= sum(b.size for b in whole)
            free[:] = [b for b in free if b not in whole]

    def _segment_bytes(self, size: int, is_small: bool) -> int:
        rules = self.rules
        if is_small:
            return rules.small_segment_bytes
        if size < rules.own_segment_bytes and not rules.expandable:
            return rules.large_segment_bytes
        return -(-size // rules.segment_step_bytes) * rules.segment_step_bytes
