"""One rank of a training run, from prepared run to saved adapter."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from rich.console import Console

from meshlora.adapter.describe import describe_targets
from meshlora.adapter.manage import runtime
from meshlora.api import load_without_proof
from meshlora.parallel.groups import join, leave
from meshlora.train.keeping import clear_leftovers
from meshlora.train.launch import another_rank_failed, end_at_once, say_in_training
from meshlora.train.metrics import Reporter
from meshlora.train.prepare import Prepared
from meshlora.train.samples import FILE as SAMPLES
from meshlora.train.samples import forget_after
from meshlora.train.stopping import noticing_signals
from meshlora.train.tracking import open_trackers
from meshlora.train.trainer import Trainer


def train(run: Prepared, *, console: Console | None = None, go_on: str = "--resume auto") -> None:
    """Train as `run` says. Every rank of the job calls this; that the run is proved is its caller's part.

    go_on: what to say of how a run that was asked to stop goes on, a command.
    """
    config = run.config
    join(config.device)
    start = config.adapter if run.resume is None else str(run.resume.folder)
    model = load_without_proof(
        config.model.path,
        lora=run.lora if start is None else None,
        adapter=start,
        topology=run.topology,
        dtype=config.model.dtype,
        device=config.device,
        seed=config.train.seed,
        attn_implementation=config.model.attn_implementation,
        trust_remote_code=config.model.trust_remote_code,
        disable_dropout=config.model.disable_dropout,
        allow_unused_weights=config.model.allow_unused_weights,
        quantization=config.model.quantization,
    )
    output = Path(config.train.output)
    is_main = runtime(model).mesh.rank == 0
    if is_main and run.resume is None:
        _clear(output)
    done = run.resume.step if run.resume is not None else 0
    if is_main:
        clear_leftovers(output)
        if done:
            forget_after(output / SAMPLES, done)
    with Reporter(
        output / "metrics.jsonl",
        steps=run.steps,
        log_every=config.train.log_every,
        is_main=is_main,
        console=console,
        done=done,
        goes_on_without=config.train.on_save_error == "continue",
        trackers=open_trackers(config.train.track, output, config=dataclasses.asdict(config), done=done)
        if is_main
        else (),
    ) as reporter:
        for note in run.notes:
            reporter.say(note)
        reporter.say(
            f"{run.plan.model_type} on {run.topology}: {run.num_trainable:,} trainable parameters, "
            f"{len(run.train_data):,} sequences, {run.steps:,} steps"
        )
        for line in describe_targets(run.targets):
            reporter.say(line)
        if run.resume is not None:
            reporter.say(f"goes on after step {run.resume.step} of {run.resume.topology}: {run.resume.folder}")
        mesh = runtime(model).mesh
        with (
            noticing_signals(end_at_once, is_lost=another_rank_failed) as stop,
            mesh.patient_for(config.train.timeout_s),
        ):
            trainer = Trainer(run, model, reporter, stop)
            say_in_training()
            if trainer.train():
                reporter.say(f"adapter: {output / 'adapter'}")
            else:
                reporter.say(f"stopped as asked; saved in {trainer.last_saved}. Go on with:\n{go_on}")
    leave()


def _clear(output: Path) -> None:
    """Make the output folder, empty of an earlier run (`train.overwrite`, else `prepare` has refused)."""
    output.mkdir(parents=True, exist_ok=True)
    (output / SAMPLES).unlink(missing_ok=True)
    for name in ("adapter", "initial", "checkpoints"):
        shutil.rmtree(output / name, ignore_errors=True)
