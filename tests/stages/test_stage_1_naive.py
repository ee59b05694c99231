"""Stage 1's parts."""

import torch

from tests.stages.subject import Subject, since


@since(1, 1)
def test_a_token_sees_itself_and_all_before_it(subject: Subject) -> None:
    """Against attention written out: 6 query heads over 2 key/value heads, head_dim 8."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, heads, 8, generator=generator) for heads in (6, 2, 2))
    out = subject.part("attend_to_all")(0, q, k, v)
    for token in range(5):
        for head in range(6):
            weights = (k[: token + 1, head // 3] @ q[token, head] * 8**-0.5).softmax(0)
            torch.testing.assert_close(out[token, head], weights @ v[: token + 1, head // 3])
