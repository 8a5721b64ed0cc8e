"""allreduce: synchronous; gradients averaged over all workers at every step."""
