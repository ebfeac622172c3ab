"""The cache of compiled classes of this process, by size, or one for all sizes of a form.

The first piece of a form is compiled for its own size, which makes the fastest code. A second piece
of another size is compiled for all sizes, and later ones use that code. A size keeps the code that
it got first, so all plans of a process have the same bits at the same size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from rkgb.compiled.code.classes import CompiledClass, CompiledCode, NotCompiledError
from rkgb.compiled.code.compiling import compile_code, refusals
from rkgb.compiled.code.sizes import SizeRule
from rkgb.compiled.pieces.joint import Joint
from rkgb.torch_api.private.flags import kernel_flags

_MOST_KNOWN = 1024  # classes
_MOST_TRIES = 2  # to compile one form for all sizes

Found = CompiledClass | str  # or why there is none
Check = Callable[[CompiledClass], None]  # raises NotCompiledError
# Make code for the rule, or for one size; and a class of it at a size. Both raise NotCompiledError.
_Compiled = Callable[[SizeRule | None], CompiledCode]
_Taken = Callable[[CompiledCode, int | None], CompiledClass]


@dataclass
class _Form:
    """The code for pieces that differ only in numbers."""

    numbers: tuple[int, ...] | None = None  # of the last piece that was compiled for its own size
    codes: list[CompiledCode] = field(default_factory=list)  # for all sizes
    tries: int = 0

    def class_for(self, joint: Joint, compiled: _Compiled, taken: _Taken) -> Found:
        """Return the class of a piece: by code for all sizes if one is valid, or by its own.

        From the second size on, code for all sizes is made.
        """
        for code in self.codes:
            if found := _if_valid(code, joint, taken):
                return found
        rule = None
        if self.numbers is not None and self.tries < _MOST_TRIES:
            rule = SizeRule.fitted(self.numbers, joint.numbers)
        if rule is not None:
            self.tries += 1
            with contextlib.suppress(NotCompiledError):
                code = compiled(rule)
                if found := _if_valid(code, joint, taken):
                    self.codes.append(code)
                    return found
        try:
            found = taken(compiled(None), None)
        except NotCompiledError as error:
            return str(error)
        self.numbers = joint.numbers
        return found


def _if_valid(code: CompiledCode, joint: Joint, taken: _Taken) -> CompiledClass | None:
    """Return the class of a piece by code for all sizes, or None."""
    size = None if code.sizes is None else code.sizes.of(joint)
    if size is not None:
        with contextlib.suppress(NotCompiledError):
            return taken(code, size)
    return None


@dataclass
class KnownClasses:
    """Compiled classes by everything that their code depends on, and refusals.

    A second budget, a second layer and a second module of the same kind compile nothing.
    """

    compiled: int = 0  # number of compilations
    _found: dict[Hashable, Found] = field(default_factory=dict)
    _forms: dict[Hashable, _Form] = field(default_factory=dict)

    def get(
        self,
        joint: Joint,
        device: torch.device,
        other: CompiledClass | None = None,
        *,
        check: Check | None = None,
        note: Callable[[], None] | None = None,
    ) -> Found:
        """Return the class of a piece, compiled if it is not known, or a text that says why not.

        `other` is as for `compile_code`. `check` is called with each new class, `note` before each
        compilation.
        """
        place = (str(device), torch.get_num_threads(), kernel_flags())
        key = (joint.key, *place)
        if key in self._found:
            return self._found[key]
        for full in (self._found, self._forms):
            while len(full) >= _MOST_KNOWN:
                del full[next(iter(full))]

        def compiled(rule: SizeRule | None) -> CompiledCode:
            if note is not None:
                note()
            code = compile_code(joint, device, other, rule)
            self.compiled += 1
            return code

        def taken(code: CompiledCode, size: int | None) -> CompiledClass:
            with refusals():
                found = code.class_of(joint, device, size)
                if check is not None:
                    check(found)
            return found

        form = self._forms.setdefault((joint.form, *place), _Form())
        self._found[key] = form.class_for(joint, compiled, taken)
        return self._found[key]
