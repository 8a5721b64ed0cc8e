"""Published tables next to the runs that repeat a study."""
