"""The places that forwards were seen to change, of all models: what is there is put back."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rkgb.guards.code_watch import Seen
from rkgb.guards.entries import remembered
from rkgb.guards.sources import Source
from rkgb.outside.contents import Contents
from rkgb.outside.reached import Reached
from rkgb.torch_api.private.autograd import set_version
from rkgb.torch_api.private.modes import is_abstract, unwatched
from rkgb.torch_api.private.tables import pytree
from rkgb.torch_api.quiet import set_profile

# Places that forwards were seen to change, of all models: few, and looked at by planning only.
_changing: dict[tuple[int, str | None], tuple[Callable[[], Any], str | None]] = {}
# Sources that led to these: what they lead to later may be others.
_leading: dict[Hashable, tuple[Source, frozenset[str]]] = {}
# Functions of users that remember their results, of all models.
remembering: weakref.WeakSet[Any] = weakref.WeakSet()
# Those on whose results a recording relies, each with what ran when planning computed them, and by
# what it remembers these.
relied_on: weakref.WeakKeyDictionary[Any, tuple[Sequence[Seen], Sequence[Any]]] = (
    weakref.WeakKeyDictionary()
)
# Tensors outside that forwards were seen to write to, by identity.
_written: dict[int, weakref.ref[Tensor]] = {}


def forget_stand_ins(caches: Iterable[Any] = remembering) -> None:
    """Let functions forget their results where one is a tensor without content."""
    for cached in filter(has_stand_ins, [*caches]):
        cached.cache_clear()


def forget_computed() -> None:
    """Let functions forget what planning has computed: it would be something else by now."""
    for cached, (_, keys) in relied_on.items():
        table = remembered(cached)[0]
        for key in [key for key in table if any(key is one for one in keys)]:
            del table[key]
    relied_on.clear()


def has_stand_ins(cached: Any) -> bool:
    return any(map(is_abstract, pytree.tree_leaves(remembered(cached)[1])))


def note_written(tensor: Tensor) -> None:
    """From now on, `OutsideState` puts back the content of a tensor that a forward writes to."""
    for key in [key for key, held in _written.items() if held() is None]:
        del _written[key]
    if not is_abstract(tensor):
        _written[id(tensor)] = weakref.ref(tensor)


class OutsideState:
    """What is in the places that forwards were seen to change, to be put back.

    If it `lends`, copies take the places of what changes by being used, and of what a module holds
    that runs as a copy: `copy_of` returns its parts.
    """

    def __init__(self, *, lends: bool = False, copy_of: Callable[[Any], Any] | None = None) -> None:
        self._contents = Contents(copy_of)
        self._contents.add_caches(remembering)
        for cached, known in self._contents.caches.values():
            if not known:
                relied_on.pop(cached, None)
        held = [t for ref in _written.values() if (t := ref()) is not None]
        with unwatched() if held else contextlib.nullcontext(), torch.no_grad():
            self._tensors = [(t, t.detach().clone(), t._version) for t in held]
        add_known(self._contents, lends=lends)
        self._contents.copy_of = None  # which keeps all copies alive

    def restore(self) -> None:
        """Put it back."""
        self._contents.keep_results(relied_on)
        self._contents.restore()
        for tensor, content, version in self._tensors:
            if tensor._version != version:
                with unwatched(), torch.no_grad():
                    tensor.copy_(content)
                set_version(tensor, version)


def add_known(contents: Contents, *, lends: bool) -> None:
    """Add what is in the places that forwards were seen to change."""
    # Whoever looks at calls in this thread looks at the user's: copying is none of theirs.
    looking = sys.getprofile()
    sys.setprofile(None)
    try:
        for owned, name in _changing.values():
            if (owner := owned()) is not None:
                contents.add(owner, name, lends=lends)
        for source, attributes in _leading.values():
            reached = Reached(attributes)
            reached.add(source.read())
            for owner in reached.owners.values():
                contents.add(owner, lends=lends)
    finally:
        set_profile(looking)


def put_back_from_now_on(places: Iterable[tuple[Any, str | None]]) -> None:
    """From now on, `OutsideState` puts back what is there."""
    for owner, name in places:
        key = id(owner), name
        if key not in _changing or _changing[key][0]() is not owner:
            # A model is not kept alive by what a function has set in it.
            is_model = isinstance(owner, nn.Module)
            _changing[key] = weakref.ref(owner) if is_model else partial(itself, owner), name


def put_back_what_leads(key: Hashable, source: Source, attributes: frozenset[str]) -> None:
    """From now on, `OutsideState` puts back what a source leads to, by these attributes."""
    _leading.setdefault(key, (source, attributes))


def itself(owner: Any) -> Any:
    return owner
