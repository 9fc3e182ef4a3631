"""From what a caller asks for to requests. Everything is checked here, so bad input never reaches the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from attrs import define

from aengine.errors import TokenizerMissingError
from aengine.model.tokenizer import Tokenizer
from aengine.params import SamplingParams
from aengine.prompts import Prompt, PromptReader
from aengine.request import Request
from aengine.sampling.mask import TokenMaskSource
from aengine.sampling.random import derive_seed
from aengine.sampling.stop import StopRule
from aengine.scoring import scoring_request

__all__ = ["Intake"]


@define(eq=False)
class Intake:
    """Makes requests, none of which it submits; owner of the numbers that their ids and seeds are made from."""

    reader: PromptReader
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    seed: int
    is_alive: Callable[[str], bool]
    _num_requests: int = 0
    _num_scores: int = 0

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        token_mask: TokenMaskSource | None = None,
    ) -> Request:
        """Raises `PromptError`, `SamplingParamsError` and `TokenizerMissingError`."""
        params = params if params is not None else SamplingParams()
        params.check_vocabulary(self.reader.vocab_size)
        if params.stop and self.tokenizer is None:
            raise TokenizerMissingError(f"SamplingParams.stop = {params.stop!r} needs text, and there is no tokenizer")
        token_ids = self.reader.read(prompt)
        self._num_requests += 1
        return Request(
            request_id=self._new_id(f"request-{self._num_requests}") if request_id is None else request_id,
            prompt_token_ids=token_ids,
            params=params,
            stop=StopRule.of(params, self.eos_token_ids, self.reader.max_new_tokens(token_ids)),
            seed=derive_seed(self.seed, self._num_requests) if params.seed is None else params.seed,
            priority=priority,
            cache_salt=cache_salt,
            decoder=self.tokenizer,
            token_mask=token_mask,
        )

    def requests(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """`params` is one for all or one for each; `ValueError` where their numbers differ."""
        prompts = list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        return [self.request(*pair) for pair in zip(prompts, each, strict=True)]

    def scores(
        self,
        sequences: Iterable[tuple[Prompt, Sequence[int]]],
        params: SamplingParams | None,
        *,
        with_support: bool,
        priority: int,
        cache_salt: str | None,
    ) -> list[Request]:
        """One request for each (prompt, response)."""
        params = params if params is not None else SamplingParams()
        params.check_vocabulary(self.reader.vocab_size)
        requests = []
        for prompt, response in sequences:
            prompt_token_ids = self.reader.read(prompt)
            self._num_scores += 1
            request = scoring_request(
                self._new_id(f"score-{self._num_scores}"),
                prompt_token_ids,
                self.reader.read_response(prompt_token_ids, response),
                params,
                with_support=with_support,
                priority=priority,
                cache_salt=cache_salt,
            )
            requests.append(request)
        return requests

    def _new_id(self, request_id: str) -> str:
        """An id that no caller has chosen for a request that is alive."""
        while self.is_alive(request_id):
            request_id += "+"
        return request_id
