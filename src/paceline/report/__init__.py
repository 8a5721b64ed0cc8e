"""What people look at, derived from run folders: progress, tables, comparisons, the HTML report.

Nothing here imports torch: a report is made years later, on a machine without it.
"""
