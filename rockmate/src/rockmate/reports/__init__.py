"""A plan to look at: as text, as a page, in a notebook.

Gets a problem and its plan; gives `PlanReport`, which `rk.plan` is. Read plan_report.py (what is
offered), modules.py and curve.py (what is said: by module, and over the budget), charts.py (lines
and areas as SVG) and page.py (the page around them). Nothing here looks at tensors.
"""
