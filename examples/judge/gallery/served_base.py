"""A server that knows an adapter's name and answers with the bare base: no error, and tokens that look well.

The server is one of twenty lines, with the interface of vLLM's; `tests/engines` asks vLLM itself.
"""

from __future__ import annotations

import http.server
import json
from pathlib import Path

import torch
from common import base_model, run, with_adapter


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    adapted = with_adapter(base_model(folder)).eval()
    adapted.save_pretrained(folder / "adapter")
    base = base_model(folder)
    models = {"base": base, "adapter": adapted if is_repaired else base}

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", f"{len(body)}")
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer({"data": [{"id": "base"}, {"id": "adapter", "parent": "base"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            model, ids = models[asked["model"]], asked["prompt"]
            with torch.no_grad():
                known = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            said = [None] + [{f"{t}": {"logprob": float(row[t])}} for row, t in zip(known, ids[1:], strict=True)]
            self.answer({"choices": [{"prompt_logprobs": said, "text": ""}]})

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    (folder / "port.new").write_text(f"{server.server_port}")
    (folder / "port.new").rename(folder / "port")
    server.serve_forever()


if __name__ == "__main__":
    run(patient, ranks=1)
