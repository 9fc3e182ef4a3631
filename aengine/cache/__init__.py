"""The KV cache: pages, the prefix index over them, and who holds what."""

from __future__ import annotations

from aengine.cache.allocator import Allocator
from aengine.cache.contiguous import ContiguousStrategy
from aengine.cache.keys import Salt, TokenIds
from aengine.cache.manager import TaskCacheManager
from aengine.cache.paged import PagedStrategy
from aengine.cache.pool import ReqToTokenPool
from aengine.cache.radix import RadixCache
from aengine.cache.state import CacheLease, CacheStats, PageStats, TaskCacheState
from aengine.cache.storage import KVStorage
from aengine.cache.strategy import AllocationStrategy

__all__ = [
    "AllocationStrategy",
    "Allocator",
    "CacheLease",
    "CacheStats",
    "ContiguousStrategy",
    "KVStorage",
    "PageStats",
    "PagedStrategy",
    "RadixCache",
    "ReqToTokenPool",
    "Salt",
    "TaskCacheManager",
    "TaskCacheState",
    "TokenIds",
]
