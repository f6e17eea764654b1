"""`meshlora env`: versions, devices and folders of this machine, to go with a report of a problem.

Owns: what is told of them, which is nothing secret: no names of users, hosts or tokens, no values of the environment
but where caches are. Does not own: the machines of a job (`run.machines`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

_LIBRARIES = ("tokenizers", "datasets", "accelerate", "numpy", "pydantic", "bitsandbytes", "liger-kernel", "matplotlib")


def add(commands: Any) -> None:
    env = commands.add_parser("env", help="versions, devices and cache folders, for a report of a problem")
    env.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write it as JSON; without FILE to the terminal"
    )
    env.set_defaults(run=_env)


def _env(options: argparse.Namespace) -> None:
    from meshlora_ground.console import Console, hand_over
    from meshlora_ground.files import check_result_file, write_json_atomically

    if options.json not in (None, "-"):
        check_result_file(Path(options.json), options.json)
    found = environment()
    if options.json == "-":
        hand_over(json.dumps(found, indent=1))
        return
    if options.json is not None:
        write_json_atomically(Path(options.json), found)
    Console().show_rows([(name, _shown(value)) for name, value in found.items()])


def environment() -> dict[str, Any]:
    """What `meshlora env` tells, as plain values."""
    import torch
    from huggingface_hub.constants import HF_HUB_CACHE

    from meshlora_ground.hub import endpoint, is_offline
    from meshlora_ground.private import CACHE
    from meshlora_ground.versions import version_of, versions

    nccl, gpus, hub = "no GPU", list[str](), endpoint()
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        for number in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(number)
            gpus.append(f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB, compute capability {gpu.major}.{gpu.minor}")
    if is_offline():
        hub += ", offline"
    return {
        **versions(),
        **{name: found for name in _LIBRARIES if (found := version_of(name))},
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        # Of this process, which a container may have limited.
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}, {torch.get_num_threads()} threads",
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "cuda": torch.version.cuda or "not in this torch",
        "nccl": nccl,
        "gpus": gpus,
        "cache": _from_home(str(CACHE)),
        "hub_cache": _from_home(HF_HUB_CACHE),
        "hub": hub,
    }


def _from_home(path: str) -> str:
    """`path` without the name of the user in it."""
    home = os.path.expanduser("~")
    if path.startswith(f"{home}{os.sep}"):
        return f"~{path[len(home) :]}"  # output goes into issues
    return path


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(value) or "none"
    return str(value)
