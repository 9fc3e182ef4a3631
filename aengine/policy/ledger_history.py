"""Where a history stands: what the records read so far add up to."""

from __future__ import annotations

from attrs import Factory, define, frozen

from aengine.policy.ledger_records import OpenRecord, UpdateStage
from statemachines.policy import INITIAL, Guard, PolicyState

__all__ = ["CommittedVersion", "History", "Progress"]


@frozen
class CommittedVersion:
    """A version that samples may name: from a commit record, or the initial one of a run."""

    number: int
    digest: str
    line: int


@define
class Progress:
    """The update whose turn it is."""

    ordinal: int
    version: int
    stage: UpdateStage | None = None
    committed: bool = False
    invalidated: bool = False
    torn: bool = False


@define
class History:
    """The state after the records so far, as the engine had it. Changed by `ledger_rules.follow` only."""

    versions: list[CommittedVersion] = Factory(list)
    """Committed ones in order, initial versions included; a commit stands here from its record on."""
    num_runs: int = 0
    num_committed: int = 0
    num_withdrawn: int = 0
    num_failed: int = 0
    is_open: bool = False
    """Whether a run has begun and was not closed."""
    state: PolicyState = INITIAL
    swapped_from: PolicyState | None = None
    installed: int | None = None
    """None before the first run, and while the weights are torn."""
    last_installed: int = -1
    pending: CommittedVersion | None = None
    """A commit record that has neither taken effect nor been withdrawn."""
    is_flipped_back: bool = False
    """Whether the swap of `pending` was left without taking effect, so that it can only be withdrawn."""
    update: Progress | None = None
    last_started: int = 0
    refused: set[int] = Factory(set)
    """Ordinals of updates that ended before their turn came."""
    owes_fence: bool = False
    epoch: int = 0

    def begin_run(self, record: OpenRecord) -> None:
        """Forget what the run before had under way; its committed versions stay."""
        self.num_runs, self.is_open = self.num_runs + 1, True
        self.state, self.swapped_from = INITIAL, None
        self.installed = self.last_installed = record.version
        self.pending, self.is_flipped_back, self.update = None, False, None
        self.last_started, self.refused, self.owes_fence, self.epoch = 0, set(), False, 0

    def add_commit(self, version: CommittedVersion) -> None:
        self.pending, self.is_flipped_back = version, False
        self.versions.append(version)
        self.num_committed += 1

    def flip_back(self) -> None:
        """The swap is over and `pending` did not take effect: samples cannot name it."""
        if self.pending is not None and not self.is_flipped_back:
            self.versions.remove(self.pending)
            self.num_committed -= 1
            self.is_flipped_back = True

    def holds(self, guard: Guard | None) -> bool:
        if guard is Guard.ENTERED_FROM_DRAINING:
            return self.swapped_from is PolicyState.DRAINING
        return guard is None or self.installed is not None

    def unfinished(self) -> str | None:
        """What was under way at the end, or None."""
        if self.pending is not None:
            number = self.pending.number
            if self.is_flipped_back:
                return f"the commit of version {number} did not take effect and is not withdrawn yet"
            return f"version {number} is committed, but nothing says yet that it was published"
        if self.update is not None:
            return f"update {self.update.ordinal} to version {self.update.version} is {self.update.stage}"
        return "the weights are torn and not fenced yet" if self.owes_fence else None
