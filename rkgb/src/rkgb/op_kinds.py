"""What rkgb knows of operations by name; all else was seen when they ran."""

from __future__ import annotations

# While training they write to their statistics, arguments 3 and 4; their schemas do not say so.
BATCH_NORMS = frozenset(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"))

# For display: names that a reader recognises as 'no computation'.
VIEW_NAMES = frozenset(
    (
        *("view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "select"),
        *("slice", "narrow", "split", "chunk", "split_with_sizes", "unbind", "unflatten"),
        *("flatten", "getitem", "t", "alias", "detach", "contiguous", "to", "view_as"),
        *(
            "expand_as",
            "as_strided",
            "empty_strided",
            "diagonal",
            "swapaxes",
            "movedim",
            "real",
            "imag",
        ),
        *("view_as_real", "view_as_complex", "_unsafe_view"),
    )
)
