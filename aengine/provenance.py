"""Which policy version made what in one sample: its tokens, and the KV they attended to."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import Factory, define

from aengine.outputs import KVSpan, VersionSpan

__all__ = ["Provenance"]


@define
class _Stretch:
    """Positions `start` to `end` of the context that lies in the cache now, computed under `version`."""

    version: int
    start: int
    end: int


@define(eq=False)
class Provenance:
    """Kept while a sample runs. `computed` and `sampled` are called in the order in which things happened."""

    _context: list[_Stretch] = Factory(list)
    _version_spans: list[VersionSpan] = Factory(list)
    _kv_spans: list[KVSpan] = Factory(list)
    _num_tokens: int = 0

    @classmethod
    def continued(cls, version_spans: Sequence[VersionSpan], kv_spans: Sequence[KVSpan]) -> Provenance:
        """Of a sample whose tokens are there, and whose KV is to be computed again."""
        num_tokens = max((span.end for span in version_spans), default=0)
        return cls(version_spans=list(version_spans), kv_spans=list(kv_spans), num_tokens=num_tokens)

    def forget_context(self) -> None:
        """The sample's KV was given up and will be computed again."""
        self._context.clear()

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
            self._context.append(_Stretch(version, start, end))

    def share_context(self, other: Provenance) -> None:
        """This sample was forked from another, and attends to the same KV."""
        self._context = [_Stretch(stretch.version, stretch.start, stretch.end) for stretch in other._context]

    def sampled(self, version: int) -> None:
        """A token was drawn under `version`, having attended to all KV there is now."""
        at = self._num_tokens
        self._num_tokens += 1
        spans = self._version_spans
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, at + 1)
        else:
            spans.append(VersionSpan(version, at, at + 1))
        for stretch in self._context:
            self._attended(stretch, at)

    def _attended(self, stretch: _Stretch, at: int) -> None:
        """Lengthen the span of this stretch if the token before attended to it too, or begin one."""
        for index, span in enumerate(self._kv_spans):
            if (span.version, span.start, span.last_token) == (stretch.version, stretch.start, at):
                self._kv_spans[index] = KVSpan(span.version, span.start, stretch.end, span.first_token, at + 1)
                return
        self._kv_spans.append(KVSpan(stretch.version, stretch.start, stretch.end, at, at + 1))

    @property
    def is_mixed(self) -> bool:
        """Whether more than one version sampled its tokens or computed the KV they attended to."""
        versions = {span.version for span in self._version_spans} | {span.version for span in self._kv_spans}
        return len(versions) > 1

    def version_spans(self) -> tuple[VersionSpan, ...]:
        return tuple(self._version_spans)

    def kv_spans(self) -> tuple[KVSpan, ...]:
        return tuple(self._kv_spans)
