"""Whose a function, a class or a module is: the user's, or a library's."""

from __future__ import annotations

import functools
import sys

_OURS = ("rkgb", "rockmate", "rotor")  # of which nets and tests are read as a user's
# What these read of themselves is part of torch's state, which keys hold, or of nobody's.
_LIBRARIES = frozenset(
    (
        *sys.stdlib_module_names,
        *("torch", "functorch", "torchgen", "triton", "numpy", "sympy", "_pytest", "pluggy"),
        "typing_extensions",
        *("hypothesis", "coverage", "IPython", "ipykernel", "debugpy", "pydevd"),
        *_OURS,
    )
)
# They ask the system for nothing but what they print, or for the code of modules.
_APART = frozenset(("importlib", "linecache", "logging", "tokenize", "traceback", "warnings"))
# Of torch, what does as the standard library: it hands on what it has read.
_HANDS_ON = frozenset(("torch.random", "torch.serialization"))
_BETWEEN = frozenset(("rkgb.torch_api.patches", "rkgb.safeguards.traces"))  # of ours


def is_users(module: object) -> bool:
    """Whether what is written in a module, by its name, is the user's own.

    Examples:
        >>> is_users("torch.nn.functional"), is_users("my_model.config")
        (False, True)
    """
    return not isinstance(module, str) or _is_users(module)


@functools.cache  # it is asked at every call into C while a step is recorded
def _is_users(module: str) -> bool:
    top = module.partition(".")[0]
    return module == "__main__" or top not in _LIBRARIES or (top in _OURS and ".test" in module)


def is_pythons(module: str) -> bool:
    """Whether a module is of Python's standard library, by its name."""
    return module.partition(".")[0] in sys.stdlib_module_names


def is_ours(module: object) -> bool:
    """Whether what is written in a module is Rockmate's own."""
    return isinstance(module, str) and module.partition(".")[0] in _OURS


def hands_on(module: object) -> bool:
    """Whether a library's module gives to its caller what it reads elsewhere.

    Examples:
        >>> hands_on("pathlib"), hands_on("logging.handlers"), hands_on("torch.nn.functional")
        (True, False, False)
    """
    return _hands_on(str(module))


@functools.cache
def _hands_on(module: str) -> bool:
    top = module.partition(".")[0]
    if top in ("torch", "rkgb"):
        return module in _HANDS_ON or module in _BETWEEN
    return top == "numpy" or (is_pythons(top) and top not in _APART)
