"""Pictures, tables and pages of runs, from plain data: a summary, a log history, a run's file.

What was not measured is left out: a missing row, panel or picture is never a zero.
"""
