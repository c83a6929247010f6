"""Pictures, tables and pages of runs, made from plain data: a summary, a log history, a run's file.

What was not measured is left out. It is never shown as a zero.
"""
