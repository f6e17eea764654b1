"""What another version of torch, transformers or PEFT can break, mechanism by mechanism: one proof of each.

`make test-versions` runs them in the oldest versions that pyproject.toml allows and in the newest that there are, with
the files named in tests/versions.txt. In the pinned versions other tests have these mechanisms, so `make test` leaves
them out.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshlora.verify.options import DROPOUT
from tests.conftest import Prove

PACKED_IN_SDPA = {"packing": True, "attn_implementation": "sdpa"}
JOINED_IN_SDPA = {
    "packing": "auto",
    "attn_implementation": "sdpa",
    "recompute": "keep_attention",
    "resume": True,
    "steps": 2,
}
PROVED_HERE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tp and sp": ("llama", "tp=2,sp", {"default_dropout": DROPOUT}),
    "float32": ("qwen3", "dp=2", {"dtype": "float32", "packing": True}),
    "bfloat16": ("llama", "dp=2", {"dtype": "bfloat16", **PACKED_IN_SDPA}),
    "rows joined": ("llama", "dp=2", JOINED_IN_SDPA),
    "soft caps and windows": ("gemma2", "tp=2", {"packing": True}),
    "masks without positions": ("gpt_oss", "dp=2", {"packing": True}),
    "experts": ("qwen3_moe", "tp=2,sp,ep=2", {"packing": True}),
    "experts in float32": ("qwen3_moe", "dp=2,ep=2", {"dtype": "float32"}),
    "stages": ("llama", "pp=2", {}),
    "ring": ("llama", "cp=2,ring", {"packing": True}),
    "delta nets": ("qwen3_next", "cp=2", {}),
    "state spaces": ("bamba", "cp=2", {}),
    "convolutions": ("lfm2", "cp=2", {}),
    "few bits": ("llama", "tp=2", {"dtype": "float32", "quantization": "nf4"}),
}


@pytest.mark.proof
@pytest.mark.parametrize("name", PROVED_HERE)
def test_a_mechanism_holds_in_these_versions(name: str, prove: Prove) -> None:
    family, topology, options = PROVED_HERE[name]
    (outcome,) = prove(**{"family": family, "topologies": (topology,), "steps": 1} | options)
    assert outcome.passed, (outcome.divergence, outcome.error)
