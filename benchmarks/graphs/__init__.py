"""Benchmarks on graphs: which modules rkgb and Rockmate take, how fast, and pictures.

Gets modules; gives rows and parts of rkgb's README. Read breadth.py with breadth_cases.py and
breadth_modules.py, users.py with user_models, then speed.py and pictures.py.
"""
