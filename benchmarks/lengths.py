"""Batches of many sizes: what a new length costs, and that each step keeps budget and bits.

    $ python benchmarks/lengths.py                       # BERT, Llama and a U-Net: 1200 steps
    $ python benchmarks/lengths.py --only bert --smoke   # tiny sizes, to see that it runs

`steps/lengths.py` says what is measured, and how. Rows: lengths.csv.
"""

from __future__ import annotations

import sys

from steps.lengths import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
