"""The oldest version of each dependency that pyproject.toml allows, as constraints for scripts/set_up.sh.

python scripts/floor.py > FILE                        # torch: the pinned one, whose builds are small
FLOOR_TORCH=2.11.0 python scripts/floor.py > FILE    # torch: the oldest, 5 GB with CUDA's libraries
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def floor(project: str, torch: str) -> list[str]:
    """`name==version` for each `name>=version` in the text of a pyproject.toml; torch as it is given."""
    groups = tomllib.loads(project)["project"]
    wanted = [*groups["dependencies"], *(each for extra in groups["optional-dependencies"].values() for each in extra)]
    bounds = [re.match(r"([\w.-]+)>=([\d.]+)", each) for each in wanted]
    return [f"torch=={torch}", *sorted({f"{b[1]}=={b[2]}" for b in bounds if b is not None and b[1] != "torch"})]


def pinned_torch() -> str:
    """The version of torch that constraints.txt names."""
    return re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


if __name__ == "__main__":
    torch = os.environ.get("FLOOR_TORCH") or pinned_torch()
    print("\n".join(floor((ROOT / "pyproject.toml").read_text(), torch)))
