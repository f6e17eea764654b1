"""`meshlora generate`: its arguments, and the ranks that answer them.

Does not own: decoding (`run.decoding`), dividing prompts among ranks (`run.generated`), what is sent
(`meshlora_extra.chat.prompts`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import add_json, add_local_rank, check_json, checked_place, write_result
from meshlora_ground.errors import UserError
from meshlora_ground.files import check_result_file, write_text_atomically
from meshlora_ground.reading import path_argument

# Options of decoding, under the names of `run.config.run_file.GenerateConfig`.
_DECODING = ("max_new_tokens", "num_beams", "length_penalty", "no_repeat_ngram_size", "search", "stop", "top_p", "seed")


def add(commands: Any) -> None:
    generate = commands.add_parser("generate", help="continue prompts, on one process or a mesh")
    generate.add_argument("--model", required=True, metavar="FOLDER")
    generate.add_argument("--adapter", metavar="FOLDER", help="PEFT adapter; without it the base model speaks")
    prompts = generate.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given more than once")
    prompts.add_argument(
        "--prompts",
        type=path_argument,
        metavar="FILE",
        help='a prompt a line as JSON, "TEXT", {"prompt": "TEXT"} or {"messages": [...]}; answers are lines of JSON',
    )
    generate.add_argument("--out", metavar="FILE", help="of --prompts: write the answers there")
    add_asking(generate)
    generate.add_argument("--plain", action="store_true", help="send plain text, whatever the adapter was trained on")
    generate.add_argument("--separator", metavar="TEXT", help="default: data.separator of the run that trained it")
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


def add_asking(parser: argparse.ArgumentParser, *, is_always: bool = False) -> None:
    """Add what says how a conversation is sent. is_always: there is nothing else."""
    if not is_always:
        parser.add_argument(
            "--chat",
            action="store_true",
            help="each prompt is what a user says: the chat template leads to the answer "
            "(default where the adapter was trained on conversations)",
        )
    parser.add_argument("--system", metavar="TEXT", help="the system's turn of conversations that have none")
    parser.add_argument(
        "--chat-template", metavar="NAME|FILE", help="in place of the adapter's and the model's (data.chat_template)"
    )


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
        if options.out:
            check_result_file(Path(options.out), options.out)
        config = decoding_of(options)
        if world == 1 and options.topology is None:  # no group is opened
            questions, given = _questions(options)
            asked = [each.asked for each in questions]
            found = generate(options.model, asked, options=config, dtype=options.dtype, **given)
            _hand_over_each(options, questions, given["asking"], found)
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
            _hand_over_each(options, *run[3:], texts)
        leave()


def decoding_of(options: argparse.Namespace) -> Any:
    """The options of decoding. Raises: UserError, in the names of a command's options."""
    from meshlora.run.config.run_file import GenerateConfig

    words = {name: getattr(options, name) for name in _DECODING if hasattr(options, name)}
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


def _questions(options: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """(the prompts, what says how they are read). Every rank calls it. Raises: UserError."""
    from meshlora_extra.chat.prompts import asking_for, in_style, is_conversation, questions_of, with_day

    if options.out and options.prompts is None:
        raise UserError(f"--out {options.out}", "it has no effect without --prompts", "give both, or --json")
    asking = asking_for(options)
    is_chat = is_conversation(options, asking)
    if is_chat and options.separator:
        given, rule = f"--separator {options.separator!r} with --chat", "it has no effect: the chat template separates"
        raise UserError(given, rule, "leave out one of them")
    questions = questions_of(options, asking.system, is_chat=is_chat)
    if asking.style and not options.plain:
        questions = in_style(questions, asking.style)
    if any(not isinstance(each.asked, str) for each in questions):
        asking = with_day(asking)
    return questions, {
        "adapter": Path(options.adapter) if options.adapter else None,
        "names": [each.name for each in questions],
        "trust_remote_code": options.trust_remote_code,
        "asking": asking,
    }


def prepare(options: argparse.Namespace, config: Any, *, world: int) -> tuple[Any, Any, Any, Any, Any]:
    """(blueprint, tokenizer, token ids of the prompts, these, how they are asked) for `world` ranks. Raises: UserError:
    what does not fit."""
    from meshlora.run.decoding import read_prompts
    from meshlora.run.generated import blueprint_to_generate

    questions, given = _questions(options)
    tokenizer, encoded = read_prompts(options.model, [each.asked for each in questions], config, **given)
    blueprint = blueprint_to_generate(
        options.model,
        adapter=given["adapter"],
        topology=options.topology,
        world=world,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )
    return blueprint, tokenizer, encoded, questions, given["asking"]


def spoken(run: tuple[Any, Any, Any, Any, Any], config: Any) -> list[str]:
    """The texts, on every rank of the job. All of them call it."""
    from meshlora.loading.load import load_blueprint
    from meshlora.run.decoding import texts_of
    from meshlora.run.generated import continued_by_all

    blueprint, tokenizer, encoded, *_ = run
    found = continued_by_all(load_blueprint(blueprint).eval(), tokenizer, encoded, config)
    return texts_of([each.tokens for each in found], tokenizer, config)


def _own_words(options: argparse.Namespace) -> list[str]:
    """The arguments that ranks are started with: all but `--nproc`. Each is one word, whatever its text begins with."""
    names = ["model", "adapter", "topology", "json", "prompt", "prompts", "out", "system", "chat_template"]
    names += [*_DECODING, "separator", "temperature", "dtype"]
    words = []
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, list):
            value = [value]
        # One word each: a prompt may begin with a hyphen.
        words += [f"--{name.replace('_', '-')}={each}" for each in value if each is not None]
    for name in ("trust_remote_code", "chat", "plain"):
        words += [f"--{name.replace('_', '-')}"] * getattr(options, name)
    return words


def _hand_over_each(options: argparse.Namespace, questions: list[Any], asking: Any, texts: Iterable[str]) -> None:
    """Print the answers as they come, and write the files of options. What is said beside them goes to stderr."""
    from meshlora_extra.chat.prompts import how_it_is_sent
    from meshlora_ground.console import Console, hand_over

    say = Console(file=sys.stderr).say
    said, lines = list[dict[str, Any]](), list[str]()
    for question, text in zip(questions, texts, strict=True):
        if not said:  # now that nothing was refused
            say(how_it_is_sent(questions, asking, is_plain=options.plain))
        said.append({"prompt": question.row.get("prompt"), "text": text})
        if not text.strip():
            say(f"{question.name}: the answer is empty: the model ended at once")
        if options.prompts is not None:
            lines.append(json.dumps({**question.row, "text": text}, ensure_ascii=False))
            if options.out is None:
                hand_over(lines[-1])
        elif text.strip():
            hand_over(text)
    if options.out is not None:
        write_text_atomically(Path(options.out), "".join(f"{line}\n" for line in lines))
    write_result(options.json, {"texts": said})
