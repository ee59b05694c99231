"""Parts for ranks that hold no model. A worker imports the module of its part: here it is spared what tests import."""

from collections.abc import Callable
from typing import Any

from nanovllm.distributed.group import Group


def a_part_that_cannot_start(group: Group) -> Callable[[Any], object]:
    raise OSError("no such part")
