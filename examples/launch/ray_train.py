"""A run on a Ray cluster: one actor a rank, each of which starts `meshlora train` with its place in the job.

    python examples/launch/ray_train.py --ranks 16 run.yaml --resume auto

Other words are those of `meshlora train`; all nodes see the folder in which this starts. Ray finds the nodes. The exit
code is that of the first rank that fails. With `--cpus`, ranks get no GPU.
"""

import argparse
import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote
class Rank:
    """One process of the job. Ray shows it its own GPU alone, as number 0."""

    def address(self) -> tuple[str, int]:
        """This host, and a port of it that is free now."""
        with socket.socket() as found:
            found.bind(("", 0))
            return ray.util.get_node_ip_address(), found.getsockname()[1]

    def train(self, words: list[str], folder: str, place: dict[str, str]) -> int:
        command = [sys.executable, "-m", "meshlora", "train", *words]
        return subprocess.run(command, cwd=folder, env=os.environ | place).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--cpus", type=int, metavar="N", help="of each rank, in the place of a GPU")
    options, words = parser.parse_known_args()
    needs = {"CPU": options.cpus} if options.cpus else {"CPU": 1, "GPU": 1}
    ray.init()
    group = placement_group([needs] * options.ranks, strategy="PACK")
    ray.get(group.ready())
    ranks = [
        Rank.options(
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        ).remote()
        for number in range(options.ranks)
    ]
    # tp is innermost, and is to stay within a node: neighbours are ranks of one host.
    addresses = ray.get([rank.address.remote() for rank in ranks])
    order = sorted(range(options.ranks), key=lambda number: addresses[number][0])
    host, port = addresses[order[0]]
    meeting = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(options.ranks), "LOCAL_RANK": "0"}
    left = [
        ranks[number].train.remote(words, os.getcwd(), meeting | {"RANK": str(rank)})
        for rank, number in enumerate(order)
    ]
    while left:
        (ended, *_), left = ray.wait(left)
        if code := ray.get(ended):
            return int(code)  # the others lose contact, and end by themselves
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
