"""Going on with aborted samples as if nothing had happened."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import attrs

from aengine.audit.record import SampleRecord, sample_records
from aengine.errors import PromptError, SamplingParamsError
from aengine.outputs import CompletionOutput, RequestOutput, weakest
from aengine.params import SamplingParams
from aengine.provenance import Provenance
from aengine.request import Request, Sample

__all__ = ["aborted", "params_of", "records_of", "resume_sample", "resumed_output"]

NOT_OF_A_SAMPLE = frozenset({"n", "seed", "prompt_logprobs"})
"""Parameters of a request: a sample has its own seed."""


def aborted(output: RequestOutput) -> list[CompletionOutput]:
    """The samples that there is something to go on with."""
    return [sample for sample in output.outputs if sample.finish_reason == "abort"]


def params_of(output: RequestOutput, params: SamplingParams | None) -> SamplingParams:
    """The parameters of one sample of `output`; `params` are for outputs that do not hold them.

    Raises `PromptError` where there are none, and `SamplingParamsError` for others than those it was made with: a
    sample has one set of parameters, or nobody could replay it.
    """
    made_with = output.params if output.params is not None else params
    params = made_with if params is None else params
    if params is None or made_with is None:
        raise PromptError(f"output {output.request_id!r} does not hold its sampling parameters; give them as `params`")
    for name, before in attrs.asdict(made_with, recurse=False).items():
        if name not in NOT_OF_A_SAMPLE and getattr(params, name) != before:
            raise SamplingParamsError(name, getattr(params, name), f"the sample to be resumed was made with {before!r}")
    return attrs.evolve(params, n=1, prompt_logprobs=None)


def records_of(output: RequestOutput) -> list[SampleRecord]:
    """What a rollout file would hold of it; raises `PromptError` where it does not hold its parameters."""
    if output.params is None:
        raise PromptError(f"output {output.request_id!r} does not hold its sampling parameters")
    return list(sample_records(output.request_id, output, output.params))


def resume_sample(request: Request, done: CompletionOutput) -> None:
    """Put what a sample had into the only sample of a new request, which will draw the tokens after it."""
    sample = Sample(
        request,
        done.index,
        done.seed,
        array("i", (*request.prompt_token_ids, *done.token_ids)),
        logprobs=array("d", done.logprobs),
        raw_logprobs=array("d", done.raw_logprobs),
        top_logprobs=done.top_logprobs or (),
        mask=request.leader.mask,
        stop_text=request.leader.stop_text,
        provenance=Provenance.continued(done.version_spans, done.kv_spans),
    )
    if sample.stop_text is not None:
        for token in done.token_ids:
            sample.stop_text.feed(token, may_match=False)
    request.samples = [sample]


def resumed_output(output: RequestOutput, continued: Sequence[RequestOutput]) -> RequestOutput:
    """`output` with its aborted samples replaced by what became of them."""
    samples = {sample.index: sample for one in continued for sample in one.outputs}
    return attrs.evolve(
        output,
        outputs=tuple(samples.get(sample.index, sample) for sample in output.outputs),
        finished=all(one.finished for one in continued),
        num_preemptions=output.num_preemptions + sum(one.num_preemptions for one in continued),
        has_token_mask=output.has_token_mask or any(one.has_token_mask for one in continued),
        numerics=weakest([output.numerics, *(one.numerics for one in continued)]),
    )
