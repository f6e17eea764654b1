"""Two gloo ranks on this machine, and a tiny base: what the tests beside it share."""

import os
import socket
import traceback

import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, LlamaConfig


def make_base(folder):
    """A Llama of two layers with random weights; returns its folder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes))
    model.save_pretrained(folder)
    return folder


def batches(rank, *, lengths=(9, 5, 12, 7)):
    """Two micro-batches of this rank, of one row each; and the number of trained tokens on both ranks together."""
    torch.manual_seed(0)
    rows = [torch.randint(0, 97, (1, length)) for length in lengths]
    mine = [{"input_ids": ids, "labels": ids} for ids in rows[rank::2]]
    return mine, torch.tensor(sum(length - 1 for length in lengths))


def run(work, *arguments):
    """`work(rank, *arguments)` on both ranks, in a process group; raises if one fails."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")  # torch is imported already
    processes = [context.Process(target=_rank, args=(work, rank, port, arguments)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]


def _rank(work, rank, port, arguments):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: f"{value}" for name, value in place.items()} | {"MASTER_ADDR": "localhost"})
    os.environ.update(CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    code = 1
    try:
        torch.distributed.init_process_group("gloo")
        work(rank, *arguments)
        torch.distributed.destroy_process_group()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)  # not through the end of pytest, whose copy this is
