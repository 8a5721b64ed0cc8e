"""Views derived from run folders: progress, tables, comparisons and reports.

Nothing here imports torch: a report is made years later, on a machine without it.
"""
