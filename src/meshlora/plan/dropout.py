"""Which dropouts of a model are exact on a mesh, by family and configuration field.

Owns: the table. Does not own: refusals (`loading.guards`), masks (`meshlora_ground.masks`).

A dropout is exact if it is a separate `nn.Dropout`, acts on hidden states token by token and is called once per
forward. Not exact: dropout on attention weights, `F.dropout` in a model's forward, layer drop, router noise, and a
module called twice (phi's `resid_dropout`), whose two masks would be equal.
"""

from __future__ import annotations

from meshlora.plan.rules import kind_of

_GPT2 = {"resid_pdrop": ("attn.resid_dropout", "mlp.dropout"), "embd_pdrop": ("transformer.drop",)}
# model_type -> configuration field with the rate -> suffixes of the names of the modules that use it.
EXACT_DROPOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("codegen", "gpt2", "gpt_bigcode", "gptj"), _GPT2),
    "gpt_neo": {"resid_dropout": ("attention.resid_dropout", "mlp.dropout"), "embed_dropout": ("transformer.drop",)},
    "gpt_neox": {"hidden_dropout": ("emb_dropout", "post_attention_dropout", "post_mlp_dropout")},
    "persimmon": {"hidden_dropout": ("layers.*.dropout",)},
    "phi": {"embd_pdrop": ("embed_dropout",)},
    "stablelm": {"hidden_dropout": ("layers.*.dropout",)},
}


def is_exact_dropout(model_type: str, field: str) -> bool:
    """Whether the dropout whose rate is configuration field `field` is exact on every mesh."""
    return field in EXACT_DROPOUTS.get(model_type, {})


def is_exact_module(model_type: str, name: str) -> bool:
    """Whether the `nn.Dropout` module `name` is exact on every mesh."""
    kind = f".{kind_of(name)}"
    return any(kind.endswith(f".{end}") for ends in EXACT_DROPOUTS.get(model_type, {}).values() for end in ends)
