"""The judge without the engine, as a program: imports each file of meshlora_judge and meshlora_ground, and runs it.

    python -I tests/judge_alone.py FOLDER [SITE]

FOLDER is for its files. SITE has the two packages; by default they are those installed. Importing meshlora or
meshlora_extra is an error, whether they are installed or not.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("meshlora_ground", "meshlora_judge")


class _Refuse:
    """An import hook."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("meshlora", "meshlora_extra"):
            raise ImportError(f"the judge imports {name}")


def main(folder: Path, site: str | None) -> None:
    sys.meta_path.insert(0, _Refuse())  # type: ignore[arg-type]
    if site is not None:
        sys.path.insert(0, site)
    names = []
    for package in PACKAGES:
        there = importlib.import_module(package).__path__
        names += [found.name for found in pkgutil.walk_packages(there, f"{package}.")]
        assert site is None or all(path.startswith(site) for path in there), there
    files = [importlib.import_module(name).__file__ for name in names]
    print(json.dumps({"files": len(files), "losses": _losses(folder)}))


def _losses(folder: Path) -> list[float]:
    """Of three steps of a tiny llama, the last a second epoch's first."""
    import torch
    from transformers import LlamaConfig

    from meshlora_judge.case import random_tokens
    from meshlora_judge.inputs import write_adapter, write_twin
    from meshlora_judge.reference import reference_run
    from meshlora_judge.settings import Base, Training

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    write_twin(LlamaConfig(vocab_size=40, **sizes), folder / "model", dtype=torch.float64, seed=0)
    lora = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
    write_adapter(folder / "model", lora, folder / "adapter", seed=0, trust_remote_code=False)
    base = Base(str(folder / "model"), dtype="float64")
    settings = Training(steps=3, batch_size=4, micro_batch_size=2, lr=1e-2, schedule="constant")
    data = random_tokens(num_sequences=7, vocab_size=40, seed=0)
    return reference_run(base, settings, data, pad_token_id=0, adapter=folder / "adapter", out=folder / "alone")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3] or [None])
