"""GPUs that are not there, for every interpreter that finds this folder on PYTHONPATH, and all that is forked from it.

torch.cuda counts PRETENDED_GPUS of them, describes them, and raises where one is opened, as a build for CUDA does:
their number is read once, and what is forked afterwards has it too, but can open none; where CUDA_VISIBLE_DEVICES names
none there is none.
The file PRETENDED_GPU_LOG has a line where a process opens a GPU, or tries to after a fork or where it sees none, or
forks after it has opened one. Where opening is right, what follows is not possible: PRETENDED is raised.

Owns: what torch answers. Does not own: which commands run so (`tests/verify/test_pretended_gpu.py`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any, NoReturn

PRETENDED = "this GPU is only pretended"
_FREE, _WHOLE = 138 * 2**30, 140 * 2**30


class _Driver:
    """What the driver knows: of a forked process, what it knew in the one that counted."""

    count: int | None = None
    counted_by = opened_by = 0


def _note(what: str) -> None:
    with open(os.environ["PRETENDED_GPU_LOG"], "a", encoding="utf-8") as log:
        log.write(f"{what}: {' '.join(sys.orig_argv)[:200]}\n")


def _count() -> int:
    """As cudaGetDeviceCount, whose answer torch keeps."""
    if _Driver.count is None:
        _Driver.count, _Driver.counted_by = _device_count(), os.getpid()
    return _Driver.count


def _is_available() -> bool:
    return (_device_count() if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1" else _count()) > 0


def _device_count() -> int:
    """As NVML, which reads the environment each time."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return 0 if is_hidden else int(os.environ["PRETENDED_GPUS"])


def _open(*_: Any, **__: Any) -> None:
    if not _count():
        _note("opened where no GPU is seen")
        raise RuntimeError("No CUDA GPUs are available")
    if _Driver.counted_by != os.getpid():
        _note("opened after a fork")
        raise RuntimeError("CUDA error: initialization error")
    if _Driver.opened_by != os.getpid():
        _note("opened")
    _Driver.opened_by = os.getpid()


def _compute(*_: Any, **__: Any) -> NoReturn:
    """In place of `_lazy_init`, which torch calls where something goes onto a GPU."""
    _open()
    raise RuntimeError(PRETENDED)


def _answer(value: Any) -> Any:
    """A function that opens the GPU, and returns `value`."""

    def function(*_: Any, **__: Any) -> Any:
        _open()
        return value

    return function


def _before_fork() -> None:
    if _Driver.opened_by == os.getpid():
        _note("forked after a GPU was opened")


def _pretend(torch: Any) -> None:
    name = "NVIDIA H200 (pretended)"
    properties = {"name": name, "total_memory": _WHOLE, "major": 9, "minor": 0, "multi_processor_count": 132}
    torch.version.cuda = "13.0"
    answers = {
        "get_device_name": name,
        "get_device_capability": (9, 0),
        "mem_get_info": (_FREE, _WHOLE),
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
    }
    for function, value in answers.items():
        setattr(torch.cuda, function, _answer(value))

    def get_device_properties(device: Any = 0) -> types.SimpleNamespace:
        _open()
        return types.SimpleNamespace(**properties, uuid=f"GPU-{device}")

    torch.cuda.get_device_properties = get_device_properties
    torch.cuda.is_available, torch.cuda.device_count = _is_available, _device_count
    torch.cuda.is_initialized = lambda: _Driver.opened_by == os.getpid()
    opening = torch.cuda._lazy_init  # every tensor that is made on a GPU or moved to one comes here
    for module in [each for each_name, each in sys.modules.items() if each_name.startswith("torch.")]:
        if vars(module).get("_lazy_init") is opening:
            module._lazy_init = _compute  # type: ignore[attr-defined]
    torch.cuda.nccl.version = lambda: (2, 28, 3)
    torch.accelerator.is_available, torch.accelerator.device_count = _is_available, _device_count
    torch.accelerator.current_device_index = _answer(0)
    torch.accelerator.current_stream = _answer(types.SimpleNamespace(is_capturing=lambda: False))  # optimizers ask
    torch.accelerator.current_accelerator = lambda check_available=False: (
        None if check_available and not _is_available() else torch.device("cuda")
    )
    os.register_at_fork(before=_before_fork)
    _count()  # as some imports do, among them that of bitsandbytes


class _Finder(importlib.abc.MetaPathFinder):
    """Lets torch be imported as it is, and pretends then."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            sys.meta_path.remove(self)  # not before: libraries look for torch without importing it
            run(module)
            _pretend(module)

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
sys.modules["bitsandbytes"] = None  # type: ignore[assignment] # PEFT imports it, a fifth of the start of a process
