"""What would explain a sample that does not reproduce: typed findings, each with one sentence."""

from __future__ import annotations

from msgspec import Struct

__all__ = [
    "EditedLogprob",
    "EditedTokens",
    "Explanation",
    "LaterVersion",
    "NearWeights",
    "NotDrawn",
    "OtherParams",
    "OtherSeed",
    "OtherVersion",
    "StalePrefix",
    "TokenEdit",
    "Unexplained",
]


class TokenEdit(Struct, frozen=True):
    position: int
    recorded: int
    drawn: int


class EditedTokens(Struct, frozen=True, tag="edited_tokens"):
    """With the drawn tokens put back, everything else of the sample follows."""

    edits: tuple[TokenEdit, ...]

    @property
    def sentence(self) -> str:
        edits = ", ".join(f"token {e.position} was {e.drawn} and is recorded as {e.recorded}" for e in self.edits)
        return f"{edits}; with that put back everything follows"


class EditedLogprob(Struct, frozen=True, tag="edited_logprob"):
    """One token's log-probability, `field` names which (or both), is the only thing that differs."""

    position: int
    field: str
    recorded: float
    recomputed: float

    @property
    def sentence(self) -> str:
        return (
            f"only {self.field} of token {self.position} differs: recorded {self.recorded!r}, "
            f"computed {self.recomputed!r}; it was changed afterwards"
        )


class OtherSeed(Struct, frozen=True, tag="other_seed"):
    seed: int
    index: int
    recorded_seed: int
    recorded_index: int

    @property
    def sentence(self) -> str:
        return (
            f"its tokens were drawn with seed {self.seed} as sample {self.index}, "
            f"the record says seed {self.recorded_seed} and sample {self.recorded_index}"
        )


class NotDrawn(Struct, frozen=True, tag="not_drawn"):
    """All log-probabilities are right, but the recorded seed draws other tokens, and no seed that was tried these."""

    num_tokens: int
    num_tried: int

    @property
    def sentence(self) -> str:
        return (
            f"all log-probabilities are right, but {self.num_tokens} tokens are not what its seed draws; "
            f"none of {self.num_tried} other seeds and indices draws them"
        )


class OtherParams(Struct, frozen=True, tag="other_params"):
    """The model's own log-probabilities are right, those of what was sampled from are not."""

    num_tokens: int

    @property
    def sentence(self) -> str:
        return (
            f"raw_logprobs are right and logprobs of {self.num_tokens} tokens are not: it was sampled with other "
            "parameters than the recorded ones"
        )


class OtherVersion(Struct, frozen=True, tag="other_version"):
    """Whatever the label calls `recorded` was made under `version`; `recorded` is None where the labels contradict
    themselves."""

    version: int
    recorded: int | None

    @property
    def sentence(self) -> str:
        says = "the labels contradict themselves" if self.recorded is None else f"the label says {self.recorded}"
        return f"tokens and KV are of version {self.version}, {says}"


class StalePrefix(Struct, frozen=True, tag="stale_prefix"):
    """KV of positions 0 to `end` (half-open) that tokens from `first_token` on attended to is of another version."""

    end: int
    version: int
    recorded: int
    first_token: int

    @property
    def sentence(self) -> str:
        since = "" if self.first_token == 0 else f" for tokens from {self.first_token} on"
        return (
            f"positions 0-{self.end - 1} were computed under version {self.version}{since}, "
            f"the label says {self.recorded}"
        )


class LaterVersion(Struct, frozen=True, tag="later_version"):
    """Tokens from `first_token` on were drawn under another version, over the KV there was or KV computed again."""

    first_token: int
    version: int
    recorded: int
    kv: str

    @property
    def sentence(self) -> str:
        kv = "with the KV before it kept" if self.kv == "keep" else "with all KV computed again"
        return (
            f"tokens from {self.first_token} on were drawn under version {self.version} ({kv}), "
            f"the label says {self.recorded}"
        )


class NearWeights(Struct, frozen=True, tag="near_weights"):
    """Nothing exact was found, but the labelled weights are near."""

    largest_difference: float
    num_differing: int

    @property
    def sentence(self) -> str:
        return (
            f"{self.num_differing} log-probabilities differ by at most {self.largest_difference:.1e} from what the "
            "labelled weights give: the weights differ slightly from those that sampled, or other arithmetic did"
        )


class Unexplained(Struct, frozen=True, tag="unexplained"):
    versions: tuple[int, ...]

    @property
    def sentence(self) -> str:
        versions = ", ".join(map(str, self.versions))
        return f"neither a known version ({versions}), a mixture of two, another seed nor an edit explains it"


Explanation = (
    EditedTokens
    | EditedLogprob
    | OtherSeed
    | NotDrawn
    | OtherParams
    | OtherVersion
    | StalePrefix
    | LaterVersion
    | NearWeights
    | Unexplained
)
