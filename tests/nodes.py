"""A cluster of three nodes on this machine, whose nodes come and go by lines on stdin: ``add``, ``remove``.

The address is the first line of its output; after each change it says ``done``. It is not the driver, so a
driver may die without it.
"""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "add":
            cluster.add_node(num_cpus=2)
        else:
            cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
