"""Which dropouts of a model are exact on a mesh: facts of families, by configuration field.

Owns: the table. Does not own: what is refused (`loading.guards`), the masks (`meshlora.common.masks`).

Exact is a dropout that is an `nn.Dropout` of its own, works on the hidden states of single tokens and is called once a
forward. Not exact are dropouts on attention weights, calls of `F.dropout` inside a model's forward, layers that are
left out, noise in routers, and a module that is called twice (phi's `resid_dropout`), whose masks would be the same.
"""

from __future__ import annotations

from meshlora.plan.rules import kind_of

# model_type -> field of the configuration -> ends of the names of the modules that it is the rate of.
EXACT_DROPOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "codegen": {"resid_pdrop": ("attn.resid_dropout", "mlp.dropout"), "embd_pdrop": ("transformer.drop",)},
    "gpt2": {"resid_pdrop": ("attn.resid_dropout", "mlp.dropout"), "embd_pdrop": ("transformer.drop",)},
    "gpt_bigcode": {"resid_pdrop": ("attn.resid_dropout", "mlp.dropout"), "embd_pdrop": ("transformer.drop",)},
    "gpt_neo": {"resid_dropout": ("attention.resid_dropout", "mlp.dropout"), "embed_dropout": ("transformer.drop",)},
    "gpt_neox": {"hidden_dropout": ("emb_dropout", "post_attention_dropout", "post_mlp_dropout")},
    "gptj": {"resid_pdrop": ("attn.resid_dropout", "mlp.dropout"), "embd_pdrop": ("transformer.drop",)},
    "persimmon": {"hidden_dropout": ("layers.*.dropout",)},
    "phi": {"embd_pdrop": ("embed_dropout",)},
    "stablelm": {"hidden_dropout": ("layers.*.dropout",)},
}


def is_exact_dropout(model_type: str, field: str) -> bool:
    """Whether the dropout that `field` of a configuration is the rate of is exact on every mesh."""
    return field in EXACT_DROPOUTS.get(model_type, {})


def is_exact_module(model_type: str, name: str) -> bool:
    """Whether the `nn.Dropout` module `name` is one of those."""
    kind = f".{kind_of(name)}"
    return any(kind.endswith(f".{end}") for ends in EXACT_DROPOUTS.get(model_type, {}).values() for end in ends)
