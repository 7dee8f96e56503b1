"""Checkpoints: which weights belong to which expert, and the layer in plain torch."""
