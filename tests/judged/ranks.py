"""Two gloo ranks for a trainer that is judged: processes of their own, forked where the libraries are already imported.

Nothing of the engine is imported by these tests, so they run where the judge alone is installed: `make test-judge`.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshlora_judge.command import main

# What trainers read of a launcher.
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LIMIT_S = 240


def on_ranks(trainer: Callable[..., None], folder: Path, *args: Any, world: int = 2, launcher: bool = True) -> None:
    """Run `trainer(rank, folder, *args)` on every rank of a gloo group; what one of them raised is an AssertionError.

    launcher: torchrun's variables are set, as most trainers expect it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "peft", "accelerate", "trl"])
    folder.mkdir(parents=True, exist_ok=True)
    given = (trainer, folder, args, world, launcher)
    ranks = [context.Process(target=_rank, args=(rank, *given)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(_LIMIT_S)
    stuck = [process for process in ranks if process.is_alive()]
    for process in stuck:
        process.kill()
    said = "\n".join(file.read_text() for file in sorted(folder.glob("rank-*.error")))
    assert not said, said
    assert not stuck
    assert [process.exitcode for process in ranks] == [0] * world


def _rank(
    rank: int, trainer: Callable[..., None], folder: Path, args: tuple[Any, ...], world: int, launcher: bool
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    for name in _LAUNCHER:
        os.environ.pop(name, None)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if launcher:
        # The group is there already: address and port are looked at and not used.
        values = (rank, rank, world, world, "127.0.0.1", 29500)
        os.environ |= {name: str(value) for name, value in zip(_LAUNCHER, values, strict=True)}
    try:
        if world > 1:
            limit = datetime.timedelta(seconds=60)
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
        trainer(rank, folder, *args)
    except BaseException:  # noqa: BLE001  # to the parent, in words
        (folder / f"rank-{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # Trainers leave threads and groups behind


def judged(folder: Path) -> tuple[int, dict[str, Any]]:
    """(exit code of `meshlora judge step`, its verdict as --json writes it)."""
    import json

    file = folder / "verdict.json"
    file.unlink(missing_ok=True)
    code = main(["step", str(folder / "seen"), "--model", str(folder / "model"), "--json", str(file)])
    return code, json.loads(file.read_text()) if file.exists() else {}


def assert_proved(folder: Path) -> dict[str, Any]:
    code, verdict = judged(folder)
    assert verdict.get("findings") == [], verdict
    assert code == 0
    assert {"gradient", "update"} <= verdict["compared"].keys(), "gradients and updates were judged"
    return verdict


def assert_refuted(folder: Path, cause: str) -> dict[str, Any]:
    """The first finding has this cause."""
    code, verdict = judged(folder)
    assert code == 1, verdict
    assert verdict["findings"][0]["cause"] == cause, verdict["findings"]
    return verdict
