"""Public helpers for tests of programs that embed the engine: tiny models, and faults on demand."""

from aengine.testing.faults import FaultInjector, FaultPoint
from aengine.testing.models import TINY, random_tensors, tiny_checkpoint

__all__ = ["TINY", "FaultInjector", "FaultPoint", "random_tensors", "tiny_checkpoint"]
