"""Faults that nobody thought of, put into what a proof runs: how many are caught?

    .venv/bin/python scripts/generate_faults.py --sample 300 --seed 1
    .venv/bin/python scripts/generate_faults.py --sample 100 --case "llama tp=2,sp" --slice 3/10
    .venv/bin/python scripts/generate_faults.py --list train/gradsync.py
    .venv/bin/python scripts/generate_faults.py --under FAULT tests/unit/test_layout.py

Small changes of the product's code (`meshlora.verify.faults.generated`) are drawn from all lines that a proof comes by,
each is put into the proofs that come by its line, one after another, until one differs. Caught: by a difference, or
loudly, by an error. What every proof lets pass is looked up in docs/survivors.md, which says why: equivalent, speed or
words, or the test that catches it; what does not stand there is open. Verdicts are kept in a file (--verdicts), and the
next run goes on from it, but for files that have changed since. Exit code 1 where a survivor is open.

With --case they are drawn from the lines of some proofs alone; all others are tried on what those let pass and the page
does not know. --slice K/N takes each N-th of what is drawn, from the K-th.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.changed import run_under

from meshlora.verify.faults.generated import KEEPING, Generated, NotPutInError, faults_of, files, generated
from meshlora.verify.faults.of_objectives import PROVED
from meshlora.verify.options import DROPOUT, Request
from meshlora.verify.ours import lines_of
from meshlora.verify.pool import RankEndedError, RankError
from meshlora.verify.proof import Processes, evidence_of, reference_of
from meshlora.verify.request import Proof, prepare_proof
from meshlora_ground.versions import file_of
from meshlora_judge.diagnosis.diagnose import first_divergence, until_found
from meshlora_judge.judge import judge

SURVIVORS = Path(__file__).resolve().parents[1] / "docs" / "survivors.md"
# These are the judge's own, or never run on a rank of a proof.
NOT_PRODUCT = ("oracle", "verify", "cli/", "meshlora_ground/console.py")
TIMEOUT_S = 90.0
# As often a run without a fault shows that none of those before it has left anything behind.
CONTROL_EVERY = 25
# One in so many is of the changes that crash more often than not; the others mostly keep shapes and types.
OTHERS = 10

_ALL = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
_EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
_EMBEDDING = {"target_modules": ["embed_tokens", "q_proj", "down_proj"], "modules_to_save": ["model.norm"]}
_LLAMA = {"family": "llama", "default_dropout": DROPOUT, "objective": PROVED["sft"]}
# Two ranks each, so that all run in one pool; the cheapest first.
CASES: dict[str, dict[str, Any]] = {
    "llama tp=2,sp": {**_LLAMA, "topologies": ("tp=2,sp",)},
    "llama dp=2": {**_LLAMA, "topologies": ("dp=2",)},
    "gpt2 tp=2": {"family": "gpt2", "topologies": ("tp=2",)},
    "llama dp=2 packing": {**_LLAMA, "topologies": ("dp=2",), "packing": True},
    "llama dp=2 dpo": {**_LLAMA, "topologies": ("dp=2",), "objective": PROVED["dpo"]},
    "qwen3 tp=2,sp policy": {"family": "qwen3", "topologies": ("tp=2,sp",), "objective": PROVED["policy"]},
    "llama cp=2": {**_LLAMA, "topologies": ("cp=2",)},
    "llama cp=2 packing": {**_LLAMA, "topologies": ("cp=2",), "packing": True},
    "llama cp=2,ring": {**_LLAMA, "topologies": ("cp=2,ring",)},
    "qwen3 cp=2 dpo": {"family": "qwen3", "topologies": ("cp=2",), "objective": PROVED["dpo"]},
    "llama dp=2,dp_shard": {**_LLAMA, "topologies": ("dp=2,dp_shard",)},
    "llama tp=2 DoRA, LoRA+": {
        "family": "llama",
        "topologies": ("tp=2",),
        "overrides": {"vocab_size": 249},
        "lora": {**_ALL, "use_dora": True},
        "lora_plus_ratio": 4.0,
    },
    "llama tp=2,sp embedding, norm": {
        "family": "llama",
        "topologies": ("tp=2,sp",),
        "overrides": {"pad_token_id": 0},
        "lora": {**_ALL, **_EMBEDDING},
    },
    "llama tp=2 nf4": {"family": "llama", "topologies": ("tp=2",), "quantization": "nf4"},
    "qwen3_moe tp=2,sp,ep=2": {"family": "qwen3_moe", "topologies": ("tp=2,sp,ep=2",)},
    "qwen3_moe cp=2,ep=2": {"family": "qwen3_moe", "topologies": ("cp=2,ep=2",)},
    "qwen3_moe tp=2,sp,etp=2 shared": {
        "family": "qwen3_moe",
        "topologies": ("tp=2,sp,etp=2",),
        "lora": {**_ALL, **_EXPERTS, "share_experts": True},
    },
}


@dataclass(frozen=True)
class Verdict:
    """What came of a fault. how: differs, error, hangs, survives or not put in. by: the case, and what it found."""

    how: str
    by: str
    cases: int


@dataclass
class Runner:
    """The proofs of the cases, made once, and the ranks that run them."""

    processes: Processes

    def __post_init__(self) -> None:
        self.made: dict[str, tuple[Proof, Any]] = {}

    def proof(self, name: str) -> tuple[Proof, Any]:
        """The proof of a case, with its reference."""
        if name not in self.made:
            proof = prepare_proof(Request(**CASES[name]))
            self.made[name] = proof, reference_of(proof, self.processes.reference("cpu"))
        return self.made[name]

    def lines(self, name: str) -> set[tuple[str, int]]:
        """What the ranks of a case come by."""
        proof, (case, _, _) = self.proof(name)
        (topology,) = proof.topologies
        pool = self.processes.ranks(topology.world, "cpu")
        with pool.scratch(2**28) as folder:
            return set().union(*pool.run(lines_of, case, str(topology), str(folder)))

    def run(self, name: str, fault: str | None) -> tuple[str, str]:
        """(how it ends, what is found) of one case with a fault."""
        proof, (case, reference, rounded) = self.proof(name)
        (topology,) = proof.topologies
        pool, worker = self.processes.ranks(topology.world, "cpu"), self.processes.reference("cpu")
        try:
            evidence = evidence_of((case, reference, rounded), topology, fault, pool, worker, timeout_s=TIMEOUT_S)
            phases = list(until_found(judge(evidence)))
        except RankEndedError:
            return "hangs", ""
        except RankError as error:
            how = "not put in" if isinstance(error.cause, NotPutInError) else "error"
            return how, str(error).strip().splitlines()[-1][:120]
        except Exception as error:  # noqa: BLE001 - what the judge cannot read is no adapter
            return "error", f"{type(error).__name__}: {str(error)[:100]}"
        found = first_divergence(phases, evidence)
        return ("survives", "") if found is None else ("differs", f"{found.phase} {found.name}")

    def verdict(self, fault: Generated, names: list[str]) -> Verdict:
        """Of one fault, by the cases `names` that come by its line, in turn."""
        for number, name in enumerate(names, 1):
            how, what = self.run(name, fault.name)
            if how == "not put in":
                return Verdict(how, what, number)
            if how != "survives":
                return Verdict(how, f"{name}: {what}", number)
        return Verdict("survives", "", len(names))


def files_of_product() -> list[str]:
    """Those that a rank of a proof may run."""
    return [name for name in files() if not name.startswith(NOT_PRODUCT)]


def known_survivors() -> dict[str, str]:
    """`key` -> its class, as docs/survivors.md has them; lines move, so that none is named."""
    row = r"^\| " + r" \| ".join([r"`(.+?)`"] * 4) + r" \| (.+?) \|"
    found = re.findall(row, SURVIVORS.read_text("utf-8"), re.MULTILINE)
    return {" | ".join(words): kind for *words, kind in found}


def key(fault: Generated) -> str:
    """A fault in words that stay when lines move: file, statement, before, after, as docs/survivors.md has them."""
    words = (fault.file, fault.statement, fault.before, fault.after)
    return " | ".join(" ".join(text.split())[:100].replace("|", "¦") for text in words)


def interval(part: int, whole: int) -> str:
    """Wilson's for 95 %."""
    if not whole:
        return "–"
    z, share = 1.96, part / whole
    middle = (share + z * z / (2 * whole)) / (1 + z * z / whole)
    half = z * math.sqrt(share * (1 - share) / whole + z * z / (4 * whole**2)) / (1 + z * z / whole)
    return f"{share:.1%} ({max(0, middle - half):.0%} to {min(1, middle + half):.0%})"


def draw(
    reached: dict[str, set[tuple[str, int]]], sample: int | None, seed: int, *, kinds: Sequence[str] = ()
) -> list[tuple[Generated, list[str]]]:
    """The faults, each with the cases that come by its line; by hashes, so that most stay when the code changes.

    kinds: of changes, the last words of their names; none: all.
    """
    found = []
    for file in files_of_product():
        for fault in faults_of(file):
            if kinds and fault.name.rpartition(":")[2] not in kinds:
                continue
            names = [name for name, lines in reached.items() if (file, fault.line) in lines]
            if names:
                found.append((fault, names))
    print(f"{len(found):,} changes on the lines that {len(reached)} proofs come by")
    numbers: Counter[str] = Counter()
    places = {}
    for fault, _ in found:
        numbers[key(fault)] += 1  # of those that are alike
        places[fault.name] = hashlib.sha256(f"{seed} {key(fault)} {numbers[key(fault)]}".encode()).digest()
    found.sort(key=lambda one: places[one[0].name])
    keeping, others = ([one for one in found if one[0].is_keeping is kept] for kept in (True, False))
    if sample is None:
        return keeping + others
    return keeping[: sample - sample // OTHERS] + others[: sample // OTHERS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="so many, drawn by --seed; default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verdicts", type=Path, default=Path("runs/faults.jsonl"), help="go on from this file")
    parser.add_argument("--case", nargs="+", choices=CASES, metavar="NAME", help=f"of {'; '.join(CASES)}; default: all")
    parser.add_argument("--kind", nargs="+", default=(), choices=KEEPING, metavar="KIND", help="only these changes")
    parser.add_argument("--slice", default="0/1", metavar="K/N", help="only a part of them; K from 0")
    parser.add_argument("--list", metavar="FILE", help="only print the changes of a file, as in train/gradsync.py")
    parser.add_argument("--under", nargs="+", metavar="NAME TEST", help="run tests on a copy that has the fault")
    options = parser.parse_args()
    if options.under:
        fault = generated(options.under[0])
        done = run_under({fault.file: fault.source()}, options.under[1:])
        print(done.stdout, end="")
        return done.returncode
    if options.list:
        for fault in faults_of(options.list):
            print(f"{fault.name}  {key(fault)}")
        return 0
    options.verdicts.parent.mkdir(parents=True, exist_ok=True)
    done = _read(options.verdicts)
    started = time.monotonic()
    with Processes() as processes, options.verdicts.open("a", encoding="utf-8") as file:
        runner = Runner(processes)
        reached = {name: runner.lines(name) for name in options.case or CASES}
        others, known = [name for name in CASES if name not in reached], known_survivors()
        slice_, slices = map(int, options.slice.split("/"))
        drawn = draw(reached, options.sample, options.seed, kinds=options.kind)[slice_::slices]
        for number, (fault, names) in enumerate(drawn, 1):
            if fault.name in done:
                continue
            if number % CONTROL_EVERY == 0 and (control := runner.run("llama tp=2,sp", None))[0] != "survives":
                print(f"a run without a fault is {control}: one before it has left something behind", file=sys.stderr)
                return 2
            names = names if key(fault) in known else [*names, *others]
            verdict = done[fault.name] = runner.verdict(fault, names)
            entry = {"fault": fault.name, "source": _digest(fault.file), **vars(verdict)}
            print(json.dumps(entry), file=file, flush=True)
            print(f"{number}/{len(drawn)} {verdict.how:10s} {fault.name}  {verdict.by}", flush=True)
    return _report([(fault, done[fault.name]) for fault, _ in drawn], seconds=time.monotonic() - started)


def _report(found: list[tuple[Generated, Verdict]], *, seconds: float) -> int:
    found = [(fault, verdict) for fault, verdict in found if verdict.how != "not put in"]
    classes, known = Counter(verdict.how for _, verdict in found), known_survivors()
    survivors = [fault for fault, verdict in found if verdict.how == "survives"]
    kinds = Counter(known.get(key(fault), "open") for fault in survivors)
    harmless = sum(number for kind, number in kinds.items() if kind in ("equivalent", "speed or words"))
    by_tests = sum(number for kind, number in kinds.items() if kind.startswith("test:"))
    caught = classes["differs"] + classes["error"] + classes["hangs"]
    silent = classes["differs"] + len(survivors) - harmless
    print(f"\n{len(found)} faults in {seconds / 60:.0f} min: {dict(classes)}; survivors: {dict(kinds)}")
    print(f"caught of those that matter: {interval(caught + by_tests, len(found) - harmless)}")
    print(f"silent ones (no error): {silent}, caught {interval(classes['differs'] + by_tests, silent)}")
    for fault in survivors:
        if key(fault) not in known:
            print(f"open: {fault.name}  {key(fault)}")
    return 1 if kinds["open"] else 0


def _read(file: Path) -> dict[str, Verdict]:
    """The verdicts that hold still: of files that have not changed."""
    entries = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []
    return {
        entry["fault"]: Verdict(entry["how"], entry["by"], entry["cases"])
        for entry in entries
        if file_of(entry["fault"].partition(":")[0]).is_file()
        and entry["source"] == _digest(entry["fault"].partition(":")[0])
    }


def _digest(file: str) -> str:
    return hashlib.sha256(file_of(file).read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
