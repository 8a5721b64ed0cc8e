"""A web page that shows a folder of runs: all of them, one live, or several compared.

The server reads the events that runs append and keeps sums over time bins; the browser polls for
changes every second. Nothing here imports torch or modifies the runs.
"""
