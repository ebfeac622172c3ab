"""Exceptions that stop a recording, before their place in the model is known."""

from __future__ import annotations


class ReadsDataError(Exception):
    """`what` (a decision of Python's, or a size) depends on values, perhaps in a backward."""

    def __init__(self, what: str, backward: str, module_path: str | None = None) -> None:
        super().__init__(what, backward)
        self.what, self.backward, self.module_path = what, backward, module_path


class WritesInputError(Exception):
    """An operation writes to an input."""

    def __init__(self, name: str, operation: str, path: str, source: str) -> None:
        super().__init__(name, operation, path, source)
        self.name, self.operation, self.path, self.source = name, operation, path, source


class NeedsContentError(Exception):
    """A value is read that was not computed, because its kernels were skipped."""


class NotRecordedError(Exception):
    """The forward does something that is no operation; the text continues 'its forward …'."""

    module_path: str | None = None  # set if a backward does it
