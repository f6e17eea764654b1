"""`meshlora launch-script`: the file that starts a run on a cluster, filled in.

Owns: its arguments, and what goes where in the files of `cli/scripts`, one a launcher. Does not own: starting anything,
the checks of a run beyond its run file (`meshlora check`).
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import add_run_file, run_file_words
from meshlora_ground.errors import UserError

# The file of each launcher, and the options that have an effect there.
_KINDS = {
    "slurm": ("slurm.sh", {"time", "stop_before", "partition", "account"}),
    "k8s": ("kubernetes.yaml", {"image", "claim"}),
    "skypilot": ("skypilot.yaml", {"gpu", "claim"}),
    "torchrun": ("torchrun.sh", set[str]()),
}
_DEFAULTS: dict[str, Any] = {
    "time": "24:00:00",
    "stop_before": 300,
    "image": "meshlora:latest",
    "claim": "meshlora",
    "gpu": "H100",
}
# Of a run that was asked to stop: schedulers start it again.
STOPPED = 85
_LONGEST_SIGNAL_S = 65535  # SLURM's own limit
_TIME = re.compile(r"(?:(?P<days>\d{1,4})-)?(?P<first>\d{1,5})(?::(?P<second>\d{1,2}))?(?::(?P<third>\d{1,2}))?")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "launch-script",
        help="write the file that starts a run on SLURM, Kubernetes, SkyPilot or by torchrun",
        description="The file goes to the terminal, or to --out. It resumes from the last checkpoint, so the same file "
        "starts a run and goes on with it.",
    )
    add_run_file(parser, example="topology=tp=8,sp")
    kind = parser.add_mutually_exclusive_group(required=True)
    takers = {"slurm": "sbatch", "k8s": "kubectl", "skypilot": "sky jobs launch", "torchrun": "each node's shell"}
    for name, taker in takers.items():
        kind.add_argument(f"--{name}", action="store_const", const=name, dest="kind", help=f"for {taker}")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default 1)")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="ranks on each, a GPU each (default: as topology needs)"
    )
    parser.add_argument("--cpus-per-gpu", type=int, default=8, metavar="N", help="cores of each rank (default 8)")
    parser.add_argument("--name", metavar="NAME", help="of the job (default: that of the run file)")
    parser.add_argument("--time", metavar="LIMIT", help="of SLURM, as in 24:00:00 (default) or 2-12:00:00")
    parser.add_argument(
        "--stop-before", type=int, metavar="S", help="seconds before that limit in which the run saves (default 300)"
    )
    parser.add_argument("--partition", metavar="NAME", help="of SLURM")
    parser.add_argument("--account", metavar="NAME", help="of SLURM")
    parser.add_argument("--image", metavar="NAME", help="of the containers of Kubernetes (default meshlora:latest)")
    parser.add_argument("--claim", metavar="NAME", help="Kubernetes' volume or SkyPilot's bucket (default meshlora)")
    parser.add_argument("--gpu", metavar="NAME", help="which SkyPilot is to find (default H100)")
    parser.add_argument("--out", metavar="FILE", help="write it there")
    parser.set_defaults(run=_launch_script)


def _launch_script(options: argparse.Namespace) -> None:
    from meshlora.run.config.file import read_runs
    from meshlora_ground.console import Console, hand_over
    from meshlora_ground.files import check_result_file, write_text_atomically
    from meshlora_ground.topology import Topology

    _check_options(options)
    if options.out:
        check_result_file(Path(options.out), f"--out {options.out}")
    # All of a file have the same topology.
    config = next(iter(read_runs(options.file, options.overrides, downloads=False).values()))
    ranks = options.gpus_per_node
    if ranks is None:
        smallest = Topology.parse(config.topology)
        ranks, rest = divmod(smallest.world, options.nodes)  # the topology without a number has the least dp
        if rest:
            rule = f"the {smallest.world} ranks of topology {smallest} do not divide among them"
            raise UserError(f"--nodes {options.nodes}", rule, "give --gpus-per-node too")
    topology = Topology.parse(config.topology, world=options.nodes * ranks)  # dp is what the number of ranks leaves
    text = filled(options, ranks=ranks, has_gpus=config.device != "cpu")
    if not options.out:
        hand_over(text.removesuffix("\n"))
        return
    write_text_atomically(Path(options.out), text)
    Console().say(f"written: {options.out}, for {topology} on {options.nodes} x {ranks} ranks")


def filled(options: argparse.Namespace, *, ranks: int, has_gpus: bool) -> str:
    """The file for the launcher `options.kind`, with `ranks` ranks on each node."""
    given = {name: getattr(options, name) for name in _DEFAULTS if getattr(options, name) is not None}
    run = run_file_words(options.file, options.overrides)
    words = shlex.join([*run, "--resume", "auto", "--stopped-exit-code", str(STOPPED)])
    if options.kind == "k8s":
        words = words.replace("$", "$$")  # Kubernetes reads $(NAME)
    of_gpus: dict[str, Any] = {"gpus": None, "if_gpus": None}  # which leaves their lines out
    if has_gpus:
        of_gpus = {"gpus": ranks, "if_gpus": ""}
    values = {
        **_DEFAULTS,
        **given,
        "command": _as_comment(options.words),
        "name": options.name or _as_name(Path(options.file).stem),
        "partition": options.partition,
        "account": options.account,
        "nodes": options.nodes,
        "last_node": options.nodes - 1,
        "ranks": ranks,
        **of_gpus,
        "cpus": options.cpus_per_gpu,
        "all_cpus": options.cpus_per_gpu * ranks,
        "words": words,
        "stopped": STOPPED,
    }
    template = resources.files("meshlora_extra.commands") / "scripts" / _KINDS[options.kind][0]
    lines = (_line(line, values) for line in template.read_text("utf-8").splitlines())
    return "".join(f"{line.rstrip()}\n" for line in lines if line is not None)


def _as_comment(text: str) -> str:
    """`text` without what ends a line, which YAML sees in more characters than a shell does."""
    one_line = re.sub(r"\s*[\r\n]\s*", " ", text)
    return "".join(each if each.isprintable() else " " for each in one_line)


def _line(line: str, values: Mapping[str, Any]) -> str | None:
    """`line` with its `@{name}`; None, which leaves it out, if one of them has no value here."""
    names = re.findall(r"@\{(\w+)\}", line)
    if any(values[name] is None for name in names):
        return None
    return re.sub(r"@\{(\w+)\}", lambda found: str(values[found[1]]), line)


def _check_options(options: argparse.Namespace) -> None:
    """Refuse numbers below 1, options of other launchers, and names that a launcher would misread."""
    for name in ("nodes", "gpus_per_node", "cpus_per_gpu", "stop_before"):
        number = getattr(options, name)
        if number is not None and not 1 <= number <= _LONGEST_SIGNAL_S:
            raise UserError(f"{_option(name)} {number}", f"it must be at least 1 and at most {_LONGEST_SIGNAL_S:,}")
    for kind, (_, own) in _KINDS.items():
        for name in sorted(own - _KINDS[options.kind][1]):
            if getattr(options, name) is not None:
                raise UserError(f"{_option(name)} with --{options.kind}", f"it is for --{kind}", "leave it out")
    if words := [word for word in run_file_words(options.file, options.overrides) if not word.isprintable()]:
        rule = "a word with control characters would break the file"
        raise UserError(words[0], rule, "put the value into the run file")
    for name in ("partition", "account", "image", "claim", "gpu"):
        if (given := getattr(options, name)) is not None and not re.fullmatch(r"[\w.:/@,-]+", given):
            raise UserError(f"{_option(name)} {given}", "it has letters, digits and .:/@,- only")
    if options.name is not None and options.name != _as_name(options.name):
        rule = "small letters, digits and single hyphens within, at most 50"
        raise UserError(f"--name {options.name}", rule, f"as in {_as_name(options.name)}")
    if options.kind == "slurm":
        _check_time(options.time or _DEFAULTS["time"], options.stop_before or _DEFAULTS["stop_before"])


def _check_time(text: str, stop_before_s: int) -> None:
    found = _TIME.fullmatch(text)
    if found is None or (found["third"] and not found["second"]):
        raise UserError(f"--time {text}", "SLURM reads minutes, HH:MM:SS or days-HH:MM:SS", "as in 24:00:00")
    days, first, second, third = [int(number or 0) for number in found.groups()]
    # 90 and 90:30 are minutes, 1:30:00 and 2-1 begin with hours.
    hours_first = found["days"] is not None or found["third"] is not None
    limit_s = 86400 * days + 60 * first + second
    if hours_first:
        limit_s = 86400 * days + 3600 * first + 60 * second + third
    if limit_s <= stop_before_s:
        given = f"--time {text} with --stop-before {stop_before_s}"
        rule = f"the limit is {limit_s} s: the run would be asked to stop as it starts"
        raise UserError(given, rule, "raise --time or lower --stop-before")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _as_name(text: str) -> str:
    """`text` as the name of a job that every launcher takes: a label of DNS, with room for the number of a pod."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:50].strip("-") or "meshlora"
