"""Rotary tables, made without torch: its first parallel `cos` in a process may be inaccurate (pytorch#188792)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.interface import Rotary
from aengine.model.spec import ModelSpec, RopeScaling

__all__ = ["build_rotary"]


def build_rotary(spec: ModelSpec, num_positions: int) -> Rotary:
    """Cosines and sines in float64 of angles that are rounded to float32 wherever transformers rounds them: at position
    10,000 the rounding moves an angle by up to 5e-4, and the trainer's model has it too."""
    angles = np.outer(np.arange(num_positions, dtype=np.float32), _frequencies(spec)).astype(np.float64)
    return Rotary(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def _frequencies(spec: ModelSpec) -> NDArray[np.float32]:
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    frequencies = np.float32(1) / (spec.rope_theta ** exponents.astype(np.float64)).astype(np.float32)
    if spec.rope_scaling is None:
        return frequencies
    return _scale_llama3(frequencies.astype(np.float64), spec.rope_scaling).astype(np.float32)


def _scale_llama3(frequencies: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """Llama 3.1: slow frequencies are divided by the factor, fast ones kept, those between go over smoothly."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)  # within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    scaled: NDArray[np.float64] = frequencies * (kept + (1.0 - kept) / scaling.factor)
    return scaled
