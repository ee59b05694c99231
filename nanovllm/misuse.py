"""Uses of an LLM that cannot work. Without these checks they would hang, or end with an error that explains nothing."""

import os
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch

from nanovllm.config import EngineConfig

makers: set[int] = set()  # process ids: of this process once it has made an LLM, and of those that it was forked from


def check_names(options: Mapping[str, Any]) -> None:
    """Raises TypeError for the name of an argument that `LLM` does not have."""
    known = ["model", "skip_tokenizer_init", "on_event", *(field.name for field in fields(EngineConfig))]
    for name in options.keys() - known:
        near = get_close_matches(name, known, n=1, cutoff=0.7)
        remedy = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
        raise TypeError(f"LLM has no argument {name!r}; {remedy}")


def check_threads(device: torch.device) -> None:
    """Raises RuntimeError in a process without PyTorch's threads, whose first matrix product on a CPU would hang."""
    if device.type == "cpu" and makers - {os.getpid()} and torch.get_num_threads() > 1:
        raise RuntimeError(
            "this process was forked from one that had made an LLM, and PyTorch's threads do not live on in it; "
            "start it by multiprocessing.get_context('spawn'), or call torch.set_num_threads(1) first"
        )


class Home:
    """The process in which an LLM was made."""

    def __init__(self) -> None:
        self.process = os.getpid()
        makers.add(self.process)

    def check(self) -> None:
        """Raises RuntimeError in another process."""
        if os.getpid() != self.process:
            raise RuntimeError("this LLM was made before this process was forked; make an LLM in the process itself")
