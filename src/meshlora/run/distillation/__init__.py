"""Distillation: teachers, and how far a student is from one at each trained token."""
