"""single: one worker, no communication; the reference of the exact strategies."""
