"""`meshlora push`: what is sent to whom, what is said of it, and what is refused. The hub is on loopback."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from meshlora.cli.main import main
from meshlora_extra.hub.push import base_to_name, files_to_push
from tests.hub import Hub, HubHandler
from tests.processes import Started
from tests.unit.saved import save

SRC = Path(__file__).parents[2] / "src"
NAME, TOKEN, BASE = "acme/mine", "hf_thisIsASecretOfMine", "acme/base"
COMMIT = "1" * 40
SENT = {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}


class _Writes(HubHandler):
    """Also what an upload asks, as far as huggingface_hub does without its own store (Xet)."""

    of: WritableHub

    def do_GET(self) -> None:
        if self.path != f"/api/models/{NAME}":
            super().do_GET()
            return
        self.of.tokens.add(self.headers.get("Authorization", ""))
        if self.of.is_private is None:
            self._answer(b"{}", 401, {"X-Error-Code": "RepoNotFound"})
            return
        self._answer(json.dumps({"id": NAME, "private": self.of.is_private, "siblings": []}).encode())

    def do_PUT(self) -> None:
        self.of.stored[self.path.rpartition("/")[2]] = self._body()
        self._answer(b"")

    def do_POST(self) -> None:
        hub, body = self.of, self._body()
        hub.requests.append(f"POST {self.path}")
        hub.tokens.add(self.headers.get("Authorization", ""))
        if hub.status:
            self._answer(f"no, {TOKEN}".encode(), hub.status)
        elif self.path == "/api/repos/create":
            hub.is_private = json.loads(body).get("visibility") == "private"
            self._answer(json.dumps({"url": f"{hub.url}/{NAME}"}).encode())
        elif self.path == "/api/validate-yaml":
            self._answer(b'{"errors": [], "warnings": []}')
        elif "/preupload/" in self.path:
            files = [{"path": each["path"], **_mode(each["path"])} for each in json.loads(body)["files"]]
            self._answer(json.dumps({"files": files}).encode())
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/put/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self._answer(json.dumps({"transfer": "basic", "objects": objects}).encode())
        else:
            assert "/commit/main" in self.path, self.path
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.got[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.got[value["path"]] = hub.stored[value["oid"]]
            answer = {"commitUrl": f"{hub.url}/{NAME}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
            self._answer(json.dumps(answer).encode())

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)


def _mode(path: str) -> dict[str, object]:
    return {"uploadMode": "lfs" if path.endswith(".safetensors") else "regular", "shouldIgnore": False}


@dataclass
class WritableHub(Hub):
    """got: file -> what was committed. is_private: of the repository; None: it is not there. status: of refusals."""

    got: dict[str, bytes] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    is_private: bool | None = None
    status: int = 0

    @property
    def handler(self) -> type[HubHandler]:
        return _Writes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a finished adapter on a base that was loaded from a folder, with more than is sent beside it."""
    made = save(tmp_path / "run" / "adapter", kind="adapter", step=6)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "base"), "r": 4}
    (made / "adapter_config.json").write_text(json.dumps(config))
    (made / "README.md").write_text("---\nlibrary_name: peft\n---\n# mine\n")
    (made / "tokenizer.json").write_text("{}")
    (made / "manifest.json").unlink()
    for name in ("training_state.safetensors", "pytorch_model.bin", "secret.txt", "code.py"):
        (made / name).write_text("x")
    return made


@pytest.fixture
def push(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """`push(hub, *arguments)`: the command's (exit code, stdout, stderr)."""

    def pushed(hub: Hub, *arguments: str, **variables: str) -> tuple[int, str, str]:
        own = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "MESHLORA_HF_HUB_OFFLINE": "0", "COLUMNS": "400"}
        own |= {"PYTHONPATH": str(SRC), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        with Started(tmp_path, "-m", "meshlora", "push", *arguments, **(own | variables)) as started:
            return started.end()

    return pushed


Push = Callable[..., tuple[int, str, str]]


def test_adapter_arrives_privately_with_a_base_that_others_can_load(folder: Path, push: Push) -> None:
    before = (folder / "adapter_config.json").read_bytes()
    with WritableHub({}) as hub:
        code, out, err = push(hub, str(folder.parent), NAME, "--base", BASE)
        assert (code, err) == (0, ""), err
        assert hub.is_private is True
        assert hub.tokens == {f"Bearer {TOKEN}"}
        assert out.splitlines()[-1] == f"pushed: {hub.url}/{NAME}"
    assert TOKEN not in out + err
    assert set(hub.got) == SENT
    assert hub.got["adapter_model.safetensors"] == (folder / "adapter_model.safetensors").read_bytes()
    assert json.loads(hub.got["adapter_config.json"])["base_model_name_or_path"] == BASE
    assert str(folder.parent.parent) not in str(hub.got)
    header = yaml.safe_load(hub.got["README.md"].decode().split("---")[1])
    assert header == {"base_model": BASE, "library_name": "peft"}
    assert (folder / "adapter_config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("is_private", "status", "said"),
    [
        (False, 0, "everybody can read it; give --public"),
        pytest.param(None, 403, "does not let this token write there (status 403)", marks=pytest.mark.proof),
    ],
)
def test_nothing_is_sent_where_it_should_not_go(
    folder: Path, push: Push, is_private: bool | None, status: int, said: str
) -> None:
    with WritableHub({}, is_private=is_private, status=status) as hub:
        code, out, err = push(hub, str(folder), NAME, "--base", BASE)
    assert (code, hub.got) == (2, {})
    assert said in err
    assert len(err.splitlines()) == 1
    assert TOKEN not in out + err


MISTAKES: dict[str, tuple[list[str], str]] = {
    "a base that only this machine has": ([NAME], "give --base OWNER/NAME"),
    "no name": (["mine", "--base", BASE], "it is no name of a repository"),
    "no base": ([NAME, "--base", "base"], "--base base: it is no name of the hub"),
    "offline": ([NAME, "--base", BASE], "HF_HUB_OFFLINE is set"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line_before_anything_is_asked(
    mistake: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLORA_HF_HUB_OFFLINE", "1")
    arguments, said = MISTAKES[mistake]
    assert main(["push", str(folder), *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_damaged_folder_is_not_pushed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = save(tmp_path / "adapter", kind="adapter", step=6)
    (made / "adapter_model.safetensors").write_bytes(b"other")
    assert main(["push", str(made), NAME, "--base", BASE]) == 2
    assert "adapter_model.safetensors is damaged" in capsys.readouterr().err


def test_files_of_other_folders_are_not_sent(folder: Path) -> None:
    assert {file.name for file in files_to_push(folder)} == SENT
    os.makedirs(folder / "vocab.txt")
    assert {file.name for file in files_to_push(folder)} == SENT


def test_base_of_the_hub_needs_no_word(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": BASE}))
    assert base_to_name(folder, None) == BASE
