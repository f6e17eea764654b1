"""`meshlora verify`: its arguments, and the request that they make. The proof itself is in `verify.command`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from meshlora.cli.arguments import add_ranks_per_gpu
from meshlora_ground.errors import UserError
from meshlora_ground.lifetime import import_libraries

# Of train.schedule, as `run.config.run_file.Schedule` has them. Proofs of these end above 0, so that an ignored min_lr
# shows.
_FALLING = ("cosine", "cosine_of_run", "cosine_with_restarts", "polynomial", "warmup_stable_decay")
SCHEDULES = ("linear", *_FALLING, "constant", "inverse_sqrt", "cycle")


def add(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="prove that a model, an adapter and a topology train as one process would",
        description="Compare training on each topology with transformers + peft on one process, tensor by tensor. "
        "Exit code 0: proved; 1: they differ; 2: the request is wrong, or refused.",
    )
    verify.add_argument("--model", metavar="FOLDER", help="checkpoint")
    verify.add_argument("--family", metavar="MODEL_TYPE", help="any model_type of transformers; needs no files")
    verify.add_argument("--twin", action="store_true", help="shrink the configuration; weights are not read")
    verify.add_argument(
        "--topology", action="append", metavar="T", help="as in dp=2,tp=2,sp; auto; may be repeated (default: tp=2,sp)"
    )
    verify.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="a field of the family's configuration, as in num_key_value_heads=2",
    )
    verify.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE | KEY=VALUE",
        help="YAML with fields of peft.LoraConfig, or one of them; repeatable; default: r=8, all linears",
    )
    _add_run(verify)
    steps = "optimizer steps (default 3; with another schedule than linear 4)"
    verify.add_argument("--steps", type=int, metavar="N", help=steps)
    verify.add_argument("--micro-batch-size", type=int, default=2, metavar="N", help="sequences at once (default 2)")
    verify.add_argument("--adapters", type=int, default=1, metavar="N", help="also train so many at once")
    verify.add_argument("--data", metavar="FILE", help="take sequences from here; default: random tokens")
    verify.add_argument("--nproc", type=int, metavar="N", help="at most N processes; for auto: exactly (default 4)")
    verify.add_argument("--json", metavar="FILE", help="write the result, as docs/verify.md describes")
    verify.add_argument("--html", metavar="FILE", help="write a report to look at")
    verify.add_argument("--plan", metavar="FILE", help="plan of a family that no table has, as --save writes it")
    verify.add_argument("--save", metavar="FILE", help="write the plan that was found, once it is proved")
    verify.add_argument(
        "--mutation", action="append", default=[], metavar="NAME", help="put this fault in, or all; it must be caught"
    )
    verify.add_argument("--seed", type=int)
    verify.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add_ranks_per_gpu(verify)
    verify.add_argument("--trust-remote-code", action="store_true")
    verify.set_defaults(run=_verify)


def _add_run(verify: argparse.ArgumentParser) -> None:
    """What a run file says of a run."""
    verify.add_argument("--dtype", default="float64", help="float64 (default), float32 or bfloat16")
    verify.add_argument("--objective", default="sft", help="kind of train.objective (default sft)")
    verify.add_argument(
        "--packing",
        nargs="?",
        const=True,
        default=False,
        choices=[True, "auto"],
        metavar="auto",
        help="several sequences in one row, with auto those of a micro-batch, against one a row",
    )
    verify.add_argument("--images", action="store_true", help="some sequences have images: of --data, or random")
    verify.add_argument("--resume", action="store_true", help="our side is stopped, and goes on from its checkpoint")
    verify.add_argument(
        "--recompute",
        nargs="?",
        const=True,
        default=False,
        choices=[True, "keep_attention", "offload"],
        metavar="HOW",
        help="train.recompute: full, offload, or keep_attention, with sdpa on both sides; against none",
    )
    verify.add_argument("--quantization", metavar="KIND", help="nf4, int8, mxfp4, nvfp4, fp8, keep; of twins gptq, awq")
    verify.add_argument("--compute", metavar="KIND", help="products of the frozen base: fp8 or fp8_backward")
    verify.add_argument("--kernels", default="none", choices=["liger", "fused", "none"], help="of our side, on GPUs")
    verify.add_argument(
        "--optimizer", default="adamw", choices=["adamw", "adamw_8bit", "lora_fa"], help="as train.optimizer"
    )
    verify.add_argument("--schedule", default="linear", choices=SCHEDULES, help="as train.schedule (default linear)")
    verify.add_argument("--neftune-alpha", type=float, default=0.0, metavar="A", help="of noise on embedded tokens")


def _verify(options: argparse.Namespace) -> None:
    import_libraries()
    from meshlora.processes.launchers import launcher_place
    from meshlora.run.config.file import check_lora_keys, read_lora
    from meshlora.run.edge import rank_edge
    from meshlora.verify.command import verify
    from meshlora.verify.faults.of_objectives import as_proved
    from meshlora.verify.faults.registry import MUTATIONS
    from meshlora.verify.options import DEFAULT_LORA, DROPOUT, SEED, Request, of_schedule, same_fields

    place = launcher_place()
    if place is not None and place.world > 1:
        with rank_edge():
            rule = "it starts ranks of its own"
            way_out = "start it once, without torchrun or srun"
            raise UserError(f"meshlora verify as one of {place.world} ranks of a launcher", rule, way_out)
    names: list[str] = []
    for each in options.mutation:
        names += MUTATIONS if each == "all" else [each]
    objective = as_proved(options.objective)
    schedule = of_schedule(options.schedule, ends_above_zero=options.schedule in _FALLING)
    overrides = _fields(options.overrides)
    lora, dropout = dict(DEFAULT_LORA), DROPOUT
    files = [each for each in options.lora if "=" not in each]
    if len(files) > 1:
        raise UserError(f"--lora {' --lora '.join(files)}", "one file says what the adapter is", "give one of them")
    for file in files:
        lora = read_lora(file)
    if options.lora:
        fields = _fields([each for each in options.lora if each not in files], "--lora")
        check_lora_keys(fields)
        lora, dropout = lora | fields, 0.0  # their own
    given = same_fields(Request, options) | {
        "topologies": tuple(options.topology or ["tp=2,sp"]),
        "overrides": overrides,
        "lora": lora,
        "default_dropout": dropout,
        "objective": objective,
        "routed": "auto" if objective.kind == "grpo" else False,
        "seed": SEED if options.seed is None else options.seed,
        "attn_implementation": "sdpa" if options.recompute == "keep_attention" else "eager",
        "mutations": tuple(dict.fromkeys(names)),  # each once, in order
        **schedule,
        "steps": schedule["steps"] if options.steps is None else options.steps,
    }
    verify(
        Request(**given), command=options.words, json_file=options.json, html_file=options.html, plan_file=options.save
    )


def _fields(overrides: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """Values of `KEY=VALUE`, parsed as YAML."""
    from meshlora.run.config.file import yaml_value

    fields = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            raise UserError(f"{option} {override}", "it must read KEY=VALUE, as in --set num_key_value_heads=2")
        fields[name] = yaml_value(f"{option} {override}", text)
    return fields
