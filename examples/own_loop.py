"""A training loop of your own. From the repository's root, alone or on two processes:

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py --topology tp=2,sp
"""

import argparse

import torch
from peft import LoraConfig
from transformers import AutoTokenizer

import meshlora
from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import leave
from meshlora.data import GlobalBatches, collate, read_records, share, tokenize
from meshlora.train.losses import summed_cross_entropy


def main(topology: str, dtype: str, steps: int, out: str) -> None:
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = meshlora.load("examples/tiny_base", lora=lora, topology=topology, dtype=dtype).train()
    mesh = model.meshlora.mesh
    tokenizer = AutoTokenizer.from_pretrained("examples/tiny_base")
    data = tokenize(read_records("examples/docstrings/train.jsonl"), tokenizer, max_length=128)
    batches = GlobalBatches(len(data), global_batch_size=7, seed=0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(steps):
        loss_sum, num_tokens = torch.zeros(1, device=mesh.device), 0
        for part in share(batches.batch(step), dp_rank=mesh.dp.rank, dp_size=mesh.dp.size, micro_batch_size=3):
            batch = collate([data[i] for i in part], pad_token_id=tokenizer.pad_token_id, token_multiple=mesh.tp.size)
            ids, mask, labels = (t.to(mesh.device) for t in (batch.input_ids, batch.attention_mask, batch.labels))
            with meshlora.lift():  # for comparisons in float64; changes nothing for other dtypes
                loss = summed_cross_entropy(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, labels)
            loss.backward()
            loss_sum, num_tokens = loss_sum + loss.detach(), num_tokens + batch.num_trained_tokens
        total = meshlora.finish_gradients(model, num_tokens=num_tokens)
        meshlora.clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = float(all_reduce_sum(loss_sum, mesh.dp)) / total
        if mesh.rank == 0:
            print(f"step {step + 1}  loss {mean_loss:.4f}")
    meshlora.save_adapter(model, out)
    leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--topology", default="", help="as in dp=2, or tp=2,sp")
    parser.add_argument("--dtype", default="float32", help="of the base")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", default="runs/own_loop", help="folder of the adapter")
    main(**vars(parser.parse_args()))
