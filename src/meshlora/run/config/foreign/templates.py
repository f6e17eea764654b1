"""Other trainers' names of chat templates, and which of those that are shipped here write the same."""

from __future__ import annotations

# Their name, in small letters -> ours; another name means a template of the tokenizer's own, or none here.
TEMPLATES = {
    **dict.fromkeys(("chatml", "qwen3_nothink", "yi"), "chatml"),
    **dict.fromkeys(("qwen", "qwen2", "qwen_25", "qwen2.5", "qwen25", "qwen-2.5"), "qwen"),
    **dict.fromkeys(("llama3", "llama-3", "llama_3"), "llama3"),
    **dict.fromkeys(("llama2", "llama-2", "llama_2"), "llama2"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma_2", "gemma_3"), "gemma"),
    **dict.fromkeys(("mistral", "mistral_v2v3", "mistral_v3"), "mistral"),
    "mistral_v1": "mistral_v1",
    **dict.fromkeys(("phi3", "phi", "phi_3", "phi_35"), "phi3"),
    **dict.fromkeys(("phi4", "phi_4", "phi-4"), "phi4"),
    **dict.fromkeys(("deepseek3", "deepseek_v3"), "deepseek3"),
    "zephyr": "zephyr",
    "vicuna": "vicuna",
}
