"""Inventory of machines, shared by plan, doctor, launch and the twin."""

from paceline.cluster.pool import Host, Pool, read_pool

__all__ = ["Host", "Pool", "read_pool"]
