"""Asking a model: prompts of files, conversations in a terminal, and the page of one."""
