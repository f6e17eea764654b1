"""Make the tiny base: a 2.4 M parameter Llama pretrained on Python's own documentation strings.

Owns the whole recipe: text, tokenizer, model, training loop, files. Does not know about LoRA or meshes. The result is
committed next to this file, so this script only needs to be run again to change it:

    OMP_NUM_THREADS=1 python examples/tiny_base/pretrain.py

One thread took 17 minutes (991 s of training). Held-out loss went 4.588 (step 249), 3.731 (999), 3.424 (1749), 3.371
(the saved bfloat16 weights); a model that knows only token frequencies loses 6.389. The text comes from the running
interpreter's standard library, here Python 3.11.7, so another version gives other weights.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
SEED = 0
VOCAB_SIZE = 2048
ROW_LEN = 256  # tokens in a packed training row
BATCH_ROWS = 8
PEAK_LR = 3e-3
WARMUP_STEPS = 100
WEIGHT_DECAY = 0.1
HELD_OUT_EVERY = 20  # one source file in twenty is held out
MAX_EVAL_ROWS = 128
EOS, PAD = "<|endoftext|>", "<|pad|>"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

# Trained tokens of a conversation are those between the generation markers: the assistant's text and its eos.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '### assistant\\n' -}}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- '### ' + message['role'] + '\\n' + message['content'] + '\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### assistant\\n' -}}{%- endif -%}
"""

SAMPLE_PROMPTS = (
    'def open(path, mode="r"):\n    """',
    'class Connection(object):\n    """',
    'def remove(self, item):\n    """',
)


# ---- text ----


def source_files(root: Path) -> list[Path]:
    """Every Python source of the standard library that is neither installed by a package nor a test, sorted."""
    found = [path.relative_to(root) for path in root.rglob("*.py")]
    return [root / path for path in sorted(found) if not SKIPPED_FOLDERS & set(path.parts)]


def quoted(text: str, *, indent: str) -> str:
    """A documentation string as it would stand in a source file, closing quotes included."""
    body = inspect.cleandoc(text)
    closing = '\n"""\n' if "\n" in body else '"""\n'
    lines = f'"""{body}{closing}'.splitlines()
    return "\n".join(indent + line if line else line for line in lines) + "\n"


def documented(tree: ast.Module) -> Iterator[str]:
    """One document for each docstring: its signature line, then the quoted string."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        if isinstance(node, ast.Module):
            yield quoted(text, indent="")
        elif isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            head = f"class {node.name}({bases}):" if bases else f"class {node.name}:"
            yield f"{head}\n{quoted(text, indent='    ')}"
        else:
            yield f"def {node.name}({ast.unparse(node.args)}):\n{quoted(text, indent='    ')}"


def help_topics(tree: ast.Module) -> Iterator[str]:
    """The pages `help()` shows on the language itself: the values of the dict in `pydoc_data/topics.py`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for value in node.values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value.strip() + "\n"


def read_corpus(root: Path) -> tuple[list[str], list[str]]:
    """(training documents, held-out documents). Whole files are held out, so that no docstring has a sibling there."""
    train: list[str] = []
    held_out: list[str] = []
    for index, path in enumerate(source_files(root)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # lib2to3 keeps files that are wrong on purpose
            continue
        is_topics = path.parent.name == "pydoc_data"
        documents = help_topics(tree) if is_topics else documented(tree)
        (held_out if index % HELD_OUT_EVERY == 0 and not is_topics else train).extend(documents)
    return train, held_out


# ---- tokenizer ----


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that any text has tokens and none is unknown."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=2 * ROW_LEN,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def pack(documents: list[str], *, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """All documents end to end, each closed by eos, cut into rows.  -> [N, S] int64"""
    stream: list[int] = []
    for document in documents:
        stream += tokenizer.encode(document, add_special_tokens=False, verbose=False)
        stream.append(tokenizer.eos_token_id)
    num_rows = len(stream) // ROW_LEN
    return torch.tensor(stream[: num_rows * ROW_LEN]).view(num_rows, ROW_LEN)


def unigram_loss(train: Tensor, held_out: Tensor) -> float:
    """Nats a token that a model knowing only the training frequencies loses on the held-out rows."""
    counts = torch.bincount(train.flatten(), minlength=VOCAB_SIZE).double() + 1
    return -(counts / counts.sum()).log()[held_out.flatten()].mean().item()


# ---- model and training ----


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Heads, key-value heads and every width divide by 4, so the base can be split four ways."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=2 * ROW_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def next_token_loss(model: LlamaForCausalLM, rows: Tensor) -> Tensor:
    logits = model(input_ids=rows, use_cache=False).logits  # [B, S, V]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, rows: Tensor) -> float:
    """Mean loss in nats a token over at most MAX_EVAL_ROWS rows."""
    batches = rows[:MAX_EVAL_ROWS].split(BATCH_ROWS)
    return sum(next_token_loss(model, batch).item() * len(batch) for batch in batches) / min(len(rows), MAX_EVAL_ROWS)


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    scales = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95))


def learning_rate(step: int, *, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return PEAK_LR * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def batches(rows: Tensor, *, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches of rows without end, shuffled anew in every pass."""
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for chosen in order.split(BATCH_ROWS):
            if len(chosen) == BATCH_ROWS:
                yield rows[chosen]


def pretrain(model: LlamaForCausalLM, *, train: Tensor, held_out: Tensor, num_steps: int) -> None:
    optimizer = build_optimizer(model)
    started = time.perf_counter()
    rows = batches(train, generator=torch.Generator().manual_seed(SEED))
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps=num_steps)
        loss = next_token_loss(model, next(rows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == num_steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.perf_counter() - started:6.0f} s", flush=True)
        if (step + 1) % 250 == 0 or step == num_steps - 1:
            print(f"step {step:5d}  held-out loss {evaluate(model, held_out):.3f}", flush=True)


def print_samples(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    for prompt in SAMPLE_PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=60, do_sample=False)
        print("-" * 40, tokenizer.decode(tokens[0]), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain the tiny base on the standard library's docstrings.")
    parser.add_argument("--steps", type=int, default=2500, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder that receives the model files")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    train_documents, held_out_documents = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    num_bytes = sum(len(document.encode()) for document in train_documents)
    print(f"{len(train_documents)} training documents, {num_bytes} bytes; {len(held_out_documents)} held out")

    tokenizer = train_tokenizer(train_documents)
    train = pack(train_documents, tokenizer=tokenizer)
    held_out = pack(held_out_documents, tokenizer=tokenizer)
    print(
        f"{train.numel()} training tokens, {held_out.numel()} held out; {num_bytes / train.numel():.2f} bytes a token"
    )
    print(f"unigram loss {unigram_loss(train, held_out):.3f}, uniform {math.log(VOCAB_SIZE):.3f}")

    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    pretrain(model, train=train, held_out=held_out, num_steps=options.steps)

    model.to(torch.bfloat16)
    print(f"held-out loss of the saved bfloat16 weights {evaluate(model, held_out):.3f}")
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print_samples(model, tokenizer)


if __name__ == "__main__":
    main()
