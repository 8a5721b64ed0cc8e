"""A Ray cluster of two nodes in separate processes; ends when its standard input does.

Takes the CPUs of each node (1) and prints its address; the word "remove" on its input takes the
second node away.
"""

import sys

from ray.cluster_utils import Cluster

node = {"num_cpus": int(sys.argv[1]) if sys.argv[1:] else 1, "object_store_memory": 100 << 20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
second = cluster.add_node(**node)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
for line in sys.stdin:
    if line.strip() == "remove":
        # At once, as when a machine dies.
        cluster.remove_node(second, allow_graceful=False)
        print("removed", flush=True)
cluster.shutdown()
