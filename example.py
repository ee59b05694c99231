"""The shortest use of nanovllm. The same script runs on vLLM: change the import, and name a model."""

from nanovllm import LLM, SamplingParams

prompts = [
    "Nell the fox lived at the edge of Willowbrook. She had a small red kite,",
    '"Good morning, José!" called Maja the mole across the garden.',
    "In the whole of Oakenshaw there was only one golden trumpet,",
]

if __name__ == "__main__":
    llm = LLM()  # the embedded story model; LLM("Qwen/Qwen3-0.6B") for a real one
    for output in llm.generate(prompts, SamplingParams(temperature=0.8, max_tokens=120, seed=7)):
        print(f"\n{output.prompt}\033[1m{output.outputs[0].text}\033[0m")
