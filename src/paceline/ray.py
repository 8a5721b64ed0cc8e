"""Ray as an engine."""
