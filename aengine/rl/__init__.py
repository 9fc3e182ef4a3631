"""What a trainer needs: versions counted from its optimizer, rollouts as tensors, advantages and losses."""

from aengine.rl.batch import RolloutBatch
from aengine.rl.grpo import GRPOMetrics, group_advantages, grpo_loss
from aengine.rl.tracker import PolicyTracker

__all__ = ["GRPOMetrics", "PolicyTracker", "RolloutBatch", "group_advantages", "grpo_loss"]
