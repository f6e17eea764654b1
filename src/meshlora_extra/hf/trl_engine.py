"""Rollouts of TRL's GRPOTrainer by a vLLM server: the adapter goes there as a file, completions come back.

Owns: what TRL asks of its `vllm_generation`. Does not own: the requests (`rl.engine`), the files that engines read
(`rl.publishing`).

TRL itself sends every weight of the base, merged. Of a mesh no rank has a whole one, and the adapter is all that has
changed: rank 0 publishes it, as `meshlora rl` does, and the server loads it beside the base that it was started with.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshlora.adapter.attach import runtime
from meshlora.adapter.formats.peft_format import save_adapter
from meshlora.comm.collectives import broadcast_text
from meshlora_extra.engines import served
from meshlora_extra.hf.rows import gathered_rows, padded_over
from meshlora_extra.rl.engine import Engine
from meshlora_extra.rl.publishing import publish, remove_older
from meshlora_extra.rl.rollouts import seed_of
from meshlora_ground.errors import UnsupportedError, UserError

_NAME = "meshlora"
_KEPT = 3
# What TRL hands on to the engine, by one name on both sides.
_SAMPLED_BY = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class MeshEngine:
    """The server that `vllm_server_base_url`, or host and port, of a GRPOConfig name; every rank makes one.

    It reads the adapters in `output_dir`/published, and was started with --enable-lora and
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=true.
    """

    def __init__(self, model: Any, args: Any) -> None:
        """Raises UnsupportedError: another `vllm_mode`, or an adapter that engines do not compute."""
        if args.vllm_mode != "server":
            rule = "an engine in each rank's process would hold the whole base beside its part, and take merged weights"
            raise UnsupportedError(f"vllm_mode={args.vllm_mode!r}", rule, "use vllm_mode='server'")
        if args.vllm_structured_outputs_regex is not None:
            raise UnsupportedError("vllm_structured_outputs_regex", "it is not handed on from a mesh", "leave it out")
        state = runtime(model)
        assert state.active is not None
        served(state.adapters[state.active].plan, state.whole.plan, "lora")
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        self._model, self._args, self._mesh, self._asked = model, args, state.mesh, 0
        self._engine, self._folder = Engine(url, args.vllm_server_timeout), Path(args.output_dir) / "published"

    def sync_weights(self) -> None:
        """Let the server load the adapter as it is now. Collective. Raises UserError, on all ranks: it does not."""
        saved, whole = self._folder / ".publishing", runtime(self._model).whole
        if self._mesh.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(saved, ignore_errors=True)
        save_adapter(self._model, saved)

        def load() -> None:
            name = f"step-{self._asked:06d}"
            version = publish(saved, self._folder, name=name, model_and_plan=lambda: (whole.model, whole.plan))
            self._engine.load_adapter(_NAME, version)
            remove_older(self._folder, _KEPT)

        self._by_first(load)

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """(prompts, completions, their log-probabilities, None), as TRL's own. prompts: of this dp rank, each as often
        as it is completed. Collective. Raises UserError, on all ranks: what the server says is no answer.
        """
        every, args = self._of_all(prompts), self._args
        options = {name: getattr(args, name) for name in _SAMPLED_BY if getattr(args, name) is not None}
        options["seed"] = seed_of(args.seed, self._asked)
        self._asked += 1

        def ask() -> list[Any]:
            found = self._engine.complete(
                _NAME,
                every[::num_generations],
                vocab_size=self._model.config.get_text_config().vocab_size,
                n=num_generations,
                max_tokens=args.max_completion_length,
                **options | (args.generation_kwargs or {}),
            )
            return [(each.tokens, each.log_probs) for each in itertools.chain.from_iterable(found)]

        first = self._mesh.dp.rank * len(prompts)
        said = self._by_first(ask)[first : first + len(prompts)]
        log_probs = [[[each] for each in own] for _, own in said]
        return prompts, [tokens for tokens, _ in said], log_probs, None

    def _of_all(self, prompts: list[list[int]]) -> list[list[int]]:
        """The prompts of all dp ranks, one rank's after the other's. Collective."""
        table = torch.full((len(prompts), max(map(len, prompts))), -1, device=self._mesh.device)
        for row, ids in zip(table, prompts, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        table = padded_over(table, self._mesh.dp, dim=1, pad_index=-1, pad_first=False)
        return [[token for token in row if token >= 0] for row in gathered_rows(table, self._mesh.dp).tolist()]

    def _by_first(self, ask: Callable[[], Any]) -> Any:
        """What `ask` returns on rank 0, as JSON has it, or its error, on every rank. Collective."""
        said = ""
        if self._mesh.rank == 0:
            try:
                said = json.dumps([ask(), None])
            except UserError as error:  # told to all: else they wait for an answer
                said = json.dumps([None, [error.given, error.rule, error.way_out]])
        found, wrong = json.loads(broadcast_text(said, self._mesh.world, self._mesh.device))
        if wrong is not None:
            raise UserError(*wrong)
        return found
