"""Proof that samples are what their labels say: records on disk, and an independent forward pass."""

from aengine.audit.gap import TrainerGap, trainer_gap

__all__ = ["TrainerGap", "trainer_gap"]
