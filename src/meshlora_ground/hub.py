"""Names of the hub: from `Qwen/Qwen3-0.6B` to a folder, out of huggingface_hub's cache or downloaded into it.

Does not own: the cache and the transfer (`huggingface_hub`). There is one download at a time on a machine, and only the
process that downloads goes online. It is started for one name and ends with it, so no other library of ours can contact
anything; what it may print, which could hold a token, goes through `without_secrets`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import glob
import hashlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import urlsplit

from packaging.version import Version
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from meshlora_ground import private
from meshlora_ground.console import Console
from meshlora_ground.errors import UserError, did_you_mean, one_line
from meshlora_ground.lifetime import end_with
from meshlora_ground.private import PrivateFolder, locked
from meshlora_ground.reading import found_above, read_text
from meshlora_ground.versions import version_of
from meshlora_ground.weight_files import INDEX, SINGLE, check_no_single, shard_names
from meshlora_ground.yaml_reading import parse_yaml

Kind = Literal["model", "config", "adapter", "dataset"]
# The user's own `HF_HUB_OFFLINE`, where the command line has set it for all libraries.
CHOICE = "MESHLORA_HF_HUB_OFFLINE"

HEADER = re.compile(r"---\s*\n(.*?\n)---\s*\n", re.DOTALL)  # of a card
_NAME = re.compile(r"(?P<name>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?", re.ASCII)
_DATASET = re.compile(r"(?P<name>[^:]+)(:((?P<config>[\w.-]+)/)?(?P<split>[\w.-]+))?", re.ASCII)
_TABLES = (".parquet", *(kind + packed for kind in (".jsonl", ".json", ".csv") for packed in ("", ".gz", ".zst")))
_FILES = {".csv", ".gz", ".zst", ".json", ".jsonl", ".parquet", ".safetensors", ".txt", ".yaml", ".yml"}
# Everything of a model but its weights, which its index names. Nothing pickled but adapters of old, of which tensors
# alone are read; code only where it is trusted.
_SMALL = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
_PARTS: dict[Kind, tuple[str, ...]] = {
    "model": _SMALL,
    "config": _SMALL,
    "adapter": ("adapter_config.json", "meshlora.json"),
    "dataset": ("README.md",),
}
_WEIGHTS = {"model": [SINGLE], "config": [], "adapter": ["adapter_model.safetensors"]}
_OLD = "adapter_model.bin"
_README_BYTES = 32 * 2**20
_LOCKS = private.CACHE / "hub"
# A transfer that has not moved for so long is given up; the library's own limits are shorter, and it tries again.
_STALLED_S = 300.0
_LOCK_S, _LOOK_S = 86_400.0, 0.2
# The first that remembers what a repository holds. transformers 5.17 goes with older ones alone.
_OLDEST = Version("2.4")


def located(
    given: str, option: str, *, kind: Kind = "model", revision: str | None = None, trust_remote_code: bool = False
) -> str:
    """`given` if it is a path, else the folder of the repository `given`, downloaded if the cache lacks any of it.

        located("Qwen/Qwen3-0.6B", "model.path")

    A name is `OWNER/NAME` or `OWNER/NAME@REVISION`. What is there as a path is that path, and so is what begins with a
    folder that is there.

    Args:
        option: where it was given, for messages. kind: "config" is a model without its weights.
        revision: branch, tag or commit, in the place of @REVISION.
        trust_remote_code: code of the repository is needed, too.

    Raises:
        UserError: the cache is not whole and cannot be completed: offline, no such repository, no access, no answer.
    """
    found = _name_in(given)
    if found is None:
        if revision is not None:
            raise UserError(f"{option}={given} with revision {revision}", "only names of the hub have revisions")
        return given
    if revision is not None and found["revision"] is not None:
        raise UserError(f"{option}={given} with revision {revision}", "it has one already", "give one")
    wanted = _Wanted(found["name"], kind, revision or found["revision"] or "main", trust_remote_code)
    return str(_had(wanted, given, option))


def located_here(
    given: str, option: str, *, kind: Kind = "model", revision: str | None = None, trust_remote_code: bool = False
) -> str | None:
    """As `located`, but None where that would contact the hub."""
    found = _name_in(given)
    if found is not None and not is_offline():
        name, revision = found["name"], revision or found["revision"] or "main"
        folder = _Wanted(name, kind, revision, trust_remote_code).cached()
        return None if folder is None else str(folder)
    return located(given, option, kind=kind, revision=revision, trust_remote_code=trust_remote_code)


def located_files(given: str, option: str, *, split: str) -> list[str]:
    """`given` if it is a path, else the files of a split of the dataset `given`, in order, as in `located`.

        located_files("HuggingFaceH4/no_robots", "data.train", split="train")

    A name is `OWNER/NAME`, with `@REVISION`, `:SPLIT` or `:CONFIG/SPLIT` after it. No code of the repository is run.

    Raises:
        UserError: as in `located`; it has no such configuration or split, or not as Parquet, JSON Lines or CSV.
    """
    words = _DATASET.fullmatch(given)
    found = _dataset_in(given)
    if words is None or found is None:
        return [given]
    revision, split = found["revision"] or "main", words["split"] or split
    wanted = _Wanted(found["name"], "dataset", revision, False, words["config"] or "", split)
    folder = _had(wanted, given, option)
    return [str(folder / file) for file in wanted.contents(folder)]


def is_dataset_of_hub(given: str) -> bool:
    """Whether `located_files` takes `given` for a name, and not for a path."""
    return _dataset_in(given) is not None


def _dataset_in(given: str) -> re.Match[str] | None:
    words = _DATASET.fullmatch(given)
    return _name_in(words["name"]) if words else None


def is_name(text: str) -> bool:
    """Whether `text` can be the name of a repository, OWNER/NAME, whatever is there as a folder."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text, re.ASCII) is not None


def _name_in(given: str) -> re.Match[str] | None:
    """The parts of a name; None if it is a path."""
    found = _NAME.fullmatch(given)
    if found is None or os.path.lexists(given.partition("/")[0]) or Path(given).suffix in _FILES:
        return None
    return found if is_name(found["name"]) else None


def _had(wanted: _Wanted, given: str, option: str) -> Path:
    """The folder with all of `wanted`: the cache's, or downloaded by this process or by another one meanwhile."""
    if Version(installed := version_of("huggingface_hub")) < _OLDEST:
        rule = f"there is no such folder, and names of the hub need huggingface_hub {_OLDEST}; {installed} is installed"
        raise UserError(f"{option}={given}", rule, "give a folder, or pip install -U huggingface_hub")
    stays_here = is_offline()
    if folder := wanted.cached(believing=stays_here):
        return folder
    if elsewhere := found_above(wanted.name):  # a path, given in another folder: no repository is asked for
        raise UserError(f"{option}={given}", f"there is no such folder in {Path.cwd()}", f"from here it is {elsewhere}")
    from huggingface_hub.constants import HF_HUB_CACHE

    if stays_here:
        rule = (
            f"there is no such folder in {Path.cwd()}, and HF_HUB_OFFLINE is set but {HF_HUB_CACHE} lacks files of it"
        )
        way_out = f"unset HF_HUB_OFFLINE, or fill the cache where there is a network: hf download {wanted.name}"
        raise UserError(f"{option}={given}", rule, way_out)
    locks = PrivateFolder(_LOCKS.expanduser(), f"the locks of downloads, {_LOCKS}", "let HOME be elsewhere")
    locks.make()
    name = hashlib.sha256(f"{HF_HUB_CACHE} {wanted.name}".encode()).hexdigest()[:16]
    with locked(locks, f"{name}.lock", f"downloads {wanted.name}", limit_s=_LOCK_S):
        return wanted.cached() or _download(wanted, option, Path(HF_HUB_CACHE))


def is_offline() -> bool:
    """Whether the user wants nothing to go online."""
    chosen = os.environ.get(CHOICE, os.environ.get("HF_HUB_OFFLINE", "")) or os.environ.get("TRANSFORMERS_OFFLINE", "")
    return chosen.upper() in ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads it


@dataclass(frozen=True)
class _Wanted:
    """What of which repository."""

    name: str
    kind: Kind
    revision: str
    with_code: bool
    config: str = ""
    split: str = ""

    @property
    def repo_type(self) -> Literal["model", "dataset"]:
        """As the hub names it."""
        return "dataset" if self.kind == "dataset" else "model"

    def tree(self, revision: str) -> dict[str, int]:
        """File -> bytes of the repository, as the cache remembers. Raises: CachedRepoTreeNotFoundError: it does not."""
        from huggingface_hub import get_cached_repo_tree

        found = get_cached_repo_tree(self.name, revision=revision, repo_type=self.repo_type)
        return {file.path: file.size for file in found}

    def cached(self, *, believing: bool = False) -> Path | None:
        """The folder, if everything that is wanted is in the cache. Contacts nothing.

        believing: if the cache does not say what the repository holds, as before huggingface_hub 2, take what is there.
        """
        from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

        try:
            if not believing:
                self.tree(self.revision)
            return self.fetch(local_files_only=True)
        except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
            return None

    def fetch(self, *, local_files_only: bool, say: Any = None) -> Path:
        """The folder, with everything that is wanted. say: told the commit and the weights before they are loaded."""
        from huggingface_hub import snapshot_download

        parts = [*_PARTS[self.kind]]
        if self.with_code:
            parts.append("*.py")
        options: dict[str, Any] = {"local_files_only": local_files_only, "repo_type": self.repo_type}
        folder = Path(snapshot_download(self.name, revision=self.revision, allow_patterns=parts, **options))
        weights = self.contents(folder)
        if say is not None:
            say(folder.name, weights)
        if not weights:
            return folder
        # By the commit: a branch may have moved on meanwhile.
        patterns = list(map(glob.escape, weights))
        return Path(snapshot_download(self.name, revision=folder.name, allow_patterns=patterns, **options))

    def contents(self, folder: Path) -> list[str]:
        """The files of the weights, or of the split; other formats lie beside them in many repositories."""
        if self.kind == "dataset":
            return self._tables(folder)
        if self.kind != "model" or not (folder / INDEX).is_file():
            weights = _WEIGHTS[self.kind]
            is_old = self.kind == "adapter" and not self._holds(folder, weights[0])
            return [_OLD] if is_old and self._holds(folder, _OLD) else weights
        shards = shard_names(folder / INDEX)
        check_no_single(f"{self.name}", shards, has_single=self._holds(folder, SINGLE))
        return shards

    def _holds(self, folder: Path, file: str) -> bool:
        """Whether the repository has `file`, downloaded or not; a cache that cannot say has what is there."""
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            return file in self.tree(folder.name)
        except CachedRepoTreeNotFoundError:
            return (folder / file).is_file()

    def _tables(self, folder: Path) -> list[str]:
        """The files of the split, as the repository's README.md says, or else by their names."""
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            there = sorted(self.tree(folder.name))
        except CachedRepoTreeNotFoundError:  # a cache from before huggingface_hub 2, offline
            there = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        splits = _declared(folder / "README.md", self.config)
        if splits is None:
            if self.config:
                raise UserError(f"{self.name}:{self.config}/{self.split}", "its README.md names no configurations")
            word = re.compile(rf"(^|[/._-]){re.escape(self.split)}([/._-]|$)")
            splits = {self.split: [glob.escape(file) for file in there if word.search(file)]}
        if self.split not in splits:
            raise UserError(f"{self.name}:{self.split}", "it has no such split", did_you_mean(self.split, splits))
        # A file that two patterns name is one file.
        files = set[str]()
        for pattern in splits[self.split]:
            files |= {*fnmatch.filter(there, pattern)}
        tables = sorted(file for file in files if file.endswith(_TABLES))
        if not tables:
            rule = f"its {len(files)} files of this split are not Parquet, JSON Lines or CSV, and no code of it is run"
            raise UserError(f"{self.name}:{self.split}", rule, "name a split as OWNER/NAME:SPLIT, or convert it")
        return tables


def _declared(readme: Path, config: str) -> dict[str, list[str]] | None:
    """Split -> patterns of files, of a configuration (default: the marked one, or the first); None if none is declared.

    As `datasets` reads the header of a README.md: https://huggingface.co/docs/hub/datasets-manual-configuration.

    Raises:
        UserError: it cannot be read, or there is no such configuration.
    """
    if not readme.is_file():
        return None
    header = HEADER.match(read_text(readme, most_bytes=_README_BYTES))
    if not header:
        return None
    try:
        values = parse_yaml(header[1])
    except ValueError as error:
        raise UserError(f"{readme}", f"its header is not readable YAML ({error})") from None
    listed = values.get("configs") if isinstance(values, dict) else None
    if not isinstance(listed, list):
        return None
    configs, marked = dict[str, Any](), list[str]()
    for each in listed:
        if isinstance(each, dict) and each.get("data_files"):
            name = str(each.get("config_name", "default"))
            configs[name] = each["data_files"]
            if each.get("default") or name == "default":
                marked.append(name)
    if not configs:
        return None
    if (name := config or [*marked, *configs][0]) not in configs:
        raise UserError(f"configuration {config}", f"{readme} has none of this name", did_you_mean(config, configs))
    files = configs[name]
    if not (isinstance(files, list) and all(isinstance(each, dict) for each in files)):
        files = [{"split": "train", "path": files}]
    splits = dict[str, list[str]]()
    for each in files:
        path = each.get("path", [])
        splits[str(each.get("split", "train"))] = [path] if isinstance(path, str) else [*map(str, path)]
    return splits


# --- the download, seen from the process that waits for it ------------------------------------------------------------


def _download(wanted: _Wanted, option: str, cache: Path) -> Path:
    """The folder of `wanted`, downloaded by a process of its own."""
    console, where = Console(file=sys.stderr), endpoint()
    console.say(f"{wanted.name} ({wanted.revision}) is not in {cache}: asking {where} for it")
    words = json.dumps([os.getpid(), *dataclasses.astuple(wanted)])
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", "from meshlora_ground import hub; hub._go_online()", words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=online_environment(),
    )
    assert process.stdout is not None
    try:
        said = _followed(
            process.stdout, wanted, console, cache / f"{wanted.repo_type}s--{wanted.name.replace('/', '--')}"
        )
    finally:
        process.kill()
        process.wait()
    if "folder" in said:
        return Path(said["folder"])
    rule, way_out = said.get("failed", ("the process that downloads it has ended without a word", "try again"))
    raise UserError(f"{option}={wanted.name}", rule.replace("ENDPOINT", where), way_out)


def _followed(stream: IO[bytes], wanted: _Wanted, console: Console, folder: Path) -> dict[str, Any]:
    """The last word of the process; meanwhile a bar of the bytes that have come."""
    lines, said = _lines(stream), dict[str, Any]()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(wanted.name, total=None)
        before, moved_at = _num_bytes(folder), time.monotonic()
        last = before
        for line in lines:
            if line:
                said = json.loads(line)
                if "bytes" in said:
                    what = "data" if wanted.kind == "dataset" else "weights"
                    what = f"{said['bytes'] / 1e6:,.1f} MB of {what} in {said['files']} files"
                    console.say(f"{wanted.name}: commit {said['commit']}, {what}")
                    before = _num_bytes(folder)
                    bar.update(task, total=said["bytes"])
            if (now := _num_bytes(folder)) != last or line:
                last, moved_at = now, time.monotonic()
                bar.update(task, completed=now - before)
            if time.monotonic() > moved_at + _STALLED_S:
                rule = f"ENDPOINT has sent nothing for {_STALLED_S:.0f} s"
                return {"failed": (rule, "try again: what has come is kept")}
    return said


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """The lines of a pipe, and an empty one now and then, until its end."""
    text = ""
    while True:
        is_ready = bool(select.select([stream], [], [], _LOOK_S)[0])
        if is_ready:
            part = os.read(stream.fileno(), 2**16)
            if not part:  # its end
                return
            text += part.decode(errors="replace")
        *whole, text = text.split("\n")
        yield from whole or [""]


def _num_bytes(folder: Path) -> int:
    """Bytes of all contents of a repository in the cache, those under way included."""
    number = 0
    with contextlib.suppress(OSError):
        for file in os.scandir(folder / "blobs"):
            with contextlib.suppress(OSError):  # renamed meanwhile
                number += file.stat().st_size
    return number


def endpoint() -> str:
    """Where names are looked up, without what may be secret in it: users, passwords, paths."""
    from huggingface_hub.constants import ENDPOINT

    parts = urlsplit(ENDPOINT)
    host = f"{parts.scheme}://{parts.hostname}"
    return f"{host}:{parts.port}" if parts.port else host


def online_environment() -> dict[str, str]:
    """The environment of the process that may go online: with the user's own choice, and silent."""
    kept = dict(os.environ)
    for name in ("HF_HUB_OFFLINE", CHOICE):
        kept.pop(name, None)
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_VERBOSITY": "critical"}
    return kept | quiet


# --- the process that goes online -------------------------------------------------------------------------------------


def _go_online() -> None:
    """Download what the first argument says, with a line of JSON for each thing that the other process must know."""
    parent, *words = json.loads(sys.argv[1])
    end_with(parent)
    from huggingface_hub import constants, get_session

    get_session().timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT  # by default some requests have none
    wanted = _Wanted(*words)

    def say(**said: Any) -> None:
        os.write(1, json.dumps(said).encode() + b"\n")

    def size(commit: str, weights: Sequence[str]) -> None:
        there = wanted.tree(commit)
        sizes = [there[name] for name in weights if name in there]
        say(commit=commit, bytes=sum(sizes), files=len(sizes))

    try:
        say(folder=str(wanted.fetch(local_files_only=False, say=size)))
    except UserError as error:
        say(failed=(f"{error.given}: {error.rule}", error.way_out))
    except Exception as error:  # noqa: BLE001 - of the library, its transports and the file system
        say(failed=_explained(error, wanted))


def _explained(error: BaseException, wanted: _Wanted) -> tuple[str, str]:
    """(The rule, the way out) for a failed download."""
    from huggingface_hub import errors
    from huggingface_hub.constants import HF_HUB_CACHE

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    log_in = "hf auth login, or HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return "ENDPOINT gives it only to those who accept its conditions", f"accept them on its page, then: {log_in}"
    if isinstance(error, errors.RepositoryNotFoundError):
        rule = f"there is no such folder in {Path.cwd()}, and ENDPOINT has no repository of this name, or a private one"
        return rule, f"check the name; if it is private: {log_in}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"ENDPOINT has no revision {wanted.revision} of it", "give a branch, a tag or a commit"
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        return f"ENDPOINT answers with status {error.response.status_code}", "try again later: what has come is kept"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{HF_HUB_CACHE} cannot be written ({error.strerror})", "let HF_HOME be on another file system"
    words = one_line(without_secrets(f"{type(error).__name__}: {error}"), 200)
    return f"ENDPOINT does not answer ({words})", "try again: what has come is kept"


def without_secrets(text: str) -> str:
    """`text` with hosts for URLs, which may hold a token anywhere, and without tokens."""
    from huggingface_hub import get_token

    text = re.sub(r"(\w+://)[^\s'\"<>]+", r"\1…", text)
    token = get_token()
    return text.replace(token, "…") if token else text
