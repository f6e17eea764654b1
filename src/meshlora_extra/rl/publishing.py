"""Publishing an adapter: whole, in the layout of serving engines, under a name that never changes its content.

Owns: the folder of published versions, their names, the link to the newest. Does not own: the layouts
(`adapter.formats`), telling an engine (`rl.engine`).

    published/step-000012-3f9a01c2/    # one version: adapter_config.json, adapter_model.safetensors
    published/latest                   # a link to the newest

A version appears by a rename, and has a hash of its content in its name: an engine that has read a path never has other
weights than the path's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshlora.adapter.formats.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_config
from meshlora.run.checkpoint.retention import point
from meshlora_extra.engine_export import export_for_engines
from meshlora_extra.engines import check_options
from meshlora_ground.errors import UserError
from meshlora_ground.files import fsync

LATEST = "latest"
_OF_A_STEP = re.compile(r"step-[0-9]{6,}-[0-9a-f]{8}")


def publish(adapter: Path, to: Path, *, name: str, model_and_plan: Callable[[], tuple[Any, Any]] | None = None) -> Path:
    """Write the PEFT folder `adapter` as a new version in `to`, and return its folder. One that is there stays.

    name: how the version's name begins. model_and_plan: of adapters on experts, whose layout the model decides: the
    model on the meta device, and its plan.

    Raises:
        UserError: no adapter, or a folder that cannot be written. UnsupportedError: what engines do not compute.
    """
    check_options(read_config(adapter, ignore_dropout=True), f"{adapter / CONFIG_FILE}")
    to.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=to, prefix=f".{name}.", suffix=".tmp"))
    try:
        made = temporary / "version"
        export_for_engines(adapter, made, model_and_plan=model_and_plan)
        content = hashlib.sha256(b"".join((made / file).read_bytes() for file in (CONFIG_FILE, WEIGHTS_FILE)))
        version = to / f"{name}-{content.hexdigest()[:8]}"
        if not version.exists():
            os.replace(made, version)
            fsync(to)
        os.utime(version)  # the newest, if it was there before
        point(to / LATEST, version.name)
    except OSError as error:
        raise UserError(f"{to}", f"nothing can be published there ({error.strerror or error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return version


def remove_older(to: Path, keep: int) -> None:
    """Remove the versions that steps of a run have published in `to`, but the last `keep`, and what `latest` names.
    What has another name is not a run's to remove.
    """
    with contextlib.suppress(OSError):
        latest = os.path.realpath(to / LATEST)
        named = [each for each in to.iterdir() if _OF_A_STEP.fullmatch(each.name)]
        versions = [each for each in named if not each.is_symlink() and (each / CONFIG_FILE).is_file()]
        for old in sorted(versions, key=lambda each: each.stat().st_mtime_ns)[:-keep]:
            if os.path.realpath(old) != latest:
                shutil.rmtree(old, ignore_errors=True)
