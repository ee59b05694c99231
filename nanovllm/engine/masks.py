"""The masks of a step, and what becomes of sequences whose masks are late."""

from nanovllm.engine.grammars import Grammars
from nanovllm.engine.plan import StepHandle, StepMasks, StepPlan
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence


def fill_masks(plan: StepPlan, handle: StepHandle, scheduler: Scheduler, grammars: Grammars) -> StepMasks:
    """The masks of the newest step. A sequence that is over gets none. A sequence whose mask is late is put off."""
    seqs = [scheduler.sequences[key] for key in plan.masked if key in scheduler.sequences]
    guesses: dict[int, list[int]] = {}
    if scheduler.proposer is not None:
        guesses = handle.guesses()
    else:
        num_others = len(plan.scheduled) - len(plan.masked)  # those that are over gain nothing by the step
        late = set(grammars.late([seq.matcher for seq in seqs], num_others, handle.is_busy))
        put_off(plan, [seq for seq in seqs if seq.matcher in late], scheduler)
        seqs = [seq for seq in seqs if seq.matcher not in late]
    words = grammars.fill([(seq.matcher, guesses.get(seq.key, ())) for seq in seqs])
    return StepMasks([seq.key for seq in seqs], words)


def put_off(plan: StepPlan, seqs: list[Sequence], scheduler: Scheduler) -> None:
    """Take back that the newest plan samples these sequences. Once a mask is there, a later plan computes the last
    known token again, and samples."""
    for seq in seqs:
        seq.num_in_flight -= 1
        seq.num_known -= 1
        seq.num_computed = seq.num_known - 1
        scheduler.late.add(seq)
    if seqs:
        keys = {seq.key for seq in seqs}
        plan.scheduled[:] = [s for s in plan.scheduled if s.key not in keys]
