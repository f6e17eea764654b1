"""Inside a command that is run for a recording: what each of its Python processes does at its start.

Owns: the environment of the command, and what is done after the import of which module of torch, transformers or
accelerate. Nothing of them is imported before the command itself imports it. Does not own: what is done there (the
other files of this folder).

The first folder of PYTHONPATH has a `sitecustomize.py` (START) which calls `install`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = "MESHLORA_JUDGE_RUN"

# Python runs only the first sitecustomize of sys.path: that of the user is run by ours.
START = '''"""Written by meshlora judge run."""
import importlib.machinery
import importlib.util
import os
import sys

_own = os.path.dirname(os.path.abspath(__file__))
_others = [path for path in sys.path if os.path.abspath(path) != _own]
_other = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _other is not None and _other.loader is not None:
    _other.loader.exec_module(importlib.util.module_from_spec(_other))

from meshlora_judge.running.child import install

install()
'''

# Module -> what is called with it when it has been imported: a function of a file of this folder.
_AFTER = {
    "torch.nn.modules.module": ("listening", "listen_to_calls"),
    "torch.distributed.distributed_c10d": ("cpu", "group_on_cpu"),
    "transformers.modeling_utils": ("twins", "replace_models"),
    "transformers.training_args": ("cpu", "arguments_on_cpu"),
    "transformers.trainer": ("listening", "listen_to_trainers"),
    "accelerate.commands.launch": ("cpu", "launch_on_cpu"),
}


class Run:
    """What one process of the command knows.

    Attributes:
        folder: of the run. steps: to be recorded. has_twins: models are replaced. ranks: of the command, if it said so.
        recorder: of this process, once it records. until_end: what is open until the process ends.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        self.folder, self.ranks = folder, ranks
        self.steps: int = settings["steps"]
        self.has_twins: bool = settings["has_twins"]
        self.recorder: Any = None
        self.until_end = contextlib.ExitStack()

    def say(self, text: str) -> None:
        """Tell the user once, whichever process says it."""
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        (self.folder / "said" / name).write_text(text, encoding="utf-8")

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """A UserError of ours in the block ends this process, and is what the user is told."""
        from meshlora_ground.errors import UserError

        try:
            yield
        except UserError as error:
            parts = [error.given, error.rule, error.way_out]
            (self.folder / "refused.json").write_text(json.dumps(parts), encoding="utf-8")
            raise


def environment(folder: Path) -> Mapping[str, str]:
    """That of the command: this process's, on CPUs alone, with START where Python looks first."""
    paths = [str(folder / "start"), os.environ.get("PYTHONPATH", "")]
    given = {
        FOLDER: str(folder),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "WANDB_MODE": "disabled",
    }
    return {"OMP_NUM_THREADS": "1", **os.environ, **given}


def install() -> None:
    """Watch the imports of this process, if a run has started it."""
    folder = os.environ.get(FOLDER)
    if folder:
        ranks = os.environ.get("WORLD_SIZE", "1")
        run = Run(Path(folder), int(ranks) if ranks.isdigit() else 1)
        sys.meta_path.insert(0, _AfterImport(run))


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, run: Run) -> None:
        self.run = run
        self.left = dict(_AFTER)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.left:
            return None
        file, function = self.left.pop(name)  # which also keeps the search below from coming here again
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_change(module: Any) -> None:
            del loader.exec_module
            load(module)
            changes = importlib.import_module(f"meshlora_judge.running.{file}")
            getattr(changes, function)(module, self.run)

        loader.exec_module = load_and_change
        return spec
