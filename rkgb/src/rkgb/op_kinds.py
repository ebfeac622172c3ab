"""What rkgb knows of operations by name: the one place to teach it a new one.

Views, aliases and random operations are *observed* when each operation runs once (a reshape may or
may not copy; a dropout of probability zero returns its input). Only what cannot be observed safely
is listed here.
"""

from __future__ import annotations

from rkgb.op import Op, Ref

# Writes to buffers that the operator schema does not declare: positions of the written arguments
# and of the flag that switches the write on.
_BUFFER_WRITERS = {"batch_norm": ((3, 4), 5), "instance_norm": ((3, 4), 5)}

# Operations that make a tensor out of nothing but numbers.
CONSTRUCTORS = frozenset(
    (
        *("arange", "zeros", "ones", "full", "empty", "eye", "linspace", "scalar_tensor"),
        *("new_zeros", "new_ones", "new_full"),
    )
)

# Names that a reader recognises as 'no computation'; used for display only.
VIEW_NAMES = frozenset(
    (
        *("view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "select"),
        *("slice", "narrow", "split", "chunk", "split_with_sizes", "unbind", "unflatten"),
        *("flatten", "getitem", "t", "alias", "detach", "contiguous", "to", "view_as"),
        *("expand_as", "as_strided", "diagonal", "swapaxes", "movedim", "real", "imag"),
        *("view_as_real", "view_as_complex"),
    )
)


def written_inputs(op: Op) -> tuple[str, ...]:
    """Return the values that the operation writes to: in-place targets and updated buffers."""
    written: list[str] = []
    schema = getattr(op.target, "_schema", None)
    if schema is not None:
        for position, argument in enumerate(schema.arguments):
            info = argument.alias_info
            if info is None or not info.is_write:
                continue
            value = op.args[position] if position < len(op.args) else op.kwargs.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            written += [v.name for v in values if isinstance(v, Ref)]
    if op.target_name in _BUFFER_WRITERS:
        positions, flag = _BUFFER_WRITERS[op.target_name]
        if len(op.args) > flag and op.args[flag]:
            written += [op.args[p].name for p in positions if isinstance(op.args[p], Ref)]
    return tuple(dict.fromkeys(written))
