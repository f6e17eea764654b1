"""`meshlora judge served`: does a server apply the adapter whose name it answers to?

Owns: the arguments, and the words of the verdict. Does not own: the questions (`meshlora_judge.served.server`) or the
comparison (`meshlora_judge.served.verdict`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

from meshlora_ground.errors import MeshloraError, UserError

_OF_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_DTYPES = ("float32", "float16", "bfloat16")


def add(verbs: Any) -> None:
    help_ = "a served adapter: is it applied, to which modules not, at which scale?"
    parser = verbs.add_parser("served", help=help_, description=f"{help_[0].upper()}{help_[1:]}")
    option = parser.add_argument
    option("url", metavar="URL", help="of an OpenAI-compatible server (vLLM, SGLang): http://127.0.0.1:8000")
    option("--model", metavar="FOLDER", required=True, help="the base")
    option("--adapter", metavar="FOLDER", required=True, help="the adapter, as PEFT saves it")
    option("--name", help="what the server calls the adapter, or the merged model")
    option("--base-name", help="what it calls the base, if it serves that too")
    option("--prompts", metavar="FILE", help="a text or a JSON list of token ids a line")
    option("--dtype", choices=_DTYPES, help="of the engine; without it any of them may explain a difference")
    quantized = ("nf4", "int8", "fp8", "mxfp4", "nvfp4")
    option("--quantization", choices=quantized, help="of the engine's base, which is then rounded here too")
    option("--key-file", metavar="FILE", help="a file with the server's API key")
    option("--timeout", type=float, default=120.0, metavar="SECONDS", help="of one answer (120)")
    option("--trust-remote-code", action="store_true", help="run code of the base's folder")
    option("--json", metavar="FILE", help="write what was found there")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from meshlora_ground.files import check_result_file, write_json_atomically

    if options.json:
        check_result_file(Path(options.json), f"--json {options.json}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about each other
        verdict, name, way = _judged(options)
    text = _text(verdict, name, options)
    if options.json:
        words = {True: "proved", False: "refuted", None: "undecided"}
        found = dataclasses.asdict(verdict) | {"verdict": words[verdict.is_proved], "name": name, "asked_by": way}
        write_json_atomically(Path(options.json), found | {"text": text})
    if verdict.is_proved is None:
        given = f"undecided: the adapter moves these log-probabilities by {verdict.effect:.1e}"
        rule = f"less than {verdict.dtype}'s rounding can be told from ({verdict.limit:.1e} is explained by it)"
        raise UserError(given, rule, "give other prompts by --prompts, or --dtype if the engine's is finer")
    if not verdict.is_proved:
        raise MeshloraError(text)
    from meshlora_ground.console import Console

    Console().say(text)


def _judged(options: argparse.Namespace) -> tuple[Any, str, str | None]:
    """(the verdict, the name that was asked, the way it was asked)."""
    from meshlora_judge.served.server import Server, served_names

    server = Server(options.url, _key(options.key_file), options.timeout)
    name, base_name = served_names(
        server.models(), options.name, options.base_name, Path(os.path.abspath(options.adapter)).name
    )
    if base_name == name:
        base_name = None
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    from meshlora_judge.served.computed import default_prompts, prompts_in
    from meshlora_judge.served.verdict import judge_served
    from meshlora_judge.settings import Base

    logging.disable_progress_bar()
    remote = {"trust_remote_code": options.trust_remote_code, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(options.model, **remote)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--model {options.model}", f"transformers cannot read it ({error})") from None
    tokenizer = None
    # Without files transformers makes up an empty tokenizer for some families.
    if any((Path(options.model) / file).is_file() for file in _OF_TOKENIZERS):
        with contextlib.suppress(Exception):  # random tokens do without
            tokenizer = AutoTokenizer.from_pretrained(options.model, **remote)
    if options.prompts:
        prompts = prompts_in(Path(options.prompts), config, tokenizer)
    else:
        prompts = default_prompts(config, tokenizer)
    served = server.log_probs(name, prompts)
    served_base = server.log_probs(base_name, prompts) if base_name else None
    base = Base(
        options.model,
        dtype=_wide(Path(options.model)),
        trust_remote_code=options.trust_remote_code,
        quantization=options.quantization,
    )
    stored = f"{getattr(config, 'dtype', None) or ''}".removeprefix("torch.")
    # Engines run float32 checkpoints in 16 bits unless they are told not to.
    dtypes = [options.dtype] if options.dtype else ["float32", "float16" if stored == "float16" else "bfloat16"]
    if base.dtype == "float32" and not options.dtype:
        dtypes = dtypes[1:]  # its own rounding cannot be told
    verdict = judge_served(base, Path(options.adapter), prompts, served, served_base, dtypes=dtypes)
    return verdict, name, server.way


def _key(file: str | None) -> str | None:
    from meshlora_ground.reading import read_text

    if file is None:
        return None
    try:
        key = read_text(Path(file), most_bytes=4096).strip()
    except (OSError, ValueError) as error:
        raise UserError(f"--key-file {file}", f"it cannot be read ({error})") from None
    if not key.isascii() or not key.isprintable() or not key:
        raise UserError(f"--key-file {file}", "a key is one line of ASCII")
    return key


def _wide(folder: Path) -> str:
    """float64 where model and a copy fit into the memory, else float32."""
    from meshlora_ground.weight_files import weight_files

    stored = sum(file.stat().st_size for file in weight_files(folder))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "float64" if 4 * stored * 2 < 0.6 * memory else "float32"


def _text(verdict: Any, name: str, options: argparse.Namespace) -> str:
    """The verdict in one paragraph."""
    near = sorted(verdict.distances.items(), key=lambda item: item[1])
    if verdict.is_proved:
        merged = "" if verdict.found[0] == "base + adapter" else f" ({verdict.found[0]})"
        text = (
            f"proved: {name} serves {options.adapter}{merged}: {verdict.num_tokens} log-probabilities are "
            f"{verdict.distances[verdict.found[0]]:.1e} (root mean square) from base + adapter on one process, where "
            f"{verdict.dtype} explains {verdict.limit:.1e}, and {verdict.effect:.1e} apart is the bare base."
        )
        if verdict.unseen:
            text += f" These prompts do not tell whether {', '.join(verdict.unseen)} is applied: it moves too little."
        return text
    distance = verdict.distances.get("base + adapter", 0.0)
    start = f"refuted: {name} does not serve {options.adapter} as it is: {verdict.num_tokens} log-probabilities are "
    start += f"{distance:.1e} (root mean square) from base + adapter, and {verdict.dtype} explains {verdict.limit:.1e}"
    if verdict.found:
        least = verdict.distances[verdict.found[0]]
        return f"{start}. It serves {'; or '.join(verdict.found[:3])} ({least:.1e})."
    said = f"{start}. Another adapter, or another base: none of {len(near)} hypotheses fits; the nearest is "
    bare = verdict.distances.get("the bare base", 0.0)
    return f"{said}{near[0][0]} ({near[0][1]:.1e}); the bare base is {bare:.1e} away."
