"""`meshlora evaluate`: a trained adapter on a held-out set.

Owns: its arguments and its output. Does not own: losses (`train.evaluate`), decoding (`text.decoding`), scores
(`text.scores`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import add_local_rank, add_run_file, checked_place, run_file_words
from meshlora.common.errors import UserError
from meshlora.common.reading import path_argument
from meshlora.common.tasks import CAUSAL


def add(commands: Any) -> None:
    """Register the command."""
    evaluate = commands.add_parser("evaluate", help="loss, perplexity and scores of generated text on a held-out set")
    add_run_file(evaluate, example="data.eval=FILE")
    which = evaluate.add_mutually_exclusive_group()
    which.add_argument(
        "--adapter",
        type=path_argument,  # explicit: groups are not created by our parser class
        metavar="FOLDER",
        help="default: the finished one in train.output, else adapter of the run file",
    )
    which.add_argument("--base", action="store_true", help="the base model alone")
    evaluate.add_argument("--data", metavar="FILE", help="instead of data.eval, all of it")
    evaluate.add_argument(
        "--nproc", type=int, metavar="N", help="N ranks on the run file's topology; default: one process"
    )
    evaluate.add_argument(
        "--generate", action="store_true", help="also continue the prompts and score the texts; on one process"
    )
    evaluate.add_argument("--json", metavar="FILE", help="write the result")
    evaluate.add_argument(
        "--hypotheses", metavar="FILE", help="write generated texts, a line each (default hypotheses.txt in the output)"
    )
    add_local_rank(evaluate)
    evaluate.set_defaults(run=_evaluate)


def _evaluate(options: argparse.Namespace) -> None:
    from meshlora.comm.groups import leave, on_gpus
    from meshlora.common.files import check_result_file, write_json_atomically
    from meshlora.common.hub import located_files
    from meshlora.config.file import read_run
    from meshlora.text.scores import check_scorers
    from meshlora.train.edge import launched_by_us, leave_result, rank_edge
    from meshlora.train.evaluate import adapter_of_run, evaluate, prepare_evaluation
    from meshlora.train.launch import launch
    from meshlora.train.machines import machines

    place = checked_place(options)
    if options.hypotheses and not options.generate:
        raise UserError(f"--hypotheses {options.hypotheses}", "it has no effect without --generate", "give both")
    with rank_edge(is_watched=True) if place is not None else contextlib.nullcontext() as watch:
        for file in filter(None, (options.json, options.hypotheses)):
            check_result_file(Path(file), file)
        if options.generate and place is not None:
            rule = "texts are generated on one process"
            raise UserError("--generate inside a launcher", rule, "use --nproc N for it")
        config = read_run(options.file, options.overrides)
        if options.generate and config.train.objective.task != CAUSAL:
            what = f"--generate with train.objective={config.train.objective.kind}"
            raise UserError(what, "such a model writes no text", "leave it out")
        given = {override.partition("=")[0] for override in options.overrides}
        if place is None and options.nproc is None and "topology" not in given:
            config = dataclasses.replace(config, topology="")  # one process, whatever the run used
        if options.data:
            limit = config.data.eval_limit if "data.eval_limit" in given else None
            files = located_files(options.data, "--data", split="validation")
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval=files, eval_limit=limit))
        adapter = Path(options.adapter) if options.adapter else None if options.base else adapter_of_run(config)
        world = options.nproc or (place.world if place else 1)
        if options.nproc is not None:
            on_gpus(config.device, num_ranks=options.nproc)
        run = prepare_evaluation(config, adapter=adapter, world=world)
        machines(config.device, watch)
        is_main = place is None or place.rank == 0
        _say(run.notes if is_main and not launched_by_us() else ())
        texts = Path(options.hypotheses or Path(config.train.output) / "hypotheses.txt")
        if options.generate:
            check_result_file(texts, f"{texts}", makes_folder=True)
            check_scorers()
        prompts, encoded = _prompts(run) if options.generate else ([], [])
        if options.nproc is not None:
            words = ["--adapter", str(adapter)] if adapter is not None else ["--base"]
            words += ["--data", options.data] if options.data else []
            result = launch(["evaluate", *run_file_words(options), *words], nproc=options.nproc)
        else:
            result = evaluate(run)
            leave_result(result)
            if not is_main or launched_by_us():
                leave()
                return
        if options.generate:
            result |= _generate_and_score(run, prompts, encoded, texts)
        _show(result)
        if options.json:
            write_json_atomically(Path(options.json), result)
        leave()


def _say(notes: tuple[str, ...]) -> None:
    from meshlora.common.console import Console

    for note in notes:
        Console().say(note)


def _prompts(run: Any) -> tuple[list[Any], list[list[int]]]:
    """(prompts with references, their token ids)."""
    from meshlora.data import prompts_of, read_records
    from meshlora.text.decoding import encode_prompts
    from meshlora.text.tokenizer import load_tokenizer

    config = run.config
    records = read_records(config.data.eval, columns=config.data.columns, format=config.data.format)[
        : config.data.eval_limit
    ]
    prompts = prompts_of(records)
    encoded = encode_prompts(
        [prompt.text for prompt in prompts],
        load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code),
        run.blueprint.config,
        config.generate,
        names=[prompt.origin for prompt in prompts],
    )
    return prompts, encoded


def _generate_and_score(run: Any, prompts: list[Any], encoded: list[list[int]], file: Path) -> dict[str, Any]:
    """Generate from every prompt on this process, write the texts and score them against the references."""
    from meshlora.common.console import Console
    from meshlora.common.files import write_text_atomically
    from meshlora.plan.topology import Topology
    from meshlora.text.decoding import continuations
    from meshlora.text.scores import scores
    from meshlora.text.tokenizer import load_tokenizer
    from meshlora.train.evaluate import load_for_evaluation

    model = load_for_evaluation(dataclasses.replace(run, blueprint=run.blueprint.on(Topology.parse("", world=1))))
    tokenizer = load_tokenizer(run.config.model.path, trust_remote_code=run.config.model.trust_remote_code)
    hypotheses: list[str] = []
    with Console().busy("generating") as update:
        for text in continuations(model, tokenizer, encoded, run.config.generate):
            hypotheses.append(" ".join(text.split()))  # one line per text
            update(f"generating: {len(hypotheses)} of {len(encoded)} prompts")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, "".join(f"{text}\n" for text in hypotheses))
    references = [prompt.references for prompt in prompts]
    return {
        "prompts": len(prompts),
        "references": sum(map(len, references)),
        "generate": dataclasses.asdict(run.config.generate),
        "hypotheses": str(file),
        **scores(hypotheses, references),
    }


def _show(result: dict[str, Any]) -> None:
    from meshlora.common.console import Console
    from meshlora.config.objective import COUNTED

    say = Console().say
    adapter = f"adapter {result['adapter']}" if result["adapter"] else "the base, without an adapter"
    say(f"{result['model']}, {adapter}")
    counted = next(f"{result[name]:,} {name.replace('_', ' ')}" for name in COUNTED.values() if name in result)
    shown = f"  perplexity {result['perplexity']:.3f}" if result.get("perplexity") is not None else ""
    for name in ("accuracy", "macro_f1", "recall_at_1"):
        shown += f"  {name} {result[name]:.4f}" if name in result else ""
    say(f"{result['examples']:,} examples, {counted}, on {result['topology']}: loss {result['loss']:.4f}{shown}")
    if "bleu" in result:
        say(f"{result['prompts']:,} prompts, {result['references']:,} references: {result['hypotheses']}")
        say(f"BLEU {result['bleu']:.2f}  ROUGE-L {result['rouge_l']:.2f}  ({result['bleu_signature']})")
