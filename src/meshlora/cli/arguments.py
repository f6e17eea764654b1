"""Arguments common to several commands, and what they say: the run file, the ranks, the model."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshlora_ground.errors import UserError
from meshlora_ground.files import check_result_file, write_json_atomically


def add_run_file(parser: argparse.ArgumentParser, *, example: str = "train.lr=1e-4") -> None:
    """Add the run file, and `--set` to override its values."""
    parser.add_argument("file", metavar="RUN.yaml", help="the run file")
    override = parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=f"as in --set {example}"
    )
    override.completer = keys_of_run_files  # type: ignore[attr-defined]


def keys_of_run_files(prefix: str, **_: Any) -> list[str]:
    """The completions of `--set KEY=`."""
    from meshlora.run.config.types import groups

    found = []
    for group, keys in groups().items():
        known = [f"{group}.{key}=".lstrip(".") for key in keys]  # those of no group begin with a dot
        found += [key for key in known if key.startswith(prefix)]
    return found


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, for commands that end with `write_result`."""
    parser.add_argument("--json", metavar="FILE", help="write the result")


def check_json(options: argparse.Namespace) -> None:
    """Refuse, before the work, a file of `--json` that cannot be written. Raises: UserError."""
    if options.json:
        check_result_file(Path(options.json), options.json)


def write_result(file: str | None, result: Mapping[str, Any]) -> None:
    """Write `result` to the file of `--json`, if it is given."""
    if file:
        write_json_atomically(Path(file), dict(result))


def add_ranks_per_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks-per-gpu",
        type=int,
        default=1,
        metavar="N",
        help="let N ranks share each GPU over NCCL, to try and to prove what needs several (default 1)",
    )


def ranks_per_gpu_words(options: argparse.Namespace) -> list[str]:
    """The argument of `add_ranks_per_gpu`, to pass on, if any ranks share a GPU."""
    return ["--ranks-per-gpu", str(options.ranks_per_gpu)] if options.ranks_per_gpu != 1 else []


def add_local_rank(parser: argparse.ArgumentParser, *, default: Any = argparse.SUPPRESS) -> None:
    """Add `--local-rank`, which `torch.distributed.launch` and deepspeed put before the command or after its words."""
    parser.add_argument(
        "--local-rank", "--local_rank", type=int, default=default, metavar="N", help="as old launchers give it"
    )


def run_file_words(file: str, overrides: Iterable[str]) -> list[str]:
    """The arguments of `add_run_file` as given, to pass on to ranks."""
    words = [file]
    for override in overrides:
        words += ["--set", override]
    return words


def checked_place(options: argparse.Namespace) -> Any:
    """This process' place in its launcher's job, if any. Raises: UserError: `--nproc` below 1, or inside a launcher."""
    from meshlora.processes.launchers import launcher_place

    place = launcher_place()
    if options.nproc is not None and place is not None:
        raise UserError("--nproc inside a launcher", "the ranks are started already", "leave out --nproc")
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc {options.nproc}", "at least 1 process is needed")
    return place


def read_blueprint(options: argparse.Namespace, topology: str, *, config: Any = None) -> Any:
    """The blueprint of `--model`, or of its `config` if that is already read."""
    from meshlora.loading.blueprint import make_blueprint
    from meshlora.plan.base_options import BaseOptions
    from meshlora_ground.topology import Topology

    base = BaseOptions(
        dtype=getattr(options, "dtype", "auto"),
        disable_dropout=True,
        trust_remote_code=options.trust_remote_code,
        quantization=getattr(options, "quantization", None),
        compute=getattr(options, "compute", None),
    )
    model = config
    # Of a base that stays packed the files say which weights are in few bits.
    if config is None or (base.quantization == "keep" and Path(options.model).is_dir()):
        model = options.model
    return make_blueprint(model, Topology.parse(topology), base)
