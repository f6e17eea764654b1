"""Objectives by what they learn from: rollouts, preferences, labels; `kinds` has all of them."""
