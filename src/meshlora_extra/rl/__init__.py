"""Reinforcement learning: prompts to rollouts, and their rewards. Training on them is `meshlora.run`'s."""
