"""ahead_ab.py MODEL [QUANTIZATION]: decode steps of 1, 2, 4, 8 sequences, by what is brought to L2 ahead."""
import sys, time
from nanovllm.kernels.hopper import weight_prefetch_linear as w
from nanovllm.graphs import decode_steps as d
from functools import partial
model, quant = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 and sys.argv[2] != "none" else None)
old = d.DecodeSteps.__init__
def init(self, sizes, token_ids, step, recorder, copies):
    old(self, sizes, token_ids, step, recorder, copies); self.stash = (step, recorder)
d.DecodeSteps.__init__ = init
from benchmarks.lib.process import Engine
from benchmarks.engine import step_scenes
t0 = time.time()
more = {"quantization": quant} if quant else {}
engine = Engine("nanovllm", model, dict(load_format="dummy", max_model_len=4096, max_num_batched_tokens=2048, max_num_seqs=8, **more), t0)
print(model, quant, "start %.1f" % (time.time() - t0), flush=True)
import torch
runner = engine.llm.engine.executor.runner
steps, net = runner.recorded.decodes, runner.target.model
grid = {**step_scenes.GRID, "decodes": {"batches": [1, 2, 4, 8], "contexts": [256, 2048]}, "steps": 30}
bench = step_scenes.Bench(engine, grid, True, "wall")
Q, O, G, D = ("qkv", 2), ("o", 2), ("gate_up", 2), ("down", 2)
VARIANTS = {
    "none": (0, (), 0),
    "q>g late 32M": (32, (Q,), 1), "q>g early 32M": (32, (Q,), 2), "q>g end 32M": (32, (Q,), 3),
    "q>g o>d late 32M": (32, (Q, O), 1), "all late 32M": (32, (Q, O, G, D), 1), "all end 32M": (32, (Q, O, G, D), 3),
    "q>g late 8M": (8, (Q,), 1), "q>g late 16M": (16, (Q,), 1),
    "d>o g>q late 32M": (32, (D, G), 1), "q>d late 32M": (32, (("qkv", 3),), 1),
    "q>g o>d end 32M": (32, (Q, O), 3), "none again": (0, (), 0),
}
best = {}
for turn in range(2):
    for name, (cap, pairs, position) in VARIANTS.items():
        w.link_ahead(net, cap << 20, pairs, position)
        step, recorder = steps.stash
        for size in (8, 4, 2, 1):
          with torch.inference_mode():
            steps.load(size, d.NO_TOKENS); steps._replays[size] = recorder(partial(step, steps.numbers[size]))
        for p in bench.decodes():
            best.setdefault(name, {}).setdefault(p["name"], []).append(1e3 * p["device"])
for name, found in best.items():
    print(f"{name:20}", "  ".join(f"{k.replace(' ', '')[:14]}: {min(v):.3f}" for k, v in found.items()), flush=True)
