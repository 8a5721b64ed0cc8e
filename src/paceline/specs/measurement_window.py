"""Length of the windows in which a run measures its throughput."""

WINDOW_S = 1.0
WINDOW_BATCHES = 8
"""A window of the throughput monitor contains at least this many global batches."""
