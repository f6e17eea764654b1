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
    option = evaluate.add_argument
    add_run_file(evaluate, example="data.eval=FILE")
    which = evaluate.add_mutually_exclusive_group()
    which.add_argument(
        "--adapter",
        type=path_argument,  # explicit: groups are not created by our parser class
        metavar="FOLDER",
        help="default: the finished one in train.output",
    )
    which.add_argument("--base", action="store_true", help="the base model alone")
    option("--data", metavar="FILE", help="instead of data.eval, all of it")
    option("--nproc", type=int, metavar="N", help="N ranks on the run file's topology; default: one process")
    option(
        "--generate",
        action="store_true",
        help="also continue the prompts, divided among the ranks, and measure the texts: generate.metrics, or scores",
    )
    option("--record", metavar="FILE", help="also write what the model says of each trained token, to distil from")
    option("--top-k", type=int, default=20, metavar="K", help="so many likeliest tokens are recorded (default 20)")
    add_json(evaluate)
    option(
        "--hypotheses", metavar="FILE", help="write generated texts, a line each (default hypotheses.txt in the output)"
    )
    option("--references", metavar="PATH", help="also write the references, as the script of --scores reads them")
    option(
        "--scores",
        choices=SCRIPTS,
        metavar=" | ".join(SCRIPTS),
        help=f"the script whose scores are computed (default {SCRIPTS[0]}; none if the run has generate.metrics)",
    )
    add_local_rank(evaluate)
    evaluate.set_defaults(run=_evaluate)


def _evaluate(options: argparse.Namespace) -> None:
    from meshlora.comm.groups import leave, on_gpus
    from meshlora.run.agreement import one_day
    from meshlora.run.answers import prepare_measures
    from meshlora.run.distillation.recording import record
    from meshlora.run.edge import launched_by_us, leave_result, rank_edge
    from meshlora.run.evaluate import adapter_of_run, evaluate, prepare_evaluation, prepare_prompts
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
        prompts = measures = None
        if options.generate:
            texts = _texts_file(options, config)
            check_result_file(texts, f"{texts}", makes_folder=True)
            if script := _script(options, config):
                check_scorers(script)
            # Before this process opens its GPU: templates of prompts are rendered in a fork of it.
            prompts = prepare_prompts(run)
            measures = prepare_measures(config.generate, prompts)
        machines(config.device, watch)
        if is_main and not launched_by_us():
            for note in run.notes:
                Console().say(note)
        if options.nproc is not None:
            result = launch(_words(options, adapter), nproc=options.nproc, on_gpus=takes_gpus)
        else:
            result = evaluate(run)
            if options.record:
                record(run, Path(options.record), options.top_k)
            if prompts is not None:
                result |= _generate_and_score(run, prompts, measures, options, world=world, is_main=is_main)
            leave_result(result)
            if not is_main or launched_by_us():  # the launcher shows what its rank 0 left
                leave()
                return
        _show(result)
        write_result(options.json, result)
        leave()


def _words(options: argparse.Namespace, adapter: Path | None) -> list[str]:
    """The words of the command that each rank runs."""
    words = ["evaluate", *run_file_words(options.file, options.overrides)]
    if adapter is None:
        words.append("--base")
    else:
        words += ["--adapter", str(adapter)]
    words += ["--generate"] * options.generate
    for name in ("data", "record", "hypotheses", "references", "scores"):
        if given := getattr(options, name):
            words += [f"--{name}", given]
    words += ["--top-k", str(options.top_k)]
    return words


def _check_files(options: argparse.Namespace) -> None:
    """Refuse options without effect, and files that could not be written."""
    for name in ("hypotheses", "references", "scores"):
        if getattr(options, name) and not options.generate:
            given = f"--{name} {getattr(options, name)}"
            raise UserError(given, "it has no effect without --generate", "give both")
    if options.top_k < 1:
        raise UserError(f"--top-k {options.top_k}", "at least one token is recorded")
    files = [options.json, options.hypotheses, options.record]
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
    from meshlora_ground.objective import TEXT

    config = read_run(options.file, options.overrides)
    if options.record:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, objective=TEXT))
    if options.generate:
        check({"door": "--generate", "train.objective": config.train.objective})
    given = {override.partition("=")[0] for override in options.overrides}
    if place is None and options.nproc is None and "topology" not in given:
        config = dataclasses.replace(config, topology="")  # one process, whatever the run used
    if options.data:
        limit = config.data.eval_limit if "data.eval_limit" in given else None
        files = located_files(options.data, "--data", split="validation")
        most = config.data.max_samples if "data.max_samples" in given else None
        config = config.with_data(eval=[*files], eval_limit=limit, max_samples=most)
        if "generate.limit" not in given:
            config = dataclasses.replace(config, generate=dataclasses.replace(config.generate, limit=None))
    return config


def _texts_file(options: argparse.Namespace, config: Any) -> Path:
    return Path(options.hypotheses or Path(config.train.output) / "hypotheses.txt")


def _script(options: argparse.Namespace, config: Any) -> Any:
    """The script whose scores are computed: that of --scores, else the first, unless the run has metrics of its own."""
    return options.scores or (None if config.generate.metrics else SCRIPTS[0])


def _generate_and_score(
    run: Any, prompts: Any, measures: Any, options: argparse.Namespace, *, world: int, is_main: bool
) -> dict[str, Any]:
    """Continue every prompt on all ranks; the main one writes the texts and scores them against the references."""
    from meshlora.run.answers import answered, measured_by_rank_0
    from meshlora.run.config.metrics import code_of
    from meshlora.run.evaluate import load_to_generate
    from meshlora_ground.console import Console
    from meshlora_ground.file_hash import sha256_of

    def advance(done: int) -> None:
        update(f"generating: {done} of {len(prompts.prompts)} prompts" + f", on each of {world} ranks" * (world > 1))

    with Console().busy("generating") if is_main else contextlib.nullcontext(lambda _: None) as update:
        model, metrics = load_to_generate(run), run.config.generate.metrics
        texts = answered(model, prompts, run.config.generate, advance=advance)
        means = measured_by_rank_0(model, measures, prompts, texts) if metrics else {}
    if not is_main:
        return {}
    hypotheses = [" ".join(text.split()) for text in texts]  # a line each
    file, script = _texts_file(options, run.config), _script(options, run.config)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, "".join(f"{text}\n" for text in hypotheses))  # as the scripts read them
    if options.references:
        _write_references(Path(options.references), hypotheses, prompts.references, script or SCRIPTS[0])
    found: dict[str, Any] = {
        "prompts": len(prompts.prompts),
        "references": sum(map(len, prompts.references)),
        "generate": dataclasses.asdict(run.config.generate),
        "hypotheses": str(file),
    }
    if metrics:
        found |= {"metrics": means, "code": {str(file): sha256_of(file) for file in code_of(metrics)}}
    if script is not None:
        found |= {"scores": script, **scores(hypotheses, prompts.references, script)}
    return found


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
    if "prompts" in result:
        say(f"{result['prompts']:,} prompts, {result['references']:,} references: {result['hypotheses']}")
    if "metrics" in result:
        say("  ".join(f"{name} {value:.4f}" for name, value in result["metrics"].items()))
    if "bleu" in result:
        say(f"{shown(result)}  ({result['scores']})")
        if result["meteor"] is None:
            say(WAY_OUT)
