"""What PEFT, TRL and transformers test of themselves, tried on meshlora: a table with counts.

    python scripts/try_peers.py [peft] [trl] [trainer] [--slice K/N] [--only TEXT]

peft: the LoRA configurations of its tests. trl: the losses of its trainers. trainer: runs of transformers' Trainer.
On one process and, but for losses, on tp=2.

Exits 1 where a number is wrong, or something crashed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from peers import adapters, configurations, losses, trainers
from transformers.utils.logging import disable_progress_bar

from meshlora.verify.pool import Pool
from meshlora_ground.errors import MeshloraError

BAD = ("WRONG", "CRASHED")
_CACHE = Path.home() / ".cache" / "meshlora-peers"


TOPOLOGIES = {"": "one process", "tp=2": "tp=2"}
Row = tuple[str, str, str, str]  # case, topology, verdict, why


def of_peft(sliced: tuple[int, int], only: str, root: Path, pools: dict[str, Pool]) -> Iterator[Row]:
    """The configurations of PEFT's tests."""
    found, left = configurations.cases(configurations.source(_CACHE))
    chosen = [case for case in found[sliced[0] :: sliced[1]] if only in case.name]
    print(f"peft: {len(found)} configurations, {len(chosen)} of them now; left out: {left}", flush=True)
    bases = root / "bases"
    bases.mkdir()
    for number, case in enumerate(chosen):
        out = root / str(number)
        peft = adapters.theirs(case, bases, out)
        base = adapters.base_of(peft["family"], bases)
        for topology, pool in pools.items():
            own = out / (topology or "one")
            own.mkdir(parents=True)
            for name in ("start", "after"):
                if (out / name).exists():
                    (own / name).symlink_to(out / name)
            mine = pool.run(adapters.ours, base, own / "start", case.options, topology, own / "mine")[0]
            said = adapters.verdict(peft, mine, base, own, merged=not topology)
            yield f"{case.name} ({peft['family']})", TOPOLOGIES[topology], *said
        shutil.rmtree(out)


def of_trainer(sliced: tuple[int, int], only: str, root: Path, pools: dict[str, Pool]) -> Iterator[Row]:
    """Runs of transformers' Trainer."""
    chosen = [name for name in list(trainers.RUNS)[sliced[0] :: sliced[1]] if only in name]
    print(f"trainer: {len(trainers.RUNS)} runs, {len(chosen)} of them now", flush=True)
    adapter = trainers.start(root / "adapter")
    for name in chosen:
        out = root / name
        lines = trainers.theirs(name, adapter, out)
        for topology, pool in pools.items():
            own = root / f"{name} {topology}"
            mine = pool.run(trainers.ours, name, adapter, own, topology)[0]
            yield name, TOPOLOGIES[topology], *trainers.verdict(lines, mine, out, own)


def of_trl(sliced: tuple[int, int], only: str, root: Path, pools: dict[str, Pool]) -> Iterator[Row]:
    """The losses of TRL's trainers, on one process."""
    chosen = [name for name in list(losses.LOSSES)[sliced[0] :: sliced[1]] if only in name]
    print(f"trl: {len(losses.LOSSES)} losses, {len(chosen)} of them now", flush=True)
    adapter = losses.start(root / "adapter")
    for name in chosen:
        loss = losses.LOSSES[name]
        expected = losses.theirs(loss, adapter, root / name)
        try:
            said = losses.verdict(loss, expected, losses.ours(loss, adapter, root / name))
        except MeshloraError as error:
            said = "refused", str(error)
        yield name, TOPOLOGIES[""], *said


PARTS = {"peft": of_peft, "trl": of_trl, "trainer": of_trainer}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--slice", default="0/1", metavar="K/N", help="of each part every Nth case, from K on")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with it in their names")
    options = parser.parse_args(arguments)
    first, _, of = options.slice.partition("/")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    disable_progress_bar()
    try:
        if "peft" in (options.parts or PARTS):
            configurations.source(_CACHE)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"error: the source distribution of PEFT, with its tests, could not be had ({error})", file=sys.stderr)
        return 2
    rows: list[Row] = []
    counts: dict[str, Counter[str]] = {}
    pools = {"": Pool(1), "tp=2": Pool(2)}
    try:
        for part in options.parts or PARTS:
            with tempfile.TemporaryDirectory() as root:
                for row in PARTS[part]((int(first) % int(of), int(of)), options.only, Path(root), pools):
                    rows.append(row)
                    counts.setdefault(f"{part}, {row[1]}", Counter())[row[2]] += 1
                    print(f"{row[2]:11s} {row[0]}, {row[1]}: {row[3][:300]}", flush=True)
    finally:
        for pool in pools.values():
            pool.close()
    for where, found in counts.items():
        print(f"{where}: " + ", ".join(f"{number} {verdict}" for verdict, number in found.most_common()))
    bad = sum(row[2] in BAD for row in rows)
    print(f"{len(rows)} comparisons; wrong or crashed: {bad}")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
