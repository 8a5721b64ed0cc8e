"""What runs inside a worker process: control, training loop, evaluation, own loops."""
