"""The command line: `meshlora train | verify | check | plan | generate | merge | export`.

Owns: arguments, and the edge where an error becomes one line and an exit code: 0 done, 1 it failed, 2 the request was
wrong. Does not own: anything that happens in between.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A hub is never asked: a model is a local folder.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from meshlora.errors import MeshloraError, UserError


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors in our form and exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"error: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(UserError.exit_code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    options.words = shlex.join(["meshlora", *(sys.argv[1:] if arguments is None else arguments)])
    run: Callable[[argparse.Namespace], None] = options.run
    interrupts = _note_interrupts()
    try:
        run(options)
    except BaseException as error:
        # Libraries that are interrupted while they are imported turn it into errors of their own.
        if interrupts or isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
            return 130
        if not isinstance(error, MeshloraError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _note_interrupts() -> list[int]:
    """A list that grows when Ctrl-C is pressed, which still raises KeyboardInterrupt."""
    seen: list[int] = []

    def interrupt(number: int, _: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    return seen


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="meshlora", description="LoRA adapters on any mesh of processes.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    train = commands.add_parser("train", help="train an adapter as a run file says")
    _add_run_arguments(train)
    train.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    train.add_argument(
        "--no-preflight",
        action="store_true",
        help="train without a proof that this model, adapter and topology train as one process would; only families "
        "that are proved for everyone are then accepted",
    )
    train.set_defaults(run=_train)

    _add_verify(commands)

    check = commands.add_parser("check", help="check a run file, its model and its data, without starting ranks")
    _add_run_arguments(check)
    check.set_defaults(run=_check)

    plan = commands.add_parser("plan", help="show how a model is split on a topology")
    plan.add_argument("--model", required=True, metavar="FOLDER", help="checkpoint; only config.json is read")
    plan.add_argument("--topology", required=True, metavar="T", help="as in dp=2,tp=2,sp")
    plan.add_argument(
        "--gradients", action="store_true", help="also the axes over which each factor's gradient is summed"
    )
    plan.add_argument("--trust-remote-code", action="store_true")
    plan.set_defaults(run=_plan)

    generate = commands.add_parser("generate", help="continue prompts on one process")
    generate.add_argument("--model", required=True, metavar="FOLDER")
    generate.add_argument("--adapter", metavar="FOLDER", help="PEFT adapter; without it the base model speaks")
    generate.add_argument("--prompt", required=True, action="append", help="may be given more than once")
    generate.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--dtype", default="auto")
    generate.add_argument("--trust-remote-code", action="store_true")
    generate.set_defaults(run=_generate)

    _add_merge_and_export(commands)
    return parser


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="prove that a model, an adapter and a topology train as one process would",
        description="Compare training on each topology with transformers + peft on one process, tensor by tensor. "
        "Exit code 0: proved; 1: they differ; 2: the request is wrong, or refused.",
    )
    verify.add_argument("--model", metavar="FOLDER", help="checkpoint")
    verify.add_argument("--family", metavar="MODEL_TYPE", help="any model_type of transformers; needs no files")
    verify.add_argument(
        "--twin", action="store_true", help="shrink the model's configuration; its weights are not read"
    )
    verify.add_argument(
        "--topology", required=True, action="append", metavar="T", help="as in dp=2,tp=2,sp; auto; may be repeated"
    )
    verify.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="a field of the family's configuration, as in num_key_value_heads=2",
    )
    verify.add_argument("--lora", metavar="FILE", help="YAML with fields of peft.LoraConfig; default: r=8, all")
    verify.add_argument("--dtype", default="float64", help="float64 (default), float32 or bfloat16")
    verify.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps (default 3)")
    verify.add_argument("--data", metavar="FILE", help="take sequences from here; default: random tokens")
    verify.add_argument("--nproc", type=int, metavar="N", help="at most N processes; for auto: exactly (default 4)")
    verify.add_argument("--json", metavar="FILE", help="write the result, as docs/verify.md describes")
    verify.add_argument("--html", metavar="FILE", help="write a report to look at")
    verify.add_argument(
        "--mutation", action="append", default=[], metavar="NAME", help="put this fault in, or all; it must be caught"
    )
    verify.add_argument("--seed", type=int, default=0)
    verify.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    verify.add_argument("--trust-remote-code", action="store_true")
    verify.set_defaults(run=_verify)


def _add_merge_and_export(commands: Any) -> None:
    merge = commands.add_parser("merge", help="write a checkpoint with the adapter in its weights")
    merge.add_argument("--model", required=True, metavar="FOLDER", help="checkpoint in safetensors")
    merge.add_argument("--adapter", required=True, metavar="FOLDER", help="PEFT adapter (LoRA, DoRA)")
    merge.add_argument("--out", required=True, metavar="FOLDER", help="new folder")
    merge.add_argument("--dtype", default="auto", help="of the written weights; default: as they are stored")
    merge.add_argument("--no-logits", action="store_true", help="do not run model + adapter and the merged model")
    merge.add_argument("--trust-remote-code", action="store_true")
    merge.set_defaults(run=_merge)

    export = commands.add_parser("export", help="write an adapter as PEFT, microsoft/LoRA or serving engines store it")
    export.add_argument("adapter", metavar="ADAPTER", help="adapter folder, or a lora_state_dict in safetensors")
    export.add_argument("--layout", required=True, choices=("peft", "loralib", "per-expert"))
    export.add_argument("--out", required=True, metavar="PATH", help="new folder; for loralib a .safetensors file")
    export.add_argument("--model", metavar="FOLDER", help="for per-expert, and back; only config.json is read")
    export.add_argument("--trust-remote-code", action="store_true")
    export.add_argument("--lora-alpha", type=float, metavar="N", help="of a lora_state_dict that does not say it")
    export.add_argument(
        "--enable-lora", metavar="LIST", help="of a lora_state_dict that does not say it, as in 1,0,1 for q and v"
    )
    export.set_defaults(run=_export)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="RUN.yaml", help="the run file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="as in --set train.lr=1e-4"
    )


def _train(options: argparse.Namespace) -> None:
    from meshlora.config import read_run
    from meshlora.parallel.groups import join, launcher_place, on_gpus
    from meshlora.train.launch import launch, launched_by_us, rank_edge
    from meshlora.train.prepare import prepare
    from meshlora.train.run import train
    from meshlora.verify.preflight import preflight

    place = launcher_place()
    if options.nproc is not None and place is not None:
        raise UserError("--nproc inside a launcher", "the ranks are started already", "leave out --nproc")
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc {options.nproc}", "at least 1 process is needed")
    if options.nproc is not None:
        config = read_run(options.file, options.overrides)
        on_gpus(config.device, num_ranks=options.nproc)
        preflight(prepare(config, world=options.nproc), skip=options.no_preflight)
        overrides = [word for override in options.overrides for word in ("--set", override)]
        launch(["train", options.file, *overrides], nproc=options.nproc)
        return
    with rank_edge():
        run = prepare(read_run(options.file, options.overrides), world=place.world if place else 1)
        if not launched_by_us() and (place is None or place.rank == 0):
            # Joined first, so that the ranks that wait for this one notice when it ends here.
            join(run.config.device)
            preflight(run, skip=options.no_preflight)
        train(run)


def _verify(options: argparse.Namespace) -> None:
    from meshlora.parallel.groups import launcher_place
    from meshlora.train.launch import rank_edge
    from meshlora.verify.command import verify
    from meshlora.verify.mutations import MUTATIONS
    from meshlora.verify.request import DEFAULT_LORA, Request, read_lora

    place = launcher_place()
    if place is not None and place.world > 1:
        with rank_edge():
            raise UserError(
                f"meshlora verify as one of {place.world} ranks of a launcher",
                "it starts ranks of its own",
                "start it once, without torchrun or srun",
            )
    names = [name for each in options.mutation for name in (MUTATIONS if each == "all" else [each])]
    request = Request(
        topologies=tuple(options.topology),
        model=options.model,
        family=options.family,
        twin=options.twin,
        overrides=_fields(options.overrides),
        lora=read_lora(options.lora) if options.lora else dict(DEFAULT_LORA),
        dtype=options.dtype,
        steps=options.steps,
        seed=options.seed,
        data=options.data,
        nproc=options.nproc,
        mutations=tuple(dict.fromkeys(names)),
        device=options.device,
        trust_remote_code=options.trust_remote_code,
    )
    verify(request, command=options.words, json_file=options.json, html_file=options.html)


def _fields(overrides: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` -> values, read as YAML."""
    import yaml

    fields = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            raise UserError(f"--set {override}", "it must read KEY=VALUE, as in --set num_key_value_heads=2")
        try:
            fields[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"--set {override}", f"{text!r} is not a YAML value", "put it in quotes") from None
    return fields


def _check(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from meshlora.adapter.describe import describe_targets
    from meshlora.config import read_run
    from meshlora.train.prepare import prepare
    from meshlora.verify.preflight import preflight_state

    run = prepare(read_run(options.file, options.overrides))
    table = Table(show_header=False, box=None)
    rows = {
        "model": f"{run.config.model.path} ({run.plan.model_type}, {run.plan.num_layers} layers)",
        "topology": f"{run.topology} ({run.topology.world} processes)",
        "adapter": "\n".join([f"{run.num_trainable:,} trainable parameters", *describe_targets(run.targets)]),
        "train data": _size(run.train_data),
        "eval data": _size(run.eval_data),
        "steps": f"{run.steps:,} of {run.config.train.batch_size} sequences",
        "output": run.config.train.output,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    overrides = [word for override in options.overrides for word in ("--set", override)]
    command = shlex.join(["meshlora", "train", options.file, *overrides, "--nproc", str(run.topology.world)])
    console.print(preflight_state(run), highlight=False, soft_wrap=True, markup=False)
    console.print(f"ready: {command}", highlight=False, soft_wrap=True, markup=False)


def _size(data: object) -> str:
    from meshlora.data import TokenizedDataset

    if not isinstance(data, TokenizedDataset):
        return "none"
    return f"{len(data):,} sequences, {len(data.input_ids):,} tokens, {data.num_trained_tokens:,} trained"


def _plan(options: argparse.Namespace) -> None:
    from rich.console import Console

    from meshlora.plan.table import gradient_table, plan_table

    _, plan = _meta(options, options.topology)
    console = Console()
    console.print(plan_table(plan))
    if options.gradients:
        console.print(gradient_table(plan))


def _meta(options: argparse.Namespace, topology: str) -> Any:
    """The model of `--model`, on the meta device, and its plan."""
    from meshlora.api import build_meta, read_model_config, resolve_dtype
    from meshlora.plan.topology import Topology

    trust = options.trust_remote_code
    config = read_model_config(options.model, trust_remote_code=trust)
    parsed, dtype = Topology.parse(topology), resolve_dtype("auto", config)
    return build_meta(config, parsed, dtype=dtype, disable_dropout=True, trust_remote_code=trust)


def _generate(options: argparse.Namespace) -> None:
    from meshlora.generate import generate

    for text in generate(
        options.model,
        options.prompt,
        adapter=Path(options.adapter) if options.adapter else None,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    ):
        print(text)


def _merge(options: argparse.Namespace) -> None:
    from meshlora.adapter.merge import merge
    from meshlora.api import read_model_config, resolve_dtype

    config = read_model_config(options.model, trust_remote_code=options.trust_remote_code)
    done = merge(
        options.model,
        options.adapter,
        options.out,
        config=config,
        dtype=None if options.dtype == "auto" else resolve_dtype(options.dtype, config),
        check_logits=not options.no_logits,
        trust_remote_code=options.trust_remote_code,
    )
    if done.is_untied:
        print("the adapter makes tied weights differ: both are stored, and config.json says tie_word_embeddings: false")
    print(f"{done.num_changed} of {done.num_tensors} tensors changed, {done.num_bytes / 1e9:.3g} GB")
    print(f"checked: {done.check}")
    print(f"merged: {options.out}")


def _export(options: argparse.Namespace) -> None:
    from meshlora.adapter.export import export, import_loralib

    given, layout = Path(options.adapter), options.layout
    is_file = given.exists() and not given.is_dir()
    for option in () if is_file else ("lora_alpha", "enable_lora"):
        if getattr(options, option) is not None:
            name = option.replace("_", "-")
            raise UserError(f"--{name}", "an adapter folder says it itself", f"leave out --{name}")
    if is_file and layout != "peft":
        raise UserError(f"{given} and --layout {layout}", "it is one file already", "use --layout peft")
    if options.model and (is_file or layout == "loralib"):
        raise UserError(f"--model {options.model}", "this needs no model", "leave out --model")
    if not options.model and layout == "per-expert":
        raise UserError("--layout per-expert", "the model says how its experts lie", "give --model FOLDER")
    if options.model:
        done = _export_experts(options)
    elif is_file:
        enabled = _enabled(options.enable_lora)
        done = import_loralib(given, options.out, lora_alpha=options.lora_alpha, enable_lora=enabled)
    else:
        done = export(given, options.out, layout=layout)
    print(f"exported and read back: {options.out} ({done} tensors)")


def _export_experts(options: argparse.Namespace) -> Any:
    from meshlora.adapter.engine_export import export_per_expert, import_per_expert

    convert = import_per_expert if options.layout == "peft" else export_per_expert
    model, plan = _meta(options, "")
    return convert(options.adapter, options.out, model=model, plan=plan)


def _enabled(text: str | None) -> list[bool] | None:
    if text is None:
        return None
    words = text.split(",")
    if not set(words) <= {"0", "1"}:
        raise UserError(f"--enable-lora {text}", "it is a list of 0 and 1, one for each piece", "1,0,1 for q and v")
    return [word == "1" for word in words]
