"""One LoRA configuration by PEFT on one process, and by meshlora on a mesh: everything that a user would see.

Owns: what PEFT computes (`theirs`), what meshlora computes of it (`ours`), and the verdict. Does not own: which
configurations there are (`peers.configurations`).

Each adapter is PEFT's with random values. Compared in float64: logits, loss, the adapter after a step of SGD, logits
with the adapter off and merged; the names and shapes of a fresh adapter of ours, and our file in PEFT again.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.loading.blueprint import read_model_config
from meshlora_extra.merging.merge import merge
from meshlora_ground.errors import MeshloraError
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from peers.configurations import Case

# Tried in this order, until PEFT takes the names of a configuration.
FAMILIES = ("llama", "gpt2", "opt", "bloom", "mixtral", "qwen3_moe", "llama4_text")
LR = 0.1
_LIMIT = 1e-9
_WEIGHTS = "adapter_model.safetensors"


def base_of(family: str, folder: Path) -> Path:
    """The folder of a twin of `family` with random weights in float64, made once."""
    made = folder / family
    if not made.is_dir():
        write_twin(twin_config(family, tp=2), made, dtype=torch.float64, seed=1)
    return made


def batch() -> dict[str, Tensor]:
    """Three rows of unequal lengths; token 1 is in each, token 2 in one: some configurations ask for them."""
    ids = torch.randint(3, 250, (3, 14), generator=torch.Generator().manual_seed(3))
    ids[0, 4] = ids[1, 2] = ids[1, 9] = ids[2, 7] = 1
    ids[2, 5] = 2
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def theirs(case: Case, bases: Path, out: Path) -> dict[str, Any]:
    """What PEFT makes of a case: `family` and numbers, or `refused`. Leaves `out/start` and `out/after`."""
    refused = ""
    for family in [case.family] if case.family else FAMILIES:
        base = base_of(family, bases)
        try:
            config = LoraConfig(**copy.deepcopy(case.options))
            model = _peft_model(base, config)
            _randomize(model)
        except Exception as error:  # noqa: BLE001  # of PEFT: anything
            refused = refused or f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        names = {name: list(value.shape) for name, value in _saved(model, out / "start").items()}
        with meshlora.lift():
            return {"family": family, "shapes": names, **_numbers_of(model, base, config, out)}
    return {"family": case.family or FAMILIES[0], "refused": refused}


def _plain(folder: Path) -> Any:
    """A model of transformers in float64, for which grouped products of experts have no kernel."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()


def _peft_model(base: Path, config: LoraConfig) -> Any:
    model = _plain(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = get_peft_model(model, config)
    return _in_float64(made)


def _in_float64(model: Any) -> Any:
    """Its parameters, which PEFT may make in float32: its buffers are computed anew, in float64 where lifted."""
    for value in model.parameters():
        value.data = value.data.double()
    return model.eval()


def _randomize(model: Any) -> None:
    """Each trained value moved, so that no factor is zero; the same in every run."""
    numbers = torch.Generator().manual_seed(11)
    for name, value in sorted(model.named_parameters()):
        if value.requires_grad:
            value.data += 0.1 * torch.randn(value.shape, generator=numbers, dtype=torch.float64)
            assert value.abs().max() > 0, name


def _saved(model: Any, folder: Path) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(folder))
    return load_file(folder / _WEIGHTS)


def _numbers_of(model: Any, base: Path, config: LoraConfig, out: Path) -> dict[str, Any]:
    with torch.no_grad(), model.disable_adapter():
        off = model(**batch()).logits
    found = model(**batch())
    trained = [value for value in model.parameters() if value.requires_grad]
    torch.optim.SGD(trained, lr=LR).zero_grad()
    found.loss.backward()
    before = [value.detach().clone() for value in trained]
    torch.optim.SGD(trained, lr=LR).step()
    _saved(model, out / "after")
    for value, was in zip(trained, before, strict=True):
        value.data.copy_(was)
    plain = _plain(base)
    with torch.no_grad():
        of_base = plain(**batch()).logits
        merged = None
        if config.alora_invocation_tokens is None and not config.lora_bias:  # PEFT merges none of these
            merged = model.merge_and_unload()(**batch()).logits
    return {"logits": found.logits.detach(), "loss": found.loss.item(), "off": off, "base": of_base, "merged": merged}


def ours(base: Path, start: Path, options: Mapping[str, Any], topology: str, out: Path) -> dict[str, Any]:
    """Body of a rank: the same of meshlora, from PEFT's folder, and a fresh adapter.

    Leaves `out/after` and `out/fresh`.
    """
    found: dict[str, Any] = {}
    try:
        config = LoraConfig(**copy.deepcopy(dict(options)))
    except (TypeError, ValueError) as error:
        return {"fresh refused": f"peft.LoraConfig: {error}"}
    try:
        fresh = meshlora.load(str(base), lora=config, topology=topology, dtype="float64")
        meshlora.save_adapter(fresh, out / "fresh")
        del fresh
    except MeshloraError as error:
        found["fresh refused"] = str(error)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is reported
        found["fresh crashed"] = f"{type(error).__name__}: {error}"
    try:
        return found | _ours_of(base, start, topology, out)
    except MeshloraError as error:
        return found | {"refused": str(error)}
    except Exception as error:  # noqa: BLE001
        return found | {"crashed": f"{type(error).__name__}: {error}"}


def _ours_of(base: Path, start: Path, topology: str, out: Path) -> dict[str, Any]:
    model = meshlora.load(str(base), adapter=str(start), topology=topology, dtype="float64").eval()
    given = batch()
    tokens = {name: given[name] for name in ("input_ids", "attention_mask")}
    found: dict[str, Any] = {}
    with meshlora.lift():
        with torch.no_grad():
            found["logits"] = model(**tokens).logits
            try:
                with meshlora.disable_adapter(model):
                    found["off"] = model(**tokens).logits
            except MeshloraError as error:
                found["off refused"] = str(error)
        optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=LR)
        with meshlora.step(model, optimizer, max_norm=None) as step:
            loss = model(**given).loss
            found["loss"] = loss.item()
            step.backward(loss)
    meshlora.save_adapter(model, out / "after")
    return found


def merged_by_us(base: Path, start: Path, out: Path) -> tuple[Tensor | None, str]:
    """(logits of `meshlora merge`, why there are none)."""
    try:
        config = read_model_config(str(base), trust_remote_code=False)
        merge(base, start, out / "merged", config=config, check_logits=False)
        model = _plain(out / "merged")
    except MeshloraError as error:
        return None, str(error)
    with torch.no_grad(), meshlora.lift():
        return model(**batch()).logits, ""


def in_peft(base: Path, adapter: Path) -> Tensor:
    """Logits of PEFT with the folder of an adapter."""
    model = _plain(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _in_float64(PeftModel.from_pretrained(model, str(adapter)))
    with torch.no_grad(), meshlora.lift():
        return model(**batch()).logits


def verdict(
    peft: Mapping[str, Any], mine: Mapping[str, Any], base: Path, out: Path, *, merged: bool
) -> tuple[str, str]:
    """(what it is, why) of a case. out: the folder with `start`, `after` of PEFT, and `mine` of meshlora.

    merged: whether `meshlora merge` is asked too.
    """
    if words := mine.get("crashed") or mine.get("fresh crashed"):
        return "CRASHED", words
    if "refused" in peft:
        if words := mine.get("fresh refused"):
            return "both refuse", words
        try:
            in_peft(base, out / "mine" / "fresh")
        except Exception as error:  # noqa: BLE001  # of PEFT: anything
            return "WRONG", f"its folder is not read by PEFT: {error}".splitlines()[0]
        return "ours alone", peft["refused"]
    if words := mine.get("refused") or mine.get("fresh refused"):
        return "refused", words
    gaps = {
        "logits": gap(mine["logits"], peft["logits"]),
        "loss": abs(mine["loss"] - peft["loss"]),
        **_of_files(out, peft["shapes"]),
    }
    notes = []
    if "off" in mine:
        gaps["off"] = gap(mine["off"], peft["base"])
        if gap(peft["off"], peft["base"]) > _LIMIT:
            notes.append("PEFT's disabled adapter is not the base")
    if merged and peft["merged"] is not None:
        logits, why = merged_by_us(base, out / "start", out / "mine")
        if logits is None:
            notes.append(f"no merge: {why}")
        else:
            gaps["merged"] = gap(logits, peft["logits"])
            if gap(peft["merged"], peft["logits"]) > _LIMIT:
                notes.append("PEFT's merged model is not its unmerged one")
    gaps["in PEFT"] = gap(in_peft(base, out / "mine" / "after"), in_peft(base, out / "after"))
    wrong = {name: value for name, value in gaps.items() if not value < _LIMIT}
    if wrong:
        return "WRONG", ", ".join(f"{name} {value:.1e}" for name, value in wrong.items())
    better = any(note.startswith("PEFT's") for note in notes)
    return "better" if better else "equal", "; ".join(notes) or f"largest {max(gaps.values()):.0e}"


def _of_files(out: Path, shapes: Mapping[str, list[int]]) -> dict[str, float]:
    """Gaps of names and shapes of a fresh adapter (0 or inf), and of the gradients that a step of SGD has left."""
    fresh, after = load_file(out / "mine" / "fresh" / _WEIGHTS), load_file(out / "mine" / "after" / _WEIGHTS)
    before, expected = load_file(out / "start" / _WEIGHTS), load_file(out / "after" / _WEIGHTS)
    # PEFT stores the base's embedding beside an adapter on it, which nobody trains.
    own = {name for name in before if name in after or not before[name].equal(expected[name])}
    found: dict[str, float] = {}
    made = {name: list(value.shape) for name, value in fresh.items()}
    if made != {name: shapes[name] for name in own}:
        odd = sorted(name for name in {*made, *own} if name not in own or made.get(name) != shapes[name])
        found[f"names: {odd[0]}, {len(odd)} of them"] = float("inf")
    if set(after) != own:
        return found | {f"names after a step: {sorted(set(after) ^ own)[:2]}": float("inf")}
    largest = max(float((expected[name] - before[name]).abs().max()) for name in own)
    differ = max(float((expected[name] - after[name].double()).abs().max()) for name in own)
    return found | {"gradients": differ / max(largest, 1e-30)}


def gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))
