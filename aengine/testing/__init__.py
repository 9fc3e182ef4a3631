"""Public helpers for tests of programs that embed the engine: tiny models, faults on demand, and waiting."""

from aengine.testing.faults import FaultInjector, FaultPoint
from aengine.testing.models import TINY, random_tensors, tiny_checkpoint
from aengine.testing.waiting import until

__all__ = ["TINY", "FaultInjector", "FaultPoint", "random_tensors", "tiny_checkpoint", "until"]
