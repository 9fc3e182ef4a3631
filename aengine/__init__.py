"""An embeddable LLM rollout engine for reinforcement learning that knows which policy made every token."""

from aengine.blocking import BlockingEngine
from aengine.completed import CompletedOutputs
from aengine.config import EngineConfig
from aengine.conversation import Conversation
from aengine.engine import Engine
from aengine.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineInvalidatedError,
    EventLoopRunningError,
    ModelUnavailableError,
    PromptError,
    QueueFullError,
    RequestFailedError,
    SamplingParamsError,
    StaleVersionError,
    WeightUpdateError,
)
from aengine.model.checkpoint import Checkpoint, load_checkpoint
from aengine.outputs import CompletionOutput, KVSpan, RequestOutput, VersionSpan
from aengine.params import SamplingParams
from aengine.policy.pending import WeightUpdateAck
from aengine.policy.version import PolicyVersion
from aengine.scoring import ScoreOutput
from aengine.stats import EngineStats
from aengine.stream import RequestStream, StreamDelta

__all__ = [
    "BlockingEngine",
    "Checkpoint",
    "CheckpointError",
    "CompletedOutputs",
    "CompletionOutput",
    "ConfigError",
    "Conversation",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineInvalidatedError",
    "EngineStats",
    "EventLoopRunningError",
    "KVSpan",
    "ModelUnavailableError",
    "PolicyVersion",
    "PromptError",
    "QueueFullError",
    "RequestFailedError",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "SamplingParamsError",
    "ScoreOutput",
    "StaleVersionError",
    "StreamDelta",
    "VersionSpan",
    "WeightUpdateAck",
    "WeightUpdateError",
    "load_checkpoint",
]
