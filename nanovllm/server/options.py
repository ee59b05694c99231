"""The options of `nanovllm serve`, and what is refused before anything is loaded. Imports nothing heavy."""

import argparse
import json
import os
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any


def json_object(text: str) -> dict[str, Any]:
    """Raises ValueError, which argparse reports, for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text} is no JSON object")
    return value


# Named as in EngineConfig, which checks them; None is its default.
ENGINE: dict[str, Callable[[str], Any]] = {
    "max_model_len": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "num_kv_blocks": int,
    "gpu_memory_utilization": float,
    "kv_cache_gib": float,
    "tensor_parallel_size": int,
    "speculative": json_object,
    "generation_config": str,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 is any free one (default %(default)s)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("NANOVLLM_API_KEY") or None,  # set but empty is not set
        help="ask clients for this key; the environment variable NANOVLLM_API_KEY keeps it out of the process list",
    )
    parser.add_argument("--insecure", action="store_true", help="listen beyond this machine without a key")
    parser.add_argument("--served-model-name", help="what clients call the model (default: the last part of its path)")
    parser.add_argument("--max-queue", type=int, default=512, help="sequences that may wait (default %(default)s)")
    parser.add_argument("--max-body-mib", type=float, default=4.0, help="largest request (default %(default)s MiB)")
    parser.add_argument("--drain-timeout", type=int, default=60, help="seconds to finish what runs on SIGTERM")
    for name, kind in ENGINE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="as in nanovllm.config")


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for options that must not or cannot be."""
    key = args.api_key
    if key is not None and not (key.isascii() and key.isprintable() and key and key == key.strip()):
        raise ValueError("--api-key must be printable ASCII without spaces around it, one character at least")
    if not is_loopback(args.host) and not args.api_key and not args.insecure:
        raise ValueError(
            f"--host {args.host} lets other machines use the model; set --api-key, or --insecure if that is meant"
        )
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535; got {args.port}")
    for name in ("max_body_mib", "drain_timeout"):
        if not 0 < getattr(args, name) < 2**31:
            raise ValueError(f"--{name.replace('_', '-')} must be positive; got {getattr(args, name)}")


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return False
