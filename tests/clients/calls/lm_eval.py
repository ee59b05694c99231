"""lm-evaluation-harness: `local-completions` gives the log-likelihoods of its own `hf` model.

The task is made here, since there is no network. torch, which only `hf` needs, is that of the project.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from calls.shared import CALLS, Server

LACKS = dict.fromkeys(CALLS.keys() - {"echo"}, "scores texts only")
TOLERANCE = 1e-3
DOCUMENTS = [
    {"begin": "Nell the fox had a red", "ends": [" kite", " apple", " letter from the king"], "gold": 0},
    {"begin": "Otto made crème brûlée and", "ends": [" slept.", " read to her."], "gold": 1},
    {"begin": '"It was you," said', "ends": [" Nell.", " the door 🦊."], "gold": 0},
]
TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{begin}}",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "read": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{begin}}{{ends[0]}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}


def echo(server: Server) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = Path(tempfile.mkdtemp())
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)), encoding="utf-8")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}}}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test"} | data | task))
    manager = TaskManager(include_path=str(folder), include_defaults=False)

    def answers(kind: str, **arguments: Any) -> list[Any]:
        results: Any = lm_eval.simple_evaluate(
            model=kind, model_args=arguments, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0
        )
        return [sample["resps"] for name in TASKS for sample in results["samples"][name]]

    place = {"base_url": f"{server.base_url}/completions", "model": server.model, "tokenizer": server.tokenizer}
    limits = {"max_length": 200, "tokenized_requests": True, "num_concurrent": 2, "max_retries": 1}
    os.environ["OPENAI_API_KEY"] = server.api_key
    ours = answers("local-completions", **place, **limits)
    truth = answers("hf", pretrained=server.tokenizer, dtype="float32", device="cpu", max_length=200, batch_size=1)
    pairs = list(zip(flat(ours), flat(truth), strict=True))
    assert len(pairs) > 10
    for mine, theirs in pairs:
        assert abs(mine - theirs) <= TOLERANCE, (mine, theirs)
    print(f"{len(pairs)} numbers, at most {max(abs(a - b) for a, b in pairs):.1e} apart")


def flat(found: Any) -> list[float]:
    """All numbers: log-likelihoods, and whether each is the greedy continuation."""
    if isinstance(found, list | tuple):
        return [number for one in found for number in flat(one)]
    return [float(found)]
