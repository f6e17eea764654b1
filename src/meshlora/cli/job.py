"""The life of a training, for the process that starts its ranks, for each of these, and for one that trains alone.

Owns: its order: look, hold, prove, train. Does not own: arguments (`cli.train`), the checks (`run.together`), the proof
(`verify.preflight`), the training (`run.run`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import run_file_words, write_result
from meshlora.comm.groups import join, on_gpus
from meshlora.processes.heartbeat import Watch
from meshlora.processes.launchers import Place
from meshlora.run import edge
from meshlora.run.agreement import agreed, one_day
from meshlora.run.checkpoint.manifest import read_manifest
from meshlora.run.checkpoint.resuming import find_checkpoint
from meshlora.run.config.file import read_runs
from meshlora.run.config.run_file import RunConfig
from meshlora.run.extras import part
from meshlora.run.launch import launch
from meshlora.run.machines import machines, own_words
from meshlora.run.mistakes import all_at_once
from meshlora.run.prepared import Prepared
from meshlora.run.run import merge_at_end, train
from meshlora.run.together import holding_outputs, logs_of, prepare_runs, words_of
from meshlora.run.watch.metrics import last_values
from meshlora.verify.pool import stop_forking
from meshlora.verify.preflight import preflight, proof_words
from meshlora_ground.console import Console
from meshlora_ground.errors import MeshloraError, RankFailedError, UserError


@dataclass(frozen=True)
class Found:
    """What a process found in the files of a job. prompts: of rollouts that it makes itself (`meshlora_extra.rl`)."""

    runs: dict[str, Prepared]
    prompts: Any = None

    @property
    def config(self) -> RunConfig:
        """Of the first run: all have the same device and loop."""
        return next(iter(self.runs.values())).config


@dataclass(frozen=True)
class Job:
    """A training as the command line asks for it.

    words: the whole command. file, overrides: the run file, and values in place of its own. place: this process', under
    a launcher; nproc: or how many ranks it starts, and ranks_per_gpu: how many share each GPU. has_page: `--watch`. The
    others are arguments of the command.
    """

    words: str
    file: str
    overrides: Sequence[str] = ()
    command: str = "train"
    place: Place | None = None
    nproc: int | None = None
    ranks_per_gpu: int = 1
    resume: str | None = None
    resume_despite: Sequence[str] = ()
    no_preflight: bool = False
    hardware: str | None = None
    has_page: bool = False
    json: str | None = None

    @property
    def starts_ranks(self) -> bool:
        """Whether this process starts the ranks, and is none of them."""
        return self.nproc is not None

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for the job: it starts the ranks, or it is rank 0."""
        return self.place is None or self.place.rank == 0

    @property
    def leads(self) -> bool:
        """Whether it is the one that outlives all others, which holds the outputs and proves."""
        return self.is_main and not edge.launched_by_us()

    @property
    def makes_rollouts(self) -> bool:
        """Whether it is `meshlora rl`."""
        return self.command == "rl"

    def run(self, watch: Watch | None = None) -> bool:
        """Returns False if it was stopped before its end. watch: of a rank (`run.edge.rank_edge`)."""
        with contextlib.ExitStack() as held:
            day = one_day()  # before files are read: two ranks could do it on two days
            if self.starts_ranks:
                found = self._look(day, held)
            else:
                found = agreed(lambda: self._look(day, held), lambda found: words_of(found.runs), own=own_words())
            if are_finished(found.runs, is_main=self.is_main):
                self._write(found, is_done=True)
                return True
            if not self.starts_ranks:
                if found.config.train.deterministic:
                    edge.be_deterministic()
                if line := machines(found.config.device, watch):
                    Console().say(line)
            planned = self._planned(found)
            if self.leads:
                self._prove(found)
            if self.starts_ranks:
                is_done = self._launch(found)
            else:
                is_done = self._train(found, watch, planned)
            if edge.launched_by_us():  # which ends with the code itself, and writes
                edge.leave_result(is_done)
                return True
            self._write(found, is_done=is_done)
            return is_done

    def _look(self, day: str, held: contextlib.ExitStack) -> Found:
        """Read and check the run file and all that it names; hold the outputs, in the process that leads."""
        world = self.nproc or 1  # alone
        if self.place is not None:
            world = self.place.world
        resume, despite = self.resume, self.resume_despite
        if self.is_main:  # whose message is heard
            with all_at_once(self.file, [*self.overrides], world=world, resumes=resume is not None):
                runs = self._read(day, world)
        else:
            runs = self._read(day, world)
        prompts = self._prompts(runs[""]) if self.makes_rollouts else None
        if self.leads:
            # Read again under the lock: another run may have used them since.
            runs = held.enter_context(holding_outputs(runs, resume=resume, despite=despite))
        return Found(runs, prompts)

    def _read(self, day: str, world: int) -> dict[str, Prepared]:
        """Read and check the run file, for `world` processes."""
        configs, note = fitted(read_runs(self.file, [*self.overrides]), world=world)
        if self.starts_ranks:  # what each rank would refuse, once
            device = next(iter(configs.values())).device
            on_gpus(device, num_ranks=world, ranks_per_gpu=self.ranks_per_gpu)
        for config in configs.values():
            if self.makes_rollouts and config.rl is None:
                raise UserError("this run file", "it has no group rl", "meshlora train runs it")
            if not self.makes_rollouts and config.rl is not None:
                raise UserError("rl", "only meshlora rl makes rollouts", "use that, or leave it out")
        runs = prepare_runs(configs, world=world, resume=self.resume, despite=self.resume_despite, day=day)
        return {name: self.described(run, note) for name, run in runs.items()}

    def described(self, run: Prepared, note: Sequence[str] = ()) -> Prepared:
        """`run` with its command, what is proved of it, and a further note."""
        proof = proof_words(run, skip=self.no_preflight, ranks_per_gpu=self.ranks_per_gpu)
        return run.described(note, command=edge.whole_command(edge.command_of(self.words)), proof=proof)

    def _prompts(self, run: Prepared) -> Any:
        """The prompts of rollouts, checked with their rewards before this process opens its GPU: templates of prompts
        are rendered in a fork of it."""
        rollouts = part("rollouts", "rl")
        prompts = rollouts.check_rl(run, say=Console().say if self.is_main and not self.starts_ranks else None)
        if self.leads:
            rollouts.check_rewards(run, prompts)
        return prompts

    def _planned(self, found: Found) -> Any:
        """The planned step, on the rank that shows it. A wrong file is refused before any rank is started."""
        if not self.hardware or not self.is_main:
            return None
        plan = part("plan", "--hardware")
        hardware = plan.hardware_of_run(found.runs, self.hardware)
        return None if self.starts_ranks else plan.planned_step(found.runs, hardware)

    def _prove(self, found: Found) -> None:
        if self.place is not None:  # join first: ranks that wait for this one then notice if it ends here
            join(found.config.device)
        preflight(found.runs, skip=self.no_preflight, ranks_per_gpu=self.ranks_per_gpu)
        stop_forking()  # whose server holds some 300 MB

    def _launch(self, found: Found) -> bool:
        """Start the ranks on this machine, and wait for them."""
        assert self.nproc is not None
        words = [self.command, *run_file_words(self.file, self.overrides)]
        if self.resume is not None:
            words += ["--resume", self.resume]
        for name in self.resume_despite:
            words += ["--resume-despite", name]
        if self.hardware:
            words += ["--hardware", self.hardware]
        if self.no_preflight:  # for what the adapter's card says
            words += ["--no-preflight"]
        with self._watched(found), self._saying_what_is_saved(found):
            said = launch(
                words,
                nproc=self.nproc,
                on_gpus=on_gpus(found.config.device, num_ranks=self.nproc, ranks_per_gpu=self.ranks_per_gpu),
                ranks_per_gpu=self.ranks_per_gpu,
                command=self.words,
                timeout_s=max(run.config.train.timeout_s for run in found.runs.values()),
            )
        return said is not False

    @contextlib.contextmanager
    def _saying_what_is_saved(self, found: Found) -> Iterator[None]:
        """Where the ranks fail in the block, say how to go on from what the runs have saved, if it is whole."""
        began = time.time()
        try:
            yield
        except RankFailedError as error:
            if error.exit_code != UserError.exit_code:
                with contextlib.suppress(MeshloraError, OSError):  # what failed is still to be said
                    self._say_what_is_saved(found, since=began if self.resume is None else 0.0)
            raise

    def _say_what_is_saved(self, found: Found, *, since: float) -> None:
        """since: seconds of the epoch; what is older is of a run that this one was to replace."""
        outputs = [Path(run.config.train.output) for run in found.runs.values()]
        saved = [find_checkpoint(output, "auto", lambda _: None) for output in outputs]
        folders = [f"{one.folder}" for one in saved if one is not None and one.folder.stat().st_mtime >= since]
        if folders:
            Console().say(f"saved in {', '.join(folders)}. Go on with:\n{edge.how_to_go_on(self.words)}")

    def _train(self, found: Found, watch: Watch | None, planned: Any) -> bool:
        """Train as one rank of a launcher, or alone."""
        runs, making = found.runs, None
        if self.place is not None and self.place.rank > 0:  # rank 0 alone speaks on the terminal
            edge.log_to_file(
                logs_of(runs), self.place.rank, goes_on=any(run.resume is not None for run in runs.values())
            )
        if self.makes_rollouts:
            rollouts = part("rollouts", "rl")
            making = rollouts.making(runs[""], found.prompts)
            if self.is_main:
                rollouts.describe(runs[""], found.prompts, Console())
        go_on = edge.how_to_go_on(self.words)
        with self._watched(found):
            return train(runs, go_on=go_on, watch=watch, planned=planned, making=making, ends_if_stopped=True)

    @contextlib.contextmanager
    def _watched(self, found: Found) -> Iterator[None]:
        """With `--watch`, a page shows the run during the block, and the others beside it."""
        if not self.has_page or not self.leads:
            yield
            return
        output = Path(found.config.train.output).absolute()
        with part("page", "--watch").serving(output.parent, first=output.name) as url:
            Console().say(f"watch it: {url}   (on this machine, while the run lasts; whoever has the address may look)")
            yield

    def _write(self, found: Found, *, is_done: bool) -> None:
        """Write the result of `--json`, in the process that speaks for the job."""
        if not self.is_main:
            return
        runs = {}
        for name, run in found.runs.items():
            output = Path(run.config.train.output)
            adapter = f"{output / 'adapter'}" if is_done else None  # that of a run which was stopped is not its result
            last = last_values(output / "metrics.jsonl")
            runs[name] = {"output": f"{output}", "adapter": adapter, "num_steps": run.steps, **last}
        write_result(self.json, {"is_done": is_done, "runs": runs})


def fitted(configs: dict[str, RunConfig], *, world: int) -> tuple[dict[str, RunConfig], Sequence[str]]:
    """(`configs` on a topology of `world` processes, notes that say so), where `train.on_fewer` asks for it."""
    if next(iter(configs.values())).train.on_fewer == "stop":
        return configs, ()
    found: tuple[dict[str, RunConfig], Sequence[str]] = part("elastic", "train.on_fewer").fitted(configs, world=world)
    return found


def are_finished(runs: Mapping[str, Prepared], *, is_main: bool = True) -> bool:
    """Whether all runs are complete; the main rank then reports each, and writes a merged model that is missing."""
    if not all(run.is_finished for run in runs.values()):
        return False
    if not is_main:
        return True
    for run in runs.values():
        output = Path(run.config.train.output)
        done = read_manifest(output / "adapter", kinds=("adapter",)).step
        words = f"all {run.steps:,} steps are done" if done == run.steps else f"stopped early, after {done:,} steps"
        Console().say(f"{words}: {output}/adapter")
        if run.config.train.merge_at_end:
            merge_at_end(run)
    return True
