"""Telemetry of a run: typed events, the run folder, the result, metrics and verdicts."""
