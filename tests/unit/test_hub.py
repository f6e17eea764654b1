"""Names of the hub: what is asked of whom, what is said of it, and what a run keeps of it. The hub is on loopback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from meshlora.adapter.formats.peft_format import config_to_store, lora_config
from meshlora.loading.blueprint import read_model_config
from meshlora.reading.places import files_of
from meshlora.run.checkpoint.identity import check_same
from meshlora.run.config.file import read_run
from meshlora.run.config.model_presets import facts_of
from meshlora_ground import hub
from meshlora_ground.errors import UserError
from meshlora_ground.hub import located, located_files
from meshlora_ground.weight_files import repository_of
from tests.hub import Hub, commit_of
from tests.processes import Started, wait_until
from tests.unit.mistakes import Setup

SRC, BASE = Path(__file__).parents[2] / "src", Path(__file__).parents[2] / "examples" / "tiny_base"
NAME, TOKEN = "acme/tiny-1.0", "hf_thisIsASecretOfMine"
ONE, OTHER = "1" * 40, "2" * 40
LOCATED = "import sys; from meshlora_ground.hub import located; print(located(sys.argv[1], 'model.path'))"
# What is opened by any process that is started, in a file of its own.
HOOK = """
import os, sys

def _note(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo") and arguments[0] is not None:
        where = arguments[1] if event == "socket.connect" else arguments[:2]
        if isinstance(where, tuple):
            with open(os.environ["CONTACTS"], "a") as file:
                file.write(f"{where[0]}:{where[1]}\\n")

sys.addaudithook(_note)
"""


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """A small model, with what lies beside the weights in many repositories."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors")
    there = {name: (BASE / name).read_bytes() for name in names}
    others = ("pytorch_model.bin", "consolidated.safetensors", "modeling_tiny.py", "original/weights.pth", "README.md")
    return there | dict.fromkeys(others, b"x" * 1000)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Started]:
    """`start(hub, *arguments)`: a command whose home, hub and cache are the test's; it may go online."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(textwrap.dedent(HOOK))

    def started(hub: Hub, *arguments: str, **variables: str) -> Started:
        path = f"{tmp_path / 'hook'}{os.pathsep}{SRC}"
        own = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "PYTHONPATH": path, "HF_TOKEN": TOKEN}
        own |= {"CONTACTS": str(tmp_path / "contacts"), "MESHLORA_HF_HUB_OFFLINE": "0", "COLUMNS": "400"}
        return Started(tmp_path, *arguments, **(own | variables))

    return started


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("is_offline", ["0", "1"])
def test_a_relative_path_from_another_folder_is_no_name_of_the_hub(
    is_offline: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As examples/*.yaml name their model from the repository's folder: nothing is asked of anybody."""
    (tmp_path / "examples" / "tiny_base").mkdir(parents=True)
    (tmp_path / "examples" / "data.jsonl").write_text("{}\n")
    (tmp_path / "here" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "deep")
    monkeypatch.setenv("MESHLORA_HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(hub, "_download", lambda *_: pytest.fail("it was asked for"))
    for look in (
        lambda: located("examples/tiny_base", "o"),
        lambda: located_files("examples/tiny_base", "o", split=""),
    ):
        with pytest.raises(UserError) as caught:
            look()
        assert str(caught.value) == (
            f"o=examples/tiny_base: there is no such folder in {Path.cwd()}; from here it is ../../examples/tiny_base"
        )
    with pytest.raises(UserError, match=r"no such file; from .*/here/deep it is \.\./\.\./examples/data.jsonl"):
        files_of("examples/data.jsonl")


def test_a_folder_that_is_not_there_is_said_to_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a file in it; relative to what, too."""
    monkeypatch.chdir(tmp_path)
    for look in (read_model_config, facts_of):
        with pytest.raises(UserError) as caught:
            look("nomodel")
        assert str(caught.value) == (
            f"model 'nomodel': there is no such folder in {tmp_path}; give a folder, or a name of the hub: OWNER/NAME"
        )


Start = Callable[..., Started]


@pytest.mark.long
def test_only_what_is_needed_is_downloaded_once_and_said(files: dict[str, bytes], start: Start, tmp_path: Path) -> None:
    with Hub({NAME: files}) as hub:
        with start(hub, "-c", LOCATED, NAME) as first:
            code, out, err = first.end()
        assert code == 0, err
        folder, asked = Path(out.strip()), len(hub.requests)
        there = {file.name for file in folder.rglob("*")}
        assert there == {name for name in files if BASE.joinpath(name).exists()} - {"README.md"}
        assert all((folder / name).read_bytes() == files[name] for name in there)
        size = f"{len(files['model.safetensors']) / 1e6:,.1f} MB of weights in 1 files"
        before, after = err.splitlines()
        assert before == f"{NAME} (main) is not in {tmp_path}/home/.cache/huggingface/hub: asking {hub.url} for it"
        assert after == f"{NAME}: commit {commit_of(files)}, {size}"
        assert hub.tokens == {f"Bearer {TOKEN}"}
        with start(hub, "-c", LOCATED, NAME) as second:
            assert second.end() == (0, out, "")
        with start(hub, "-c", LOCATED, NAME, HF_HUB_OFFLINE="1", MESHLORA_HF_HUB_OFFLINE="1") as third:
            assert third.end() == (0, out, "")
        assert len(hub.requests) == asked
        assert set((tmp_path / "contacts").read_text().splitlines()) == {f"127.0.0.1:{hub.port}"}


@pytest.mark.long
def test_of_an_adapter_the_old_file_is_taken_where_there_is_no_other(start: Start) -> None:
    """Of a repository that has both, the one that is not pickled."""
    code = LOCATED.replace("'model.path'", "'adapter', kind='adapter'")
    old = {"adapter_config.json": b"{}", "adapter_model.bin": b"x" * 100, "training_args.bin": b"x"}
    both = old | {"adapter_model.safetensors": b"y" * 100}
    with Hub({"acme/old": old, "acme/both": both}) as hub:
        for name, file in (("acme/old", "adapter_model.bin"), ("acme/both", "adapter_model.safetensors")):
            with start(hub, "-c", code, name) as command:
                returned, out, err = command.end()
            assert returned == 0, err
            assert {each.name for each in Path(out.strip()).iterdir()} == {"adapter_config.json", file}


MISTAKES = {
    "gated": ("acme/gated", {}, ("only to those who accept its conditions", "hf auth login")),
    "unknown": ("acme/unknown", {}, ("has no repository of this name", "check the name")),
    "down": ("acme/down", {}, ("answers with status 503", "try again later")),
    "revision": (f"{NAME}@v9", {}, ("no revision v9", "give a branch")),
    "nobody": (NAME, {"HF_ENDPOINT": "http://127.0.0.1:9"}, ("does not answer (ConnectError", "try again")),
    "offline": (NAME, {"MESHLORA_HF_HUB_OFFLINE": "1"}, ("HF_HUB_OFFLINE is set", "hf download acme/tiny-1.0")),
    "silent": (NAME, {"HF_HUB_DOWNLOAD_TIMEOUT": "1"}, ("does not answer (ReadTimeout", "what has come is kept")),
}


# Each starts the command, and that what downloads. By default: no such name, no such revision, no answer, not asked.
_SELDOM = ("gated", "down", "silent")


@pytest.mark.long
@pytest.mark.parametrize(
    "mistake", [pytest.param(m, marks=[pytest.mark.proof] if m in _SELDOM else []) for m in MISTAKES]
)
def test_what_cannot_be_had_is_one_message_without_secrets(mistake: str, files: dict[str, bytes], start: Start) -> None:
    name, variables, words = MISTAKES[mistake]
    refused = {"acme/gated": (403, "GatedRepo"), "acme/down": (503, "")}
    stopped = {"config.json": 100} if mistake == "silent" else {}
    with Hub({NAME: files}, refused=refused, prefix="/mirror/of-a-secret-path", stopped=stopped) as hub:
        arguments = ("-m", "meshlora", "plan", "--model", name, "--topology", "tp=2")
        with start(hub, *arguments, **variables) as command:
            code, out, err = command.end()
        lines = err.splitlines()
        assert (code, out) == (2, "")
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
        assert all(word in lines[-1] for word in words), lines[-1]
        assert len(lines) == (1 if mistake == "offline" else 2), lines
        assert not [secret for secret in (TOKEN, "secret-path") if secret in err]
        assert bool(hub.requests) == (mistake not in ("nobody", "offline"))


@pytest.mark.long
def test_a_user_and_a_password_in_the_endpoint_are_not_shown(files: dict[str, bytes], start: Start) -> None:
    with Hub({NAME: files}) as hub:
        endpoint = hub.url.replace("://", f"://me:{TOKEN}@")
        with start(hub, "-c", LOCATED, NAME, HF_ENDPOINT=endpoint) as command:
            code, out, err = command.end()
        assert code == 0, err
        assert f"asking {hub.url} for it" in err
        assert TOKEN not in out + err


@pytest.mark.long
def test_a_download_that_was_killed_is_no_model(files: dict[str, bytes], start: Start, tmp_path: Path) -> None:
    with Hub({NAME: files}, stopped={"model.safetensors": 2**20}) as hub:
        with start(hub, "-c", LOCATED, NAME) as command:
            wait_until(lambda: hub.downloads("model.safetensors") and command.living())
            command.process.send_signal(signal.SIGKILL)
            command.process.wait()
            wait_until(lambda: not command.living(), timeout_s=10.0)
        for believing in ("1", ""):  # offline nothing else could be taken
            with start(hub, "-c", LOCATED, NAME, MESHLORA_HF_HUB_OFFLINE=believing) as command:
                if not believing:
                    hub.go_on.set()
                code, out, err = command.end()
                assert (code == 0) == (not believing), err
        assert (Path(out.strip()) / "model.safetensors").read_bytes() == files["model.safetensors"]
        assert "lacks files of it" not in err


@pytest.mark.long
def test_a_cache_that_does_not_say_what_is_missing_is_completed(
    files: dict[str, bytes], start: Start, tmp_path: Path
) -> None:
    """One that another library has filled with what it needed; offline it is taken as it is."""
    folder = tmp_path / "home/.cache/huggingface/hub/models--acme--tiny-1.0"
    snapshot = folder / "snapshots" / commit_of(files)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit_of(files))
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_bytes(files[name])
    with Hub({NAME: files}) as hub:
        for is_offline in ("1", ""):
            with start(hub, "-c", LOCATED, NAME, MESHLORA_HF_HUB_OFFLINE=is_offline) as command:
                code, out, err = command.end()
            assert (code, out) == (0, f"{snapshot}\n"), err
            assert (snapshot / "tokenizer.json").exists() == (not is_offline)
        assert not hub.downloads("model.safetensors")


@pytest.mark.long
def test_runs_that_begin_at_once_download_once(files: dict[str, bytes], start: Start) -> None:
    with (
        Hub({NAME: files}, stopped={"model.safetensors": 1000}) as hub,
        start(hub, "-c", LOCATED, NAME) as one,
        start(hub, "-c", LOCATED, NAME) as other,
    ):
        wait_until(lambda: hub.downloads("model.safetensors"))
        hub.go_on.set()
        ends = [one.end(), other.end()]
        assert [code for code, _, _ in ends] == [0, 0], ends
        assert ends[0][1] == ends[1][1]
        assert hub.downloads("model.safetensors") == hub.downloads("main") == 1
        assert sorted(err.count("asking") for _, _, err in ends) == [0, 1]


README = b"""---
license: mit
configs:
- config_name: short
  default: true
  data_files:
  - split: train
    path: data/short-*.jsonl
  - split: validation
    path: [data/held-out.jsonl]
- config_name: long
  data_files: data/long.jsonl
---
# Words
"""
NAMES = ("short-1", "short-2", "held-out", "long")
DATA = {f"data/{name}.jsonl": f'{{"prompt": "{name}", "completion": "b"}}\n'.encode() for name in NAMES}
DATA |= {"words.py": b"raise"}
SPLITS = {
    "words": ["short-1", "short-2"],
    "words:validation": ["held-out"],
    "words:long/train": ["long"],
    "named": ["a-train-0"],
    "named:test": ["test"],
}
FILES = """
import sys
from meshlora_ground.hub import located_files
print(*located_files(sys.argv[1], "data.train", split="train"))
"""


_PROOF = ("words:validation", "words:long/train", "named", "named:test")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.proof) if n in _PROOF else n for n in SPLITS])
def test_a_split_of_a_dataset_is_its_files_and_no_code(name: str, start: Start) -> None:
    names = SPLITS[name]
    named = {f"x/{each}.parquet": each.encode() for each in ("a-train-0", "test", "constrained")} | {
        "train.py": b"raise"
    }
    with Hub({"acme/words": DATA | {"README.md": README}, "acme/named": named}) as hub:
        with start(hub, "-c", FILES, f"acme/{name}") as command:
            code, out, err = command.end()
        assert code == 0, err
        assert [Path(file).stem for file in out.split()] == names
        assert all(Path(file).is_file() for file in out.split())
        assert f"MB of data in {len(names)} files" in err
        files = [request for request in hub.requests if request.startswith("GET /datasets/")]
        assert len(files) == len(names) + ("words" in name)


def test_a_split_that_is_not_there_is_named(cache: Path) -> None:
    folder = cache / "datasets--acme--words" / "snapshots" / ONE
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_bytes(README)
    for file in DATA:
        (folder / file).write_bytes(DATA[file])
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text(ONE)
    assert located_files("acme/words", "data.train", split="train") == [
        str(folder / "data" / f"short-{number}.jsonl") for number in (1, 2)
    ]
    for name, words in {
        "acme/words:test": "no such split; known: train, validation",
        "acme/words:lang/train": "none of this name; did you mean 'long'",
        "acme/none": "lacks files of it",
    }.items():
        with pytest.raises(UserError, match=words):
            located_files(name, "data.train", split="train")
    for path in ("train.jsonl", "data/x.parquet", "./a/b", "a/b/c:d", "a:b", ""):
        assert located_files(path, "data.train", split="train") == [path]


def test_the_data_of_a_run_are_those_of_the_names(cache: Path, setup: Setup) -> None:
    folder = cache / "datasets--acme--mine" / "snapshots" / ONE
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        shutil.copy(setup.folder / "train.jsonl", folder / f"{split}.jsonl")
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text(ONE)
    setup.set("data.train", ["acme/mine", str(setup.folder / "train.jsonl")])
    setup.set("data.eval", "acme/mine")
    run = setup.prepared()
    assert run.config.data.train == [str(folder / "train.jsonl"), str(setup.folder / "train.jsonl")]
    assert run.config.data.eval == [str(folder / "validation.jsonl")]
    assert (len(run.train_data), run.eval_data and len(run.eval_data)) == (16, 8)


# --- what a run makes of it, with a cache made by hand ----------------------------------------------------------------


def _snapshot(cache: Path, name: str, commit: str, source: Path, revision: str = "main") -> Path:
    folder = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(source, folder / "snapshots" / commit)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    return folder / "snapshots" / commit


@pytest.mark.parametrize("revision", [None, "old", ONE])
def test_revision_of_the_run_file_is_the_one_that_is_read(revision: str | None, cache: Path, setup: Setup) -> None:
    old, new = (_snapshot(cache, NAME, *each) for each in ((ONE, setup.model, "old"), (OTHER, setup.model, "main")))
    setup.tree["model"] = {"path": NAME} | ({"revision": revision} if revision else {})
    setup.write()
    assert read_run(setup.folder / "run.yaml").model.path == str(old if revision else new)


def test_adapter_and_run_remember_name_and_commit(cache: Path, setup: Setup) -> None:
    _snapshot(cache, NAME, ONE, setup.model)
    _snapshot(cache, "acme/lora", OTHER, setup.adapter)
    setup.tree["model"] = {"path": NAME}
    setup.from_adapter()
    setup.set("adapter", "acme/lora")
    run = setup.prepared()
    assert run.identity["model.revision"] == f"{NAME}@{ONE}"
    assert run.config.adapter == str(cache / "models--acme--lora" / "snapshots" / OTHER)
    stored = config_to_store(lora_config({"r": 4}, "lora"), run.config.model.path)
    assert (stored["base_model_name_or_path"], stored["revision"]) == (NAME, ONE)


def test_run_that_goes_on_with_another_commit_is_refused_with_the_one_it_had(cache: Path, setup: Setup) -> None:
    identities = []
    for commit in (ONE, OTHER):
        _snapshot(cache, NAME, commit, setup.model)
        setup.tree["model"] = {"path": NAME}
        identities.append(setup.prepared().identity)
    with pytest.raises(
        UserError, match=rf"other model\.revision: {NAME}@{ONE} there, {NAME}@{OTHER} here.*{NAME}@{ONE}"
    ):
        check_same("checkpoint", *identities, despite=(), way_out="start a new run")


def test_a_folder_of_that_path_wins(cache: Path, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    _snapshot(cache, NAME, ONE, setup.model)
    assert located(NAME, "model.path").startswith(str(cache))
    monkeypatch.chdir(setup.folder)
    shutil.copytree(setup.model, setup.folder / NAME)
    assert located(NAME, "model.path") == NAME
    shutil.rmtree(setup.folder / NAME)
    assert located(NAME, "model.path") == NAME  # of a folder `acme` that is here nothing is asked elsewhere
    for path in ("model", "./acme/tiny", "/acme/tiny", "acme/train.jsonl", "a/b/c", "..", ""):
        assert located(path, "model.path") == path
    with pytest.raises(UserError, match="only names of the hub have revisions"):
        located("model", "model.path", revision="main")


def test_shards_are_those_of_the_index(cache: Path, setup: Setup) -> None:
    """Not a file beside them, and none less."""
    folder = _snapshot(cache, NAME, ONE, setup.model)
    (folder / "model.safetensors").rename(folder / "weights-1.safetensors")
    index = {"weight_map": {"a": "weights-1.safetensors", "b": "weights-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    trees = {file.name: {"size": 1, "blob_id": "0"} for file in folder.iterdir()}
    trees |= {name: {"size": 1, "blob_id": "0"} for name in ("weights-2.safetensors", "consolidated.safetensors")}
    (folder.parents[1] / "trees").mkdir()
    (folder.parents[1] / "trees" / f"{ONE}.json").write_text(json.dumps({"format_version": 1, "files": trees}))
    with pytest.raises(UserError, match="lacks files of it"):
        located(NAME, "model.path")
    assert located(NAME, "model.path", kind="config") == str(folder)
    (folder / "weights-2.safetensors").touch()
    assert located(NAME, "model.path") == str(folder)


def test_an_old_huggingface_hub_takes_folders_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "version_of", lambda _: "1.5.0")
    assert located(str(tmp_path), "model.path") == str(tmp_path)
    with pytest.raises(UserError, match=r"need huggingface_hub 2\.4; 1\.5\.0 is installed; give a folder"):
        located("acme/tiny", "model.path")


def test_only_snapshots_are_repositories() -> None:
    found = repository_of(f"/cache/models--acme--tiny-1.0/snapshots/{ONE}")
    assert found is not None
    assert (found.name, found.commit) == (NAME, ONE)
    for path in (None, "model", f"models--acme/snapshots/{ONE}", f"models--acme--tiny/snapshots/{ONE}/x", "/"):
        assert repository_of(path) is None


@pytest.mark.long
@pytest.mark.parametrize("command", ["check", pytest.param("train", marks=pytest.mark.proof)])
def test_a_run_contacts_nothing_but_the_hub_and_that_once(
    command: str, files: dict[str, bytes], start: Start, tmp_path: Path
) -> None:
    """The libraries that then read model and tokenizer ask nobody."""
    tree = {
        "model": {"path": NAME},
        "data": {"train": str(BASE.parent / "docstrings" / "train.jsonl"), "max_length": 128},
        "train": {"output": str(tmp_path / "out"), "steps": 1, "batch_size": 2},
        "lora": {"r": 2, "target_modules": ["q_proj"]},
        "device": "cpu",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    with Hub({NAME: files}) as hub:
        words = [command, str(tmp_path / "run.yaml"), *(["--no-preflight"] if command == "train" else [])]
        with start(hub, "-m", "meshlora", *words) as run:
            code, out, err = run.end(120.0)
        assert code == 0, err
        assert TOKEN not in out + err
        assert hub.requests[-1].startswith("GET")
        assert hub.requests[-1].endswith("/model.safetensors")
        assert len(set(hub.requests)) == len(hub.requests)
        assert set((tmp_path / "contacts").read_text().splitlines()) == {f"127.0.0.1:{hub.port}"}
    if command == "train":
        config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["revision"]) == (NAME, commit_of(files))
