"""Forward hooks of submodules while a step is recorded: computing hooks, and observer hooks.

The operations of a hook are recorded like the forward itself. A hook that computes nothing and
returns nothing is an observer hook: it is called with the real tensors of every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from rkgb.elements.effect import Effect, ObserverHook
from rkgb.errors import SideEffectError
from rkgb.guards.code_watch import CodeWatch
from rkgb.outside.changes import Outside
from rkgb.recording.recorder import Recorder
from rkgb.safeguards.refusals import has_backward_hooks, refuse_backward_hooks

_TABLES = ("_forward_pre_hooks", "_forward_hooks")
# Hooks of libraries that compute a weight, collect a module's result, or set requires_grad on a
# result. They may run again, and pass nothing to other code.
_HARMLESS = ("torch.nn.utils", "torch.ao", "torch.distributed.tensor", "transformers.")


class HookWatch:
    """Watches the forward hooks in the submodules of a copy of a model."""

    def __init__(
        self,
        recorder: Recorder,
        codes: CodeWatch,
        model: nn.Module,
        twin: nn.Module,
        outside: Outside,
        known: Sequence[Effect] = (),
    ) -> None:
        self.recorder, self.codes, self.outside = recorder, codes, outside
        self.known = frozenset(known)  # observer hooks among them are not called again
        self.looks: list[tuple[ObserverHook, tuple[Any, ...]]] = []
        for path, module in twin.named_modules():
            for table in _TABLES if path else ():
                hooks = getattr(module, table)
                for key, hook in list(hooks.items()):
                    hooks[key] = self._watched(ObserverHook(path, table, key), hook)
            if has_backward_hooks(model.get_submodule(path)):
                # Whatever calls the module, such as its `_call_impl`, calls this.
                refuse = functools.partial(self._refuse_recorded, model, path)
                module.register_forward_pre_hook(refuse, prepend=True)

    def _refuse_recorded(self, model: nn.Module, path: str, *_: object) -> None:
        if not self.recorder.is_paused:  # otherwise it runs whole
            refuse_backward_hooks(model, path)

    def _watched(self, look: ObserverHook, hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(module: nn.Module, *args: Any) -> Any:
            if self.recorder.is_paused:
                return hook(module, *args)
            if look in self.known:
                self.looks.append((look, args))
                return None
            count, attributes = self.recorder.count, dict(vars(module))
            with self.codes.apart() as ran, self.outside.knowing_the_module():
                result = hook(module, *args)
            now = vars(module)
            same = len(now) == len(attributes) and all(now[n] is v for n, v in attributes.items())
            if result is None and self.recorder.count == count and same and not may_run_again(hook):
                self.looks.append((look, args))
            else:  # reads of an observer hook are not part of the recording
                self.codes.add(ran)
            return result

        return watched


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
        SideEffectError: a submodule has such hooks.
    """
    for path in paths:
        for own, module in twin.get_submodule(path).named_modules():
            for table in _TABLES if own or path else ():
                for hook in getattr(module, table).values():
                    if not may_run_again(hook):
                        where = f"{path}.{own}".strip(".")
                        raise SideEffectError(
                            f"module '{path or '(root)'}' would have to run whole, and module "
                            f"'{where}' in it has a forward hook. Remove the hook, or mend what "
                            "cannot be recorded there."
                        )
