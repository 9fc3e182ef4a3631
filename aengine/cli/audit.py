"""`aengine audit`: is every sample of a rollouts file what its label says?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from attrs import asdict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from aengine.audit.job import AuditPlan, plan_audit, run_audit
from aengine.audit.policies import PolicyWeights, policies_of_model, policies_of_snapshots
from aengine.audit.report import AuditSummary
from aengine.audit.snapshots import SnapshotStore
from aengine.cli.loading import load_model
from aengine.cli.report import DebugOption, JsonOption, errors_in_one_sentence, new_console

__all__ = ["audit"]

NOT_REPRODUCED, OTHER_BITS, UNAUDITABLE, CONSISTENT = 3, 4, 5, 6
NUM_EXPLANATIONS = 10


def _share(text: str) -> float:
    """`5%` or `0.05`."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0.0 < share <= 1.0:
        raise typer.BadParameter(f"{text!r} is not a share of the samples, such as 5% or 0.05")
    return share


def audit(
    rollouts: Annotated[Path, typer.Argument(help="A rollouts file, such as `aengine rollout` writes.")],
    snapshots: Annotated[
        Path | None, typer.Option(help="Directory of a snapshot store with the versions that made the samples.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Instead: the model with the weights of the file's one version.")
    ] = None,
    sample: Annotated[
        Any, typer.Option(parser=_share, help="Share of the samples to audit.", metavar="SHARE")
    ] = "100%",
    report: Annotated[
        Path | None, typer.Option(help="JSON Lines file for one verdict a sample; what is in it is not done again.")
    ] = None,
    explain: Annotated[
        int, typer.Option(min=0, help="How many samples that do not reproduce are looked into for a cause.")
    ] = 20,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compute samples again from weights and seeds, and compare every token and log-probability bit for bit.

    Exit status: 0 all were reproduced, 3 some were not, 4 some have the same tokens and other bits, 5 some could not be
    audited, 6 all are as near as another kind of machine allows; 1 for an error, 2 for wrong usage.
    """
    if (snapshots is None) == (model is None):
        raise typer.BadParameter("give either --snapshots or --model")
    with errors_in_one_sentence(debug):
        console = new_console()
        plan = plan_audit(rollouts, sample)
        policies = _policies(plan, snapshots, model, console)
        summary = _run(plan, policies, report, explain, console)
        if as_json:
            typer.echo(json.dumps(asdict(summary)))
        _tell(plan, summary, console)
        raise typer.Exit(_status(summary))


def _policies(plan: AuditPlan, snapshots: Path | None, model: str | None, console: Console) -> PolicyWeights:
    if snapshots is not None:
        return policies_of_snapshots(SnapshotStore(snapshots), plan.header, plan.digests)
    assert model is not None
    return policies_of_model(load_model(model, console), plan.header, plan.digests)


def _run(plan: AuditPlan, policies: PolicyWeights, report: Path | None, explain: int, console: Console) -> AuditSummary:
    columns = (
        TextColumn("samples"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[wrong]} not reproduced"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("samples", total=len(plan.places), wrong=0)

        def show(summary: AuditSummary) -> None:
            bar.update(task, completed=summary.samples, wrong=summary.samples - summary.reproduced)

        return run_audit(plan, policies, report=report, explain=explain, progress=show)


def _tell(plan: AuditPlan, summary: AuditSummary, console: Console) -> None:
    """Everything that qualifies the last line comes before it."""
    for sentence, count in summary.explanations.most_common(NUM_EXPLANATIONS):
        console.print(f"{count} x {sentence}", markup=False)
    if plan.machine_differences:
        console.print(f"made on another machine: {'; '.join(plan.machine_differences)}", markup=False)
    if summary.left_out:
        console.print(f"{summary.left_out} samples were left out, as --sample says")
    if summary.scored_only:
        console.print(f"{summary.scored_only} samples were drawn under a token mask: scored, not drawn again")
    if summary.finish_unchecked:
        console.print(f"of {summary.finish_unchecked} samples the end could not be checked")
    if summary.oracle_checked:
        console.print(
            f"float64 oracle: {summary.oracle_checked} samples, {summary.oracle_failed} of them too far; "
            f"largest difference {summary.oracle_largest_difference:.1e}"
        )
    console.print(f"{summary.sentence()} ({summary.tokens} tokens, {summary.seconds:.1f} s)")


def _status(summary: AuditSummary) -> int:
    if summary.not_reproduced or summary.oracle_failed:
        return NOT_REPRODUCED
    if summary.other_bits:
        return OTHER_BITS
    if summary.unauditable:
        return UNAUDITABLE
    return CONSISTENT if summary.consistent else 0
