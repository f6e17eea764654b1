"""The transformers class of a configuration: one choice for product and judge."""

from __future__ import annotations

from transformers import CONFIG_MAPPING

from meshlora_ground.model_class import model_class, own_class
from tests.for_each import for_each


@for_each(
    ("model_type", "architecture", "expected"),
    [
        ("llama", None, "LlamaForCausalLM"),
        ("gemma3", None, "Gemma3ForConditionalGeneration"),
        ("gemma3_text", None, "Gemma3ForCausalLM"),
        ("llama4", None, "Llama4ForConditionalGeneration"),
        ("llama4_text", None, "Llama4ForCausalLM"),
        ("mistral3", None, "Mistral3ForConditionalGeneration"),
        ("qwen2_5_vl", None, "Qwen2_5_VLForConditionalGeneration"),
        # A composite whose text part alone has a class as well: as the checkpoint says, else whole.
        ("qwen3_5", None, "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5", "Qwen3_5ForCausalLM", "Qwen3_5ForCausalLM"),
        ("qwen3_5", "SomethingElse", "Qwen3_5ForConditionalGeneration"),
    ],
)
def test_a_composite_is_loaded_whole_and_as_its_checkpoint_says(
    model_type: str, architecture: str | None, expected: str
) -> None:
    config = CONFIG_MAPPING[model_type](architectures=[architecture] if architecture else None)
    assert own_class(config).__name__ == expected


def test_code_of_the_checkpoint_is_loaded_by_the_auto_class_that_it_names() -> None:
    config = CONFIG_MAPPING["llama"]()
    config.auto_map = {"AutoConfig": "a.B", "AutoModelForImageTextToText": "a.C"}
    assert model_class(config).__name__ == "AutoModelForImageTextToText"
    assert own_class(config) is None
