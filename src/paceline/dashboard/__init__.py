"""A page in the browser over a folder of runs: all of them, one live, several compared.

The server reads what runs append and keeps sums over time bins; the browser asks once a second
for what has changed. Nothing here imports torch, and nothing touches the runs.
"""
