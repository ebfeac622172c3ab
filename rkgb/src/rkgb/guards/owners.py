"""Whose a function, a class or a module is: the user's, or a library's that no forward changes."""

from __future__ import annotations

import sys

_OURS = ("rkgb", "rockmate", "rotor")  # of which nets and tests are read as a user's
# What these read of themselves is part of torch's state, which keys hold, or of nobody's.
_LIBRARIES = frozenset(
    (
        *sys.stdlib_module_names,
        *("torch", "functorch", "torchgen", "triton", "numpy", "sympy", "_pytest", "pluggy"),
        *("hypothesis", "coverage", "IPython", "ipykernel", "debugpy", "pydevd"),
        *_OURS,
    )
)


def is_users(module: object) -> bool:
    """Whether what is written in a module, by its name, is the user's own.

    Examples:
        >>> is_users("torch.nn.functional"), is_users("my_model.config")
        (False, True)
    """
    if not isinstance(module, str) or module == "__main__":
        return True
    top = module.partition(".")[0]
    return top not in _LIBRARIES or (top in _OURS and ".test" in module)
