"""Which version computed what, read back from a sample's spans: the contexts that its tokens attended to."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from aengine.errors import ProvenanceError
from aengine.outputs import KVSpan, VersionSpan

__all__ = ["Context", "Stretch", "contexts_of", "restrict", "single_version"]


@frozen
class Stretch:
    """Positions `start` to `end` (half-open, from the prompt's start) were computed under policy version `version`."""

    version: int
    start: int
    end: int


@frozen
class Context:
    """Output tokens `first_token` to `last_token` (half-open) were drawn on top of this KV, each of what lies before
    its own position.

    The stretches follow each other from position 0 to that of the last of these tokens. KV depends on the KV before
    it, so the same positions under the same versions have the same bits, and a sample has one context unless its KV
    was computed again under another version.
    """

    stretches: tuple[Stretch, ...]
    first_token: int
    last_token: int

    def version_at(self, position: int) -> int:
        return next(stretch.version for stretch in self.stretches if stretch.start <= position < stretch.end)

    def of_tokens(self, first_token: int, last_token: int) -> Context:
        """Of some of its tokens; the KV ends where the last of them needs it to."""
        end = self.stretches[-1].end - (self.last_token - last_token)
        stretches = tuple(Stretch(s.version, s.start, min(s.end, end)) for s in self.stretches if s.start < end)
        return Context(stretches, first_token, last_token)

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(stretch.version for stretch in self.stretches)


def single_version(num_prompt: int, num_tokens: int, version: int) -> tuple[Context, ...]:
    """The contexts of a sample whose tokens and KV are all of one version."""
    if num_tokens == 0:
        return ()
    return (Context((Stretch(version, 0, num_prompt + num_tokens - 1),), 0, num_tokens),)


def restrict(contexts: Sequence[Context], first_token: int, last_token: int) -> tuple[Context, ...]:
    """The contexts of tokens `first_token` to `last_token` (half-open)."""
    return tuple(
        context.of_tokens(max(first_token, context.first_token), min(last_token, context.last_token))
        for context in contexts
        if context.first_token < last_token and context.last_token > first_token
    )


def contexts_of(
    num_prompt: int, num_tokens: int, version_spans: Sequence[VersionSpan], kv_spans: Sequence[KVSpan]
) -> tuple[Context, ...]:
    """The contexts of a sample in order of its tokens.

    Raises `ProvenanceError` where a token has no version or two, has no KV for a position before it or two, or was
    drawn under another version than the one that computed the position just before it, which one step does together.
    """
    versions = _token_versions(num_tokens, version_spans)
    borders = {0, num_tokens} | {at for span in kv_spans for at in (span.first_token, span.last_token)}
    if min(borders) < 0 or max(borders) > num_tokens:
        raise ProvenanceError(f"kv_spans speak of tokens {min(borders)} to {max(borders)} of {num_tokens}")
    contexts: list[Context] = []
    for first, last in zip(sorted(borders), sorted(borders)[1:], strict=False):
        context = _context(num_prompt, first, last, kv_spans)
        _check_drawn_under(context, num_prompt, versions)
        if contexts and _continues(contexts[-1], context):
            context = Context(context.stretches, contexts.pop().first_token, last)
        contexts.append(context)
    return tuple(contexts)


def _token_versions(num_tokens: int, spans: Sequence[VersionSpan]) -> list[int]:
    versions: list[int] = []
    for span in spans:
        if span.start != len(versions) or span.end <= span.start:
            raise ProvenanceError(f"version_spans do not follow each other at token {len(versions)}: {span}")
        versions += [span.version] * (min(span.end, num_tokens + 1) - span.start)
    if len(versions) != num_tokens:
        raise ProvenanceError(f"version_spans end at token {len(versions)}, the sample has {num_tokens}")
    return versions


def _context(num_prompt: int, first: int, last: int, spans: Sequence[KVSpan]) -> Context:
    """Of tokens `first` to `last`, to all of which the same spans apply."""
    applying = sorted((s for s in spans if s.first_token <= first < s.last_token), key=lambda s: s.start)
    stretches: list[Stretch] = []
    at, end = 0, num_prompt + last - 1
    for span in applying:
        if span.start != at or span.end <= span.start:
            raise ProvenanceError(f"token {first}: positions {at} to {span.start} have no KV, or two ({span})")
        at = min(span.end, end)
        stretches.append(Stretch(span.version, span.start, at))
    if at != end or stretches[-1].start >= num_prompt + first:
        raise ProvenanceError(f"token {last - 1}: kv_spans end at position {at}, not at {end}")
    return Context(tuple(stretches), first, last)


def _check_drawn_under(context: Context, num_prompt: int, versions: Sequence[int]) -> None:
    for token in range(context.first_token, context.last_token):
        position = num_prompt + token - 1
        if context.version_at(position) != versions[token]:
            raise ProvenanceError(
                f"token {token} was drawn under version {versions[token]}, but the KV of position {position}, made in "
                f"the same step, is of version {context.version_at(position)}"
            )


def _continues(before: Context, context: Context) -> bool:
    """Whether the KV of `before` is the beginning of that of `context`."""
    cut = [
        Stretch(stretch.version, stretch.start, min(stretch.end, before.stretches[-1].end))
        for stretch in context.stretches
        if stretch.start < before.stretches[-1].end
    ]
    return tuple(cut) == before.stretches
