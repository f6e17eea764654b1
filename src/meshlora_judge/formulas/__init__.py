"""The judge's own formulas, from whole logits, by what they learn from."""
