"""How long a sequence may be: the positions of a model, with scaled rotary embeddings and offsets."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from meshlora.loading.blueprint import make_blueprint
from meshlora.loading.positions import most_positions
from meshlora.plan.base_options import BaseOptions
from meshlora.run.run_data import check_fits
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.unit.records import make_tokenizer


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default"}, 128),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        # What is scaled already: config.json gives the product itself.
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 128),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            128,
        ),
    ],
)
def test_positions_are_those_that_scaling_of_the_rotary_embedding_gives(rope: dict[str, object], limit: int) -> None:
    config = twin_config("llama", vocab_size=320, rope_parameters={"rope_theta": 10000.0, **rope})
    assert config.max_position_embeddings == 128
    blueprint = make_blueprint(config, Topology.parse("tp=2"), BaseOptions(dtype="float32"))
    check_fits(make_tokenizer(), blueprint, max_length=limit)
    with pytest.raises(UserError, match=f"data.max_length={limit + 1}: the model has {limit} positions"):
        check_fits(make_tokenizer(), blueprint, max_length=limit + 1)


def test_positions_that_are_counted_from_the_padding_token_are_fewer() -> None:
    config = AutoConfig.for_model("roberta", vocab_size=320, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    config.update({"intermediate_size": 16, "max_position_embeddings": 64, "pad_token_id": 1})
    model = AutoModelForSequenceClassification.from_config(config).eval()
    limit = most_positions(config, model)
    assert limit == 62
    model(torch.full((1, limit), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, limit + 1), 5))
