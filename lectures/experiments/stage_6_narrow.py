"""A gather only as wide as the longest context of the moment: what the stand-in says to that, and what the tape."""

from functools import partial

from torch import Tensor

from stages.stage_3_paged_blocks import Rectangle
from stages.stage_6_cuda_graphs import CUDAGraphEngine, Rows
from tools.pictures.decode_profile import TapeGraph
from tools.pictures.three_requests import STORY_MODEL, hugging_face_greedy, three_requests


class OnlyAsWide(CUDAGraphEngine):
    def whole_tables(self, rows: Rows, numbers: Tensor) -> Rectangle:
        whole = super().whole_tables(rows, numbers)
        longest = int(rows.context_lens.max())
        return Rectangle(whole.tokens, whole.context_slots[:, :longest], whole.mask[..., :longest])


prompts, params = three_requests()
engine = OnlyAsWide(STORY_MODEL, max_num_seqs=4)
same = engine.generate(prompts, params) == hugging_face_greedy(prompts, params)
print("stand-in: the tokens are", "those of transformers" if same else "wrong")
try:
    TapeGraph(partial(engine.decode_step, 4))
except RuntimeError as refused:
    print("on tape: ", refused)
