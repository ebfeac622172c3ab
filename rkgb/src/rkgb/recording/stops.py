"""What stops a recording, before it is known where in the model that was."""

from __future__ import annotations


class ReadsDataError(Exception):
    """Python or a kernel's size depends on values; `what` does, and in which backward, if any."""

    def __init__(self, what: str, backward: str, module_path: str | None = None) -> None:
        super().__init__(what, backward)
        self.what, self.backward, self.module_path = what, backward, module_path


class WritesInputError(Exception):
    """An operation, at a line of a module, writes to an input."""

    def __init__(self, name: str, operation: str, path: str, source: str) -> None:
        super().__init__(name, operation, path, source)
        self.name, self.operation, self.path, self.source = name, operation, path, source


class NeedsContentError(Exception):
    """A value is looked at, and what it was computed from was not all computed."""


class NotRecordedError(Exception):
    """The forward does something that is no operation; the text completes 'its forward …'."""

    module_path: str | None = None  # where a backward does
