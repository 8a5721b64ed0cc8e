"""Strategies, optimizers and schedules as data: torch-free, written the same everywhere."""
