"""Sending an adapter folder to the hub.

Owns: which files go, what they say of the base there, and what is refused before anything is sent. Does not own: the
names and the one process that goes online (`meshlora_ground.hub`), the transfer (`huggingface_hub`).

A repository is made private, and one that everybody can read is not written to unless that is wanted. The token is read
by the process that goes online, which prints it to nobody.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from meshlora_ground.errors import UserError, one_line
from meshlora_ground.files import read_json
from meshlora_ground.hub import HEADER, endpoint, is_name, is_offline, online_environment, without_secrets
from meshlora_ground.lifetime import end_with
from meshlora_ground.reading import read_text
from meshlora_ground.yaml_reading import parse_yaml

_CONFIG, _CARD = "adapter_config.json", "README.md"
# An adapter, and what it takes to use it. No training state, no manifest of a run, nothing pickled, no code.
_NEEDED = (_CONFIG, "adapter_model.safetensors")
_PATTERNS = (
    *(*_NEEDED, "meshlora.json", _CARD, "tokenizer*.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "generation_config.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.tiktoken", "spiece.model", "sentencepiece.bpe.model"),
)
_LOG_IN = "hf auth login, or HF_TOKEN, with a token that may write"


def files_to_push(folder: Path) -> list[Path]:
    """The files of an adapter folder that are sent, in order. Raises: UserError: it is no adapter folder."""
    if not folder.is_dir():
        raise UserError(f"adapter {folder}", "there is no such folder")
    for name in _NEEDED:
        if not (folder / name).is_file():
            raise UserError(f"adapter {folder}", f"it has no {name}", "give the folder of a PEFT adapter")
    return sorted({file for pattern in _PATTERNS for file in folder.glob(pattern) if file.is_file()})


def base_to_name(folder: Path, given: str | None) -> str:
    """The name of the base on the hub for the adapter in `folder`. given: of the user. Raises: UserError: the adapter
    names a folder, which nobody else has, and the user nothing."""
    stored = read_json(folder / _CONFIG)
    if not isinstance(stored, dict):
        raise UserError(f"{folder / _CONFIG}", "it is no JSON object")
    if given is not None:
        if not is_name(given):
            raise UserError(f"--base {given}", "it is no name of the hub", "give OWNER/NAME")
        return given
    named = stored.get("base_model_name_or_path")
    if not isinstance(named, str) or not is_name(named) or os.path.isdir(named):
        rule = f"its base is {named!r}, which nobody else can load"
        raise UserError(f"adapter {folder}", rule, "give --base OWNER/NAME, the model's name on the hub")
    return named


def push(folder: Path, name: str, *, base: str, is_public: bool) -> str:
    """Send the adapter in `folder` to the repository `name`, in one commit; returns its address.

    base: `base_to_name`. is_public: everybody may read it.

    Raises:
        UserError: no adapter, no name, no token, offline, or refused by the hub.
    """
    from huggingface_hub import get_token

    files, where = files_to_push(folder), endpoint()
    if not is_name(name):
        raise UserError(f"{name}", "it is no name of a repository", "give OWNER/NAME")
    if is_offline():
        raise UserError(f"push to {name}", "HF_HUB_OFFLINE is set", "unset it where there is a network")
    if get_token() is None:
        raise UserError(f"push to {name}", f"{where} lets nobody write without a token", _LOG_IN)
    with tempfile.TemporaryDirectory(prefix="meshlora-push-") as temporary:
        for file in files:
            shutil.copyfile(file, Path(temporary, file.name))
        _name_base(Path(temporary), base)
        said = _sent(temporary, name, is_public=is_public)
    if "address" in said:
        return str(said["address"])
    rule, way_out = said.get("failed", ("the process that sends it has ended without a word", "try again"))
    raise UserError(f"push to {name}", rule.replace("ENDPOINT", where), way_out)


def _name_base(folder: Path, base: str) -> None:
    """Name `base` in the configuration and in the header of the card, whatever stood there."""
    stored = read_json(folder / _CONFIG)
    if stored.get("base_model_name_or_path") != base:
        stored |= {"base_model_name_or_path": base, "revision": None}
    (folder / _CONFIG).write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    card = folder / _CARD
    if not card.is_file():
        return
    try:
        text = read_text(card)
        found = HEADER.match(text)
        header = parse_yaml(found[1]) if found else {}
    except ValueError as error:
        raise UserError(f"{_CARD}", f"its header is not readable YAML ({error})") from None
    if not isinstance(header, Mapping):
        raise UserError(f"{_CARD}", "its header is no mapping")
    body = text[found.end() :] if found else text
    whole = yaml.safe_dump({**header, "base_model": base}, sort_keys=True, allow_unicode=True)
    card.write_text(f"---\n{whole}---\n{body}", encoding="utf-8")


def _sent(folder: str, name: str, *, is_public: bool) -> dict[str, Any]:
    """The last word of the process that goes online."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from meshlora_extra.hub import push; push._go_online()"],
        input=json.dumps([os.getpid(), folder, name, is_public]),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=online_environment(),
        text=True,
        check=False,
    )
    return dict(json.loads((done.stdout.splitlines() or ["{}"])[-1]))


def _go_online() -> None:
    """Send what stdin says; the last line of stdout is what came of it."""
    parent, folder, name, is_public = json.load(sys.stdin)
    end_with(parent)
    from huggingface_hub import HfApi, constants, errors, get_session

    get_session().timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    said: dict[str, Any]
    try:
        api = HfApi()
        try:
            is_open = not api.repo_info(name).private
        except errors.RepositoryNotFoundError:
            is_open = False
        if is_open and not is_public:
            said = {"failed": ("it is there, and everybody can read it", "give --public, or another name")}
        else:
            api.create_repo(name, private=not is_public, exist_ok=True)
            done = api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload the adapter")
            said = {"address": f"{done.repo_url}", "commit": done.oid}
    except Exception as error:  # noqa: BLE001 - of the library, its transports and the file system
        said = {"failed": _explained(error)}
    os.write(1, json.dumps(said).encode() + b"\n")


def _explained(error: BaseException) -> tuple[str, str]:
    """(The rule, the way out) for a failed push."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status in (401, 403):
            return f"ENDPOINT does not let this token write there (status {status})", _LOG_IN
        return f"ENDPOINT answers with status {status}", "try again later: a commit is whole or not there"
    words = one_line(without_secrets(f"{type(error).__name__}: {error}"), 200)
    return f"ENDPOINT does not answer ({words})", "try again: a commit is whole or not there"
