"""Checkpoints: saved between two steps, found again, and read under this plan or another."""
