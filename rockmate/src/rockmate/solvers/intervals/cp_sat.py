"""CP-SAT of ortools, loaded without pandas.

`ortools.sat.python.cp_model` imports pandas for variables in tables, which no program here has, and
pandas takes five sixths of the import. Whoever uses such variables gets pandas then.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

_NAME = "ortools.sat.python.cp_model"
_loading = threading.Lock()


class _Pandas(ModuleType):
    """Stands for pandas, and loads it where it is asked for anything that it has not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def cp_model() -> Any:
    """Return ortools' module of models for CP-SAT.

    Raises:
        ImportError: ortools is not installed.
    """
    with _loading:  # blocks are solved in threads
        return sys.modules.get(_NAME) or _loaded()


def _loaded() -> ModuleType:
    spec = None if "pandas" in sys.modules else importlib.util.find_spec(_NAME)
    if spec is None or spec.loader is None:
        return importlib.import_module(_NAME)
    pandas = _Pandas("pandas")
    vars(pandas).update(Index=object, Series=object)  # of annotations

    def imports(name: str, *more: Any) -> Any:
        return pandas if name == "pandas" else __import__(name, *more)

    module = importlib.util.module_from_spec(spec)
    vars(module)["__builtins__"] = {**vars(builtins), "__import__": imports}
    spec.loader.exec_module(module)
    vars(module)["__builtins__"] = builtins
    del pandas.Index, pandas.Series
    # In this order `from ... import cp_model` finds one module, also after a Ctrl-C between them.
    module = sys.modules.setdefault(_NAME, module)
    package, _, name = _NAME.rpartition(".")
    setattr(sys.modules[package], name, module)
    return module
