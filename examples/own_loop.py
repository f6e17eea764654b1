"""A training loop of your own. From the repository's root, alone or on two processes:

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py --topology tp=2,sp
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
from peft import LoraConfig
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

import meshlora


def main(topology: str, dtype: str, steps: int, out: str) -> None:
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = meshlora.load("examples/tiny_base", lora=lora, topology=topology, dtype=dtype).train()
    mesh, tokenizer = model.meshlora.mesh, AutoTokenizer.from_pretrained("examples/tiny_base")
    texts = map(json.loads, Path("examples/docstrings/train.jsonl").read_text(encoding="utf-8").splitlines())
    data = [tokenizer(text["prompt"] + text["completion"], truncation=True, max_length=128) for text in texts]
    rows = meshlora.sampler(model, data, batch_size=6 // mesh.dp.size, seed=0)
    loader = DataLoader(data, batch_sampler=rows, collate_fn=meshlora.collator(model, tokenizer))
    batches = itertools.chain.from_iterable(loader for _ in itertools.count())  # epoch after epoch
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for number in range(steps):
        # The lift is for comparisons in float64; it changes nothing for other dtypes.
        with meshlora.step(model, optimizer, max_norm=1.0) as step, meshlora.lift():
            for batch in itertools.islice(batches, 2):  # accumulation
                step.backward(model(**{name: value.to(mesh.device) for name, value in batch.items()}).loss)
        if mesh.rank == 0:
            print(f"step {number + 1}  loss {step.loss:.4f}  norm {step.grad_norm:.4f}  {step.num_tokens} tokens")
    meshlora.save_adapter(model, out)
    meshlora.leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--topology", default="", help="as in dp=2, or tp=2,sp")
    parser.add_argument("--dtype", default="float32", help="of the base")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", default="runs/own_loop", help="folder of the adapter")
    main(**vars(parser.parse_args()))
