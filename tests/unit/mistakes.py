"""How a user's mistake is made and what must be said of it: a good run in a folder, broken in one place.

What holds for every mistake is `check_mistake`; the mistakes are in `test_user_mistakes*.py`, the good run in
`conftest.py`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from meshlora.cli.main import main
from meshlora.run.config.file import read_run
from meshlora.run.prepared import Prepared
from meshlora.run.together import prepare_run
from meshlora_ground.errors import printable
from meshlora_judge.twin import twin_config

UP = "model.layers.1.mlp.up_proj"
UP_A = f"base_model.model.{UP}.lora_A.weight"
Tensors = dict[str, Tensor]


@dataclass
class Setup:
    """A good run in a folder of its own, to be broken in one place.

    Attributes:
        tree: what run.yaml will hold; text: or its text, if not None.
        nproc: for `train`; arguments: of both commands, after the run file.
        command: a whole other command line instead, without the paths that vary.
    """

    folder: Path
    tree: dict[str, Any]
    text: str | None = None
    file: str = "run.yaml"
    nproc: int = 2
    arguments: list[str] = field(default_factory=list)
    command: list[str] | None = None

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"

    def set(self, path: str, value: Any) -> None:
        *parents, last = path.split(".")
        functools.reduce(lambda tree, key: tree[key], parents, self.tree)[last] = value

    def drop(self, path: str) -> None:
        *parents, last = path.split(".")
        del functools.reduce(lambda tree, key: tree[key], parents, self.tree)[last]

    def lora(self, **options: Any) -> None:
        self.tree["lora"].update(options)

    def config(self, **values: Any) -> None:
        _edit_json(self.model / "config.json", values)

    def family(self, model_type: str, **values: Any) -> None:
        """The configuration of another family; it must be refused before its weights are missed."""
        twin_config(model_type, **values).save_pretrained(self.model)

    def weights(self, edit: Callable[[Tensors], Any]) -> None:
        _edit_tensors(self.model / "model.safetensors", edit)

    def from_adapter(self) -> None:
        self.drop("lora")
        self.set("adapter", str(self.adapter))

    def adapter_config(self, **values: Any) -> None:
        self.from_adapter()
        _edit_json(self.adapter / "adapter_config.json", values)

    def adapter_weights(self, edit: Callable[[Tensors], Any]) -> None:
        self.from_adapter()
        _edit_tensors(self.adapter / "adapter_model.safetensors", edit)

    def data(self, *records: Any) -> None:
        text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
        (self.folder / "train.jsonl").write_text(text)

    def write(self) -> None:
        text = yaml.safe_dump(self.tree) if self.text is None else self.text
        (self.folder / "run.yaml").write_text(text)

    def prepared(self, **options: object) -> Prepared:
        """The run with these options, as in `data__max_length=12`."""
        for name, value in options.items():
            self.set(name.replace("__", "."), value)
        self.write()
        return prepare_run(read_run(self.folder / "run.yaml"))

    def command_lines(self) -> list[list[str]]:
        if self.command is not None:
            return [[part.format(folder=self.folder) for part in self.command]]
        run = [str(self.folder / self.file), *self.arguments]
        return [["check", *run], ["train", *run, "--nproc", str(self.nproc)]]


def _edit_json(file: Path, values: dict[str, Any]) -> None:
    tree = json.loads(file.read_text()) | values
    file.write_text(json.dumps(tree))


def _edit_tensors(file: Path, edit: Callable[[Tensors], Any]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@dataclass(frozen=True)
class Case:
    """A mistake: how to make it, and the words that must be said of it."""

    make: Callable[[Setup], Any]
    words: tuple[str, ...]


def case(make: Callable[[Setup], Any], *words: str) -> Case:
    return Case(make, words)


def several(*actions: Callable[[Setup], Any]) -> Callable[[Setup], None]:
    def make(s: Setup) -> None:
        for action in actions:
            action(s)

    return make


def setting(path: str, value: Any) -> Callable[[Setup], None]:
    return lambda s: s.set(path, value)


def lora(**options: Any) -> Callable[[Setup], None]:
    return lambda s: s.lora(**options)


def truncate(file: str, size: int) -> Callable[[Setup], None]:
    def make(s: Setup) -> None:
        path = s.folder / file
        path.write_bytes(path.read_bytes()[:size])

    return make


def text(file: str, content: str) -> Callable[[Setup], Any]:
    return lambda s: (s.folder / file).write_text(content)


def command(*parts: str) -> Callable[[Setup], None]:
    return lambda s: setattr(s, "command", list(parts))


def remove(*files: str) -> Callable[[Setup], None]:
    def make(s: Setup) -> None:
        for file in files:
            (s.folder / file).unlink()

    return make


def narrower_adapter(tensors: Tensors) -> None:
    for name in tensors:
        tensors[name] = tensors[name][:, :48].clone() if ".lora_A." in name else tensors[name]


def check_mistake(mistake: Case, setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    """`check` and `train --nproc`, or the one other command, say the same, and it holds the words."""
    mistake.make(setup)
    setup.write()
    messages = [message_of(line, setup, capfd) for line in setup.command_lines()]
    assert len(set(messages)) == 1, "check and train disagree"
    assert_words(messages[0], mistake.words)


def message_of(line: list[str], setup: Setup, capfd: pytest.CaptureFixture[str]) -> str:
    """The one message of a command that must fail with exit code 2 and leave no file."""
    before = sorted(setup.folder.rglob("*"))
    assert main(line) == 2
    assert sorted(setup.folder.rglob("*")) == before
    return one_error(*capfd.readouterr())


def one_error(out: str, err: str) -> str:
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert sum(line.startswith("error: ") for line in err.splitlines()) == 1
    assert len(err) <= 2_000
    assert err == printable(err), "a terminal would obey it"
    return err.removeprefix("error: ")


def texts_of(run: Prepared, data: Any) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(run.config.model.path)
    return [tokenizer.decode(one.input_ids, skip_special_tokens=True) for one in data]


def assert_words(message: str, words: tuple[str, ...]) -> None:
    assert not [word for word in words if word not in message], message
