from datasets import load_dataset
from transformers import DataCollatorForSeq2Seq, TrainingArguments
from trl import SFTTrainer
from unsloth import FastLanguageModel, is_bfloat16_supported
from unsloth.chat_templates import get_chat_template, train_on_responses_only

raise SystemExit("it is read, never run")

LENGTH = 2048

if __name__ == "__main__":
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name="unsloth/Llama-3.1-8B-Instruct", max_seq_length=LENGTH, dtype=None, load_in_4bit=True
    )
    tokenizer = get_chat_template(tokenizer, chat_template="llama-3.1")

    def rendered(examples):
        return {"text": [tokenizer.apply_chat_template(each, tokenize=False) for each in examples["messages"]]}

    data = load_dataset("allenai/openassistant-guanaco-reformatted", split="train")
    data = data.map(rendered, batched=True)
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        target_modules=["k_proj", "q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj"],
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=3407,
        use_rslora=False,
        loftq_config=None,
    )
    trainer = SFTTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=data,
        dataset_text_field="text",
        max_seq_length=LENGTH,
        data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer),
        dataset_num_proc=2,
        packing=False,
        args=TrainingArguments(
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            warmup_ratio=0.1,
            max_steps=200,
            learning_rate=2e-4,
            fp16=not is_bfloat16_supported(),
            bf16=is_bfloat16_supported(),
            logging_steps=50,
            optim="adamw_8bit",
            lr_scheduler_type="linear",
            seed=3407,
            output_dir="outputs",
            report_to="none",
        ),
    )
    trainer = train_on_responses_only(trainer, instruction_part="user", response_part="assistant")
    trainer.train()
