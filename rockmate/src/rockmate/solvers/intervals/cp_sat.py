"""CP-SAT of ortools, loaded without pandas.

`ortools.sat.python.cp_model` imports pandas for variables in tables, which no program here has, and
pandas takes five sixths of the import. Whoever uses such variables gets pandas then.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_NAME = "ortools.sat.python.cp_model"


class _Pandas(ModuleType):
    """Stands for pandas, and loads it where it is asked for anything that it has not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


@functools.cache
def cp_model() -> Any:
    """Return ortools' module of models for CP-SAT.

    Raises:
        ImportError: ortools is not installed.
    """
    if _NAME in sys.modules or "pandas" in sys.modules:
        return importlib.import_module(_NAME)
    pandas = _Pandas("pandas")
    vars(pandas).update(Index=object, Series=object)  # of annotations

    def imports(name: str, *more: Any) -> Any:
        return pandas if name == "pandas" else __import__(name, *more)

    spec = importlib.util.find_spec(_NAME)
    if spec is None or spec.loader is None:
        return importlib.import_module(_NAME)
    module = importlib.util.module_from_spec(spec)
    vars(module)["__builtins__"] = {**vars(builtins), "__import__": imports}
    sys.modules[_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # a Ctrl-C, too
        del sys.modules[_NAME]
        raise
    vars(module)["__builtins__"] = builtins
    del pandas.Index, pandas.Series
    package, _, name = _NAME.rpartition(".")
    setattr(sys.modules[package], name, module)
    return module
