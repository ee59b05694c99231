"""The masks of a step: as few as possible, since some take a millisecond."""

from nanovllm.engine.grammars import Grammars
from nanovllm.engine.plan import StepHandle, StepMasks, StepPlan
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence


def fill_masks(plan: StepPlan, handle: StepHandle, scheduler: Scheduler, grammars: Grammars) -> StepMasks:
    """The masks of the newest step. A sequence that is over gets none.

    Most sequences need no mask: most tokens that a model draws without one are allowed. So the grammar is only asked
    about this token (see `StepHandle.unfiltered`). If it refuses the token, a mask is filled while the device waits. To
    avoid that wait, a sequence whose token was refused lately gets its next masks in advance, while the model runs.
    """
    seqs = [scheduler.sequences[key] for key in plan.masked if key in scheduler.sequences]
    if scheduler.proposer is not None:
        guesses = handle.guesses()
        return StepMasks([s.key for s in seqs], grammars.fill([(s.matcher, guesses.get(s.key, ())) for s in seqs]))
    early = [s for s in seqs if s.key not in handle.unfiltered or is_refused(s)]
    words = grammars.fill([(s.matcher, ()) for s in early])
    drawn, keys = handle.drawn(), [s.key for s in early]
    # Grammars whose masks were filled in advance are asked, too: only their answers end `Matcher.refused`.
    refused = [s for s in seqs if s.key in drawn and not allows(s, drawn[s.key]) and s.key not in keys]
    words += grammars.fill([(s.matcher, ()) for s in refused])
    return StepMasks(keys + [s.key for s in refused], words)


def is_refused(seq: Sequence) -> bool:
    return seq.matcher is not None and seq.matcher.refused


def allows(seq: Sequence, token_id: int) -> bool:
    return token_id >= 0 and seq.matcher is not None and seq.matcher.allows(token_id)
