"""Plans in files: everything needed to use a plan again without solver or measurement.

Gets problems, plans, and costs of kinds of operation; gives JSON text, and reads it back. Any text
that is not exactly such a file is refused. Nothing here sees a tensor, and nothing in a file is
run.

Read rows (data types as JSON, and strictly back), then plan_file (the content), differences (why a
plan does not fit, in words), cache_folder (where plans are kept between two starts).
"""
