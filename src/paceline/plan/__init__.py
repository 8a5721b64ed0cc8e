"""What a job would cost on a pool: the model of time that the planner and the twin share."""
