"""What a training step costs beside plain PyTorch, what a capture costs, and whether plans hold.

    $ make step
    $ .venv/bin/python benchmarks/step.py --against ../older      # a second checkout, in turn
    $ .venv/bin/python benchmarks/step.py --only enc8 planned_    # by names, or by parts of them
    $ .venv/bin/python benchmarks/step.py --profile enc8          # where a planned step's time goes
    $ .venv/bin/python benchmarks/step.py --smoke                 # tiny sizes, to see that it runs

`steps/turns.py` says what is measured, and how.
"""

from __future__ import annotations

import contextlib
import sys

from steps.turns import Draw, main

if __name__ == "__main__":
    draw: Draw | None = None
    with contextlib.suppress(ImportError):  # matplotlib is optional
        from visualize import draw_all as draw
    sys.exit(main(sys.argv[1:], draw))
