"""`meshlora judge adapter FOLDER`: whether an adapter's files can be what was trained, whoever wrote them.

Owns: the arguments and the exit code. Does not own: what is looked at (`adapter_files.verdict`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from meshlora_ground.errors import MeshloraError
from meshlora_ground.reading import path_argument


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "adapter",
        help="look at an adapter's files: shards, missing parts, names that PEFT drops",
        description="Exit code 0: nothing speaks against it; 1: it cannot be what was trained; 2: it is none that can "
        "be read. No file is written but that of --json, and nothing pickled is run.",
    )
    verb.add_argument("folder", metavar="FOLDER", help="PEFT's, or as Megatron, torchtune or loralib write it")
    words = "its base, a folder or a name of the hub: every module must have its factors, and PEFT must load all"
    verb.add_argument("--model", metavar="BASE", type=path_argument, help=words)
    words = "a recording by meshlora_judge.record that ended with the step after which this was saved"
    verb.add_argument("--run", dest="recording", metavar="RECORDING", type=path_argument, help=words)
    verb.add_argument("--json", metavar="FILE", help="write the findings")
    verb.set_defaults(run=_adapter)


def _adapter(options: argparse.Namespace) -> None:
    from meshlora_ground.console import Console
    from meshlora_ground.files import check_result_file, write_json_atomically
    from meshlora_ground.hub import located
    from meshlora_judge.adapter_files.verdict import judge_folder

    if options.json:
        check_result_file(Path(options.json), options.json)
    model = None
    if options.model is not None:
        model = Path(located(options.model, "--model", kind="config"))
    run = Path(options.recording) if options.recording else None
    verdict = judge_folder(Path(options.folder), model=model, run=run)
    if options.json:
        write_json_atomically(Path(options.json), verdict.as_json())
    if not verdict.is_sound:
        raise MeshloraError(verdict.paragraph())
    Console().say(verdict.paragraph())
