"""All recorded steps of the target model behind one call."""

from collections.abc import Sequence

from torch import Tensor

from nanovllm.engine.plan import Scheduled
from nanovllm.graphs.decode_steps import DecodeStep, DecodeSteps
from nanovllm.graphs.prompt_steps import Pack, PromptStep, PromptSteps
from nanovllm.graphs.recorder import Recorder
from nanovllm.graphs.sizes import StepSizes
from nanovllm.sampling.sampler import Sampled

COPIES_IN_FLIGHT = 3  # one step runs, one is submitted, one is being written


class RecordedSteps:
    """Decode steps and steps with prompts. They know rows and numbers; what runs is handed in (see the two modules)."""

    def __init__(
        self,
        sizes: StepSizes,
        token_ids: Tensor,
        decode_step: DecodeStep,
        prompt_step: PromptStep,
        pack: Pack,
        recorder: Recorder,
    ) -> None:
        self.decodes = DecodeSteps(sizes, token_ids, decode_step, recorder, COPIES_IN_FLIGHT)
        self.prompts = PromptSteps(sizes, token_ids, pack, prompt_step, recorder, COPIES_IN_FLIGHT)

    def replay(self, scheduled: Sequence[Scheduled]) -> Sampled | None:
        """Compute this work by the recording that is cheapest; None, and nothing is done, if no recording has room."""
        return self.decodes.replay(scheduled) or self.prompts.replay(scheduled)
