"""switch: several strategies in sequence in one run."""
