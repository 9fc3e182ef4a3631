"""Which policy version made what in one sample: its tokens, and the KV they attended to."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from aengine.outputs import KVSpan, VersionSpan

__all__ = ["Provenance"]

UNATTENDED = -1


@define(eq=False)
class _Stretch:
    """Positions `start` to `end` of the context that lies in the cache now, computed under `version`."""

    version: int
    start: int
    end: int
    first_token: int = UNATTENDED
    """The output token that attended to it first; every one after it has done so, too."""
    attended_end: int = 0
    """What `end` was when the last token attended to it."""

    def span(self, num_tokens: int) -> KVSpan:
        return KVSpan(self.version, self.start, self.attended_end, self.first_token, num_tokens)


@define(eq=False)
class Provenance:
    """Kept while a sample runs. `computed` and `sampled` are called in the order in which things happened.

    There is one for every sample in the queue, and one call for every token, so what most never need is made when it is
    needed: spans when they are asked for, or when something new begins.
    """

    _context: tuple[_Stretch, ...] = ()
    _version: int | None = None
    """Of the token that was sampled last."""
    _version_start: int = 0
    _num_tokens: int = 0
    _past_versions: tuple[VersionSpan, ...] = ()
    _past_kv: tuple[KVSpan, ...] = ()
    """Of context that has been given up."""

    @classmethod
    def continued(cls, version_spans: Sequence[VersionSpan], kv_spans: Sequence[KVSpan]) -> Provenance:
        """Of a sample whose tokens are there, and whose KV is to be computed again."""
        if not version_spans:
            return cls(past_kv=tuple(kv_spans))
        *past, last = version_spans
        return cls((), last.version, last.start, last.end, tuple(past), tuple(kv_spans))

    def forget_context(self) -> None:
        """The sample's KV was given up and will be computed again."""
        self._past_kv = self.kv_spans()
        self._context = ()

    def computed(self, start: int, end: int, version: int) -> None:
        """KV of positions `start` to `end` is there, computed under `version` (by this sample, or found in the index,
        which holds nothing of another version)."""
        if start == end:
            return
        last = self._context[-1] if self._context else None
        assert start == (last.end if last else 0), "KV is computed in order of position"
        if last is not None and last.version == version:
            last.end = end
        else:
            self._context += (_Stretch(version, start, end),)

    def share_context(self, other: Provenance) -> None:
        """This sample was forked from another, and attends to the same KV."""
        self._context = tuple(_Stretch(stretch.version, stretch.start, stretch.end) for stretch in other._context)

    def sampled(self, version: int) -> None:
        """A token was drawn under `version`, having attended to all KV there is now."""
        at = self._num_tokens
        if version != self._version:
            self._past_versions = self.version_spans()
            self._version, self._version_start = version, at
        for stretch in self._context:
            if stretch.first_token == UNATTENDED:
                stretch.first_token = self._attended_since(stretch, at)
            stretch.attended_end = stretch.end
        self._num_tokens = at + 1

    def _attended_since(self, stretch: _Stretch, at: int) -> int:
        """`at`, or where the span began that this stretch continues: the same KV, given up and computed again since
        the token before."""
        for index, span in enumerate(self._past_kv):
            if (span.version, span.start, span.last_token) == (stretch.version, stretch.start, at):
                self._past_kv = self._past_kv[:index] + self._past_kv[index + 1 :]
                return span.first_token
        return at

    @property
    def is_mixed(self) -> bool:
        """Whether more than one version sampled its tokens or computed the KV they attended to."""
        versions = {span.version for span in self.version_spans()} | {span.version for span in self.kv_spans()}
        return len(versions) > 1

    def version_spans(self) -> tuple[VersionSpan, ...]:
        if self._version is None:
            return self._past_versions
        return (*self._past_versions, VersionSpan(self._version, self._version_start, self._num_tokens))

    def kv_spans(self) -> tuple[KVSpan, ...]:
        attended = [stretch for stretch in self._context if stretch.first_token != UNATTENDED]
        if not attended:
            return self._past_kv
        return (*self._past_kv, *(stretch.span(self._num_tokens) for stretch in attended))
