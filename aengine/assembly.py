"""Putting an engine together: weights, page pool, gate, scheduler and updater, each made once."""

from __future__ import annotations

import logging
import uuid
from functools import partial

import torch
from attrs import frozen

from aengine.auditor import Auditor
from aengine.cache.manager import TaskCacheManager
from aengine.cache.storage import KVStorage
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.events import EventLog
from aengine.intake import Intake
from aengine.kernels.formats import FLOAT_TYPES
from aengine.kernels.invariance import FAST
from aengine.kernels.warmup import warm_up_torch
from aengine.model.checkpoint import Checkpoint
from aengine.model.decoder import Decoder
from aengine.model.numerics import decoder_shape, probe_numerics
from aengine.model.shared import share_weights
from aengine.model.spec import ModelSpec
from aengine.model.weights import DecoderWeights, build_weights
from aengine.outputs import NumericsLabel
from aengine.plan import Planner
from aengine.policy.digest import combine_digests, digest_each
from aengine.policy.gate import PolicyGate
from aengine.policy.journal import Journal
from aengine.policy.lease import StableLease
from aengine.policy.ledger import Ledger
from aengine.policy.roles import StagedWeights
from aengine.policy.update import Transaction
from aengine.policy.updater import WeightUpdater
from aengine.policy.version import PolicyVersion
from aengine.prompts import PromptReader
from aengine.runner import ModelRunner, SharedModelRunner
from aengine.scheduler import Scheduler
from aengine.signal import Signal
from aengine.stats import EngineStats, PrefixStats
from aengine.worker import Outcome, Worker

__all__ = ["Assembly", "assemble"]

Loaded = tuple[ModelRunner, PolicyVersion, Journal]

SILENT = logging.NullHandler()
"""Keeps the logging module from printing warnings of a program that has not set up logging."""


@frozen(eq=False)
class Assembly:
    """The parts of an open engine."""

    worker: Worker
    runner: ModelRunner
    cache: TaskCacheManager
    gate: PolicyGate
    planner: Planner
    scheduler: Scheduler
    updater: WeightUpdater
    auditor: Auditor
    journal: Journal
    intake: Intake

    def close(self) -> None:
        """Let go of threads and files. Raises `LedgerError` if the ledger's end cannot be written."""
        self.worker.close()
        self.journal.close()

    @property
    def numerics(self) -> NumericsLabel:
        """What is promised of the bits of every sample."""
        return self.runner.decoder.weights.strategy.mode

    def stats(self) -> EngineStats:
        cache, numerics = self.cache.stats(), self.runner.decoder.weights.strategy
        return EngineStats(
            state=self.gate.state.value,
            policy_version=None if self.gate.version is None else self.gate.version.number,
            num_waiting=self.planner.num_waiting,
            num_running=self.planner.num_running,
            num_preemptions=self.planner.num_preemptions,
            num_sampled_tokens=self.scheduler.num_sampled_tokens,
            num_reprefilled_tokens=self.planner.num_reprefilled_tokens,
            num_mixed_policy_samples=self.planner.num_mixed_policy_samples,
            num_invalidated_pages=self.journal.num_invalidated,
            updates=dict(self.updater.totals),
            pages=cache.pages,
            prefix=PrefixStats(cache.query_tokens, cache.hit_tokens),
            numerics=numerics.mode,
            dtype=str(self.runner.decoder.weights.dtype).removeprefix("torch."),
            max_sequence_len=self.intake.reader.max_new_tokens(()),
            is_shared=isinstance(self.runner, SharedModelRunner),
            products={str(choice.shape): choice.strategy for choice in numerics.choices},
            operators={finding.name: finding.strategy for finding in numerics.operators},
            unverified=numerics.complaints(),
            audits=self.auditor.totals(),
        )


async def assemble(checkpoint: Checkpoint, config: EngineConfig, *, share: bool = False) -> Assembly:
    """Build the parts; what takes long runs in the worker thread. Raises `ConfigError` for sizes that cannot work."""
    logging.getLogger("aengine").addHandler(SILENT)  # adding it again does nothing
    max_model_len = _max_model_len(checkpoint.spec, config)
    num_pages = _num_pages(checkpoint.spec, config, max_model_len)
    worker = Worker("aengine worker")
    try:
        load = partial(_load, checkpoint, config, max_model_len, num_pages, share)
        runner, version, journal = _take(await worker.finish(load))
    except BaseException:
        worker.close()
        raise
    cache = TaskCacheManager(
        num_pages=num_pages,
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        prefix_caching=config.prefix_caching,
        cache=config.cache,
    )
    reader = PromptReader(
        tokenizer=checkpoint.tokenizer,
        vocab_size=checkpoint.spec.vocab_size,
        max_model_len=max_model_len,
        capacity=cache.capacity_tokens,
    )
    return _connect(checkpoint, config, worker, runner, version, journal, cache, reader)


def _connect(
    checkpoint: Checkpoint,
    config: EngineConfig,
    worker: Worker,
    runner: ModelRunner,
    version: PolicyVersion,
    journal: Journal,
    cache: TaskCacheManager,
    reader: PromptReader,
) -> Assembly:
    """Everything that decides, around what was loaded; one signal tells all of it that something has changed."""
    changed = Signal()
    gate = PolicyGate(version, changed)
    gate.on_transition(journal.append)
    planner = Planner(
        cache,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_queued_reqs=config.max_num_queued_reqs,
    )
    auditor = Auditor(
        gate,
        runner,
        worker,
        journal,
        changed,
        is_idle=lambda: not planner.has_work(gate.state),
        fraction=config.audit_fraction,
        seed=config.seed,
        max_model_len=reader.max_new_tokens(()),
    )
    scheduler = Scheduler(
        gate,
        cache,
        planner,
        runner,
        worker,
        changed,
        refuse_when_full=config.when_queue_full == "raise",
        check_integrity=config.check_integrity,
        on_finished=auditor.offer,
    )

    def invalidate(lease: StableLease, end_ownership: bool) -> int:
        return cache.invalidate_cache(lease, end_ownership=end_ownership)

    updater = WeightUpdater(Transaction(gate, runner, scheduler, invalidate, journal, worker))
    intake = Intake(reader, checkpoint.tokenizer, checkpoint.eos_token_ids, config.seed, scheduler.is_alive)
    return Assembly(worker, runner, cache, gate, planner, scheduler, updater, auditor, journal, intake)


def _take(loading: Outcome[Loaded]) -> Loaded:
    """What was loaded. A cancellation that came meanwhile is raised, and the ledger let go of."""
    if loading.result is None or loading.cancelled is not None:
        if loading.result is not None:
            loading.result[2].close()
        raise loading.cancelled or loading.error or AssertionError("neither a result nor an error")
    return loading.result


def _max_model_len(spec: ModelSpec, config: EngineConfig) -> int:
    if config.max_model_len is None:
        return spec.max_position_embeddings
    if config.max_model_len > spec.max_position_embeddings:
        reason = f"the model has {spec.max_position_embeddings} positions"
        raise ConfigError("max_model_len", config.max_model_len, reason)
    return config.max_model_len


def _num_pages(spec: ModelSpec, config: EngineConfig, max_model_len: int) -> int:
    """As many pages as were asked for, or as the budget holds; no more than all sequences at once could fill."""
    if config.num_pages is not None:
        return config.num_pages
    page_bytes = KVStorage.page_bytes(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=config.page_size,
        dtype=FLOAT_TYPES[config.dtype],
    )
    affordable = config.kv_cache_memory // page_bytes
    if affordable == 0:
        reason = f"one page of {config.page_size} tokens takes {page_bytes} bytes"
        raise ConfigError("kv_cache_memory", config.kv_cache_memory, reason)
    return min(affordable, config.max_num_seqs * -(-max_model_len // config.page_size))


def _weights(checkpoint: Checkpoint, config: EngineConfig, max_model_len: int, share: bool) -> DecoderWeights:
    spec, dtype = checkpoint.spec, FLOAT_TYPES[config.dtype]
    if share and dtype != torch.float32:
        raise ConfigError("dtype", config.dtype, "an engine that shares a module's parameters computes in float32")
    numerics = FAST
    if config.numerics == "invariant":
        shape = decoder_shape(spec, page_size=config.page_size, max_model_len=max_model_len, dtype=dtype)
        numerics = probe_numerics(spec, shape, share=share)
    if share:
        return share_weights(spec, checkpoint.tensors, numerics)
    return build_weights(spec, checkpoint.tensors, numerics, dtype)


def _load(checkpoint: Checkpoint, config: EngineConfig, max_model_len: int, num_pages: int, share: bool) -> Loaded:
    spec = checkpoint.spec
    warm_up_torch()
    weights = _weights(checkpoint, config, max_model_len, share)
    storage = KVStorage(
        num_layers=spec.num_layers,
        num_pages=num_pages,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=config.page_size,
        dtype=weights.dtype,
    )
    parts = digest_each(weights.named_tensors())
    installed = StagedWeights(weights, combine_digests(parts), {} if share else parts)
    make_runner = SharedModelRunner if share else ModelRunner
    runner = make_runner(Decoder(spec, weights, max_model_len), storage, installed, checkpoint.eos_token_ids)
    if config.ledger is None:
        return runner, PolicyVersion(0, installed.digest), Journal(EventLog())
    ledger = Ledger.open(config.ledger, run_id=uuid.uuid4().hex, digest=installed.digest)
    return runner, PolicyVersion(ledger.initial_version, installed.digest), Journal(EventLog(), ledger)
