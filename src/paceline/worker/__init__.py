"""What runs inside a worker process: control loop, training loop, evaluation, the own-loop wrapper."""
