"""`meshlora from-nlg`: the run file of a command of microsoft/LoRA's `gpt2_ft.py`.

Owns: which of its arguments are which keys, and which cannot be kept. Does not own: the meaning of the keys (`config`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from meshlora.run.config.presets import presets
from meshlora_ground.errors import UnsupportedError, UserError

_UNUSED: tuple[str, ...] = ("platform", "rank", "device", "world_size", "valid_batch_size", "eval_epoch")
_UNUSED += ("init_checkpoint", "model_card")
_SCHEDULES = {"linear": "linear", "constant": "constant", "cosine": "cosine_of_run", "cycle": "cycle"}


def add(commands: Any) -> None:
    """Register the command, with the arguments of gpt2_ft.py and its defaults."""
    command = commands.add_parser(
        "from-nlg",
        help="write the run file of a command of microsoft/LoRA's gpt2_ft.py",
        description="Give the arguments of gpt2_ft.py as they are, and --model and --out.",
    )
    command.add_argument("--model", required=True, metavar="FOLDER", help="its --model_card, as a checkpoint")
    command.add_argument("--out", required=True, metavar="FILE", help="the run file to write")
    command.add_argument("--nproc", type=int, default=1, metavar="N", help="its --nproc_per_node (default 1)")
    theirs = command.add_argument_group("of gpt2_ft.py")
    theirs.add_argument("--train_data", required=True, metavar="FILE")
    theirs.add_argument("--valid_data", metavar="FILE")
    theirs.add_argument("--local_rank", "--local-rank", type=int, help="taken, and not needed")
    numbers = {"train_batch_size": 8, "grad_acc": 1, "seq_len": 512, "log_interval": 100, "eval_interval": 2000}
    numbers |= {"save_interval": 500, "lora_dim": 0, "lora_alpha": 128, "warmup_step": 0, "random_seed": 10}
    for name, value in numbers.items():
        theirs.add_argument(f"--{name}", type=int, default=value, metavar="N")
    rates = {"clip": 0.0, "lora_dropout": 0.0, "label_smooth": 0.0, "lr": 1e-5, "weight_decay": 0.01}
    rates |= {"adam_epislon": 1e-6, "adam_beta1": 0.9, "adam_beta2": 0.98}
    for name, rate in rates.items():
        theirs.add_argument(f"--{name}", type=float, default=rate, metavar="X")
    for name in ("max_step", "max_epoch"):
        theirs.add_argument(f"--{name}", type=int, metavar="N")
    for name in ("correct_bias", "no_decay_bias", "fp16"):
        theirs.add_argument(f"--{name}", action="store_true")
    theirs.add_argument("--scheduler", default="linear", metavar="NAME")
    theirs.add_argument("--i_steps", default="0", metavar="LIST")
    theirs.add_argument("--i_lrs", default="0.00025", metavar="LIST")
    theirs.add_argument("--obj", default="clm", choices=("clm", "jlm"))
    theirs.add_argument("--work_dir", default="gpt2_model", metavar="FOLDER")
    for name in _UNUSED:
        theirs.add_argument(f"--{name}", help="taken, and not needed")
    command.set_defaults(run=_from_nlg)


def _from_nlg(options: argparse.Namespace) -> None:
    import yaml

    from meshlora.run.config.file import read_run
    from meshlora_ground.console import Console
    from meshlora_ground.files import check_result_file, write_text_atomically

    file = Path(options.out)
    check_result_file(file, f"--out {file}")
    if file.exists():
        raise UserError(f"--out {file}", "it is there already", "choose a new path; nothing is overwritten")
    head = "# As microsoft/LoRA's gpt2_ft.py: docs/e2e.md says what is theirs and what is not.\n"
    write_text_atomically(file, head + yaml.safe_dump(run_of(options), sort_keys=False))
    try:
        read_run(str(file), [])
    except UserError:
        file.unlink()
        raise
    say = Console().say
    say(f"run file: {file}")
    say(f"meshlora train {file}" + f" --nproc {options.nproc}" * (options.nproc > 1))


def run_of(options: argparse.Namespace) -> dict[str, Any]:
    """The content of the run file. Raises: UserError, UnsupportedError: an argument that has no counterpart."""
    _refuse(options)
    given: dict[str, Any] = vars(options)
    train: dict[str, Any] = {"output": options.work_dir}
    train["batch_size"] = options.train_batch_size * options.nproc * options.grad_acc
    train["micro_batch_size"] = options.train_batch_size  # there it is of a process
    train |= _length(options)
    train |= {"weight_decay": options.weight_decay, "decay_biases_and_norms": not options.no_decay_bias}
    train |= {"beta1": options.adam_beta1, "beta2": options.adam_beta2, "eps": options.adam_epislon}
    train |= {"max_grad_norm": options.clip, "seed": options.random_seed}
    train["objective"] = {"kind": "sft", "label_smoothing": options.label_smooth}
    train["log_every"] = options.log_interval
    for ours, theirs in {"save_every": "save_interval", "eval_every": "eval_interval"}.items():
        if theirs == "save_interval" or options.valid_data:
            train[ours] = _in_steps(theirs, given[theirs], options.grad_acc)
    data = {"train": options.train_data, "max_length": options.seq_len}
    if options.valid_data:
        data["eval"] = options.valid_data
    if options.obj == "jlm":  # of prompts too
        data["train_on"] = "everything"
    recipe = presets()["microsoft-e2e"]  # for texts that are evaluated or continued: encoded rows are complete
    separator = recipe["data"]["separator"]
    if _is_separated(options, separator):
        data["separator"] = separator
    lora = {"r": options.lora_dim, "lora_alpha": options.lora_alpha, "lora_dropout": options.lora_dropout}
    lora |= {"target_modules": ["c_attn"], "pieces": {"c_attn": ["q", "v"]}}
    return {
        "model": {"path": options.model, "disable_dropout": True},
        "lora": lora,
        "data": data,
        "train": train,
        "generate": dict(recipe["generate"]),
        "topology": f"dp={options.nproc}" if options.nproc > 1 else "",
    }


def _is_separated(options: argparse.Namespace, separator: str) -> bool:
    """Whether their gpt2_encode.py has put `separator` behind each context (`--add_bos`), by the first row of the data.

    Where that is text, or not there yet, it is as in their README.
    """
    from meshlora.reading.data_files import json_objects
    from meshlora.reading.records import Problems
    from meshlora.reading.tokenizer import load_tokenizer

    file = Path(options.train_data)
    rows = json_objects(file, Problems()) if file.is_file() and file.suffix == ".jsonl" else iter(())
    context = next((row.get("context") for _, row in rows), None)  # token ids
    if not isinstance(context, list) or not context:
        return True
    return bool(load_tokenizer(options.model).decode(context[-1:]) == separator)


def _length(options: argparse.Namespace) -> dict[str, Any]:
    """Rates, their course, and the length of the run, in optimizer steps: there they go by micro-batches."""
    found: dict[str, Any] = {"lr": options.lr, "schedule": _SCHEDULES[options.scheduler]}
    if options.scheduler == "cycle":
        steps, rates = options.i_steps.split(","), options.i_lrs.split(",")
        try:
            cycle = {int(step): float(rate) for step, rate in zip(steps, rates, strict=True)}
        except ValueError:
            given = f"--i_steps {options.i_steps} --i_lrs {options.i_lrs}"
            raise UserError(given, "they are as many whole numbers as rates", "as in 0,100,2000") from None
        cycle = {_in_steps("i_steps", step, options.grad_acc): rate for step, rate in cycle.items()}
        return {"schedule": "cycle", "cycle": cycle, "steps": max(cycle)}
    if options.warmup_step:
        found["warmup_steps"] = _in_steps("warmup_step", options.warmup_step, options.grad_acc)
        found["warmup_from_zero"] = True
    if options.max_step is not None:
        return found | {"steps": _in_steps("max_step", options.max_step, options.grad_acc)}
    if options.max_epoch is None:
        raise UserError("neither --max_step nor --max_epoch", "a run has a length", "give one")
    return found | {"epochs": options.max_epoch}


def _in_steps(name: str, number: int, grad_acc: int) -> int:
    if grad_acc < 1 or number % grad_acc:
        rule = "there it counts micro-batches, here optimizer steps"
        raise UserError(f"--{name} {number} with --grad_acc {grad_acc}", rule, "use a multiple")
    return number // grad_acc


def _refuse(options: argparse.Namespace) -> None:
    """What is not theirs here."""
    if not options.correct_bias:
        rule = "AdamW is always corrected here"
        raise UnsupportedError("a command without --correct_bias", rule, "give it, as their README does")
    if options.fp16:
        rule = "it is Apex's autocast over an fp32 base"
        raise UnsupportedError("--fp16", rule, "leave it out, and set model.dtype: bfloat16 or float16 in the file")
    if options.scheduler not in _SCHEDULES:
        rule = f"there it is a constant rate without a warm-up; known: {', '.join(_SCHEDULES)}"
        raise UserError(f"--scheduler {options.scheduler}", rule, "use one of these")
    if options.lora_dim < 1:
        raise UserError(f"--lora_dim {options.lora_dim}", "all weights would be trained", "give the rank of an adapter")
    if options.nproc < 1:
        raise UserError(f"--nproc {options.nproc}", "at least 1 process is needed")
