"""The cache of compiled classes of this process, by size, or one for all sizes of a form.

The first piece of a form is compiled for its own size, which makes the fastest code. A second piece
of another size is compiled for all sizes, and later ones use that code. A size keeps the code that
it got first, so all plans of a process have the same bits at the same size.
"""

from __future__ import annotations

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


@dataclass
class _Form:
    """The code for pieces that differ only in numbers."""

    numbers: tuple[int, ...] | None = None  # of the last piece that was compiled for its own size
    codes: list[CompiledCode] = field(default_factory=list)  # for all sizes
    tries: int = 0


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
        if key not in self._found:
            for full, most in ((self._found, _MOST_KNOWN), (self._forms, _MOST_KNOWN)):
                while len(full) >= most:
                    full.pop(next(iter(full)))
            form = self._forms.setdefault((joint.form, *place), _Form())
            making = _Making(self, form, joint, device, other, check, note)
            self._found[key] = making.of_any_size() or making.of_own_size()
        return self._found[key]


@dataclass
class _Making:
    """Makes one new class."""

    known: KnownClasses
    form: _Form
    joint: Joint
    device: torch.device
    other: CompiledClass | None
    check: Check | None
    note: Callable[[], None] | None

    def of_own_size(self) -> Found:
        """Compile a piece for its own size."""
        try:
            found = self._checked(self._compiled(None), None)
        except NotCompiledError as error:
            return str(error)
        self.form.numbers = self.joint.numbers
        return found

    def of_any_size(self) -> CompiledClass | None:
        """Use code for all sizes, or compile it from the second size on; None if none is valid."""
        for code in self.form.codes:
            if found := self._taken(code):
                return found
        rule = None
        if self.form.numbers is not None and self.form.tries < _MOST_TRIES:
            rule = SizeRule.fitted(self.form.numbers, self.joint.numbers)
        if rule is None:
            return None
        self.form.tries += 1
        try:
            code = self._compiled(rule)
        except NotCompiledError:
            return None
        found = self._taken(code)
        if found is not None:
            self.form.codes.append(code)
        return found

    def _compiled(self, rule: SizeRule | None) -> CompiledCode:
        if self.note is not None:
            self.note()
        code = compile_code(self.joint, self.device, self.other, rule)
        self.known.compiled += 1
        return code

    def _taken(self, code: CompiledCode) -> CompiledClass | None:
        size = None if code.sizes is None else code.sizes.of(self.joint)
        if size is None:
            return None
        try:
            return self._checked(code, size)
        except NotCompiledError:
            return None

    def _checked(self, code: CompiledCode, size: int | None) -> CompiledClass:
        with refusals():
            found = code.class_of(self.joint, self.device, size)
            if self.check is not None:
                self.check(found)
        return found
