"""`meshlora publish`, and `meshlora rl` with an engine elsewhere: adapters appear whole, and the newest one acts."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from meshlora.adapter.formats.peft_format import CONFIG_FILE, WEIGHTS_FILE
from meshlora.cli.main import main
from meshlora.reading.tokenizer import load_tokenizer
from meshlora.run.config.file import read_run
from meshlora.run.decoding import Continuation
from meshlora.run.together import prepare_run
from meshlora_extra.rl.engine import Engine
from meshlora_extra.rl.publishing import publish, remove_older
from meshlora_extra.rl.rewards import Rewards
from meshlora_extra.rl.rollouts import Rollouts
from meshlora_extra.rl.run_with_rollouts import check_rl
from meshlora_ground.errors import UserError
from tests.extra.test_rl import records_of, rl_file, run_rl
from tests.for_each import for_each
from tests.pool import Pool, RankError
from tests.processes import answering
from tests.ranks.test_trainer import small_base
from tests.run_files import metrics_of

Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """(address, requests) of a server on loopback whose answers are (status, JSON or text)."""
    seen: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body))
            status, content = answer(self.path, body)
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}", seen


def peft_folder(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    base = AutoModelForCausalLM.from_pretrained(small_base())
    torch.manual_seed(seed)
    options = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False} | changes
    model = get_peft_model(base, LoraConfig(**options))
    model.save_pretrained(folder)
    return folder


def test_a_version_never_changes_and_latest_is_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (peft_folder(tmp_path / f"adapter-{seed}", seed=seed) for seed in (1, 2))
    to = tmp_path / "published"
    with serving(lambda *_: (200, "Success: added")) as (url, seen):
        for adapter in (one, other, one):
            assert main(["publish", str(adapter), "--to", str(to), "--url", f"{url}/v1", "--name", "mine"]) == 0
    versions = sorted(each.name for each in to.iterdir() if not each.is_symlink())
    assert len(versions) == 2
    assert (to / "latest" / WEIGHTS_FILE).read_bytes() == (one / WEIGHTS_FILE).read_bytes()
    paths = [body["lora_path"] for _, body in seen]
    assert paths[0] == paths[2] != paths[1]
    assert {(path, body["lora_name"], body["load_inplace"]) for path, body in seen} == {
        ("/v1/load_lora_adapter", "mine", True)
    }
    assert f"published: {paths[0]}" in capsys.readouterr().out
    assert {file.name for file in Path(paths[0]).iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}


def test_only_older_versions_of_steps_are_removed(tmp_path: Path) -> None:
    """Not what else lies in a folder that is published to."""
    one, other = (peft_folder(tmp_path / f"adapter-{seed}", seed=seed) for seed in (1, 2))
    to = tmp_path / "models"
    kept = [to / "my-model", to / "step-000001", to / "step-000001-0a1b2c3d"]
    for folder in kept:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"mine")
    kept.append(publish(one, to, name="adapter"))
    versions = [publish(adapter, to, name=f"step-{step:06d}") for step, adapter in enumerate([one, other, one])]
    remove_older(to, 1)
    assert {each.name for each in to.iterdir()} == {"latest", *(each.name for each in [*kept, versions[-1]])}


def test_what_is_half_written_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, to = peft_folder(tmp_path / "adapter"), tmp_path / "published"

    replace = os.replace

    def stops(one: Any, other: Any) -> None:
        if Path(other).parent == to:
            raise OSError(28, "No space left on device")
        replace(one, other)

    monkeypatch.setattr("os.replace", stops)
    with pytest.raises(UserError, match=r"nothing can be published there \(No space left on device\)"):
        publish(adapter, to, name="adapter")
    assert list(to.iterdir()) == []


@pytest.mark.parametrize("option", [{"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["norm"]}])
def test_what_engines_compute_otherwise_is_refused(
    option: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = peft_folder(tmp_path / "adapter", **option)
    assert main(["publish", str(adapter), "--to", str(tmp_path / "published")]) == 2
    (name,) = option
    assert f"{CONFIG_FILE}: {name}=" in capsys.readouterr().err
    assert not (tmp_path / "published").exists()


CONVERTED: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "ranks": {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 16}, "target_modules": ["q_proj", "up_proj"]},
    "pattern": {"target_modules": r".*\.0\..*(q|k)_proj"},
}


@pytest.mark.parametrize("name", CONVERTED)
def test_what_engines_read_otherwise_is_converted(name: str, tmp_path: Path) -> None:
    """They divide one lora_alpha by one r, and list the names of modules: PEFT computes the same with either folder."""
    adapter = peft_folder(tmp_path / "adapter", **CONVERTED[name])
    version = publish(adapter, tmp_path / "published", name="a")
    stored = json.loads((version / CONFIG_FILE).read_text())
    assert not any(stored[option] for option in ("use_rslora", "rank_pattern", "alpha_pattern"))
    assert isinstance(stored["target_modules"], list)
    ids, found = torch.arange(3, 23).view(2, 10), []
    for folder in (adapter, version):
        base = AutoModelForCausalLM.from_pretrained(small_base(), dtype=torch.float64)
        with warnings.catch_warnings():  # of layers that the pattern left out, and that have no factors
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(base, folder)
        with torch.no_grad():
            found.append(model(ids).logits)
            with model.disable_adapter():
                assert (model(ids).logits - found[0]).abs().max() > 1e-3
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


WRONG = [
    ({"alpha_pattern": {"q_proj": 5}, "target_modules": ["q_proj", "v_proj"]}, "is scaled by 2.5, .*engines know one"),
    ({"init_lora_weights": "pissa"}, "the factors are of a base from which a part was taken"),
    ({"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"}, "engines apply an adapter to all tokens"),
]


@for_each(("changes", "words"), WRONG)
def test_what_engines_would_compute_otherwise_is_not_published(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    adapter = peft_folder(tmp_path / "adapter", target_modules=changes.pop("target_modules", ["q_proj"]))
    file = adapter / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=words):
        publish(adapter, tmp_path / "published", name="a")
    folder = tmp_path / "published"
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (404, {"detail": "Not Found"}, "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=true and --enable-lora"),
        (400, {"error": {"message": "rank 64 is above max_lora_rank"}}, "400 rank 64 is above max_lora_rank"),
        (500, "went wrong", "it loads an adapter not: 500 went wrong"),
    ],
)
def test_an_engine_that_refuses_is_quoted(
    status: int, content: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = peft_folder(tmp_path / "adapter")
    with serving(lambda *_: (status, content)) as (url, _):
        assert main(["publish", str(adapter), "--to", str(tmp_path / "to"), "--url", url]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the engine at http://127.0.0.1:")
    assert words in line


def test_an_engine_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda *_: (200, "")) as (url, _):
        pass
    adapter = str(peft_folder(tmp_path / "adapter"))
    assert main(["publish", adapter, "--to", str(tmp_path / "to"), "--url", url]) == 2
    assert "it cannot be reached" in capsys.readouterr().err
    assert main(["publish", adapter, "--to", str(tmp_path / "to"), "--url", "localhost:80"]) == 2
    assert "it begins with http:// or https://" in capsys.readouterr().err
    assert main(["publish", str(tmp_path / "nothing"), "--to", str(tmp_path / "to")]) == 2
    assert "nothing: there is no such folder" in capsys.readouterr().err


def _choice(index: int, **changes: Any) -> dict[str, Any]:
    return {"index": index, "token_ids": [index, 9], "logprobs": {"token_logprobs": [-1.0, -0.5]}} | changes


def test_completions_are_in_the_order_of_their_prompts() -> None:
    with serving(lambda *_: (200, {"choices": [_choice(index) for index in (3, 0, 2, 1)]})) as (url, seen):
        found = Engine(url).complete("mine", [[1, 2], [3]], vocab_size=10, n=2, max_tokens=5, temperature=1.0)
    assert found == [[Continuation([i, 9], [-1.0, -0.5]) for i in pair] for pair in ((0, 1), (2, 3))]
    ((path, body),) = seen
    assert path == "/v1/completions"
    assert body == {
        "model": "mine",
        "prompt": [[1, 2], [3]],
        "n": 2,
        "max_tokens": 5,
        "return_token_ids": True,
        "logprobs": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def _npy(array: np.ndarray) -> str:
    with io.BytesIO() as file:
        np.save(file, array)
        return base64.b64encode(file.getbuffer()).decode()


def test_experts_of_an_engine_that_says_them_are_in_the_records(tmp_path: Path) -> None:
    routed = np.arange(24, dtype=np.uint8).reshape(3, 4, 2)  # of two tokens of the prompt and the first after it
    with serving(
        lambda *_: (200, {"choices": [_choice(0, routed_experts=_npy(routed)), _choice(1, finish_reason="length")]})
    ) as (url, _):
        ((one, other),) = Engine(url).complete("mine", [[1, 2]], vocab_size=64, n=2, max_tokens=2)
    assert one.routed_experts == routed.tolist()
    assert other.routed_experts is None
    assert (one.is_truncated, other.is_truncated) == (False, True)
    run = prepare_run(read_run(rl_file(tmp_path, "experts", "")))
    prompts, config = check_rl(run), run.config.rl
    assert prompts is not None
    assert config is not None
    says: Any = SimpleNamespace(reporter=SimpleNamespace(say=lambda _: None))
    tokenizer = load_tokenizer(small_base(), trust_remote_code=False)
    maker = Rollouts(says, config, prompts, None, Rewards(config.rewards), tokenizer)  # type: ignore[arg-type]
    said = [Continuation([5, 6], [-1.0, -2.0], routed.tolist()), *[Continuation([7], [-1.0], is_truncated=True)] * 3]
    first, *rest = maker._records(prompts.of_round(0)[:1] * 4, said, 1)
    assert first["routed_experts"] == routed.tolist()
    assert all("routed_experts" not in record for record in rest)
    assert [record["truncated"] for record in (first, *rest)] == [False, True, True, True]
    for wrong in ("AAAA", "not base64", _npy(np.zeros((2, 2))), _npy(np.array([{}], dtype=object))):
        answer = (200, {"choices": [_choice(0, routed_experts=wrong)]})
        with (
            serving(lambda *_, answer=answer: answer) as (url, _),
            pytest.raises(UserError, match="its routed_experts"),
        ):
            Engine(url).complete("mine", [[1, 2]], vocab_size=64, n=1, max_tokens=2)


@for_each(
    ("choices", "words"),
    [
        ([_choice(0)], "it gave 1 completions, and 2 were asked for"),
        ([_choice(0), _choice(1, token_ids=None)], "completion 1: it has no token_ids"),
        ([_choice(0), _choice(1, token_ids=[3, -1])], "token_ids has a token outside the vocabulary of 64"),
        ([_choice(0), _choice(0)], "its completions are not numbered from 0 to 1"),
        ([_choice(0), _choice(1) | {"index": None}], "its completions are not numbered from 0 to 1"),
        ([_choice(0), _choice(1) | {"index": [1]}], "its completions are not numbered from 0 to 1"),
        ([_choice(0), "text"], "its completions are not numbered from 0 to 1"),
        (2, "it gave 0 completions, and 2 were asked for"),
        ([_choice(0), _choice(1, logprobs=[-1.0, -0.5])], "it has not one log-probability"),
        ([_choice(0), _choice(1, logprobs=None)], "it has not one log-probability for each token"),
        (
            [_choice(0), _choice(1, logprobs={"token_logprobs": [-1.0, float("nan")]})],
            "holds what is not a finite number",
        ),
    ],
)
def test_an_answer_of_another_kind_is_refused(choices: list[Any], words: str) -> None:
    with serving(lambda *_: (200, {"choices": choices})) as (url, _), pytest.raises(UserError, match=words):
        Engine(url).complete("mine", [[1, 2]], vocab_size=64, n=2, max_tokens=2)
    with serving(lambda *_: (200, "<html>")) as (url, _), pytest.raises(UserError, match="its answer is not JSON"):
        Engine(url).complete("mine", [[1, 2]], vocab_size=64, n=2, max_tokens=2)


class _PeftEngine:
    """An engine by transformers + peft in float64: it samples with the adapter that it was told last."""

    def __init__(self) -> None:
        self.base = AutoModelForCausalLM.from_pretrained(small_base(), dtype=torch.float64)
        self.model: Any = None
        self.loads_once = False

    @torch.no_grad()
    def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/load_lora_adapter":
            if self.model is None:
                self.model = PeftModel.from_pretrained(self.base, body["lora_path"], adapter_name="0").eval()
            elif not self.loads_once:
                name = str(len(self.model.peft_config))
                self.model.load_adapter(body["lora_path"], name)
                self.model.set_adapter(name)
            return 200, "Success"
        torch.manual_seed(body["seed"])
        choices = []
        for prompt in body["prompt"]:
            for _ in range(body["n"]):
                ids, scores = list(prompt), []
                for _ in range(body["max_tokens"]):
                    log_p = self.model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
                    ids.append(int(torch.multinomial(log_p.exp(), 1)))
                    scores.append(float(log_p[ids[-1]]))
                choices.append(
                    {"index": len(choices), "token_ids": ids[len(prompt) :], "logprobs": {"token_logprobs": scores}}
                )
        return 200, {"choices": choices}


def _by_engine(folder: Path, name: str, url: str, **rl: Any) -> Path:
    return rl_file(
        folder, name, "dp=2", rl={"source": url, "max_new_tokens": 4, "adapter_name": "own", **rl}, steps=2, lr=0.05
    )


def test_an_engine_samples_with_the_adapter_of_the_step_before(tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    """What the trainer computes with is what transformers + peft computed with what was published."""
    with serving(_PeftEngine()) as (url, seen):
        pools(2).run(run_rl, _by_engine(tmp_path, "engine", url), 2)
    output = tmp_path / "engine"
    assert [path for path, _ in seen] == ["/v1/load_lora_adapter", *["/v1/completions", "/v1/load_lora_adapter"] * 2]
    assert {body.get("lora_name", body.get("model")) for _, body in seen} == {"own"}
    assert [record["adapter_steps"] for step in (1, 2) for record in records_of(output, step)[:1]] == [0, 1]
    lines = metrics_of(output)
    assert all(line["largest_engine_gap"] < 1e-5 for line in lines)
    assert all(line["ratio"] == 1.0 for line in lines)
    last = Path(seen[-1][1]["lora_path"])
    assert last.name.startswith("step-000002-")
    assert (last / WEIGHTS_FILE).read_bytes() == (output / "adapter" / WEIGHTS_FILE).read_bytes()
    assert not (output / ".publishing").exists()


@pytest.mark.proof
def test_an_engine_that_goes_on_with_its_first_adapter_is_seen(tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    engine = _PeftEngine()
    engine.loads_once = True
    with serving(engine) as (url, _):
        pools(2).run(run_rl, _by_engine(tmp_path, "stale", url), 2)
    assert [line["largest_engine_gap"] < 1e-5 for line in metrics_of(tmp_path / "stale")] == [True, False]


def test_an_adapter_is_published_every_so_many_steps_and_at_the_end(
    tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    file = rl_file(tmp_path, "every", "dp=2", rl={"publish_to": str(tmp_path / "to"), "publish_every": 2}, steps=3)
    pools(2).run(run_rl, file, 2)
    assert sorted(each.name[:11] for each in (tmp_path / "to").iterdir()) == [
        "latest",
        "step-000000",
        "step-000002",
        "step-000003",
    ]


@pytest.mark.proof
def test_an_engine_that_ends_in_mid_run_ends_the_run_with_its_words(
    tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    def answer(path: str, _: Any) -> tuple[int, Any]:
        return (200, "") if "lora" in path else (400, {"message": "no such model"})

    words = "it completes prompts not: 400 no such model"
    with serving(answer) as (url, _), pytest.raises((UserError, RankError), match=words):
        pools(2).run(run_rl, rl_file(tmp_path, "refused", "dp=2", rl={"source": url}), 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rl.publish_every": "2"}, "rl.publish_every: it has no effect without rl.publish_to"),
        ({"rl.adapter_name": "x"}, "it is the adapter's name in an engine, and rl.source is none"),
        ({"rl.source": "recorded", "rl.publish_to": "x"}, "rl.publish_to with recorded rollouts"),
        ({"rl.source": "http://x", "rl.temperature": "0.5"}, "an engine's log-probabilities are those before"),
        (
            {"rl.source": "http://x", "rl.publish_every": "2", "train.objective.importance_cap": "null"},
            "the adapter that samples is an older one",
        ),
        ({"rl.publish_to": "x", "lora.use_dora": "true"}, "lora: use_dora=True: not every engine computes with it"),
    ],
)
def test_options_of_engines_without_effect_are_refused(
    changes: dict[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    assert main(["rl", str(rl_file(tmp_path, "wrong", "")), "--nproc", "1", *overrides]) == 2
    assert words in capsys.readouterr().err
