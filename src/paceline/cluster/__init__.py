"""The machines: an inventory that plan, doctor, launch and the twin share."""

from paceline.cluster.pool import Host, Pool, read_pool

__all__ = ["Host", "Pool", "read_pool"]
