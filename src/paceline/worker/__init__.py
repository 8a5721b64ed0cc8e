"""Code of a worker process: control, training loop, evaluation, custom loops."""
