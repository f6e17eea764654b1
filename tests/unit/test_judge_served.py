"""`meshlora judge served` names what a server does with an adapter, and refuses to say what its numbers do not tell."""

from __future__ import annotations

import contextlib
import http.server
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshlora_ground.errors import MeshloraError, UserError
from meshlora_ground.parser import Parser
from meshlora_judge.served.server import Server, served_names
from meshlora_judge.verbs import served as verb
from tests.peft_adapters import make_base, save_adapter, with_adapter
from tests.processes import answering
from tests.wrong_adapters import alpha, edited, exchanged, other_values, shifted, without

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
Answers = Callable[[list[int]], list[float]]


def make_adapter(base: Path, folder: Path, std: float = 0.1, **lora: Any) -> Path:
    return save_adapter(load(base), folder, of_a=0.1 * std, of_b=std, **{"lora_alpha": 8} | lora)


def load(base: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype, experts_implementation="eager")


def adapted(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Any:
    return with_adapter(load(base, dtype), adapter)


def answers(model: Any) -> Answers:
    """What an engine with this model says."""

    def of(prompt: list[int]) -> list[float]:
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([prompt])).logits[0, :-1].float()
        return list(logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]].tolist())

    return of


@contextlib.contextmanager
def serving(models: dict[str, Answers], *, way: str = "prompt_logprobs", key: str = "") -> Iterator[str]:
    """The address of a server under OpenAI's interface. way: the only one in which it tells log-probabilities."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parents = {name: None if name == "base" or "base" not in models else "base" for name in models}
            self.say(200, {"data": [{"id": name, "parent": parent} for name, parent in parents.items()]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                return self.say(401, {"error": "no key"})
            if way == "echo and one more token" and not body["max_tokens"]:
                return self.say(400, {"error": "max_tokens must be at least 1"})
            numbers = models[body["model"]](body["prompt"])
            choice: dict[str, Any] = {"text": ""}
            if way == "prompt_logprobs" and "prompt_logprobs" in body:
                entries = zip(body["prompt"][1:], numbers, strict=True)
                tables = [{f"{t}": {"logprob": x, "rank": 5}, "-1": {"logprob": -0.1, "rank": 1}} for t, x in entries]
                choice["prompt_logprobs"] = [None, *tables]
            elif "echo" in body and way != "prompt_logprobs":
                choice["logprobs"] = {"token_logprobs": [None, *numbers] + [-0.5] * body["max_tokens"]}
            self.say(200, {"choices": [choice]})
            return None

        def say(self, status: int, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", f"{len(content)}")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    with answering(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}"


def judge(url: str, base: Path, adapter: Path, *words: str) -> None:
    parser = Parser()
    verb.add(parser.add_subparsers())
    options = parser.parse_args(["served", url, "--model", str(base), "--adapter", str(adapter), *words])
    options.run(options)


def found(url: str, base: Path, adapter: Path, file: Path, *words: str) -> dict[str, Any]:
    """What the command writes about it; its exit code is that of its verdict."""
    try:
        judge(url, base, adapter, "--json", str(file), *words)
        code = 0
    except MeshloraError as error:
        code = error.exit_code
    value: dict[str, Any] = json.loads(file.read_text())
    assert code == {"proved": 0, "refuted": 1, "undecided": 2}[value["verdict"]]
    return value


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("llama")
    base = make_base(folder / "base", "llama", num_hidden_layers=3)
    return base, make_adapter(base, folder / "mine", target_modules="all-linear")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("mixture")
    base = make_base(folder / "base", "qwen3_moe")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return base, make_adapter(base, folder / "mine", target_modules=["q_proj", "v_proj"], target_parameters=experts)


# Name -> (the mistake, what the verdict says).
WRONG: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "alpha_doubled": (
        lambda a, out: edited(a, out, lora_alpha=2 * alpha(a)),
        "scaled by 2 (as if use_rslora were on, or applied twice, or alpha",
    ),
    "scale_of_rslora": (lambda a, out: edited(a, out, use_rslora=True), "scaled by 2"),
    "a_third": (lambda a, out: edited(a, out, lora_alpha=alpha(a) / 3), "scaled by 0.333"),
    "alpha_ignored": (lambda a, out: edited(a, out, lora_alpha=4), "scaled by 0.5 (as if the scale were 1)"),
    "no_down_proj": (lambda a, out: edited(a, out, without("down_proj")), "base + adapter without down_proj"),
    "no_mlp": (lambda a, out: edited(a, out, without(r"\.mlp\.")), "base + adapter without MLP"),
    "no_attention": (lambda a, out: edited(a, out, without("self_attn")), "base + adapter without attention"),
    "two_kinds": (lambda a, out: edited(a, out, without("q_proj|up_proj")), "without q_proj, without up_proj"),
    "a_layer": (lambda a, out: edited(a, out, without(r"layers\.1\.")), "base + adapter, without layer 1"),
    "shifted": (lambda a, out: edited(a, out, shifted), "A and B of layers shifted by 1 in a circle"),
    "k_and_v": (lambda a, out: edited(a, out, exchanged("k_proj", "v_proj")), "k_proj and v_proj exchanged"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_each_mistake_is_named(mistake: str, llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = llama
    change, expected = WRONG[mistake]
    wrong = change(adapter, tmp_path / "wrong")
    with serving({"base": answers(load(base)), "mine": answers(adapted(base, wrong))}) as url:
        value = found(url, base, adapter, tmp_path / "found.json")
    assert value["verdict"] == "refuted"
    assert expected in value["found"][0], value
    assert value["dtype"] == "float32"


@pytest.mark.parametrize("way", ["prompt_logprobs", "echo", "echo and one more token"])
def test_the_right_adapter_passes_in_each_way_of_asking(way: str, llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = llama
    with serving({"base": answers(load(base)), "mine": answers(adapted(base, adapter))}, way=way) as url:
        value = found(url, base, adapter, tmp_path / "found.json")
    assert (value["verdict"], value["found"][0], value["asked_by"]) == ("proved", "base + adapter", way)
    assert value["unseen"] == []
    assert value["effect"] > 1000 * value["limit"]


def test_the_bare_base_under_the_name_of_the_adapter(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = llama
    with serving({"mine": answers(load(base))}) as url:
        value = found(url, base, adapter, tmp_path / "found.json")
    assert (value["verdict"], value["found"][0]) == ("refuted", "the bare base")


def test_another_adapter_is_said_to_be_none_of_the_hypotheses(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = llama
    wrong = edited(adapter, tmp_path / "wrong", other_values)
    with serving({"base": answers(load(base)), "mine": answers(adapted(base, wrong))}) as url:
        value = found(url, base, adapter, tmp_path / "found.json")
    assert (value["verdict"], value["found"]) == ("refuted", [])
    assert "Another adapter, or another base" in value["text"]


def test_an_engine_in_bfloat16_is_judged_by_its_rounding(llama: tuple[Path, Path], tmp_path: Path) -> None:
    """Without a base to ask, with one, and with half of the scale."""
    base, adapter = llama
    low = torch.bfloat16
    right, bare = answers(adapted(base, adapter, low)), answers(load(base, low))
    with serving({"mine": right}) as url:
        value = found(url, base, adapter, tmp_path / "found.json")
    assert (value["verdict"], value["dtype"]) == ("proved", "bfloat16")
    wrong = adapted(base, edited(adapter, tmp_path / "wrong", lora_alpha=alpha(adapter) / 2), low)
    with serving({"base": bare, "mine": right, "half": answers(wrong)}) as url:
        value = found(url, base, adapter, tmp_path / "found.json")
        assert (value["verdict"], value["dtype"]) == ("proved", "bfloat16")
        with pytest.raises(UserError, match="rounding to float32 explains"):
            judge(url, base, adapter, "--dtype", "float32")
        value = found(url, base, adapter, tmp_path / "found.json", "--name", "half")
    assert "scaled by 0.5" in value["found"][0] or "scaled by 0.49" in value["found"][0]


def test_a_merge_in_low_precision_is_a_right_one_and_said(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = llama
    merged = adapted(base, adapter).merge_and_unload()
    with torch.no_grad():
        for parameter in merged.parameters():
            parameter.copy_(parameter.bfloat16())
    with serving({"merged": answers(merged)}) as url:
        value = found(url, base, adapter, tmp_path / "found.json", "--dtype", "float32")
    assert (value["verdict"], value["found"][0]) == ("proved", "a merge rounded to bfloat16")
    assert "serves" in value["text"]
    assert "(a merge rounded to bfloat16)" in value["text"]


def test_an_effect_below_rounding_is_no_proof(llama: tuple[Path, Path], tmp_path: Path) -> None:
    """Neither of the adapter nor of the bare base."""
    base, adapter = llama
    small = edited(adapter, tmp_path / "mine", lora_alpha=alpha(adapter) * 1e-4)
    for model in (adapted(base, small, torch.bfloat16), load(base, torch.bfloat16)):
        with serving({"mine": answers(model)}) as url, pytest.raises(UserError, match="undecided: the adapter moves"):
            judge(url, base, small, "--dtype", "bfloat16")


def test_a_kind_that_moves_nothing_is_said_to_be_unseen(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = llama
    lame = edited(adapter, tmp_path / "mine", without("k_proj"))
    with serving({"mine": answers(adapted(base, lame))}) as url:
        value = found(url, base, lame, tmp_path / "found.json")
    assert (value["verdict"], value["unseen"]) == ("proved", ["k_proj"])
    assert "do not tell whether k_proj" in value["text"]


@pytest.mark.parametrize(
    ("words", "expected"), [("", "base + adapter"), ("experts", "without experts"), ("self_attn", "without attention")]
)
def test_experts_that_an_engine_leaves_out(
    words: str, expected: str, mixture: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = mixture
    served = edited(adapter, tmp_path / "wrong", without(words)) if words else adapter
    with serving({"base": answers(load(base)), "mine": answers(adapted(base, served))}) as url:
        value = found(url, base, adapter, tmp_path / "found.json")
    assert value["found"][0].endswith(expected)


def test_a_saved_head_or_embedding_that_an_engine_leaves_out(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = llama
    whole = make_adapter(
        base, tmp_path / "mine", target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"]
    )
    model = adapted(base, whole)
    model.base_model.model.lm_head.enable_adapters(False)
    with serving({"mine": answers(model)}) as url:
        assert found(url, base, whole, tmp_path / "a.json")["found"][0].endswith("without lm_head")
    model.base_model.model.lm_head.enable_adapters(True)
    model.base_model.model.model.embed_tokens.enable_adapters(False)
    with serving({"mine": answers(model)}) as url:
        assert found(url, base, whole, tmp_path / "b.json")["found"][0].endswith("without embed_tokens")


def test_another_base_is_not_blamed_on_the_adapter(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = llama
    torch.manual_seed(5)
    other = AutoModelForCausalLM.from_config(load(base).config)
    with serving({"base": answers(other), "mine": answers(other)}) as url, pytest.raises(UserError, match="another mo"):
        judge(url, base, adapter)


def test_the_users_own_prompts_and_a_key(llama: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = llama
    prompts, key = tmp_path / "prompts.txt", tmp_path / "key"
    prompts.write_text("[5, 6, 7, 8, 9]\n\n[20, 30, 40]\n")
    key.write_text("secret\n")
    with serving({"mine": answers(adapted(base, adapter))}, key="secret") as url:
        value = found(url, base, adapter, tmp_path / "found.json", "--prompts", str(prompts), "--key-file", str(key))
        assert (value["verdict"], value["num_tokens"]) == ("proved", 6)
        with pytest.raises(UserError, match=r"401.*--key-file"):
            judge(url, base, adapter)
        for line in ("[5]", "[5, 100000]", "a text", "[5, true]"):
            prompts.write_text(line)
            with pytest.raises(UserError, match=r"prompts\.txt, line 1"):
                judge(url, base, adapter, "--prompts", str(prompts), "--key-file", str(key))


def test_a_server_that_is_none_is_one_line(llama: tuple[Path, Path]) -> None:
    base, adapter = llama
    for url, said in (
        ("127.0.0.1:8000", "it is no address"),
        ("ftp://a", "it is no address"),
        ("http://[", "it is no address"),
        ("http://example.com:8000", "by https only"),
        ("http://127.0.0.1:9", "is it started"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            judge(url, base, adapter)
        assert "\n" not in f"{caught.value}"
    with serving({"a": answers, "b": answers, "base": answers}) as url:  # type: ignore[dict-item]
        with pytest.raises(UserError, match="did you mean 'base'"):
            judge(url, base, adapter, "--name", "bas")
        with pytest.raises(UserError, match="serves several models: a, b, base"):
            judge(url, base, adapter)
    with serving({"mine": lambda prompt: []}, way="echo") as url, pytest.raises(UserError, match="no such numbers"):
        judge(url, base, adapter)


def test_which_of_the_served_models_is_meant() -> None:
    listed = {"base": None, "mine": "base"}
    assert served_names(listed, None, None, "folder") == ("mine", "base")
    assert served_names({"m": None}, None, None, "folder") == ("m", None)
    assert served_names({"a": None, "folder": None, "b": None}, None, "b", "folder") == ("folder", "b")


def test_numbers_that_are_no_log_probabilities_are_not_taken() -> None:
    for numbers in ([0.5, -1.0, -1.0], [float("nan"), -1.0, -1.0], ["x", -1.0, -1.0], [-1.0], [None, -1.0, -1.0]):
        with (
            serving({"mine": lambda prompt, of=numbers: of}, way="echo") as url,  # type: ignore[misc]
            pytest.raises(UserError, match="gives no log-probabilities"),
        ):
            Server(url).log_probs("mine", [[5, 6, 7, 8]])


def test_an_adapter_that_peft_reads_in_part_judges_nobody(llama: tuple[Path, Path], tmp_path: Path) -> None:
    """PEFT is silent about factors that it drops: the reference itself would be wrong."""
    base, adapter = llama
    renamed = edited(adapter, tmp_path / "wrong", lambda t: {k.replace("q_proj", "w_proj"): v for k, v in t.items()})
    with serving({"mine": answers(load(base))}) as url, pytest.raises(UserError, match="of its factors are not"):
        judge(url, base, renamed)
