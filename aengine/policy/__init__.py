"""Which weights: the policy version, the gate that keeps it stable, and the transaction that changes it."""

from aengine.policy.digest import digest_tensors
from aengine.policy.gate import PolicyGate, StableLease
from aengine.policy.update import WeightUpdateAck
from aengine.policy.version import PolicyVersion

__all__ = ["PolicyGate", "PolicyVersion", "StableLease", "WeightUpdateAck", "digest_tensors"]
