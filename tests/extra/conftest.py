"""What these tests share with those of one process."""

from tests.unit.conftest import engine, good, models, nothing_has_happened_yet, setup, setups

__all__ = ["engine", "good", "models", "nothing_has_happened_yet", "setup", "setups"]
