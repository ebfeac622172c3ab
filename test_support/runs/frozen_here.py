"""Importing this freezes what is there: the last import of a process from which others fork."""

from runs.frozen import freeze

freeze()
