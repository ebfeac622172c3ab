"""Plans in files: what a plan needs in order to be used again without solver or measurement.

In: problems, plans, costs of kinds of operation. Out: JSON text, and back; every text that is not
exactly such a file is refused. Nothing here sees a tensor, and nothing in a file is ever run.

Read rows (data types as JSON, and strictly back), then plan_file (what is kept), differences (why
a plan does not fit, in words), cache_folder (where plans lie between two starts).
"""
