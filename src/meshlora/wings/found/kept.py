"""Found plans as YAML: kept for the next process, and for a user to read, edit and give back.

    model_type: bert
    transformers: 5.23.0
    code: 1c0ffee...          # of the family's code that the plan was found in
    leaves:
      attention.self.query: column
      attn.c_attn: {split: column, pieces: q k v}
    opened: [attention, attention.output, output]

Does not own: finding one (`wings.found.finder`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
import yaml

from meshlora.plan.families.family import Leaf
from meshlora.plan.layout import Split
from meshlora.wings.found.finder import Found
from meshlora_ground import private
from meshlora_ground.errors import UserError, did_you_mean
from meshlora_ground.private import PrivateFolder, open_own
from meshlora_ground.versions import digest, sources_of
from meshlora_ground.yaml_reading import parse_yaml

_SHIPPED = Path(__file__).with_name("plans.yaml")
_MOST_BYTES = 2**18
_HEAD = ("model_type", "transformers", "code")
_LISTS = ("wide_norms", "whole", "opened", "after")
_MAPS = tuple(each.name for each in dataclasses.fields(Found) if each.name not in _LISTS)


def code_of(model: Any) -> str:
    """A hash of the code of the family of `model`."""
    return digest([inspect.getsource(sys.modules[type(model).__module__])])


def as_yaml(found: Found, model: Any) -> str:
    """The text of a file that `from_yaml` reads."""
    values: dict[str, Any] = {"model_type": model.config.model_type, "transformers": transformers.__version__}
    values["code"] = code_of(model)
    values["leaves"] = {path: _words(leaf) for path, leaf in found.leaves.items()}
    for name in (*_MAPS, *_LISTS):
        value = getattr(found, name)
        if name != "leaves" and value:
            values[name] = _plain(value)
    return yaml.safe_dump(values, sort_keys=False, width=120)


def _plain(value: Any) -> Any:
    """Lists in place of tuples, as YAML has them."""
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value


def _words(leaf: Leaf) -> str | dict[str, Any]:
    if leaf == Leaf(leaf.split):
        return str(leaf.split)
    fields = dataclasses.asdict(leaf)
    changed = {name: fields[name] for name in ("pieces", "groups", "local_groups") if fields[name] not in ("", 0)}
    return {"split": str(leaf.split), **changed}


def from_yaml(text: str, what: str) -> tuple[Found, dict[str, str]]:
    """(the plan in a file, its `model_type`, `transformers` and `code`). what: the file, in messages.

    Raises:
        UserError: it is no such file.
    """
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise UserError(what, str(error)) from None
    return _read(values, what)


def _read(values: Any, what: str) -> tuple[Found, dict[str, str]]:
    if not isinstance(values, dict) or not isinstance(values.get("leaves"), dict):
        raise UserError(what, "it must be a plan, as meshlora verify --save writes it")
    known = (*_HEAD, *_MAPS, *_LISTS)
    for name in values:
        if name not in known:
            raise UserError(f"{what}: {name}", "a plan has no such key", did_you_mean(str(name), known))
    fields: dict[str, Any] = {"leaves": {path: _leaf(path, each, what) for path, each in values["leaves"].items()}}
    for name in _LISTS:
        fields[name] = _texts(values.get(name, []), f"{what}: {name}")
    for name in ("local", "passes"):
        fields[name] = {p: _texts(v, f"{what}: {name}") for p, v in _map(values, name, what).items()}
    for name in ("kept_whole", "units"):
        fields[name] = {path: str(each) for path, each in _map(values, name, what).items()}
    fields["parameters"] = _dims(_map(values, "parameters", what), f"{what}: parameters")
    fields["sliced"] = {
        path: _dims(_map({path: each}, path, what), f"{what}: sliced", "batch*heads")
        for path, each in _map(values, "sliced", what).items()
    }
    return Found(**fields), {name: str(values.get(name, "")) for name in _HEAD}


def _map(values: Mapping[str, Any], name: str, what: str) -> dict[str, Any]:
    found = values.get(name, {})
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UserError(f"{what}: {name}", "it must be a mapping of names")
    return found


def _texts(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UserError(what, "it must be a list of names")
    return tuple(value)


def _dims(values: Mapping[str, Any], what: str, *words: str) -> dict[str, Any]:
    for name, dim in values.items():
        if dim not in words and (isinstance(dim, bool) or not isinstance(dim, int) or not 0 <= dim < 8):
            raise UserError(f"{what}: {name}: {dim!r}", "it must be the number of a dim")
    return dict(values)


def _leaf(path: Any, value: Any, what: str) -> Leaf:
    fields = value if isinstance(value, dict) else {"split": value}
    rule = "it must be column or row, or a mapping of split, pieces, groups and local_groups"
    if not isinstance(path, str) or fields.keys() - {"split", "pieces", "groups", "local_groups"}:
        raise UserError(f"{what}: {path}: {value!r}", rule)
    pieces, groups, local = fields.get("pieces", ""), fields.get("groups", 1), fields.get("local_groups", 0)
    is_number = type(groups) is int and groups > 0
    if not isinstance(pieces, str) or type(local) is not int or not (is_number or groups in ("heads", "kv_heads")):
        raise UserError(f"{what}: {path}: {value!r}", rule)
    if fields.get("split") not in ("column", "row"):
        raise UserError(f"{what}: {path}: {value!r}", rule)
    return Leaf(Split(fields["split"]), pieces, groups, local)


@functools.cache
def _shipped() -> dict[str, Any]:
    values: dict[str, Any] = parse_yaml(_SHIPPED.read_text(encoding="utf-8")) or {}
    return values


def shipped(model_type: str) -> Found | None:
    """The plan of a family that was found, proved and recorded (`scripts/keep_plans.py`); None: it has none."""
    values = _shipped().get(model_type)
    return None if values is None else _read(values, f"{_SHIPPED}: {model_type}")[0]


def kept(model: Any, find: Callable[[], Found]) -> Found:
    """What an earlier process has found for the configuration of `model` with this code, or what `find` does.

    A cache that cannot be used costs no more than another search.
    """
    words = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    key = digest([words, transformers.__version__, code_of(model), *sources_of("meshlora.wings.found.finder")])
    path = private.CACHE.expanduser() / "found"
    try:
        with open_own(path / f"{key}.yaml") as file:
            return from_yaml(file.read(_MOST_BYTES).decode(), str(path))[0]
    except (OSError, UserError, UnicodeDecodeError):
        found = find()
    folder = PrivateFolder(path, f"the cache of plans, {path}", "remove it")
    with contextlib.suppress(UserError):
        folder.write(f"{key}.yaml", as_yaml(found, model).encode())
    return found


def text_of(file: Path) -> str:
    """The text of a plan's file, checked. Raises: UserError: it cannot be read, or is no plan."""
    try:
        text = file.read_bytes()[:_MOST_BYTES].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"plan {file}", f"it cannot be read ({error})") from None
    from_yaml(text, f"plan {file}")
    return text


def given(text: str, model: Any) -> Found:
    """The plan in `text`, which a user gave for `model`.

    Raises:
        UserError: it is no plan, one of another family, or one found in other code.
    """
    found, head = from_yaml(text, "plan")
    what = f"plan of model_type {head['model_type']!r}"
    if head["model_type"] != model.config.model_type:
        raise UserError(what, f"the model is of model_type {model.config.model_type!r}", "give the plan of its family")
    if head["code"] != code_of(model):
        rule = f"it was found in the code of transformers {head['transformers']}, and the installed one has other code"
        raise UserError(what, rule, "find it again: meshlora verify --family NAME --save FILE")
    return found
