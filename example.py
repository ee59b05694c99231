"""The shortest use of nanovllm. The same script runs on vLLM: change the import, and name a model."""

from nanovllm import LLM, SamplingParams

prompts = ["Nell the fox had a small red kite that danced in the lightest wind. Her best friend was Otto the badger."]
params = SamplingParams(temperature=0.8, max_tokens=120, seed=46)

if __name__ == "__main__":
    llm = LLM()  # the embedded story model; LLM("Qwen/Qwen3-0.6B") for a real one
    for output in llm.generate(prompts, params):
        print(output.prompt + output.outputs[0].text)
