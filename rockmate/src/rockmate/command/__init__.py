"""The command line: estimate, plan, show, report, compare.

Gets arguments; prints text, or one JSON object with `--json`, and gives an exit code. Read
arguments.py (the arguments), then actions.py (the commands, and `module:factory` names).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rkgb import RkgbError
from rockmate.command.actions import FactoryError, print_result
from rockmate.command.arguments import parser
from rockmate.errors import RockmateError

__all__ = ["main"]

_REFUSED, _UNKNOWN, _INTERRUPTED = 1, 2, 130  # exit codes; argparse's for unknown arguments is 2


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for an error, 2 for unknown arguments or none.

    Example:
        $ python -m rockmate estimate models:gpt2 --json
    """
    words = sys.argv[1:] if words is None else words
    if not words:
        parser().print_help(sys.stderr)
        return _UNKNOWN
    chosen = parser().parse_args(words)
    try:
        print_result(chosen)
    except (RockmateError, RkgbError, FactoryError, OSError) as error:
        _say(f"rockmate: {error}")
        return _REFUSED
    except KeyboardInterrupt:
        _say("rockmate: interrupted")
        return _INTERRUPTED
    return 0


def _say(text: str) -> None:
    encoding = sys.stderr.encoding or "utf-8"
    sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
