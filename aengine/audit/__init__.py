"""Proof that samples are what their labels say: records on disk, and an independent forward pass."""
