"""Replicas of the server behind one address, with Ray Serve, which routes, restarts and scales them.

    pip install -e ".[serve,ray]"
    python examples/ray_serve.py [MODEL] [--replicas 2] [--gpus-each 0] [--router load] [--port 8000]

Each replica is a process with an engine of its own and the very application that `nanovllm serve` runs. A replica whose
step loop has died says so when Ray asks, and is replaced. Clients see one OpenAI-compatible server. Where a cluster
runs already (`examples/cluster.sh`, KubeRay), this uses it: replicas then spread over its machines. docs/cluster.md has
the rest.
"""

import argparse
import os
import signal
import threading

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report to its makers otherwise

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig

from nanovllm import AsyncLLM
from nanovllm.server.app import build_app

ROUTERS = {
    "load": RequestRouterConfig(),  # of two replicas drawn at random, the one with fewer requests
    # Requests with the same x-session-id meet the same replica, which has the conversation in its prefix cache.
    "sessions": RequestRouterConfig(
        request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
    ),
}


class Replica:
    """Ray makes the actor, and asks it for its application and its health."""

    def __init__(self, model: str | None) -> None:
        self.model = model or "story_model"
        self.llm = AsyncLLM(model, max_queue=64)  # a full replica says 429

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(self.llm, model_name=self.model)

    def check_health(self) -> None:
        self.llm.check_health()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="directory or hub id; without it, the story model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gpus-each", type=float, default=0)
    parser.add_argument("--router", choices=ROUTERS, default="load", help="how a request finds its replica")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    stop = threading.Event()
    ray.init(include_dashboard=False)
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, lambda *_: stop.set())
    serve.start(http_options={"host": args.host, "port": args.port})
    replicas = serve.deployment(serve.ingress()(Replica)).options(
        num_replicas=args.replicas,
        ray_actor_options={"num_cpus": 1, "num_gpus": args.gpus_each},
        max_ongoing_requests=512,  # batching is the engine's business: let them all in
        request_router_config=ROUTERS[args.router],
    )
    serve.run(replicas.bind(args.model))
    print(f"{args.replicas} replicas are serving at http://{args.host}:{args.port}", flush=True)
    stop.wait()
    serve.shutdown()  # which drains the replicas


if __name__ == "__main__":
    main()
