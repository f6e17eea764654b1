"""PEFT merges an adapter of the head of a tied model into the one matrix: the embedding is changed with it."""

from __future__ import annotations

from pathlib import Path

from common import base_model, run, with_adapter


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    targets = ["q_proj", "v_proj"] if is_repaired else ["q_proj", "v_proj", "lm_head"]
    model = with_adapter(base_model(folder), target_modules=targets)
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "merged")


if __name__ == "__main__":
    run(patient, ranks=1, tie_word_embeddings=True)
