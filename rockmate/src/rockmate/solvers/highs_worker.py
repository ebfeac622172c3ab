"""Runs HiGHS on an MPS file and prints the answer as one line of JSON.

Started as a script in a process of its own: highspy and ortools cannot be loaded together. It
imports nothing of this package.
"""

from __future__ import annotations

import json
import sys


def main(path: str, time_limit: str) -> None:
    """Solve the program at `path` and print status and values by name."""
    import highspy

    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("random_seed", 0)
    highs.setOptionValue("mip_rel_gap", 0.0)
    if time_limit != "inf":
        highs.setOptionValue("time_limit", float(time_limit))
    highs.readModel(path)
    highs.run()
    status = highs.getModelStatus()
    found = highs.getInfo().primal_solution_status == highspy.kSolutionStatusFeasible
    if status == highspy.HighsModelStatus.kOptimal:
        text = "optimal"
    elif status == highspy.HighsModelStatus.kInfeasible:
        text = "infeasible"
    else:
        text = "feasible" if found else "unknown"
    values = None
    if text in ("optimal", "feasible"):
        names = [highs.getColName(i)[1] for i in range(highs.getNumCol())]
        values = dict(zip(names, highs.getSolution().col_value, strict=True))
    print(json.dumps({"status": text, "values": values}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
