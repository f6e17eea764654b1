"""Tests of the judge on stacks of others."""
