"""`meshlora evaluate`: a trained adapter on a held-out set.

Does not own: losses (`run.evaluate`), decoding (`run.decoding`), scores (`meshlora_extra.paper.scores`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import add_json, add_local_rank, add_run_file, checked_place, run_file_words, write_result
from meshlora_extra.paper.meteor import WAY_OUT
from meshlora_extra.paper.scores import SCRIPTS, check_scorers, scores, shown, spaced, written_references
from meshlora_ground.errors import UserError
from meshlora_ground.files import check_result_file, new_folder, write_text_atomically
from meshlora_ground.reading import path_argument


def add(commands: Any) -> None:
    evaluate = commands.add_parser("evaluate", help="loss, perplexity and scores of generated text on a held-out set")
    add_run_file(evaluate, example="data.eval=FILE")
    which = evaluate.add_mutually_exclusive_group()
    which.add_argument(
        "--adapter",
        type=path_argument,  # explicit: groups are not created by our parser class
        metavar="FOLDER",
        help="default: the finished one in train.output",
    )
    which.add_argument("--base", action="store_true", help="the base model alone")
    evaluate.add_argument("--data", metavar="FILE", help="instead of data.eval, all of it")
    evaluate.add_argument(
        "--nproc", type=int, metavar="N", help="N ranks on the run file's topology; default: one process"
    )
    evaluate.add_argument(
        "--generate",
        action="store_true",
        help="also continue the prompts, divided among the ranks, and score the texts",
    )
    add_json(evaluate)
    evaluate.add_argument(
        "--hypotheses", metavar="FILE", help="write generated texts, a line each (default hypotheses.txt in the output)"
    )
    evaluate.add_argument(
        "--references", metavar="PATH", help="also write the references, as the script of --scores reads them"
    )
    evaluate.add_argument(
        "--scores",
        choices=SCRIPTS,
        metavar=" | ".join(SCRIPTS),
        help=f"the script whose scores are computed (default {SCRIPTS[0]})",
    )
    add_local_rank(evaluate)
    evaluate.set_defaults(run=_evaluate)


def _evaluate(options: argparse.Namespace) -> None:
    from meshlora.comm.groups import leave, on_gpus
    from meshlora.run.agreement import one_day
    from meshlora.run.edge import launched_by_us, leave_result, rank_edge
    from meshlora.run.evaluate import adapter_of_run, evaluate, prepare_evaluation
    from meshlora.run.generated import prepare_prompts
    from meshlora.run.launch import launch
    from meshlora.run.machines import machines
    from meshlora_ground.console import Console

    place = checked_place(options)
    with rank_edge(is_watched=True) if place is not None else contextlib.nullcontext() as watch:
        _check_files(options)
        config = _config(options, place)
        adapter = None
        if not options.base:
            adapter = Path(options.adapter) if options.adapter else adapter_of_run(config)
        world = options.nproc or (place.world if place else 1)
        # Asked before CUDA is opened here.
        takes_gpus = options.nproc is not None and on_gpus(config.device, num_ranks=options.nproc)
        run = prepare_evaluation(config, adapter=adapter, world=world, day=one_day())
        is_main = place is None or place.rank == 0
        prompts = None
        if options.generate:
            texts = _texts_file(options, config)
            check_result_file(texts, f"{texts}", makes_folder=True)
            check_scorers(options.scores or SCRIPTS[0])
            # Before this process opens its GPU: templates of prompts are rendered in a fork of it.
            prompts = prepare_prompts(run)
        machines(config.device, watch)
        if is_main and not launched_by_us():
            for note in run.notes:
                Console().say(note)
        if options.nproc is not None:
            words = ["evaluate", *run_file_words(options.file, options.overrides)]
            if adapter is None:
                words.append("--base")
            else:
                words += ["--adapter", str(adapter)]
            words += ["--generate"] * options.generate
            for name in ("data", "hypotheses", "references", "scores"):
                if given := getattr(options, name):
                    words += [f"--{name}", given]
            result = launch(words, nproc=options.nproc, on_gpus=takes_gpus)
        else:
            result = evaluate(run)
            if prompts is not None:
                result |= _generate_and_score(run, prompts, options, world=world, is_main=is_main)
            leave_result(result)
            if not is_main or launched_by_us():  # the launcher shows what its rank 0 left
                leave()
                return
        _show(result)
        write_result(options.json, result)
        leave()


def _check_files(options: argparse.Namespace) -> None:
    """Refuse options without effect, and files that could not be written."""
    for name in ("hypotheses", "references", "scores"):
        if getattr(options, name) and not options.generate:
            given = f"--{name} {getattr(options, name)}"
            raise UserError(given, "it has no effect without --generate", "give both")
    files = [options.json, options.hypotheses]
    if options.scores in (None, SCRIPTS[0]):  # of the others they are a folder
        files.append(options.references)
    for file in filter(None, files):
        check_result_file(Path(file), file)
    if options.references and options.references not in files and Path(options.references).exists():
        raise UserError(f"--references {options.references}", "it is there already", "choose a new folder")


def _config(options: argparse.Namespace, place: Any) -> Any:
    """The run file with the topology and the data of this evaluation."""
    from meshlora.plan.pairs import check
    from meshlora.run.config.file import read_run
    from meshlora_ground.hub import located_files

    config = read_run(options.file, options.overrides)
    if options.generate:
        check({"door": "--generate", "train.objective": config.train.objective})
    given = {override.partition("=")[0] for override in options.overrides}
    if place is None and options.nproc is None and "topology" not in given:
        config = dataclasses.replace(config, topology="")  # one process, whatever the run used
    if options.data:
        limit = config.data.eval_limit if "data.eval_limit" in given else None
        files = located_files(options.data, "--data", split="validation")
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval=[*files], eval_limit=limit))
    return config


def _texts_file(options: argparse.Namespace, config: Any) -> Path:
    return Path(options.hypotheses or Path(config.train.output) / "hypotheses.txt")


def _generate_and_score(
    run: Any, prompts: Any, options: argparse.Namespace, *, world: int, is_main: bool
) -> dict[str, Any]:
    """Continue every prompt on all ranks; the main one writes the texts and scores them against the references."""
    from meshlora.run.generated import generated_texts
    from meshlora_ground.console import Console

    def advance(done: int) -> None:
        update(f"generating: {done} of {len(prompts.prompts)} prompts" + f", on each of {world} ranks" * (world > 1))

    with Console().busy("generating") if is_main else contextlib.nullcontext(lambda _: None) as update:
        hypotheses = generated_texts(run, prompts, advance=advance)
    if not is_main:
        return {}
    file, script = _texts_file(options, run.config), options.scores or SCRIPTS[0]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, "".join(f"{text}\n" for text in hypotheses))  # a line each, as the scripts read them
    if options.references:
        _write_references(Path(options.references), hypotheses, prompts.references, script)
    return {
        "prompts": len(prompts.prompts),
        "references": sum(map(len, prompts.references)),
        "generate": dataclasses.asdict(run.config.generate),
        "hypotheses": str(file),
        "scores": script,
        **scores(hypotheses, prompts.references, script),
    }


def _write_references(path: Path, hypotheses: list[str], references: list[tuple[str, ...]], script: Any) -> None:
    """Write what the script of the scores reads: one file, or a folder that has the texts too."""
    files = written_references(references, script)
    if "" in files:
        write_text_atomically(path, files[""])
        return
    with new_folder(path) as folder:
        for name, text in (files | {"hypothesis": "".join(f"{spaced(text)}\n" for text in hypotheses)}).items():
            (folder / name).write_text(text, encoding="utf-8")


def _show(result: dict[str, Any]) -> None:
    from meshlora_ground.console import Console
    from meshlora_ground.objective import COUNTED

    say = Console().say
    adapter = "the base, without an adapter"
    if result["adapter"]:
        adapter = f"adapter {result['adapter']}"
    say(f"{result['model']}, {adapter}")
    counted = next(f"{result[name]:,} {name.replace('_', ' ')}" for name in COUNTED.values() if name in result)
    more = ""
    if result.get("perplexity") is not None:
        more = f"  perplexity {result['perplexity']:.3f}"
    for name in ("accuracy", "macro_f1", "recall_at_1"):
        if name in result:
            more += f"  {name} {result[name]:.4f}"
    say(f"{result['examples']:,} examples, {counted}, on {result['topology']}: loss {result['loss']:.4f}{more}")
    if "bleu" in result:
        say(f"{result['prompts']:,} prompts, {result['references']:,} references: {result['hypotheses']}")
        say(f"{shown(result)}  ({result['scores']})")
        if result["meteor"] is None:
            say(WAY_OUT)
