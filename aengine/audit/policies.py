"""The weights that a replay computes with, by policy version, loaded when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attrs import define, field
from torch import Tensor

from aengine.audit.record import RolloutHeader
from aengine.audit.snapshots import SnapshotStore
from aengine.errors import AuditError, SnapshotError, UnknownVersionError
from aengine.kernels.invariance import FAST, UNPACKED, LinearChoice, Numerics, probe
from aengine.kernels.linear import STRATEGIES
from aengine.model.checkpoint import Checkpoint
from aengine.model.matching import match_tensors
from aengine.model.shared import share_weights, shared_linear_shapes
from aengine.model.spec import ModelSpec
from aengine.model.weights import DecoderWeights, build_weights, linear_shapes
from aengine.policy.digest import digest_tensors

__all__ = ["PolicyWeights", "policies_of_model", "policies_of_snapshots", "recorded_numerics"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

HELD = 2

LoadTensors = Callable[[int], Mapping[str, Tensor]]


@define(eq=False)
class PolicyWeights:
    """Call it with a version number for its weights, packed. The last two are held.

    Raises `UnknownVersionError` for a number that is not among `versions`, and what `load` raises.
    """

    spec: ModelSpec
    numerics: Numerics
    load: LoadTensors
    versions: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_shared: bool = False
    """Whether products are to be unfused, as those of an engine that shares a module's parameters."""
    _held: dict[int, DecoderWeights] = field(factory=dict, init=False)

    def __call__(self, version: int) -> DecoderWeights:
        if version not in self.versions:
            raise UnknownVersionError(version, self.versions)
        weights = self._held.pop(version, None)
        if weights is None:
            while len(self._held) >= HELD:
                del self._held[next(iter(self._held))]
            weights = self._build(self.load(version))
        self._held[version] = weights  # the one used last comes last
        return weights

    def _build(self, tensors: Mapping[str, Tensor]) -> DecoderWeights:
        if not self.is_shared:
            return build_weights(self.spec, tensors, self.numerics, self.dtype)
        own = {name: tensor.to(self.dtype).contiguous() for name, tensor in tensors.items()}
        return share_weights(self.spec, own, self.numerics)


def check_header(header: RolloutHeader) -> None:
    """Refuse a header that no engine writes before anything is built by it. Raises `AuditError`."""
    most = header.spec.max_position_embeddings
    if not 0 < header.max_sequence_len <= most + 1:
        raise AuditError(f"the header says max_sequence_len {header.max_sequence_len}; the model has {most} positions")


def policies_of_snapshots(store: SnapshotStore, header: RolloutHeader, digests: Mapping[int, str]) -> PolicyWeights:
    """Every version in `store`; `digests` are those that the rollouts file names.

    Raises `AuditError` where there is none. Loading one raises `SnapshotError` if the stored weights are damaged, or
    not those that the rollouts were made with.
    """
    check_header(header)
    versions = store.versions()
    if not versions:
        raise AuditError(f"there are no snapshots in {store.path}")

    def load(version: int) -> Mapping[str, Tensor]:
        snapshot = store.load(version)
        if (recorded := digests.get(version, snapshot.policy.digest)) != snapshot.policy.digest:
            reason = f"version {version} has digest {snapshot.policy.digest}, the rollouts were made with {recorded}"
            raise SnapshotError(store.path, reason)
        if snapshot.spec != header.spec:
            raise SnapshotError(store.path, f"version {version} is of another model than the rollouts")
        return snapshot.tensors

    numerics = recorded_numerics(header)
    return PolicyWeights(header.spec, numerics, load, tuple(versions), _dtype(header), header.is_shared)


def policies_of_model(checkpoint: Checkpoint, header: RolloutHeader, digests: Mapping[int, str]) -> PolicyWeights:
    """The versions whose digest is that of the model's weights; raises `AuditError` where there is none."""
    check_header(header)
    if checkpoint.spec != header.spec:
        raise AuditError(f"{checkpoint.name} is another model than {header.model}: their specs differ")
    tensors = match_tensors(checkpoint.spec, checkpoint.tensors)
    numerics, dtype = recorded_numerics(header), _dtype(header)
    digest = digest_tensors((name, tensor.to(dtype)) for name, tensor in tensors.items())
    versions = tuple(number for number, recorded in digests.items() if recorded == digest)
    if not versions:
        known = ", ".join(f"version {number} with {recorded}" for number, recorded in digests.items())
        raise AuditError(f"the weights of {checkpoint.name} have digest {digest}; the rollouts are of {known}")
    return PolicyWeights(header.spec, numerics, lambda _: tensors, versions, dtype, header.is_shared)


def recorded_numerics(header: RolloutHeader) -> Numerics:
    """The products that the header says were used, where this machine has them; else what a probe chooses here."""
    if header.numerics == "fast":
        return FAST
    shared, fused = shared_linear_shapes(header.spec), linear_shapes(header.spec, _dtype(header))
    shapes = sorted(set(shared if header.is_shared else fused))
    names = [header.products.get(str(shape), "") for shape in shapes]
    if not all(name in STRATEGIES and STRATEGIES[name].is_available() for name in names):
        return probe(shapes, UNPACKED if header.is_shared else ())
    choices = (
        LinearChoice(shape, name, single_row=False, holds=True) for shape, name in zip(shapes, names, strict=True)
    )
    return Numerics("invariant", tuple(choices))


def _dtype(header: RolloutHeader) -> torch.dtype:
    dtype = DTYPES.get(header.dtype)
    if dtype is None:
        raise AuditError(f"the rollouts were computed in {header.dtype}, which is none of {', '.join(DTYPES)}")
    return dtype
