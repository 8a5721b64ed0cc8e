"""ps: weights and optimizer on servers; workers pull, compute and push."""
