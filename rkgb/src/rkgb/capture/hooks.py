"""Forward hooks of submodules while a step is recorded: computing hooks, and observer hooks.

The operations of a hook are recorded like the forward itself. A hook that computes nothing and
returns nothing is an observer hook: it is called with the real tensors of every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from rkgb.capture.twin import Copies, known_by
from rkgb.elements.effect import Effect, ObserverHook
from rkgb.errors import HookInsideError, StopsRecordingError
from rkgb.guards.code_watch import CodeWatch, Seen
from rkgb.guards.loads import loads_of
from rkgb.outside.changes import Outside
from rkgb.outside.held import OF_MODULE, content_of, has_content, same_content
from rkgb.recording.recorder import Recorder
from rkgb.safeguards.refusals import has_backward_hooks, refuse_backward_hooks

_TABLES = ("_forward_pre_hooks", "_forward_hooks")
# Hooks of libraries that compute a weight, collect a module's result, or set requires_grad on a
# result. They may run again, and pass nothing to other code.
_HARMLESS = ("torch.nn.utils", "torch.ao", "torch.distributed.tensor", "transformers.")


class ReadHooksError(StopsRecordingError):
    """Hooks set on the model what its forward reads: they have to set it on the copy."""

    def __init__(self, hooks: frozenset[ObserverHook]) -> None:
        super().__init__(hooks)
        self.hooks = hooks


class HookWatch:
    """Watches the forward hooks in the submodules of a copy of a model.

    A hook refers to the model itself, on which it sets in each step what it sets. One among `read`
    sets what the forward reads, and refers to `copies`.
    """

    def __init__(
        self,
        recorder: Recorder,
        codes: CodeWatch,
        model: nn.Module,
        twin: nn.Module,
        outside: Outside,
        known: Sequence[Effect] = (),
        read: Collection[ObserverHook] = (),
        copies: Copies | None = None,
    ) -> None:
        self.model, self.twin = model, twin
        self._set: dict[ObserverHook, set[str]] = {}  # by others: attributes of the model
        self.recorder, self.codes, self.outside = recorder, codes, outside
        self.known = frozenset(known)  # observer hooks among them are not called again
        self.looks: list[tuple[ObserverHook, tuple[Any, ...]]] = []
        for path, module in twin.named_modules():
            for table in _TABLES if path else ():
                hooks = getattr(module, table)
                for key, hook in list(hooks.items()):
                    look = ObserverHook(path, table, key)
                    if copies is not None and look in read:  # a part of the forward
                        hooks[key] = copies.of(getattr(model.get_submodule(path), table)[key])
                    else:
                        hooks[key] = self._watched(look, hook)
            if has_backward_hooks(model.get_submodule(path)):
                # Whatever calls the module, such as its `_call_impl`, calls this.
                refuse = functools.partial(self._refuse_recorded, model, path)
                module.register_forward_pre_hook(refuse, prepend=True)

    def _refuse_recorded(self, model: nn.Module, path: str, *_: object) -> None:
        if not self.recorder.is_paused:  # otherwise it runs whole
            refuse_backward_hooks(model, path)

    def _watched(self, look: ObserverHook, hook: Callable[..., Any]) -> Callable[..., Any]:
        may_set = not may_run_again(hook)
        known, of_twin = list[nn.Module](), list[nn.Module]()
        if may_set and (found := [one for one in known_by(hook) if self._leads_to_model(one)]):
            of_twin, copies = [*self.twin.modules()], {*map(id, self.twin.modules())}
            # Another view of the model has its own attributes.
            more = (one for one in found if isinstance(one, nn.Module) and id(one) not in copies)
            known = [*self.model.modules(), *more]

        def watched(module: nn.Module, *args: Any) -> Any:
            if self.recorder.is_paused:
                return hook(module, *args)
            if look in self.known:
                self.looks.append((look, args))
                return None
            count, attributes = self.recorder.count, dict(vars(module))
            held, of_copy = _held_by(known), _held_by(of_twin)
            with self.codes.apart() as ran, self.outside.knowing_the_module():
                result = hook(module, *args)
            sets, now = _changed(held, _held_by(known)), vars(module)
            same = len(now) == len(attributes) and all(now[n] is v for n, v in attributes.items())
            if result is None and self.recorder.count == count and same and may_set:
                self.looks.append((look, args))
                sets |= _changed(of_copy, _held_by(of_twin))
                self._set.setdefault(look, set()).update(sets)
            else:  # reads of an observer hook are not part of the recording
                if sets:
                    raise ReadHooksError(frozenset((look,)))
                self.codes.add(ran)
            return result

        return watched

    def _leads_to_model(self, known: Any) -> bool:
        """Whether it is a module, or a container that the model or its copy holds."""
        return issubclass(type(known), nn.Module) or id(known) in self._containers

    @functools.cached_property
    def _containers(self) -> set[int]:
        modules = (*self.model.modules(), *self.twin.modules())
        tables = (vars(module).items() for module in modules)
        named = (pair for table in tables for pair in table if pair[0] not in OF_MODULE)
        return {id(value) for _, value in named if has_content(value)}

    def refuse_read(self, ran: Iterable[Seen]) -> None:
        """Refuse hooks that set what the functions of the forward that `ran` name.

        Raises:
            ReadHooksError: with these hooks.
        """
        named = {n for one in ran for n in (*loads_of(one.code).attributes, *one.names)}
        if read := frozenset(look for look, names in self._set.items() if names & named):
            raise ReadHooksError(read)


def _held_by(modules: Iterable[nn.Module]) -> dict[tuple[int, str], tuple[Any, Any]]:
    """Return the attributes of modules, and what containers among them hold."""
    return {
        (id(module), name): (value, content_of(value) if has_content(value) else None)
        for module in modules
        for name, value in vars(module).items()
        if name not in OF_MODULE
    }


def _changed(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> set[str]:
    """Return the names of attributes that hold something else now."""
    return {
        key[1]
        for key in before.keys() | now.keys()
        if key not in before or key not in now or not _is_same(before[key], now[key])
    }


def _is_same(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    return before[0] is now[0] and (before[1] is None or same_content(before[1], now[1]))


class HookTables:
    """The hooks of a model. One that runs while a step is recorded may remove itself."""

    def __init__(self, model: nn.Module) -> None:
        tables = [vars(m)[n] for m in model.modules() for n in vars(m) if "_hooks" in n]
        self._known = [(table, {**table}) for table in tables if isinstance(table, dict)]

    def restore(self) -> None:
        """Register again what was: steps call it themselves."""
        for table, known in self._known:
            if [*table] != [*known]:
                table.clear()
                table.update(known)


def may_run_again(hook: Any) -> bool:
    """Return whether a hook is one of a library that may run again."""
    origins = (type(hook).__module__, getattr(hook, "__module__", ""))
    return any(str(origin).startswith(_HARMLESS) for origin in origins)


def refuse_hooks_inside(twin: nn.Module, paths: Sequence[str]) -> None:
    """Refuse opaque calls of submodules with forward hooks of the user's inside.

    A hook there would get tensors of another graph than the step's, and be called again.

    Raises:
        HookInsideError: a submodule has such hooks.
    """
    for path in paths:
        for own, module in twin.get_submodule(path).named_modules():
            for table in _TABLES if own or path else ():
                for hook in getattr(module, table).values():
                    if not may_run_again(hook):
                        where = f"{path}.{own}".strip(".")
                        error = HookInsideError(
                            f"module '{path or '(root)'}' would have to run whole, and module "
                            f"'{where}' in it has a forward hook. Remove the hook, or mend what "
                            "cannot be recorded there."
                        )
                        error.hooked = where
                        raise error
