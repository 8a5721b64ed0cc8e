"""Launchers of processes: on this machine, over SSH, by an engine."""
