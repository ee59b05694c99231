"""Exercise 4a: Keep two customers apart, with one more ingredient in the hash.

From the time to first token anybody can tell whether somebody else has sent a text before: it comes at once. So each
customer gets a salt, and blocks are found only by those with the same one. vLLM calls it `cache_salt`.

`SaltedPool.salt` is the salt of the request that is being served; an empty one is everybody's. Where must it enter? Not
in every block: a name contains the name before it. It is enough to begin the chain elsewhere.

1. `root`: the digest and the identity from which the chain of the present salt starts. Without a salt both are 0. Two
   salts must never have the same identity, even if their digests were to collide. Identities are drawn from
   `self.num_identities`, so that no content ever gets one that is a root's.
2. `find_prefix` starts from it, and so does `describe` for a block without a parent.

Check: .venv/bin/python -m tools.lectures.lecture_exercises 4a
"""

from stages.core import SamplingParams, Sequence
from stages.stage_4_prefix_caching import Content, PrefixCachingEngine, PrefixCachingPool


class SaltedPool(PrefixCachingPool):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.salt = ""

    def root(self) -> tuple[int, int]:
        """The (digest, identity) that stand for "nothing before it" under the present salt."""
        return 0, 0  # yours to mend

    def find_prefix(self, seq: Sequence) -> list[int]:
        return super().find_prefix(seq)  # yours to write: stage 4's, from self.root()

    def describe(self, parent: Content | None, tokens: tuple[int, ...]) -> Content:
        return super().describe(parent, tokens)  # yours to write: stage 4's, from self.root()


class SaltedEngine(PrefixCachingEngine):
    pool: SaltedPool

    def make_pool(self, num_blocks: int, block_size: int) -> SaltedPool:
        return SaltedPool(num_blocks, block_size)

    def generate_for(self, salt: str, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        self.pool.salt = salt
        return self.generate(prompts, params)
