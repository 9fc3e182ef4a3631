"""Other contexts that a sample may have been made in: which are worth a try, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

from aengine.audit.context import Context, Stretch, restrict, single_version
from aengine.audit.explanation import Explanation, LaterVersion, OtherVersion, StalePrefix
from aengine.audit.record import SampleRecord

__all__ = ["Hypothesis", "later_versions", "other_versions", "stale_prefixes"]

BORDERS = (64, 32, 16, 8, 4, 1)
"""Pages have these sizes mostly, so positions that are multiples of them are tried first."""


@frozen(eq=False)
class Hypothesis:
    contexts: tuple[Context, ...]
    explanation: Explanation


def other_versions(record: SampleRecord, labelled: Sequence[Context], versions: Sequence[int]) -> Iterator[Hypothesis]:
    """One version stands in the place of another, everywhere; or, whatever the labels say, it made everything."""
    named = sorted({version for context in labelled for version in context.versions})
    if len(named) == 1:
        named = []
    for version in versions:
        for recorded in named:
            if recorded != version:
                contexts = tuple(_renamed(context, recorded, version) for context in labelled)
                yield Hypothesis(contexts, OtherVersion(version, recorded))
    counts = len(record.prompt_token_ids), len(record.token_ids)
    single = labelled[0].stretches[0].version if labelled and not named else None
    for version in versions:
        if version != single:
            yield Hypothesis(single_version(*counts, version), OtherVersion(version, single))


def later_versions(
    record: SampleRecord, labelled: Sequence[Context], token: int, versions: Sequence[int]
) -> Iterator[Hypothesis]:
    """An update came before `token`, and the label does not say so."""
    if token == 0:
        return
    position, last = len(record.prompt_token_ids) + token - 1, len(record.token_ids)
    before, after = restrict(labelled, 0, token), restrict(labelled, token, last)
    end = position + last - token
    for version in versions:
        recorded = after[0].version_at(position)
        if version == recorded:
            continue
        kept = [Stretch(s.version, s.start, min(s.end, position)) for s in after[0].stretches if s.start < position]
        for kv, stretches in (
            ("keep", (*kept, Stretch(version, position, end))),
            ("recompute", (Stretch(version, 0, end),)),
        ):
            contexts = (*before, Context(stretches, token, last))
            yield Hypothesis(contexts, LaterVersion(token, version, recorded, kv))


def stale_prefixes(
    record: SampleRecord, labelled: Sequence[Context], token: int, versions: Sequence[int]
) -> Iterator[list[Hypothesis]]:
    """From `token` on, positions 0 to some border were found as another version had left them. Page borders first."""
    position = len(record.prompt_token_ids) + token - 1  # computed in the step that drew the token
    before, after = restrict(labelled, 0, token), restrict(labelled, token, len(record.token_ids))
    tried: set[int] = set()
    for border in BORDERS:
        ends = [end for end in range(border, position + 1, border) if end not in tried]
        tried.update(ends)
        for version in versions:
            group = []
            for end in ends:
                recorded = after[0].version_at(end - 1)
                if version != recorded:
                    contexts = (*before, _with_prefix(after[0], end, version), *after[1:])
                    group.append(Hypothesis(contexts, StalePrefix(end, version, recorded, token)))
            if group:
                yield group


def _renamed(context: Context, recorded: int, version: int) -> Context:
    stretches = tuple(
        Stretch(version if stretch.version == recorded else stretch.version, stretch.start, stretch.end)
        for stretch in context.stretches
    )
    return Context(stretches, context.first_token, context.last_token)


def _with_prefix(context: Context, end: int, version: int) -> Context:
    rest = [Stretch(s.version, max(s.start, end), s.end) for s in context.stretches if s.end > end]
    return Context((Stretch(version, 0, end), *rest), context.first_token, context.last_token)
