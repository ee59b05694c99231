"""Replicas of the server behind one address, with Ray Serve, which routes, restarts and scales them.

    pip install -e ".[serve,ray]"
    python examples/ray_serve.py [MODEL] [--replicas 2] [--gpus-each 0] [--router two-choices] [--port 8000]
    nanovllm simulate Qwen3-0.6B --card h200 --replicas 4 --router sessions ... --json simulation.json
    python examples/ray_serve.py Qwen/Qwen3-0.6B --from simulation.json --gpus-each 1

Each replica is a process with an engine of its own and the very application that `nanovllm serve` runs. A replica whose
step loop has died says so when Ray asks, and is replaced. Clients see one OpenAI-compatible server. Where a cluster
runs already (`examples/cluster.sh`, KubeRay), this uses it: replicas then spread over its machines. docs/cluster.md has
the rest.

With --from the replicas are those of a simulation: their number or autoscaling, the router, the limits and the engine's
options.
"""

import argparse
import json
import os
import signal
import threading
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report to its makers otherwise

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig

from nanovllm import AsyncLLM
from nanovllm.server.app import build_app
from nanovllm.simulate.routers import ROUTERS as ROUTER_CLASSES

# Those of `nanovllm simulate` that Ray can apply to HTTP requests as they are. Its other routers want requests of its
# own LLM deployments, whose prompts they read, or a second deployment that counts.
ROUTERS = {
    "two-choices": "of two replicas drawn at random, the one with fewer requests",
    "round-robin": "one after the other",
    # The replica has the conversation in its prefix cache.
    "sessions": "requests with the same x-session-id meet the same replica",
}
# How long a text may be, and how many KV blocks there are, is for the real model and the real memory to say.
CHOSEN = (
    "tensor_parallel_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "kvcache_block_size",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "async_scheduling",
    "speculative",
)


class Replica:
    """Ray makes the actor, and asks it for its application and its health."""

    def __init__(self, model: str | None, max_queue: int, engine: dict[str, Any]) -> None:
        self.model = model or "story_model"
        self.llm = AsyncLLM(model, max_queue=max_queue, **engine)  # a full replica says 429

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(self.llm, model_name=self.model)

    def check_health(self) -> None:
        self.llm.check_health()


def simulated(path: str) -> dict[str, Any]:
    """The scenario in a file of `nanovllm simulate --json`. Raises ValueError for another file, and for a router that
    cannot be applied here."""
    try:
        with open(path, encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)["scenario"]
        router = found["router"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--from {path}: no file that `nanovllm simulate --json` has written ({error!r})") from None
    if router not in ROUTERS:
        raise ValueError(
            f"--from {path}: its router {router!r} cannot be applied to HTTP requests as they are; here are "
            f"{', '.join(ROUTERS)}. To keep conversations together, simulate sessions"
        )
    return found


def plan(args: argparse.Namespace) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """Options of Ray's deployment, max_queue of a replica, and the engine's options."""
    if args.plan is None:
        router = ROUTER_CLASSES[args.router]
        config: dict[str, Any] = {"request_router_class": router.ray_class, "request_router_kwargs": {}}
        return {"num_replicas": args.replicas, "request_router_config": config}, 64, {}
    scenario = simulated(args.plan)
    engine = {name: scenario["engine"][name] for name in CHOSEN}
    return scenario["ray"], scenario["max_queue"], engine


def main(arguments: list[str] | None = None, replica: type[Replica] = Replica) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="directory or hub id; without it, the story model")
    parser.add_argument("--from", dest="plan", metavar="FILE", help="what nanovllm simulate --json has written")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gpus-each", type=float, default=0)
    parser.add_argument(
        "--router", choices=ROUTERS, default="two-choices", help="how a request finds its replica (default %(default)s)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(arguments)
    try:
        deployment, max_queue, engine = plan(args)
    except ValueError as error:
        parser.error(str(error))
    stop = threading.Event()
    ray.init(include_dashboard=False)
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, lambda *_: stop.set())
    serve.start(http_options={"host": args.host, "port": args.port})
    # Batching is the engine's business: let all requests in, if nothing else is said.
    options = {"max_ongoing_requests": 512, **deployment}
    options["request_router_config"] = RequestRouterConfig(**options["request_router_config"])
    replicas = serve.deployment(serve.ingress()(replica)).options(
        ray_actor_options={"num_cpus": 1, "num_gpus": args.gpus_each}, **options
    )
    serve.run(replicas.bind(args.model, max_queue, engine))
    print(f"replicas are serving at http://{args.host}:{args.port}", flush=True)
    stop.wait()
    serve.shutdown()  # which drains the replicas


if __name__ == "__main__":
    main()
