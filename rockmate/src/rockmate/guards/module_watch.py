"""Finds the state of a module at each call: by a snapshot that still holds, or by a new one."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

from torch import nn

from rkgb.elements import attribute_keyword, is_inside
from rkgb.guards import Sources
from rockmate.guards.module_state import Place, WatchedState
from rockmate.guards.snapshot import HOOKS, Snapshot

_MORE_OF_HOOKS = (
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_MOST_SNAPSHOTS = 8  # of one module, one per state: a GAN's discriminator has two


class ModuleWatch:
    """A module whose state `now()` returns at each call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._recent: list[Snapshot] = []
        self._states: dict[tuple[Any, ...], WatchedState] = {}
        self._ignored: frozenset[str | Place] | None = None  # there is no plan
        self.sources = Sources()  # what Python reads besides
        self.asked = frozenset[str]()  # attributes that it asks objects for
        self.open: tuple[Place, ...] = ()  # attributes that calls hand over as numbers

    def ignore(
        self,
        paths: Collection[str],
        names: Collection[Place] = (),
        *,
        from_now_on: Collection[str] = (),
    ) -> None:
        """Leave what no plan takes for granted out of states, now that there is one more plan.

        The attributes in `paths` are of its opaque calls, so its recording specialises none of what
        they read. `names` are single attributes, by the path of their module, that its steps set.
        An earlier plan may read them: only what each leaves out is left out. `from_now_on` are
        opaque in all later plans too; earlier ones are for states that have them, and end.
        """
        new = frozenset[str | Place]((*paths, *names))
        if self._ignored is not None:
            always = (path for path in from_now_on if _lies_in(path, new))
            new = _in_both(new, self._ignored) | {*always}
        if new != self._ignored:
            self._ignored, self._recent = new, []

    def read(self, sources: Sources) -> None:
        """Include these places in states from now on."""
        joined = self.sources.joined(sources)
        if joined is not self.sources:
            self.sources, self._recent = joined, []
            self.asked = joined.attributes

    def hand_over(self, names: tuple[Place, ...]) -> None:
        """Leave these attributes out of states from now on, because calls pass their numbers."""
        self.open, self._recent = names, []

    def numbers(self, autocast: Hashable) -> dict[str, Any]:
        """Return the numbers of open attributes by keyword; an attribute without one is closed."""
        while self.open:
            snapshot = self.now(autocast)
            found = [snapshot.attribute(*place) for place in self.open]
            if all(type(value) in (float, int) for value in found):
                keywords = (attribute_keyword(*place) for place in self.open)
                return dict(zip(keywords, found, strict=True))
            pairs = zip(self.open, found, strict=True)
            self.hand_over(tuple(p for p, value in pairs if type(value) in (float, int)))
        return {}

    def now(self, autocast: Hashable) -> Snapshot:
        """Return a snapshot that still holds, the last used one first, or else a new one."""
        recent = self._recent
        if recent and recent[0].holds(autocast):
            return recent[0]
        for place, snapshot in enumerate(recent[1:], 1):
            if snapshot.holds(autocast):
                self._recent = [snapshot, *recent[:place], *recent[place + 1 :]]
                return snapshot
        ignored = frozenset((*(self._ignored or ()), *self.open))
        taken = Snapshot(self.model, self._states, ignored, self.sources)
        if taken.found:  # names that objects ask for which what was read has led to
            self.sources.ask(taken.found)
            self.asked = self.sources.attributes
            return self.now(autocast)
        others = [s for s in recent if s.state is not taken.state and s.is_of_the_same(taken)]
        self._recent = [taken, *others][:_MOST_SNAPSHOTS]
        return taken

    def let_go(self, snapshot: Snapshot, autocast: Hashable) -> None:
        """Forget a snapshot if a step has ended it, and with it the tensors that it replaced."""
        if not snapshot.holds(autocast):
            self._recent = [other for other in self._recent if other is not snapshot]

    def forget(self, used: Sequence[WatchedState]) -> None:
        """Forget the states without plans, and the values that were looked up for plans."""
        kept = {*used, *(snapshot.state for snapshot in self._recent[:1])}
        self._states = {facts: s for facts, s in self._states.items() if s in kept}
        self._recent = [s for s in self._recent if s.state in kept]
        for snapshot in self._recent:
            snapshot.values.clear()


def _in_both(
    ours: frozenset[str | Place], theirs: frozenset[str | Place]
) -> frozenset[str | Place]:
    """Return the modules and single attributes that lie in both of two choices of them."""
    pairs = ((ours, theirs), (theirs, ours))
    return frozenset(one for few, many in pairs for one in few if _lies_in(one, many))


def _lies_in(one: str | Place, chosen: frozenset[str | Place]) -> bool:
    path = one if isinstance(one, str) else one[0]
    return one in chosen or any(is_inside(path, p) for p in chosen if isinstance(p, str))


def view_of(model: nn.Module, kind: type[nn.Module] | None = None) -> nn.Module:
    """Return another object that shares a module's state, of its class or another one."""
    view: nn.Module = object.__new__(kind or type(model))
    object.__setattr__(view, "__dict__", vars(model))
    return view


def without_hooks(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Return a copy of `model` that shares everything but its own hooks, which a call runs."""
    bare: nn.Module = object.__new__(kind)
    table = vars(bare)
    table.update((n, value) for n, value in vars(model).items() if not n.startswith("__"))
    for name in (*HOOKS, *_MORE_OF_HOOKS):
        if name in table:
            table[name] = type(table[name])()
    table["_compiled_call_impl"] = None
    table.pop("_rockmate", None)
    own: Any = table.get("forward")
    if getattr(own, "__self__", None) is model:
        table["forward"] = own.__func__.__get__(bare)
    return bare
