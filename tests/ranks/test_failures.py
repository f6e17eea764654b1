"""A failing rank ends all ranks, with its cause shown once; what it leaves on disk is whole.

Launches (`tests.ranks.jobs`) of processes that are forked; with `make proof` of those that are started anew. Full disks
have a file of their own.
"""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.processes import free_port, is_alive, wait_until
from tests.ranks.jobs import PATIENCE_S, TRAIN, Job, base, job_either_way

__all__ = ["base", "job_either_way"]  # fixtures


# What torch and its backends say on a rank whose peer is gone.
NOISE = ("Connection closed by peer", "lost contact", "connectFullMesh", "ProcessGroup", "ChildFailedError", "elastic")


def test_cause_of_the_rank_that_raised_is_shown_first_and_once(job: Job) -> None:
    job.write(
        """
    def fault(loss):
        raise ZeroDivisionError("the cause")
    at(2, 1, fault)
"""
    )
    code, _, err = job.run()
    assert code == 1
    assert err.startswith("error: rank 1: Traceback")
    assert err.count("ZeroDivisionError: the cause") == 1
    assert err.count("Traceback") == 1
    assert not [noise for noise in NOISE if noise in err], err
    assert not (job.output / "adapter").exists()


def test_rank_killed_in_the_middle_of_a_save_is_named_and_leaves_whole_adapters(job: Job) -> None:
    job.write(
        """
    from meshlora.adapter.formats import peft_format
    save_file, calls = peft_format.save_file, []

    def killed_half_way(tensors, file, metadata):
        save_file(tensors, file, metadata=metadata)
        calls.append(file)
        if len(calls) == 4:  # initial, step 1, step 2, and now step 3
            file.write_bytes(file.read_bytes()[:100])
            (here / "fault-at").write_text(str(time.time()))
            die()

    if rank == 0:
        peft_format.save_file = killed_half_way
""",
        save_every=1,
    )
    code, out, err = job.run()
    assert code == 1
    assert err.splitlines() == ["error: rank 0 was ended by signal 9 (SIGKILL); the machine may be out of memory"]
    assert out.splitlines()[-2] == "saved in output/checkpoints/step-000002. Go on with:"
    assert out.splitlines()[-1].endswith("--resume auto")
    assert not (job.output / "adapter").exists()
    saved = sorted((job.output / "checkpoints").glob("step-*"))
    assert [folder.name for folder in saved] == ["step-000001", "step-000002"]
    for folder in [job.output / "initial", *saved]:
        model = AutoModelForCausalLM.from_pretrained(job.folder.parent / "model")
        PeftModel.from_pretrained(model, folder)


def test_user_mistake_starts_no_rank(job: Job) -> None:
    job.write(warmup_steps=9)
    code, out, err = job.run()
    assert (code, out) == (2, "")
    assert err.splitlines() == ["error: train.warmup_steps=9: it must be below the 5 steps of the run"]
    assert job.started_ranks() == []
    assert not job.output.exists()


@pytest.mark.long
def test_user_mistake_under_torchrun_is_said_once(job: Job) -> None:
    job.write(warmup_steps=9)
    code, _, err = job.run(
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "meshlora", "train", "run.yaml")
    )
    assert code != 0
    assert err.count("error: train.warmup_steps=9: it must be below the 5 steps of the run") == 1
    assert err.startswith("error: ")  # then torchrun's own report, which ends with the same words
    assert not job.output.exists()


# By default one of the two comes first here, and the other twice in the next test but two: both go the same way.
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.proof)])
def test_first_signal_saves_and_says_how_to_go_on(number: signal.Signals, job: Job) -> None:
    job.write(steps=1_000_000)
    process = job.start(*TRAIN, "--set", "train.schedule=constant")
    wait_until(job.trains)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, ""), err
    assert job.living_ranks() == []
    (saved,) = job.checkpoints()
    assert int(saved.name.removeprefix("step-")) == len((job.output / "metrics.jsonl").read_text().splitlines())
    assert out.splitlines()[-2:] == [
        f"stopped as asked; saved in output/checkpoints/{saved.name}. Go on with:",
        "meshlora train run.yaml --nproc 2 --no-preflight --set train.schedule=constant --resume auto",
    ]
    assert not (job.output / "adapter").exists()


@pytest.mark.long
def test_signal_under_torchrun_saves_on_all_ranks(job: Job) -> None:
    job.write(steps=1_000_000)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "meshlora", "train", "run.yaml")
    process = job.start(*torchrun, "--no-preflight")
    wait_until(job.trains)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert job.living_ranks() == []
    (saved,) = job.checkpoints()
    assert f"saved in output/checkpoints/{saved.name}" in out
    assert "meshlora train run.yaml --no-preflight --resume auto" in out


@pytest.mark.proof
def test_ranks_of_a_torchrun_that_is_killed_end(job: Job) -> None:
    """They trained on, unseen, and kept their GPUs."""
    job.write(steps=1_000_000)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "meshlora", "train", "run.yaml")
    process = job.start(*torchrun, "--no-preflight")
    wait_until(job.trains)
    process.send_signal(signal.SIGUSR1)  # which torchrun does not handle, unless it is told to
    wait_until(lambda: not any(map(is_alive, job.started_ranks())), timeout_s=PATIENCE_S)


@pytest.mark.long
def test_request_of_a_scheduler_saves_and_ends_with_the_code_that_it_was_told(job: Job) -> None:
    """SIGUSR1 killed all ranks, and a stopped run ended like one that is done: no scheduler could go on with it."""
    job.write("\n    at(3, 1, lambda loss: (time.sleep(2), loss)[1])\n")
    process = job.start(*TRAIN, "--stopped-exit-code", "85")
    wait_until((job.folder / "faults" / "fault-at").exists)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):  # the last at the time limit: none insists
        process.send_signal(number)
        time.sleep(0.4)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (85, "")
    (saved,) = job.checkpoints()
    assert f"stopped as asked; saved in output/checkpoints/{saved.name}" in out
    assert out.splitlines()[-1].endswith("--stopped-exit-code 85 --resume auto")


@pytest.mark.proof
def test_every_rank_that_was_asked_to_stop_ends_with_the_code(job: Job) -> None:
    """Started one by one, as srun does, which sends SIGTERM to the others when the first ends with such a code."""
    job.write(
        """
    from meshlora.run import run
    leave = run.leave
    run.leave = lambda: (time.sleep(3 * (rank == 0)), leave())
""",
        steps=1_000_000,
    )
    words = ("-m", "meshlora", "train", "run.yaml", "--no-preflight", "--stopped-exit-code", "85")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [job.start(*words, RANK=str(rank), **place) for rank in range(2)]
    wait_until(job.trains)
    ranks[1].send_signal(signal.SIGUSR1)
    ranks[1].communicate(timeout=PATIENCE_S)
    ranks[0].send_signal(signal.SIGTERM)
    out, _ = ranks[0].communicate(timeout=PATIENCE_S)
    assert [rank.returncode for rank in ranks] == [85, 85]
    assert "stopped as asked; saved in output/checkpoints/step-" in out


@pytest.mark.long
def test_signal_to_a_single_process_saves(job: Job) -> None:
    job.write(steps=1_000_000)
    alone = ("--no-preflight", "--set", "topology=''", "--stopped-exit-code", "3")
    process = job.start("-m", "meshlora", "train", "run.yaml", *alone)
    wait_until(job.trains)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (3, "")
    (saved,) = job.checkpoints()
    assert (job.output / "checkpoints" / "latest").resolve() == saved.resolve()
    assert out.splitlines()[-1].endswith("--resume auto")


@pytest.mark.long
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.proof), signal.SIGTERM])
def test_second_signal_ends_all_ranks_at_once(number: signal.Signals, job: Job) -> None:
    # Rank 1 never ends its step, so the first signal cannot be followed.
    job.write("\n    at(3, 1, lambda loss: time.sleep(1000))\n")
    process = job.start()
    wait_until((job.folder / "faults" / "fault-at").exists)
    process.send_signal(number)
    time.sleep(1)
    assert process.poll() is None
    begun = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - begun < 10
    assert process.returncode == 128 + number
    assert err.splitlines() == ["interrupted" if number == signal.SIGINT else "error: ended by signal 15 (SIGTERM)"]
    assert job.living_ranks() == []


@pytest.mark.long
def test_nothing_lives_on_when_the_launcher_is_killed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks trained on, and its folder stayed."""
    with tempfile.TemporaryDirectory(prefix="meshlora-test-") as temporary:  # a socket's path must be short
        monkeypatch.setenv("TMPDIR", temporary)
        job.write("\n    at(3, rank, lambda loss: time.sleep(1000))\n")
        process = job.start()
        wait_until((job.folder / "faults" / "fault-at").exists)
        assert [path.name.partition("-")[0] for path in Path(temporary).iterdir()] == ["meshlora"]
        assert len(job.started_ranks()) == 2
        process.kill()
        wait_until(lambda: not any(map(is_alive, job.started_ranks())) and not list(Path(temporary).iterdir()), 5)


def test_rank_that_hangs_is_named_with_the_collective(job: Job) -> None:
    job.write("\n    at(3, 1, lambda loss: time.sleep(1000))\n", timeout_s=4)
    code, _, err = job.run()
    assert code == 1
    assert len(err.splitlines()) == 1
    assert "was given up after 4 s (train.timeout_s): rank 1 did not arrive; rank 1 was last in" in err
    assert err.startswith("error: rank 0: all_reduce over ranks 0, 1 (number ")


@pytest.mark.long
def test_loss_that_is_not_finite_stops_the_run_and_only_rank_0_speaks_on_the_terminal(job: Job) -> None:
    job.write(
        """
    import warnings
    for each in (0, 1):
        at(3, each, lambda loss: (warnings.warn(f"from rank {rank}"), loss * float("nan"))[1])
"""
    )
    code, out, err = job.run()
    assert code == 1
    assert err.count("error:") == 1
    assert "step 3: the loss is nan: in sequences " in err
    assert "first the loss itself, of finite outputs; lower train.lr" in err
    assert "Traceback" not in err
    assert not (job.output / "adapter").exists()
    assert len((job.output / "metrics.jsonl").read_text().splitlines()) == 2
    assert "from rank 0" in err
    assert "from rank 1" not in out + err
    assert "UserWarning: from rank 1" in (job.output / "logs" / "rank-1.log").read_text()
    assert [file.name for file in (job.output / "logs").iterdir()] == ["rank-1.log"]
