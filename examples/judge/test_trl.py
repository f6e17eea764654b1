"""TRL's SFTTrainer on two ranks, with accumulation: is its step that of one process?"""

import pytest
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from two_ranks import make_base, run

import meshlora_judge


def _sft(rank, base, folder, tokenizer):
    rows = [{"input_ids": [2 + (number * place) % 90 for place in range(1, 5 + number)]} for number in range(16)]
    arguments = SFTConfig(
        f"{folder}-saved",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        report_to="none",
        save_strategy="no",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(base),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )
    with meshlora_judge.record(trainer, folder, steps=2):
        trainer.train()


@pytest.mark.judged
def test_sft(judge_step, tmp_path):
    # Rows are tokenised already: TRL asks it for padding alone.
    words = WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")
    base = make_base(tmp_path / "base")
    run(_sft, base, judge_step.folder, tokenizer)
    judge_step.verdict(judge_step.folder, base)
