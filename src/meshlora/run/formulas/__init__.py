"""Formulas of objectives over the log-probabilities of a batch; `run.objectives` runs them."""
