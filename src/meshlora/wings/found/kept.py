"""Found plans as YAML: kept for the next process, shipped with meshlora, and for a user to read and give back.

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
import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
import yaml

from meshlora.plan.families.family import FamilyPlan, Leaf
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
_LISTS = ("wide_norms", "whole", "before", "after", "opened")
_MAPS = ("leaves", "local", "sliced", "parameters", "passes", "units", "kept_whole")


def code_of(model: Any) -> str:
    """A hash of the code of the family of `model`."""
    return digest([inspect.getsource(sys.modules[type(model).__module__])])


def as_values(found: Found) -> dict[str, Any]:
    """The plain values of a plan, as YAML has them."""
    values: dict[str, Any] = {**vars(found.plan), "units": found.units, "kept_whole": found.kept_whole}
    values["leaves"] = {path: _words(leaf) for path, leaf in found.plan.leaves.items()}
    plain: dict[str, Any] = json.loads(json.dumps({name: each for name, each in values.items() if each}))
    return {"leaves": {}, **plain}


def as_yaml(found: Found, model: Any) -> str:
    """The text of a file that `from_yaml` reads."""
    head = dict(zip(_HEAD, (model.config.model_type, transformers.__version__, code_of(model)), strict=True))
    return yaml.safe_dump({**head, **as_values(found)}, sort_keys=False, width=120)


def _words(leaf: Leaf) -> str | dict[str, Any]:
    changed = {name: value for name, value in vars(leaf).items() if value != getattr(Leaf(leaf.split), name)}
    return {"split": str(leaf.split), **changed} if changed else str(leaf.split)


def from_yaml(text: str, what: str) -> tuple[Found, dict[str, str]]:
    """(the plan in a file, its `model_type`, `transformers` and `code`). what: the file, in messages.

    Raises:
        UserError: it is no such file.
    """
    try:
        return _read(parse_yaml(text), what)
    except ValueError as error:
        raise UserError(what, str(error)) from None


def _read(values: Any, what: str) -> tuple[Found, dict[str, str]]:
    if not isinstance(values, dict) or "leaves" not in values:
        raise UserError(what, "it must be a plan, as meshlora verify --save writes it")
    for name, value in values.items():
        if name not in (*_HEAD, *_LISTS, *_MAPS):
            raise UserError(f"{what}: {name}", "a plan has no such key", did_you_mean(str(name), [*_MAPS, *_LISTS]))
        kind = dict if name in _MAPS else list if name in _LISTS else str
        if not isinstance(value, kind) or not all(isinstance(each, str) for each in value):
            raise UserError(f"{what}: {name}", f"it must be a {kind.__name__} of names")
    maps: dict[str, Any] = {name: values.get(name, {}) for name in _MAPS}
    for path, value in maps["leaves"].items():
        maps["leaves"][path] = _leaf(f"{what}: {path}", value)
    for name, rule, is_right in (
        ("local", "a list of attributes", lambda v: isinstance(v, list)),
        ("passes", "a list of arguments", lambda v: isinstance(v, list)),
        ("parameters", "the number of a dim", lambda v: type(v) is int and 0 <= v < 8),
        ("sliced", "argument: dim", lambda v: isinstance(v, dict)),
    ):
        for path, value in maps[name].items():
            if not is_right(value):
                raise UserError(f"{what}: {name}: {path}: {value!r}", f"it must be {rule}")
            maps[name][path] = tuple(value) if isinstance(value, list) else value
    units, kept_whole = maps.pop("units"), maps.pop("kept_whole")
    lists: dict[str, Any] = {name: tuple(values.get(name, ())) for name in _LISTS}
    plan = FamilyPlan(**maps, **lists)
    return Found(plan, units, kept_whole), {name: values.get(name, "") for name in _HEAD}


def _leaf(what: str, value: Any) -> Leaf:
    fields = value if isinstance(value, dict) else {"split": value}
    pieces, groups, local = fields.get("pieces", ""), fields.get("groups", 1), fields.get("local_groups", 0)
    is_known = fields.get("split") in ("column", "row") and fields.keys() <= {*vars(Leaf(Split.ROW))}
    has_groups = groups in ("heads", "kv_heads") or (type(groups) is int and groups > 0)
    if not (is_known and has_groups and isinstance(pieces, str) and type(local) is int):
        rule = "it must be column or row, or a mapping of split, pieces, groups and local_groups"
        raise UserError(f"{what}: {value!r}", rule)
    return Leaf(Split(fields["split"]), pieces, groups, local)


@functools.cache
def all_shipped() -> Mapping[str, Any]:
    """Names of families -> the plan that they share, as plain values."""
    return parse_yaml(_SHIPPED.read_text(encoding="utf-8")) or {}


def shipped(model_type: str) -> Found | None:
    """The plan of a family that was found, proved and recorded (`scripts/keep_plans.py`); None: it has none."""
    for names, values in all_shipped().items():
        if model_type in names.split():
            return _read(json.loads(json.dumps(values)), f"{_SHIPPED}: {model_type}")[0]
    return None


def kept(model: Any, find: Callable[[], Found]) -> Found:
    """What an earlier process has found for the configuration of `model` with this code, or what `find` does.

    A cache that cannot be used costs no more than another search.
    """
    words = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    key = digest([words, transformers.__version__, code_of(model), *sources_of("meshlora.wings.found.finder")])
    path = private.CACHE.expanduser() / "found"
    with contextlib.suppress(OSError, UserError, UnicodeDecodeError), open_own(path / f"{key}.yaml") as file:
        return from_yaml(file.read(_MOST_BYTES).decode(), str(path))[0]
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
