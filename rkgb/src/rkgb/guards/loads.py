"""What a function loads from outside of its call, by its bytecode."""

from __future__ import annotations

import dis
from dataclasses import dataclass, replace
from types import CodeType

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
# By these, attributes are read whose names are not written in the code.
_BY_ANY_NAME = frozenset(("vars", "dir", "attrgetter", "methodcaller", "getmembers", "__dict__"))
_SETS_BY_NAME = frozenset(("setattr", "delattr", "vars", "__dict__"))


@dataclass(frozen=True, slots=True)
class Loads:
    """The names that a function loads, each with the line where it does so first."""

    globals: dict[str, int]
    free: dict[str, int]  # variables of functions around it
    attributes: dict[str, int]
    imports: dict[str, int]  # modules that are imported in it
    stores: dict[str, int]  # global variables and those of functions around it that it sets
    sets: dict[str, int]  # attributes of objects
    compares: set[str]  # `IS`, but with constants, `IN`, `EQUALS`; also in what it makes
    catches: bool = False  # errors that an operation on tensors may raise


IS, IN, EQUALS = "is", "in", "=="
_OTHER_ERRORS = frozenset(  # no operation on tensors raises them for other values
    ("AttributeError", "EinopsError", "ImportError", "KeyError", "StopIteration", "TypeError")
)
# By these, a list is searched.
_SEARCHES = frozenset(("index", "count", "remove"))
OWN = "."  # before the name of an attribute that code of the user's asks for itself
ANY = "*"  # as the name of an attribute
_known: dict[int, tuple[CodeType, Loads]] = {}  # codes compare by value, and are few
_MOST = 20_000


def loads_of(code: CodeType) -> Loads:
    """Return what a function loads."""
    known = _known.get(id(code))
    if known is None:
        while len(_known) >= _MOST:
            del _known[next(iter(_known))]
        known = _known[id(code)] = code, _read(code)
    return known[1]


def _read(code: CodeType) -> Loads:
    found = Loads({}, {}, {}, {}, {}, {}, set())
    before, loaded, catches = "", None, "suppress" in code.co_names
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        line = step.starts_line if isinstance(step.starts_line, int) else line
        line = getattr(step, "line_number", None) or line  # from Python 3.13 on
        name, kind = step.argval, step.opname
        if kind in _GLOBALS:
            found.globals.setdefault(name, line)
        elif kind in _ATTRIBUTES:
            found.attributes.setdefault(name, line)
        elif kind == "IS_OP" and before != "LOAD_CONST":
            found.compares.add(IS)
        elif kind == "COMPARE_OP" and step.argval in ("==", "!="):
            found.compares.add(EQUALS)
        elif kind == "CONTAINS_OP":
            found.compares.add(IN)
        elif kind == "IMPORT_NAME":
            found.imports.setdefault(name, line)
        elif kind in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            found.stores.setdefault(name, line)
        elif kind in ("STORE_ATTR", "DELETE_ATTR"):
            found.sets.setdefault(name, line)
        elif kind.endswith("_DEREF") and name in code.co_freevars:
            stores = kind.startswith(("STORE", "DELETE"))
            (found.stores if stores else found.free).setdefault(name, line)
        catches |= kind == "CHECK_EXC_MATCH" and loaded not in _OTHER_ERRORS
        catches |= kind == "POP_TOP" and before == "PUSH_EXC_INFO"  # `except:`
        before, loaded = kind, name
    if not _SEARCHES.isdisjoint(found.attributes):
        found.compares.add(IN)
    for inner in code.co_consts:  # functions that it makes read its variables, and set them
        if isinstance(inner, CodeType):
            of_inner = loads_of(inner)
            found.compares.update(of_inner.compares)
            for name in {*inner.co_freevars} & {*code.co_freevars}:
                sets = name in of_inner.stores
                (found.stores if sets else found.free).setdefault(name, inner.co_firstlineno)
    texts = [held for held in code.co_consts if isinstance(held, str) and held.isidentifier()]
    if not _BY_ANY_NAME.isdisjoint(code.co_names):
        found.attributes.setdefault(ANY, line)
        found.attributes.update((text, line) for text in texts if text not in found.attributes)
    if not _SETS_BY_NAME.isdisjoint(code.co_names):
        found.sets.update((text, line) for text in texts if text not in found.sets)
    return replace(found, catches=catches)
