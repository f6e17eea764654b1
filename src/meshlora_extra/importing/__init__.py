"""Recipes of other trainers as run files: `meshlora import`."""
