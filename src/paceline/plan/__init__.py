"""The planner: predicts time, energy and cost of a job on a pool."""
