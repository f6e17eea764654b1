"""The live page: who is answered, what of a run's files is shown, and that nothing of them is taken for markup."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from meshlora.cli.main import main
from meshlora_extra.page import seen
from meshlora_extra.page.seen import Runs
from meshlora_extra.page.server import LiveServer, serving
from tests.processes import answering

STEP = {"step": 1, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.5, "tokens": 100, "step_time_s": 0.5}


def write_run(folder: Path, *lines: dict[str, Any], ending: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + ending)
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    write_run(tmp_path / "one", STEP)
    made = LiveServer(Runs(tmp_path))
    with answering(made):
        yield made


def ask(
    server: LiveServer, path: str, *, host: str | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, content) of a request with this Host header."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def test_page_and_data_are_for_those_with_the_address(server: LiveServer) -> None:
    root = f"/{server.token}/"
    assert server.url == f"http://127.0.0.1:{server.server_port}{root}"
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 32
    status, headers, page = ask(server, root)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert headers["referrer-policy"] == "no-referrer"
    assert b"<script>" not in page  # its policy allows no script within it
    for name in ("live.css", "live.js"):
        assert ask(server, f"{root}{name}")[0] == 200
    status, headers, content = ask(server, f"{root}data.json")
    assert (status, headers["cache-control"]) == (200, "no-store")
    assert json.loads(content)["runs"][0]["steps"] == [STEP]
    assert ask(server, root, method="HEAD")[2] == b""


@pytest.mark.parametrize("path", ["/", "/{other}/", "/{other}/data.json", "/data.json", "//{token}x/data.json", "/%s/"])
def test_wrong_token_is_refused(server: LiveServer, path: str) -> None:
    status, _, content = ask(server, path.format(other="a" * len(server.token), token=server.token))
    assert (status, content) == (403, b"not for you\n")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1.evil.example:{port}"])
def test_name_of_somebody_else_that_points_here_is_refused(server: LiveServer, host: str) -> None:
    """DNS rebinding: the browser takes such a page for one of that name's own."""
    path = f"/{server.token}/data.json"
    assert ask(server, path, host=host.format(port=server.server_port))[0] == 403
    assert ask(server, path, host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_asked_but_to_look(server: LiveServer, method: str) -> None:
    assert ask(server, f"/{server.token}/", method=method)[0] == 501


@pytest.mark.parametrize("run", ["../secret", "/etc", "%2e%2e/secret", "nothing"])
def test_no_file_outside_of_the_runs_is_read(server: LiveServer, run: str, tmp_path: Path) -> None:
    write_run(tmp_path.parent / "secret", {**STEP, "loss": 7.654321})
    content = json.loads(ask(server, f"/{server.token}/data.json?run={run}")[2])
    assert content["chosen"] == "one"
    assert "7.654321" not in json.dumps(content)
    assert ask(server, f"/{server.token}/../one/metrics.jsonl")[0] == 404
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "metrics.jsonl").symlink_to(tmp_path.parent / "secret" / "metrics.jsonl")
    assert Runs(tmp_path).names() == ["one"]


def test_only_finite_numbers_under_known_names_are_shown(tmp_path: Path) -> None:
    bad = {"step": 2, "loss": "<b>", "lr": None, "grad_norm": 10**400, "tokens": True, "secret": 1}
    text = '{"step": 3, "loss": NaN}\nno JSON\n[1]\n{"step": 4, "lo'
    write_run(tmp_path, STEP, bad, ending=text)
    with (tmp_path / "samples.jsonl").open("w") as file:
        file.write(
            json.dumps({"step": 1, "prompt": "p" * 9000, "text": "<script>"}) + "\n" + json.dumps({"step": []}) + "\n"
        )
    shown = Runs(tmp_path).shown(None)
    assert shown["chosen"] == "."
    assert shown["runs"][0]["steps"] == [STEP, {"step": 2}, {"step": 3}]
    assert shown["samples"] == [{"step": 1, "prompt": "p" * 2000, "text": "<script>"}]
    json.dumps(shown, allow_nan=False)


def test_page_is_told_how_many_steps_each_run_has_and_what_each_is_called(tmp_path: Path) -> None:
    """It shows "20 of 60", the time left, and whose curves are beside those of the run."""
    for name in ("one", "two"):
        write_run(tmp_path / name, {**STEP, "steps": 60})
    runs = Runs(tmp_path).shown("one")["runs"]
    assert {run["name"] for run in runs} == {"one", "two"}
    assert [run["steps"][0]["steps"] for run in runs] == [60, 60]
    script = (resources.files("meshlora_extra.page") / "live.js").read_text("utf-8")
    assert all(words in script for words in ("`${short(step.step)} of ${short(step.steps)}`", "`other runs: ${names"))


def test_metrics_on_answers_are_shown_under_the_names_of_the_run(tmp_path: Path) -> None:
    evaluated = {"step": 0, "eval_loss": 2.0, "eval_tokens": 9, "eval_perplexity": 7.4, "eval_answers": 5}
    bad = {"eval_<b>": 1.0, "eval_near": None, "eval_" + "a" * 61: 1.0}
    many = {"step": 2, "eval_loss": 1.0, **{f"eval_m{n}": n for n in range(90)}}
    write_run(tmp_path, {**evaluated, "eval_exact_match": 0.5, **bad}, STEP, many)
    first, last = Runs(tmp_path).shown(None)["runs"][0]["evaluations"]
    assert first == {"step": 0, "eval_loss": 2.0, "eval_exact_match": 0.5}
    assert len(last) == 2 + 12


def test_long_run_is_thinned_and_one_that_goes_on_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen, "_MOST_POINTS", 10)
    run = write_run(tmp_path / "run", *({**STEP, "step": step} for step in range(1, 96)))
    runs = Runs(tmp_path)
    steps = [step["step"] for step in runs.shown("run")["runs"][0]["steps"]]
    assert (len(steps) <= 11, steps[0], steps[-1]) == (True, 1, 95)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**STEP, "step": 96}) + "\n")
    assert runs.shown("run")["runs"][0]["steps"][-1]["step"] == 96


def test_an_answer_reads_the_end_of_long_samples_and_metrics_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", *({**STEP, "step": step} for step in range(1, 96)))
    with (run / "samples.jsonl").open("w") as file:
        for step in range(1, 100):
            file.write(json.dumps({"step": step, "prompt": "p" * 20_000, "text": "t"}) + "\n")
    read: list[tuple[str, int]] = []
    whole = seen._lines

    def lines(file: Path, *, most_bytes: int) -> list[dict[str, Any]]:
        found = whole(file, most_bytes=most_bytes)
        read.append((file.name, sum(len(json.dumps(line)) for line in found)))
        time.sleep(0.05)  # so that pages that ask at once would meet here
        return found

    monkeypatch.setattr(seen, "_lines", lines)
    runs = Runs(tmp_path)
    pages = [threading.Thread(target=runs.shown, args=(None,)) for _ in range(5)]
    for page in pages:
        page.start()
    for page in pages:
        page.join()
    assert [name for name, _ in read].count("metrics.jsonl") == 1
    assert max(size for name, size in read if name == "samples.jsonl") < 2**18
    assert [sample["step"] for sample in runs.shown(None)["samples"]] == [99, 98, 97, 96, 95, 94, 93, 92]


def test_script_puts_text_in_as_text_only() -> None:
    script = resources.files("meshlora_extra.page").joinpath("live.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "http://", "https://"):
        assert word not in script.replace("http://www.w3.org/2000/svg", ""), word


def test_address_that_is_none_is_answered_and_nothing_is_printed(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(server, "http://[/x", host="x")[0] == 400
    assert capsys.readouterr() == ("", "")


def test_process_of_the_page_ends_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secrets.py").write_text("raise SystemExit('code of the folder that it was started in')\n")
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", STEP)
    write_run(tmp_path / "later", STEP)
    os.utime(tmp_path / "run" / "metrics.jsonl", (1, 1))
    with serving(tmp_path, first="run") as url:
        host, _, path = url.removeprefix("http://").partition("/")
        connection = http.client.HTTPConnection(host, timeout=10)
        connection.request("GET", f"/{path}data.json")
        assert json.loads(connection.getresponse().read())["chosen"] == "run"
        connection.close()
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(host, timeout=10).connect()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no such folder"),
        (["."], "no run is there"),
        ([".", "--port", "70000"], "a port is below 65536"),
    ],
)
def test_mistake_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
