"""The preflight of a run file: of each adapter by itself and, of several, that together they train as each would alone.

Owns: that second proof, on the twin of the run's model and on its topology. Does not own: the proof of a single run
(`verify.preflight`), which comes first, and what is compared (`verify.at_once`).
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshlora.console import Console
from meshlora.errors import UnsupportedError
from meshlora.oracle.compare import Worst
from meshlora.oracle.inputs import write_twin
from meshlora.plan.topology import Topology
from meshlora.proof_records import CACHE, proved_on, remember, usable_cache
from meshlora.train.launch import signals_end_what_was_started
from meshlora.train.prepare import Prepared
from meshlora.verify.at_once import LIMIT, Base, compare_at_once, one_of_many
from meshlora.verify.preflight import preflight, preflight_state, proof_of
from meshlora.verify.proof import Processes
from meshlora.verify.stand_in import StandIn, provable
from meshlora.versions import digest


def preflight_runs(
    runs: Mapping[str, Prepared], *, skip: bool = False, console: Console | None = None, cache_dir: Path = CACHE
) -> None:
    """`preflight` of each run of a run file, and of several adapters together; arguments and errors as there."""
    console = console or Console()
    for run in runs.values() if not skip else list(runs.values())[:1]:
        preflight(run, skip=skip, console=console, cache_dir=cache_dir)
    if skip or "" in runs:
        return
    asked = _asked(runs, cache_dir)
    if proved_on(cache_dir, asked):
        return
    first = next(iter(runs.values()))
    topology, started = provable(first.topology), time.perf_counter()
    what = f"{len(runs)} adapters at once on {topology}"
    console.say(f"preflight: {what} against each by itself (once; seconds)")
    with signals_end_what_was_started(), usable_cache(cache_dir) as (_, why_not), console.busy("preflight"):
        with Processes() as processes:
            worst = compare_on_twin(runs, topology, processes)
        adapter, found = max(worst.items(), key=lambda item: item[1].relative)
        if not found.relative <= LIMIT:
            raise UnsupportedError(
                what,
                f"on the twin {adapter} does not train as it would by itself ({found.name}: {found.relative:.1e} off)",
                "train the adapters one by one",
            )
        seconds = time.perf_counter() - started
        why_not = why_not or remember(cache_dir, asked, {"worst": found.relative})
    lost = f"; not remembered, so the next run proves it again: {why_not}" if why_not else ""
    console.say(f"preflight: {what} proved in {seconds:.0f} s{lost}")


def runs_state(runs: Mapping[str, Prepared], *, cache_dir: Path = CACHE) -> str:
    """What `meshlora check` says of the preflight of a run file."""
    states = {name: preflight_state(run, cache_dir=cache_dir) for name, run in runs.items()}
    if "" in runs:
        return states[""]
    date = proved_on(cache_dir, _asked(runs, cache_dir))
    together = f"proved, {date}" if date else "train will prove it"
    return "\n".join([*(f"{name}: {state}" for name, state in states.items()), f"together: preflight: {together}"])


def _asked(runs: Mapping[str, Prepared], cache_dir: Path) -> dict[str, Any]:
    """What a record of the proof of all `runs` together must say."""
    keys = [proof_of(run, cache_dir)[1] for run in runs.values()]
    first = next(iter(runs.values()))
    return {
        "key": digest(["several adapters at once", *keys]),
        "model_type": first.plan.model_type,
        "topology": str(provable(first.topology)),
        "request": keys,
    }


def compare_on_twin(runs: Mapping[str, Prepared], topology: Topology, processes: Processes) -> dict[str, Worst]:
    """`compare_at_once` of adapters as those of `runs`, on the twin."""
    first, stand_in = next(iter(runs.values())), StandIn(*runs.values())
    adapters = {
        name: one_of_many(number, stand_in.lora(run), run.config.train)
        for number, (name, run) in enumerate(runs.items())
    }
    alone, ranks = processes.reference("cpu"), processes.ranks(topology.world, "cpu")
    alone.start()
    ranks.start()
    with tempfile.TemporaryDirectory(prefix="meshlora-") as temporary:
        folder = Path(temporary)
        write_twin(stand_in.config, folder / "twin", dtype=torch.float64, seed=0)
        model = dataclasses.replace(
            first.config.model,
            path=str(folder / "twin"),
            dtype="float64",
            attn_implementation=stand_in.attn_implementation,
            disable_dropout=True,
        )
        base = Base(model, folder)
        return compare_at_once(base, adapters, topology, ranks=ranks, alone=alone)
