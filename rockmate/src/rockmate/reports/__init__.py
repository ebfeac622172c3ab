"""Reports of a plan: as text, as a page, in a notebook.

Gets a problem and its plan; gives a `PlanReport`, which is `rk.plan`. Read plan_report.py (the
report), modules.py and curve.py (its figures by module, over the budget, and over the step),
charts.py (lines and areas as SVG) and page.py (the page); in_full.py serves other answers. Nothing
here sees tensors.
"""
