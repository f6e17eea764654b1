"""Write a small GPT-2 with random weights and a tokenizer of its own, for examples/e2e_gpt2.yaml; without a download.

python examples/make_tiny_gpt2.py     # runs/tiny_gpt2, some seconds

With --pretrain N it is first trained for N steps, all its weights, on the right-hand sides of the lines alone: it then
knows how such a text sounds, and nothing of what a left-hand side has to do with it. That is left to the adapter.
"""

import argparse
import random
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging

EOS = "<|endoftext|>"
BATCH_SIZE, LR = 16, 1e-3


def main(data: str, out: str, width: int, layers: int, pretrain: int) -> None:
    logging.disable_progress_bar()
    lines = Path(data).read_text(encoding="utf-8").splitlines()
    pairs = [tuple(side.strip() for side in line.split("||")) for line in lines if line.strip()]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([f"{left} {right}" for left, right in pairs], vocab_size=1024, special_tokens=[EOS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, bos_token=EOS)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=512,
        n_embd=width,
        n_layer=layers,
        n_head=width // 32,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    train(model, [tokenizer(f" {right}{EOS}").input_ids for _, right in pairs], pretrain)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {model.num_parameters():,} parameters, {len(tokenizer):,} tokens")


def train(model: GPT2LMHeadModel, texts: list[list[int]], steps: int) -> None:
    """Plain training on single texts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    chosen = random.Random(0)
    for step in range(steps):
        batch = [torch.tensor(ids) for ids in chosen.sample(texts, BATCH_SIZE)]
        labels = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
        mask = labels >= 0
        logits = model(input_ids=labels.clamp_min(0), attention_mask=mask.long()).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps}  loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--data", default=str(Path(__file__).parent / "e2e" / "train.txt"), help="lines of context||completion"
    )
    parser.add_argument("--out", default="runs/tiny_gpt2", help="folder of the checkpoint")
    parser.add_argument("--width", type=int, default=128, help="of the residual stream; a head has 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pretrain", type=int, default=0, metavar="N", help="steps on texts alone")
    main(**vars(parser.parse_args()))
