"""Starts and supervises the processes of a run. Nothing here imports torch."""
