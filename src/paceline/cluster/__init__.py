"""The machines: an inventory that plan, doctor, launch and the twin share."""

from paceline.cluster.files import load_pool, read_pool
from paceline.cluster.pool import Host, Pool

__all__ = ["Host", "Pool", "load_pool", "read_pool"]
