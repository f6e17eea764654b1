"""Write a tiny mixture of experts with random weights: something to try examples/experts.yaml on, without a download.

python examples/make_tiny_moe.py            # runs/tiny_moe: qwen3_moe, 8 experts a layer, 2 chosen
"""

import argparse

import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

TOKENIZER = "examples/tiny_base"


def main(out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,  # of dense layers, of which there are none
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/tiny_moe", help="folder of the checkpoint")
    main(**vars(parser.parse_args()))
