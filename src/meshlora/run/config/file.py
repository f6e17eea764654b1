"""Reading a run file: one YAML -> one tree of dataclasses, with errors that name the key.

Owns: YAML, overrides, splitting a file with several adapters into one run each; a file of `--lora`.
Does not own: names, defaults and rules of the fields (`run.config.run_file`), their types (`run.config.types`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshlora.run.config.mending import Mended, check_lora_keys, checked, mended
from meshlora.run.config.model_presets import OF_MODEL, Facts, facts_of
from meshlora.run.config.presets import TOGETHER, filled, with_preset
from meshlora.run.config.run_file import PER_ADAPTER, RUN_CONTENT, SCHEDULES_TOO, Given, ModelConfig, RunConfig, Source
from meshlora.run.config.types import groups
from meshlora_ground.errors import UserError, did_you_mean, prefixed
from meshlora_ground.hub import located, located_files
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.objectives.referenced import Referenced
from meshlora_ground.reading import read_text
from meshlora_ground.yaml_reading import parse_yaml


def read_run(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run file, apply `--set key.path=value` overrides, and fill in its preset. Raises: UserError: not readable,
    not YAML, unknown key (with the nearest name), wrong type, a rule broken, or a file with several adapters."""
    runs = read_runs(path, overrides)
    if "" not in runs:
        rule = "only train and check take several adapters"
        raise UserError(f"{path} with adapters: {', '.join(runs)}", rule, "write a run file for one of them")
    return runs[""]


def read_runs(path: str | Path, overrides: list[str] | None = None, *, downloads: bool = True) -> dict[str, RunConfig]:
    """Name -> run of each adapter in a run file; a file without `adapters:` is one run, under "".

    The keys of an adapter override the shared ones, and its output is the subfolder of its name in the shared output.
    downloads: names of the hub become folders; else they stay names.

    Raises:
        UserError: as in `read_run`, but for several adapters.
    """
    runs = {}
    for name, tree in _trees(path, overrides).items():
        try:
            runs[name] = _run(tree, Path(path), downloads)
        except UserError as error:
            raise prefixed(error, _prefix(name)) from None
    return runs


def mended_runs(path: str | Path, overrides: list[str] | None = None) -> dict[str, Mended]:
    """Name -> what is left of each run of a file without its mistakes; nothing is looked up on the hub.

    What is wrong with several runs is said of the first.
    """
    try:
        trees = _trees(path, overrides)
    except UserError as error:
        return {"": Mended({}, mistakes=[error])}
    runs, said = {}, set[str]()
    for name, tree in trees.items():
        of_preset = []
        try:
            tree = with_preset(tree)
        except UserError as error:
            of_preset.append(error)
            tree = {key: value for key, value in tree.items() if key != "preset"}
        found = runs[name] = mended(_with_names(tree))
        mistakes = [error for error in (*of_preset, *found.mistakes) if f"{error}" not in said]
        said |= {f"{error}" for error in mistakes}
        found.mistakes = [prefixed(error, _prefix(name)) for error in mistakes]
    return runs


def given_keys(path: str | Path, overrides: list[str] | None = None) -> dict[str, set[str]]:
    """Name of each run of a file -> the keys, with their groups, that it or its preset has values for."""
    found = {}
    for name, tree in _trees(path, overrides).items():
        keys = found[name] = set[str]()
        if tree.get("preset") in OF_MODEL:
            keys.add("train.lr")
        for group, values in with_preset(tree).items():
            if isinstance(values, Mapping):
                keys |= {f"{group}.{key}" for key in values}
    return found


def _prefix(name: str) -> str:
    return f"adapters.{name}: " if name else ""


def _trees(path: str | Path, overrides: list[str] | None) -> dict[str, dict[str, Any]]:
    """Name -> the tree of each adapter in a run file, as in `read_runs`."""
    tree = _read_tree(Path(path))
    for override in overrides or []:
        _apply(tree, override)
    if "adapters" not in tree:
        return {"": tree}
    adapters = tree.pop("adapters")
    if not isinstance(adapters, dict) or not adapters:
        rule = "it maps names to what each adapter has for itself, lora, data, train"
        raise UserError(f"adapters: {adapters!r}", rule)
    trees = {}
    for name, own in adapters.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            rule = f"a name is made of letters, digits, - and _, at most {_LONGEST_NAME}, and names a folder"
            raise UserError(f"adapters.{name}", rule)
        if name.lower() in _TAKEN:
            raise UserError(f"adapters.{name}", "a run keeps something else under this name", "choose another")
        trees[name] = _tree_of(tree, name, own)
    return trees


def _files(given: Given, option: str, split: str) -> Given:
    """`given` with files for names of datasets, and the default split of a folder that has several."""
    if given is None:
        return None
    found: list[str | Source] = []
    if isinstance(given, list):
        for each in given:
            part = _files(each, option, split)
            found += part if isinstance(part, list) else [part or each]
        return found
    if isinstance(given, Source):
        paths = list[str]()
        for path in given.paths:
            paths += _split_files(path, option, given.split or split)
        if paths == given.paths:
            return given
        if given.split and not set(paths).isdisjoint(given.paths):
            raise UserError(
                f"{option}: path: {', '.join(given.paths)} with split: {given.split}",
                "some are names of the hub, and some are files or folders of this machine, whose split it would be too",
                "give them as two sources",
            )
        return dataclasses.replace(given, path=paths, split=None)
    found += _split_files(given, option, split)
    return given if found == [given] else found


def _split_files(given: str, option: str, split: str) -> list[str]:
    if (Path(given) / "dataset_dict.json").is_file() and (Path(given) / split).is_dir():
        return [str(Path(given) / split)]
    return located_files(given, option, split=split)


# Names of adapters become folders in the output, next to the ranks' logs, and possibly next to the files of an earlier
# or later run with one adapter.
_LONGEST_NAME = 100
_NAME, _TAKEN = re.compile(rf"[A-Za-z0-9_-]{{1,{_LONGEST_NAME}}}"), ("logs", *RUN_CONTENT)
_DEEPEST_KEY = 10
_AROUND = 5  # folders in which paths of a run file are looked for


def _run(tree: dict[str, Any], file: Path, downloads: bool) -> RunConfig:
    facts = None
    if downloads:
        facts = functools.partial(_facts, tree, file)
    config = checked(_with_names(with_preset(tree, facts=facts)))
    if not downloads:
        return config
    check_folder(file, paths_in(config))
    return _located(config)


def paths_in(config: RunConfig) -> list[str]:
    """The paths of model, adapter and data, or their names on the hub."""
    inputs, found = config.inputs, list[str]()
    for option in ("model.path", "adapter", "data.train", "data.eval"):
        found += inputs.get(option, [])
    return found


def check_folder(file: Path, paths: Iterable[str]) -> bool:
    """Refuse a run file that is read in another folder than it was written for: its `paths`, which are relative to the
    working directory, are not there, but are relative to a folder around the file. Raises: UserError."""
    missing = [path for path in paths if not os.path.isabs(path) and not os.path.lexists(path)]
    for folder in [*file.absolute().parents][:_AROUND]:
        there = [path for path in missing if (folder / path).exists()]
        if there:
            rule = f"paths are relative to the working directory, {Path.cwd()}, where there is none"
            raise UserError(f"{', '.join(there)} in {file}", rule, f"go to {folder}, or write them in full")
    return True


def _with_names(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` with a group for an objective that is given by its kind alone, and our name of its schedule."""
    train = tree.get("train")
    if not isinstance(train, Mapping):
        return tree
    train = dict(train)
    objective, schedule = train.get("objective"), train.get("schedule")
    if isinstance(objective, str):
        train["objective"] = {"kind": objective}
    if isinstance(schedule, str):
        train["schedule"] = SCHEDULES_TOO.get(schedule, schedule)
    return {**tree, "train": train}


def _facts(tree: Mapping[str, Any], file: Path) -> Facts:
    """What a preset knows of the model of a run file. Raises: UserError."""
    model = tree.get("model")
    if not isinstance(model, Mapping):
        model = {}
    path, revision = model.get("path"), model.get("revision")
    if not isinstance(path, str) or not isinstance(revision, str | None):
        raise UserError("model.path", "this key is required, and the preset reads the model's config.json")
    check_folder(file, [path])
    return facts_of(located(path, "model.path", kind="config", revision=revision))


def _located(config: RunConfig) -> RunConfig:
    """`config` with folders for names of the hub. Raises: UserError."""
    model = config.model
    folder = located(model.path, "model.path", revision=model.revision, trust_remote_code=model.trust_remote_code)
    adapter = config.adapter and located(config.adapter, "adapter", kind="adapter")
    train, reference = config.train, config.reference
    if isinstance(train.objective, Referenced) and reference is not None and reference != config.adapter:
        found = located(reference, "train.objective.reference", kind="adapter")
        train = dataclasses.replace(train, objective=dataclasses.replace(train.objective, reference=found))
    if isinstance(train.objective, Distill) and config.teacher is not None:
        found = located(config.teacher, "train.objective.teacher", trust_remote_code=model.trust_remote_code)
        train = dataclasses.replace(train, objective=dataclasses.replace(train.objective, teacher=found))
    data = config.data
    if data.follow_s is None or config.rl is not None:  # a stream need not be there yet
        trained = _files(data.train, "data.train", "train")
        assert trained is not None
        data = dataclasses.replace(data, train=trained)
    if data.eval_share is None:
        data = dataclasses.replace(data, eval=_files(data.eval_files, "data.eval", "validation"))
    model, lora = _grown(dataclasses.replace(model, path=folder, revision=None), config.lora, adapter)
    if data.max_length == "model":
        data = dataclasses.replace(data, max_length=positions_of(model))
    return dataclasses.replace(config, data=data, model=model, adapter=adapter, train=train, lora=lora)


def _grown(
    model: ModelConfig, lora: dict[str, Any] | None, adapter: str | None
) -> tuple[ModelConfig, dict[str, Any] | None]:
    """(`model` with the tokens that it or the adapter adds, `lora` with their rows). Raises: UserError."""
    trust, tokens, special = model.trust_remote_code, model.add_tokens or [], model.add_special_tokens or []
    if adapter is None and not tokens and not special:
        return model, lora
    from meshlora.run import grown  # of transformers, which other run files need not wait for

    if adapter is not None:
        path = grown.with_vocabulary_of(model.path, adapter, trust_remote_code=trust)
        return dataclasses.replace(model, path=path), lora
    added = grown.with_tokens(model.path, tokens, special, trust_remote_code=trust)
    lora = grown.named_base(grown.rows_to_train(lora or {}, added), model.path)
    return dataclasses.replace(model, path=added.folder, add_tokens=None, add_special_tokens=None), lora


def positions_of(model: ModelConfig) -> int:
    """The most tokens of a sequence that the model has positions for. Raises: UserError: its config.json says none."""
    from meshlora.loading.blueprint import read_model_config  # of transformers, which other run files need not wait for
    from meshlora.loading.guards import longest_fixed_length
    from meshlora.loading.positions import most_positions

    found = read_model_config(model.path, trust_remote_code=model.trust_remote_code)
    limits = [most_positions(found)]
    if (fixed := longest_fixed_length(found)) is not None:
        limits.append(fixed[0])
    known = [limit for limit in limits if limit is not None]
    if not known:
        rule = f"the config.json of {model.path} has no max_position_embeddings"
        raise UserError("data.max_length=model", rule, "give a number of tokens")
    return min(known)


def read_lora(path: str | Path) -> dict[str, Any]:
    """Fields of `peft.LoraConfig` from the YAML file of `--lora`, top-level or under the key `lora`, as in a run file.
    Raises: UserError: not readable, or not a mapping."""
    try:
        values = parse_yaml(read_text(Path(path)))
    except FileNotFoundError:
        raise UserError(f"--lora {path}", "there is no such file") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"--lora {path}", f"it is not readable YAML ({why})") from None
    if isinstance(values, dict) and isinstance(values.get("lora"), dict):
        values = values["lora"]
    if not isinstance(values, dict):
        raise UserError(f"--lora {path}", "it must hold fields of peft.LoraConfig, as in r: 16")
    check_lora_keys(values)
    return values


def _read_tree(file: Path) -> dict[str, Any]:
    try:
        tree = parse_yaml(read_text(file))
    except FileNotFoundError:
        near = ""
        if file.parent.is_dir():
            near = did_you_mean(file.name, [p.name for p in file.parent.glob("*.y*ml")])
        raise UserError(f"{file}", "there is no such run file", near.removesuffix("known: ")) from None
    except OSError as error:
        raise UserError(f"{file}", f"it is not readable YAML ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{file}", f"it is not readable YAML ({error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file}", "a run file is a mapping with model:, data:, train: and lora:")
    return tree


def _tree_of(shared: Mapping[str, Any], name: str, own: Any) -> dict[str, Any]:
    """The tree of a run file for adapter `name` alone. own: its keys."""
    where = f"adapters.{name}"
    if not isinstance(own, Mapping):
        raise UserError(f"{where}: {own!r}", "it must be a group of keys: lora, adapter, data, train")
    tree = dict(shared)
    for group, values in own.items():
        if group == "adapter":
            tree.pop("lora", None)
            tree["adapter"] = values
            continue
        if group not in ("lora", *PER_ADAPTER):
            near = did_you_mean(str(group), ("lora", "adapter", *PER_ADAPTER))
            raise UserError(f"{where}.{group}", "an adapter has no such key for itself", near)
        if not isinstance(values, Mapping):
            raise UserError(f"{where}.{group}: {values!r}", "it must be a group of keys")
        of_all = set[str]()
        if group in PER_ADAPTER:
            of_all = {*groups()[group]} - PER_ADAPTER[group]
        for key in values:
            if key in of_all:  # `checked` refuses other keys
                way_out = f"give {group}.{key} outside of adapters:, for all of them"
                raise UserError(f"{where}.{group}.{key}", "an adapter has no such key for itself", way_out)
        for_all = shared.get(group) or {}
        if not isinstance(for_all, Mapping):
            raise UserError(f"{group}: {for_all!r}", "it must be a group of keys")
        tree[group] = filled(values, for_all, TOGETHER["train"] if group == "train" else ())
    train = tree.get("train")
    if isinstance(train, Mapping) and isinstance(train.get("output"), str) and train["output"].strip():
        tree["train"] = {**train, "output": str(Path(train["output"]) / name)}
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set `a.b=value` in the tree; the value is YAML."""
    path, equals, text = override.partition("=")
    if not equals or "" in path.split("."):
        raise UserError(f"--set {override}", "it must read key.path=value, as in --set train.lr=1e-4")
    *parents, last = path.split(".")
    if len(parents) > _DEEPEST_KEY:
        raise UserError(f"--set {override}", f"a key has at most {_DEEPEST_KEY} groups around it")
    for key in parents:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise UserError(f"--set {override}", f"{key} is a value, not a group of keys")
    # As in the file: `1e-4` is a number, and `[a, b]` a list.
    tree[last] = yaml_value(f"--set {override}", text)


def yaml_value(given: str, text: str) -> Any:
    """The value of `--set KEY=text`. Raises: UserError: it is no YAML."""
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(given, f"{text[:60]!r} is not a YAML value ({error})", "put it in quotes") from None
