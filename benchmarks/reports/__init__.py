"""From committed rows to the tables of the READMEs.

Gets CSV files; gives Markdown between markers. Read tables.py, report.py (the tables of the two
READMEs), readme.py (the parts of rkgb's README that scripts write) and scale_page.py (a page of
the documentation).
"""
