"""The HTML report: everything is in it, nothing gets out of it, and nothing of a user's gets in unescaped."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from meshlora_judge.report import figures
from meshlora_judge.report.heatmap import ALARM_SHADES, CALM_SHADES, HeatMap, shade_of
from meshlora_judge.report.page import number, render, write_report

LAYER_MODULES = ("self_attn.q_proj", "self_attn.o_proj", "self_attn", "mlp")
PHASES = ("sequences", "forward", "logits", "loss", "backward", "gradients", "deltas", "saved_file", "collectives")
HOSTILE = "\"'></title></style></script><script>alert(1)</script><img src=x onerror=alert(2)>"


def _tensor(name: str, relative: float | None = 2e-15, limit: float = 1e-11, note: str = "") -> dict[str, Any]:
    passed = relative is not None and relative <= limit
    return {"name": name, "relative": relative, "limit": limit, "passed": passed, "note": note}


def _modules(num_layers: int) -> list[str]:
    inside = [f"model.layers.{i}.{name}" for i in range(num_layers) for name in LAYER_MODULES]
    layers = [f"model.layers.{i}" for i in range(num_layers)]
    return ["model.embed_tokens", *inside, *layers, "model.norm", "lm_head"]


def _run(topology: str = "tp=2", mutation: str | None = None, *, num_layers: int = 2) -> dict[str, Any]:
    modules = _modules(num_layers)
    factors = [f"{m}.lora_{side}" for m in modules if m.endswith("_proj") for side in "AB"]
    tensors = {
        "sequences": [_tensor("sequence 0", 0.0, 0.0)],
        "forward": [_tensor(name) for name in modules],
        "logits": [_tensor("logits")],
        "loss": [_tensor("loss of step 1"), _tensor("loss of step 2")],
        "backward": [_tensor(name) for name in reversed(modules[1:])],
        "gradients": [_tensor(name) for name in reversed(factors)],
        "deltas": [_tensor(name, 3e-14, 1e-6) for name in factors],
        "saved_file": [_tensor(name, 3e-14, 1e-6) for name in [*factors, "logits of PEFT"]],
        "collectives": [_tensor("forward allreduce", 0.0, 0.0, "4 calls, the plan has 4")],
    }
    run: dict[str, Any] = {
        "topology": topology,
        "mutation": mutation,
        "invariant": f"what {mutation} breaks" if mutation else None,
        "seconds": 1.5,
        "error": None,
        "first_divergence": None,
        "tensors": tensors,
        "losses": {"ours": [2.5, 2.25], "reference": [2.5, 2.2500000000000004]},
        "collectives": [{"phase": "forward", "kind": "allreduce", "calls": 4, "budget": 4}],
        "splits": {"model.layers.0.self_attn.q_proj": "column"},
    }
    return _judged(run)


def _judged(run: dict[str, Any]) -> dict[str, Any]:
    """`run` with the phases and the verdict that its tensors make."""
    run["phases"] = {}
    for name, tensors in run["tensors"].items():
        worst = max(tensors, key=lambda t: (not t["passed"], t["relative"] is None, t["relative"] or 0.0))
        run["phases"][name] = {
            "passed": all(t["passed"] for t in tensors),
            "worst_relative": worst["relative"],
            "worst_name": worst["name"],
            "limit": worst["limit"],
            "num_tensors": len(tensors),
        }
    run["passed"] = not run["error"] and all(phase["passed"] for phase in run["phases"].values())
    return run


def _failing(topology: str, mutation: str | None = None, *, relative: float | None = 0.5) -> dict[str, Any]:
    run = _run(topology, mutation)
    name = "model.layers.1.self_attn.o_proj"
    tensor = next(t for t in run["tensors"]["forward"] if t["name"] == name)
    tensor.update(relative=relative, passed=False, note="a note of the tensor")
    run["first_divergence"] = {
        "phase": "forward",
        "name": name,
        "relative": relative,
        "ranks": [0, 1],
        "ratio": 0.5,
        "cause": "the output was not reduced",
        "num_failed": 1,
    }
    return _judged(run)


def _broken_off(topology: str) -> dict[str, Any]:
    run = _run(topology)
    empty = {"error": "rank 1:\nValueError: a rank gave up", "passed": False, "phases": {}, "tensors": {}, "splits": {}}
    return run | empty | {"losses": {"ours": [], "reference": []}, "collectives": []}


def _document(*runs: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "command": "meshlora verify --model some/folder",
        "model_type": "llama",
        "model": "some/folder",
        "versions": {"meshlora": "0.1.0", "torch": "2.13.0"},
        "dtype": "float64",
        "seed": 7,
        "steps": 2,
        "device": "cpu",
        "lora": {"r": 8, "target_modules": [f"linear_{i}" for i in range(40)]},
        "passed": all(run["passed"] == (run["mutation"] is None) for run in runs),
        "seconds": 12.3,
        "runs": list(runs),
        "gradient_axes": [
            {"base": "column", "factor": "lora_A", "split_dim": None, "axes": ["dp", "tp"]},
            {"base": "column", "factor": "lora_B", "split_dim": 0, "axes": ["dp"]},
        ],
    }


class _Reader(HTMLParser):
    """The elements, their attributes, and the text outside of style and script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def verdict(self) -> str:
        return self.text.split("meshlora verify", 1)[1].split()[1]


def _hostile(value: Any) -> Any:
    """Every text of the document, hostile."""
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, list):
        return [_hostile(item) for item in value]
    if isinstance(value, dict):
        # Keys that are the schema's stay; names that come from a model do not.
        return {k if k in _SCHEMA else k + HOSTILE: v if k in _FIXED else _hostile(v) for k, v in value.items()}
    return value


_SCHEMA = (
    *(*_document(), *_run(), *_tensor(""), *PHASES, "ours", "reference", "phase", "kind", "calls", "budget"),
    *("worst_relative", "worst_name", "num_tensors", "base", "factor", "split_dim", "axes"),
    *("ranks", "ratio", "cause", "num_failed"),
)
_FIXED = ("dtype", "factor")


def test_no_text_of_a_user_becomes_markup() -> None:
    plain = render(_document(_failing("tp=2"), _broken_off("dp=2"), _failing("tp=2", "fault"), _run("tp=2", "other")))
    document = _document(_failing("tp=2"), _broken_off("dp=2"), _failing("tp=2", "fault"), _run("tp=2", "other"))
    hostile = render(_hostile(document) | {"passed": False})
    assert HOSTILE in html.unescape(hostile)
    before, after = _Reader(plain), _Reader(hostile)
    assert after.scripts == before.scripts
    assert {tag for tag, _ in after.tags} == {tag for tag, _ in before.tags}
    assert not [attrs for tag, attrs in after.tags if tag == "img" or any(name.startswith("on") for name in attrs)]


def test_every_module_and_every_phase_of_a_run_is_there() -> None:
    run = _run()
    reader = _Reader(render(_document(run)))
    named = {attrs["title"] for tag, attrs in reader.tags if tag == "th" and "title" in attrs}
    for name in _modules(2):
        assert name in named or name in reader.words, name
    for phase in PHASES:
        assert phase in reader.words, phase
    cells = sum(tag == "td" and str(attrs.get("class"))[:1] in "zca" for tag, attrs in reader.tags)
    shown = sum(len(run["tensors"][p]) for p in ("forward", "logits", "backward", "gradients", "deltas", "saved_file"))
    assert cells >= shown


def test_nothing_is_fetched() -> None:
    page = render(_document(_run(), _failing("tp=2", "fault")))
    assert "http://" not in page
    assert "https://" not in page
    assert not re.search(r"@import|url\(", page)
    links = [attrs.get("src") or attrs.get("href") for _, attrs in _Reader(page).tags if {"src", "href"} & attrs.keys()]
    assert links == ["data:,"]


def test_policy_lets_the_own_script_run_and_no_other() -> None:
    reader = _Reader(render(_document(_run())))
    (policy,) = [a["content"] for t, a in reader.tags if t == "meta" and "http-equiv" in a]
    (script,) = reader.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in str(policy)


def test_passed_proof_says_so_and_has_no_section_of_differences() -> None:
    reader = _Reader(render(_document(_run("tp=2"), _run("dp=2,tp=2"), _failing("tp=2", "fault"))))
    assert reader.verdict == "proved"
    assert "100 %" in reader.text
    assert "Where it differs" not in reader.text
    assert "SURVIVED" not in reader.text


def test_failing_run_shows_place_cause_and_note() -> None:
    page = render(_document(_run("dp=2"), _failing("tp=2")))
    reader = _Reader(page)
    assert reader.verdict == "differs"
    for text in ("Where it differs", "the output was not reduced", "model.layers.1.self_attn.o_proj", "a note of the"):
        assert text in reader.text, text
    shown = [a["aria-selected"] for t, a in reader.tags if t == "button" and a.get("role") == "tab"]
    assert shown == ["false", "true"]
    assert ("tbody", {"class": "inside open", "id": "g1-2"}) in reader.tags


def test_not_finite_is_shown_as_infinity() -> None:
    reader = _Reader(render(_document(_failing("tp=2", relative=None))))
    assert reader.verdict == "differs"
    assert "✕ ∞" in reader.text
    assert number(None) == number(float("nan")) == "∞"


def test_survived_mutation_is_an_alarm() -> None:
    reader = _Reader(render(_document(_run(), _run("tp=2", "quiet_fault"), _failing("tp=2", "loud_fault"))))
    assert reader.verdict == "not"
    assert "✕ SURVIVED" in reader.text
    assert "quiet_fault" in reader.text
    assert "50 %" in reader.text


def test_run_that_broke_off_shows_its_error() -> None:
    reader = _Reader(render(_document(_broken_off("tp=2"))))
    assert reader.verdict == "differs"
    assert "ValueError: a rank gave up" in reader.text
    beside = _Reader(render(_document(_run("dp=2"), _broken_off("tp=2"))))
    assert "broke off" in beside.text
    assert "ValueError: a rank gave up" in beside.text


def test_no_mutations_no_table_of_them() -> None:
    assert "invariant" not in _Reader(render(_document(_run()))).text


def test_file_is_written_even_if_the_command_holds_bytes_that_are_not_text(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_report(_document(_run()) | {"command": "meshlora verify --model caf\udce9"}, file)
    assert "\\udce9" in file.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_many_layers_stay_small_and_folded() -> None:
    page = render(_document(*[_run(f"tp={n}", num_layers=80) for n in (2, 4)]))
    assert len(page) < 1_000_000
    assert sum(a.get("class") == "inside open" for _, a in _Reader(page).tags) == 2


def test_cells_are_under_their_columns_and_a_layer_shows_its_worst() -> None:
    run = _run()
    worst = next(t for t in run["tensors"]["gradients"] if t["name"] == "model.layers.0.self_attn.o_proj.lora_B")
    worst["relative"] = 7e-12
    drawn = HeatMap(run, decades=6.0)
    layer = next(group for group in drawn.groups if group["name"] == "model.layers.0")
    head = layer["heads"][3]
    assert (head["relative"], head["of"]) == (7e-12, "self_attn.o_proj")
    row = next(row for row in layer["rows"] if row["label"] == "self_attn.o_proj")
    assert [cell["relative"] for cell in row["cells"] if cell] == [
        2e-15,
        2e-15,
        2e-15,
        7e-12,
        3e-14,
        3e-14,
        3e-14,
        3e-14,
    ]
    mlp = next(row for row in layer["rows"] if row["label"] == "mlp")
    assert [cell is not None for cell in mlp["cells"]] == [True, True, *[False] * 6]
    (logits,) = [group for group in drawn.groups if group["name"] == "logits"]
    saved = logits["rows"][0]["cells"][-1]
    assert (saved["relative"], saved["span"]) == (3e-14, 2)


@pytest.mark.parametrize(
    ("relative", "shade"),
    [(0.0, "z"), (1e-17, "c0"), (0.99e-11, f"c{CALM_SHADES - 1}"), (1.01e-11, "a0"), (3.0, f"a{ALARM_SHADES - 1}")],
)
def test_colour_turns_at_the_limit(relative: float, shade: str) -> None:
    assert shade_of(_tensor("x", relative), decades=6.0) == shade


def test_what_must_be_exact_has_no_calm_shade_for_an_error() -> None:
    assert shade_of(_tensor("x", 1e-17, 0.0), decades=6.0) == f"a{ALARM_SHADES - 1}"
    assert shade_of(_tensor("x", None, 0.0), decades=6.0) == f"a{ALARM_SHADES - 1}"


def test_a_tensor_with_its_own_limit_carries_it() -> None:
    run = _run()
    run["tensors"]["forward"][3].update(limit=2.5e-3)
    page = render(_document(run))
    assert [a["data-l"] for _, a in _Reader(page).tags if "data-l" in a] == ["2.5e-3"]


@pytest.mark.parametrize("num_steps", [1, 3, 200])
def test_any_number_of_steps_can_be_drawn(num_steps: int) -> None:
    losses: list[float | None] = [3.0 - step / 100 for step in range(num_steps)]
    drawing = figures.curve({"ours": losses, "reference": losses})
    gaps = figures.gaps({"losses": {"ours": losses, "reference": losses}})
    assert drawing is not None
    assert gaps is not None
    assert drawing["ours"] == drawing["reference"]
    assert len(drawing["x_ticks"]) <= 10
    assert gaps["worst"] == 0
    assert all(drawing["left"] <= x <= drawing["right"] for x, _ in drawing["ours"])
    assert all(0 <= y <= drawing["bottom"] for _, y in drawing["ours"])


def test_a_loss_that_is_not_finite_is_left_out_of_the_curve_and_fails_in_the_gap() -> None:
    losses: dict[str, list[float | None]] = {"ours": [2.0, None, 2.0], "reference": [2.0, 2.0, 2.0]}
    drawing, gaps = figures.curve(losses), figures.gaps({"losses": losses})
    assert drawing is not None
    assert gaps is not None
    assert len(drawing["ours"]) == 2
    assert [point["passed"] for point in gaps["points"]] == [True, False, True]
    assert gaps["worst"] is None
    render(_document(_run() | {"losses": losses}))


def test_spread_counts_every_measured_tensor_once() -> None:
    tensors = [_tensor("a", 0.0), _tensor("b", 1e-300), _tensor("c", 2e-15), _tensor("d", 1e9), _tensor("e", None)]
    drawing = figures.spread(tensors)
    assert drawing is not None
    assert sum(bar["count"] for bar in drawing["bars"]) == len(tensors)
    assert sum(bar["count"] for bar in drawing["bars"] if bar["kind"] == "over") == 2
    assert drawing["zero"] is not None
    assert drawing["infinite"] is not None
    assert all(0 <= bar["x"] <= drawing["width"] - bar["w"] for bar in drawing["bars"])
