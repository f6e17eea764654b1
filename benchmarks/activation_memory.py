"""Saved activations, counted: what autograd keeps between forward and backward, meshlora against PEFT.

    python benchmarks/activation_memory.py [--quick] [--tiny] [--json FILE] [--seq S] [--batch B]

Counted are the storages that autograd saves in the forward and the loss, each once however often it is saved, without
those of parameters and buffers: no clock and no allocator is involved, so the numbers are the same on every machine.
A layer is (4 layers - 2 layers) / 2, so that embedding, head and loss do not count in it; a step is all four layers
with them. Of two ranks one is shown: they hold alike.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from processes import Group, batch_of, be_quiet, open_groups
from tp_vs_peft import MODEL, RANK, TINY, System, load, make_checkpoint

REFERENCE = System("PEFT, 1 process", "peft")
SYSTEMS = (
    REFERENCE,
    System("meshlora, 1 process", "meshlora"),
    System("meshlora tp=2", "meshlora", "tp=2", 2),
    System("meshlora tp=2,sp", "meshlora", "tp=2,sp", 2),
)


class SavedBytes:
    """Storages that autograd saves while this is open: address -> bytes. They are held, so that none is used twice."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {t.untyped_storage().data_ptr() for t in chain(model.parameters(), model.buffers())}
        self._held: list[Tensor] = []
        self.by_storage: dict[int, int] = {}
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights and storage.data_ptr() not in self.by_storage:
            self.by_storage[storage.data_ptr()] = storage.nbytes()
            self._held.append(tensor.detach())
        return tensor

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def total(self) -> int:
        return sum(self.by_storage.values())


def _count(system: System, folder: Path, batch_size: int, seq_len: int, vocab: int) -> int:
    """Of a training step's forward and loss, on this rank. Runs on the ranks."""
    candidate = load(system, folder)
    batch = batch_of(batch_size, seq_len, vocab)
    with SavedBytes(candidate.model) as saved:
        candidate.gradients(*batch)
    return saved.total


def _ready(_system: System) -> None:
    """The counting loads what it counts."""


def count(groups: dict[str, Group], four: Path, two: Path, *sizes: int) -> dict[str, dict[str, int]]:
    """System -> bytes of a layer and of a step. sizes: sequences, their tokens, the vocabulary."""
    found = {}
    for name, group in groups.items():
        step, less = (group.call(_count, group.system, folder, *sizes)[0] for folder in (four, two))
        assert (step - less) % 2 == 0, (name, step, less)
        found[name] = {"layer": (step - less) // 2, "step": step}
    return found


def report(results: dict[str, Any]) -> str:
    """The Markdown page."""
    reference, model = results["bytes"][REFERENCE.name], results["model"]
    lines = [
        "# Saved activations: meshlora against PEFT",
        "",
        f"Llama, hidden {model['hidden_size']}, intermediate {model['intermediate_size']}, 4 layers,",
        f"vocab {model['vocab_size']}, LoRA r={RANK} on all seven linears, fp32,",
        f"{results['batch_size']} × {results['seq_len']} tokens.",
        "Bytes that autograd saves, each storage once, without parameters.",
        "",
        f"- command: `{results['command']}`",
        "",
        "| system | a layer | of PEFT's | a step | of PEFT's |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {found['layer'] / 2**20:.2f} MiB | {found['layer'] / reference['layer']:.0%} "
        f"| {found['step'] / 2**20:.2f} MiB | {found['step'] / reference['step']:.0%} |"
        for name, found in results["bytes"].items()
    ]
    return "\n".join(lines) + "\n"


def systems(*, is_quick: bool) -> Iterator[System]:
    """Those that are counted."""
    return (system for system in SYSTEMS if system.num_ranks == 1 or not is_quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--quick", action="store_true", help="one process only")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of one process: shows that all of it runs")
    parser.add_argument("--json", type=Path, help="write the numbers there, and the page beside it")
    options = parser.parse_args()
    be_quiet()
    with tempfile.TemporaryDirectory() as name:
        sizes = {**MODEL, **(TINY if options.tiny else {}), "num_hidden_layers": 4}
        four = make_checkpoint(Path(name) / "four", **sizes)
        two = make_checkpoint(Path(name) / "two", **{**sizes, "num_hidden_layers": 2})
        chosen = dict.fromkeys(systems(is_quick=options.quick or options.tiny), 1)
        with open_groups(chosen, Path(name), _ready) as groups:
            found = count(groups, four, two, options.batch, options.seq, sizes["vocab_size"])
    results = {
        "command": " ".join(["python", *sys.argv]),
        "model": {**sizes, "lora_rank": RANK, "dtype": "float32"},
        "batch_size": options.batch,
        "seq_len": options.seq,
        "systems": [asdict(system) for system in chosen],
        "bytes": found,
    }
    page = report(results)
    print(page)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
        options.json.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    main()
