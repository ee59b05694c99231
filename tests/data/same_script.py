"""One script for two engines: replace `nanovllm` by `vllm` in the import below, and it runs on vLLM 0.25.

    python tests/data/same_script.py MODEL

MODEL is a directory with the story model and a chat template. Prints what came out, as JSON; `same_script.json` beside
it has what is expected of both. What is sampled at random differs, so only its form is told.
"""

import json
import sys
from typing import Any

from nanovllm import LLM, SamplingParams


def told(request: Any) -> dict[str, Any]:
    """All that a script may read of one request's output, as plain data."""
    choices = []
    for choice in request.outputs:
        choices.append(
            {
                "index": choice.index,
                "text": choice.text,
                "token_ids": list(choice.token_ids),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "cumulative_logprob": choice.cumulative_logprob,
                "finished": choice.finished(),
            }
        )
        if choice.logprobs is not None:
            choices[-1]["logprobs"] = [
                {id: [found.logprob, found.rank, found.decoded_token] for id, found in position.items()}
                for position in choice.logprobs
            ]
    return {"prompt_token_ids": list(request.prompt_token_ids), "finished": request.finished, "outputs": choices}


def run(model: str) -> dict[str, Any]:
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        gpu_memory_utilization=0.5,
        tensor_parallel_size=1,
        enforce_eager=True,
        seed=0,
    )
    greedy = SamplingParams(temperature=0, max_tokens=6)
    results: dict[str, Any] = {}

    def generate(name: str, prompts: Any, params: Any) -> None:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        results[name] = [told(output) | {"prompt": output.prompt} for output in outputs]

    generate("a text", "Once upon a time,", greedy)
    generate("token ids", {"prompt_token_ids": results["a text"][0]["prompt_token_ids"]}, greedy)
    generate("bare token ids", results["a text"][0]["prompt_token_ids"], greedy)
    generate(
        "texts, each with its own parameters",
        ["Nell the fox", "And so the story ends.", {"prompt": "Nell the fox"}, "Nell the fox", "Nell the fox"],
        [
            SamplingParams(temperature=0.0, max_tokens=3, logprobs=2),
            SamplingParams(temperature=0.0, max_tokens=20),  # the model ends it
            SamplingParams(temperature=0.0, max_tokens=10, stop=["lined", "a d"]),
            SamplingParams(temperature=0.0, max_tokens=10, stop="a d", include_stop_str_in_output=True),
            SamplingParams(temperature=0.0, max_tokens=10, stop_token_ids=[259], min_tokens=1),
        ],
    )
    sampled = SamplingParams(
        n=3, temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, seed=7, max_tokens=4, ignore_eos=True, logprobs=0,
        presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1, skip_special_tokens=True,
    )  # fmt: skip
    choices = llm.generate("Nell the fox", sampled, use_tqdm=False)[0].outputs
    results["sampled"] = {
        "indices": [choice.index for choice in choices],
        "lengths": [len(choice.token_ids) for choice in choices],
        "logprobs of the sampled token alone, at least": min(len(at) for c in choices for at in c.logprobs or []),
        "reasons": [choice.finish_reason for choice in choices],
    }
    messages = [{"role": "user", "content": "Tell me a story."}]
    results["a conversation"] = [told(output) for output in llm.chat(messages, greedy, False)]
    results["conversations"] = [told(output) for output in llm.chat([messages, messages], [greedy] * 2, use_tqdm=False)]
    long = "Once upon a time, in the sleepy village of Ivybridge, there lived a piglet named Pip."
    one = SamplingParams(temperature=0, max_tokens=1)
    salted: list[Any] = [long, long, {"prompt": long, "cache_salt": "a"}, {"prompt": long, "cache_salt": "a"}]
    results["tokens from the cache"] = [llm.generate(p, one, use_tqdm=False)[0].num_cached_tokens for p in salted]
    results["no prompts"] = llm.generate([], greedy, use_tqdm=False)
    return results


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1]), ensure_ascii=False, indent=1))
