"""`meshlora generate`: its arguments. The decoding is in `text.decoding`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import add_json, check_json, write_result
from meshlora.common.errors import UserError


def add(commands: Any) -> None:
    """Register the command."""
    generate = commands.add_parser("generate", help="continue prompts on one process")
    generate.add_argument("--model", required=True, metavar="FOLDER")
    generate.add_argument("--adapter", metavar="FOLDER", help="PEFT adapter; without it the base model speaks")
    generate.add_argument("--prompt", required=True, action="append", help="may be given more than once")
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
    add_json(generate)
    generate.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> None:
    from meshlora.common.console import hand_over
    from meshlora.config.run import GenerateConfig
    from meshlora.text.decoding import generate

    check_json(options)
    names = ("max_new_tokens", "num_beams", "length_penalty", "no_repeat_ngram_size", "search", "stop", "top_p", "seed")
    words = {name: getattr(options, name) for name in names}
    if options.temperature != 0:
        words |= {"do_sample": True, "temperature": options.temperature}
    try:
        config = GenerateConfig(**words, batch_size=1)
    except UserError as error:  # in this command's option names
        given = error.given.replace("generate.", "--").replace("_", "-").replace("=", " ")
        way_out = error.way_out.replace("generate.do_sample", "--temperature").replace(
            "generate.num_beams", "--num-beams"
        )
        raise UserError(given, error.rule, way_out) from None
    texts = generate(
        options.model,
        options.prompt,
        adapter=Path(options.adapter) if options.adapter else None,
        options=config,
        names=[f"--prompt {prompt[:80]!r}" for prompt in options.prompt],
        separator=options.separator,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )
    said = []
    for prompt, text in zip(options.prompt, texts, strict=True):
        hand_over(text)
        said.append({"prompt": prompt, "text": text})
    write_result(options, {"texts": said})
