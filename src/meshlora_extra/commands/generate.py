"""`meshlora generate`: its arguments, and the ranks that answer them.

Does not own: decoding (`run.decoding`), dividing prompts among ranks (`run.generated`).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import add_json, add_local_rank, check_json, checked_place, write_result
from meshlora_ground.errors import UserError

# Options of decoding, under the names of `run.config.run_file.GenerateConfig`.
_DECODING = ("max_new_tokens", "num_beams", "length_penalty", "no_repeat_ngram_size", "search", "stop", "top_p", "seed")


def add(commands: Any) -> None:
    generate = commands.add_parser("generate", help="continue prompts, on one process or a mesh")
    generate.add_argument("--model", required=True, metavar="FOLDER")
    generate.add_argument("--adapter", metavar="FOLDER", help="PEFT adapter; without it the base model speaks")
    generate.add_argument("--prompt", required=True, action="append", help="may be given more than once")
    generate.add_argument(
        "--chat", action="store_true", help="each prompt is what a user says: the chat template leads to the answer"
    )
    generate.add_argument("--separator", default="", metavar="TEXT", help="data.separator of the run that trained it")
    generate.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    generate.add_argument("--num-beams", type=int, default=1, metavar="N", help="beam search (default 1: none)")
    generate.add_argument("--length-penalty", type=float, default=1.0, metavar="X", help="of beam search")
    generate.add_argument(
        "--no-repeat-ngram-size", type=int, default=0, metavar="N", help="no N tokens occur twice (default 0: they may)"
    )
    generate.add_argument(
        "--search",
        choices=("transformers", "gpt2_beam"),
        default="transformers",
        help="gpt2_beam: the beam search of microsoft/LoRA (docs/e2e.md)",
    )
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a text; may be repeated")
    generate.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    generate.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest that make up this much")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--dtype", default="auto")
    generate.add_argument("--trust-remote-code", action="store_true")
    generate.add_argument("--nproc", type=int, metavar="N", help="N ranks on this machine; default: one process")
    generate.add_argument(
        "--topology", metavar="AXES", help="as in a run file; default: tp as far as the model can be split, then dp"
    )
    add_json(generate)
    add_local_rank(generate)
    generate.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> None:
    from meshlora.comm.groups import leave, on_gpus
    from meshlora.run.decoding import generate
    from meshlora.run.edge import rank_edge
    from meshlora.run.launch import launch
    from meshlora.run.machines import machines

    place = checked_place(options)
    with rank_edge(is_watched=True) if place is not None else contextlib.nullcontext() as watch:
        world = options.nproc or (place.world if place else 1)
        check_json(options)
        config = _config(options)
        if world == 1 and options.topology is None:  # no group is opened
            asked = _asked(options)
            found = generate(options.model, asked, options=config, dtype=options.dtype, **_of_prompts(options))
            _hand_over_each(options, found)
            return
        # Before CUDA is opened here.
        takes_gpus = options.nproc is not None and on_gpus("auto", num_ranks=options.nproc)
        run = prepare(options, config, world=world)
        machines("auto", watch)
        if options.nproc is not None:
            launch(["generate", *_own_words(options)], nproc=options.nproc, on_gpus=takes_gpus)
            return
        texts = spoken(run, config)
        if place is None or place.rank == 0:
            _hand_over_each(options, texts)
        leave()


def _config(options: argparse.Namespace) -> Any:
    """The options of decoding. Raises: UserError, in this command's option names."""
    from meshlora.run.config.run_file import GenerateConfig

    words = {name: getattr(options, name) for name in _DECODING}
    if options.temperature != 0:
        words |= {"do_sample": True, "temperature": options.temperature}
    try:
        return GenerateConfig(**words, batch_size=1)
    except UserError as error:
        # The config's words, and here there is no run file.
        given = error.given.replace("generate.", "--").replace("_", "-").replace("=", " ")
        way_out = error.way_out.replace("generate.do_sample", "--temperature").replace(
            "generate.num_beams", "--num-beams"
        )
        raise UserError(given, error.rule, way_out) from None


def _asked(options: argparse.Namespace) -> list[Any]:
    """The prompts: texts, or with `--chat` conversations."""
    from meshlora.reading.records import Record

    if not options.chat:
        return list(options.prompt)
    if options.separator:
        given, rule = f"--separator {options.separator!r} with --chat", "it has no effect: the chat template separates"
        raise UserError(given, rule, "leave out one of them")
    asked: list[Any] = []
    for prompt, name in zip(options.prompt, _names(options), strict=True):
        asked.append(Record(messages=({"role": "user", "content": prompt},), origin=name))
    return asked


def _day(options: argparse.Namespace) -> str | None:
    """The day that the chat template writes: of the run that made the adapter, else today; the same on all ranks."""
    from meshlora.run.agreement import one_day
    from meshlora.run.checkpoint.resuming import day_of_adapter

    if not options.chat:
        return None
    today = one_day()  # asked on all ranks, as it is collective
    if options.adapter:
        return day_of_adapter(Path(options.adapter)) or today
    return today


def _names(options: argparse.Namespace) -> list[str]:
    return [f"--prompt {prompt[:80]!r}" for prompt in options.prompt]


def _of_prompts(options: argparse.Namespace) -> dict[str, Any]:
    """What says how prompts are read, on one process or several."""
    return {
        "adapter": Path(options.adapter) if options.adapter else None,
        "names": _names(options),
        "separator": options.separator,
        "trust_remote_code": options.trust_remote_code,
        "day": _day(options),
    }


def prepare(options: argparse.Namespace, config: Any, *, world: int) -> tuple[Any, Any, Any]:
    """(blueprint, tokenizer, token ids of the prompts) for `world` ranks. Raises: UserError: what does not fit."""
    from meshlora.run.decoding import read_prompts
    from meshlora.run.generated import blueprint_to_generate

    given = _of_prompts(options)
    tokenizer, encoded = read_prompts(options.model, _asked(options), config, **given)
    blueprint = blueprint_to_generate(
        options.model,
        adapter=given["adapter"],
        topology=options.topology,
        world=world,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )
    return blueprint, tokenizer, encoded


def spoken(run: tuple[Any, Any, Any], config: Any) -> list[str]:
    """The texts, on every rank of the job. All of them call it."""
    from meshlora.loading.load import load_blueprint
    from meshlora.run.decoding import texts_of
    from meshlora.run.generated import continued_by_all

    blueprint, tokenizer, encoded = run
    found = continued_by_all(load_blueprint(blueprint).eval(), tokenizer, encoded, config)
    return texts_of([each.tokens for each in found], tokenizer, config)


def _own_words(options: argparse.Namespace) -> list[str]:
    """The arguments that ranks are started with: all but `--nproc`. Each is one word, whatever its text begins with."""
    given = {"model": options.model, "adapter": options.adapter, "topology": options.topology, "json": options.json}
    given |= {name: getattr(options, name) for name in (*_DECODING, "prompt", "separator", "temperature", "dtype")}
    words = []
    for name, value in given.items():
        if not isinstance(value, list):
            value = [value]
        # One word each: a prompt may begin with a hyphen.
        words += [f"--{name.replace('_', '-')}={each}" for each in value if each is not None]
    return words + ["--trust-remote-code"] * options.trust_remote_code + ["--chat"] * options.chat


def _hand_over_each(options: argparse.Namespace, texts: Iterable[str]) -> None:
    from meshlora_ground.console import hand_over

    said = []
    for prompt, text in zip(options.prompt, texts, strict=True):
        hand_over(text)
        said.append({"prompt": prompt, "text": text})
    write_result(options.json, {"texts": said})
