"""The options of `nanovllm serve`, where they may come from, and what is refused before anything heavy is imported."""

import argparse
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.server.logs import LEVELS
from nanovllm.text.reasoning import REASONING_PARSERS
from nanovllm.text.tool_calls import TOOL_FORMATS

PREFIX = "NANOVLLM_"  # of the environment variables: NANOVLLM_MAX_QUEUE is --max-queue
MAX_BODY_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """What the application needs to know beside its engine.

    api_keys:         those that open it, all the same; none opens it to everybody.
    isolate_keys:     who asks with one key shares no cached prefix with who asks with another.
    allowed_hosts:    names in the Host header that it answers to, "loopback" for all of these; None is any name.
    allowed_origins:  web pages that may use it from a browser (CORS); "*" is all.
    receive_timeout:  seconds that a body may take to come.
    allow_priority:   whether clients may say which of them is more urgent.
    enable_prompt_tokens_details:  whether `usage` tells how much of a prompt was in the prefix cache, which tells a
                      stranger what others asked, unless keys are isolated.
    chat_template:    the text of one to use instead of the checkpoint's.
    tool_parser, reasoning_parser:  the format of tool calls and of reasoning; "auto" is what the chat template tells.
    """

    api_keys: tuple[str, ...] = ()
    isolate_keys: bool = False
    allowed_hosts: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    receive_timeout: float = 30.0
    allow_priority: bool = False
    enable_prompt_tokens_details: bool = False
    access_log: bool = False
    chat_template: str | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    @property
    def tells_cached_tokens(self) -> bool:
        return self.enable_prompt_tokens_details or self.isolate_keys

    @classmethod
    def chosen(cls, args: argparse.Namespace) -> "AppOptions":
        """From the options of the command line, as `settle` leaves them."""
        values = {field.name: getattr(args, field.name) for field in fields(cls) if hasattr(args, field.name)}
        hosts = tuple(args.allowed_hosts) or None
        if is_loopback(args.host) and not args.api_key:  # else any web page could, by a name that leads here
            hosts = "loopback", *(hosts or ())
        return cls(
            **values
            | {"api_keys": tuple(args.api_key), "allowed_hosts": hosts, "allowed_origins": tuple(args.allowed_origins)}
            | {"chat_template": args.chat_template and Path(args.chat_template).read_text("utf-8")}
            | {"max_body_bytes": int(args.max_body_mib * 2**20), "access_log": not args.no_access_log}
        )


# --- the options -----------------------------------------------------------------------------------------------------


def json_object(text: str) -> dict[str, Any]:
    """Raises ValueError, which argparse reports, for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text} is no JSON object")
    return value


def names(text: str) -> list[str]:
    """A list, written with commas."""
    return text.split(",")


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
ABOUT = {
    "max_model_len": "tokens of a prompt and its output together (default: 4096, or the model's own if smaller)",
    "max_num_seqs": "sequences that run at once; others wait (default 512)",
    "max_num_batched_tokens": "tokens that a step may compute (default 16384)",
    "num_kv_blocks": "blocks of the KV cache (default: what the free memory allows)",
    "gpu_memory_utilization": "share of the GPU's memory for weights, activations and KV cache together (default 0.9)",
    "kv_cache_gib": "size of the KV cache on a CPU, in GiB (default 1.0)",
    "tensor_parallel_size": "ranks that share each layer: GPUs, or processes of a CPU (default 1)",
    "speculative": 'guess tokens ahead: \'{"model": "a/smaller-model", "k": 4}\' or \'{"method": "ngram", "k": 4}\'',
    "generation_config": "auto: the checkpoint's sampling defaults, where a request says nothing (default); vllm: none",
    "kvcache_block_size": "tokens of a KV block (default: 256 on a GPU)",
    "enable_prefix_caching": "sequences share the KV blocks of equal beginnings (default: on)",
    "enable_chunked_prefill": "a prompt may be computed over several steps (default: on)",
    "async_scheduling": "a step is planned while the one before it runs (default: on if there is a GPU)",
}  # in one line each; more is said in `EngineConfig`
# Other commands have these, too
ALSO_ENGINE = (
    *("device", "dtype", "quantization", "kv_cache_dtype", "attention_backend"),
    *("enable_expert_parallel", "enforce_eager"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Each option, once read, may be absent: then `args.settle(args)` finds its value elsewhere."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="the same as --model")
    add("--config", help="a TOML file with options: max-queue = 100")
    for name, kind in ENGINE.items():
        add(f"--{name.replace('_', '-')}", type=kind, help=ABOUT[name])
    add("--no-enable-prefix-caching", action="store_true", help="compute every prompt in full")
    add("--api-servers", type=int, help="processes for HTTP and text before the engine's (default: by the cores)")
    add("--max-queue", type=int, default=512, help="sequences that may wait (default %(default)s)")
    add("--served-model-name", help="what clients call the model (default: the last part of its path)")
    add("--chat-template", help="a file with another chat template than the checkpoint's")
    formats = "auto", "none", *TOOL_FORMATS
    add("--tool-parser", default="auto", choices=formats, help="how the model calls tools (default: by its template)")
    formats = "auto", "none", *REASONING_PARSERS
    add("--reasoning-parser", default="auto", choices=formats, help="how it reasons (default: by its template)")
    # Where it listens.
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=int, default=8000, help="0 is any free one (default %(default)s)")
    add("--root-path", default="", help="the prefix under which a proxy in front has it, such as /llm")
    add("--ssl-certfile", help="with --ssl-keyfile: serve HTTPS")
    add("--ssl-keyfile", help="the private key of --ssl-certfile")
    # Who may ask, and what.
    listed: Any = {"type": names, "action": "extend", "default": []}
    add("--api-key", **listed, help="ask clients for this key; several with commas, or given several times")
    add("--isolate-keys", action="store_true", help="no cached prefix is shared between keys")
    add("--insecure", action="store_true", help="listen beyond this machine without a key")
    add("--allowed-hosts", **listed, help="names it answers to; * is any (default: without a key, those of loopback)")
    add("--allowed-origins", **listed, help="web pages that may use it (CORS); * is any")
    add("--allow-priority", action="store_true", help="clients may say how urgent a request is")
    add("--enable-prompt-tokens-details", action="store_true", help="tell clients how much of a prompt was cached")
    # Limits.
    add("--max-connections", type=int, default=4096, help="open at once (default %(default)s)")
    add("--max-body-mib", type=float, default=4.0, help="largest request (default %(default)s MiB)")
    add("--receive-timeout", type=float, default=30.0, help="s for a head, and for a body (default %(default)s)")
    add("--drain-timeout", type=int, default=60, help="s to finish what runs on SIGTERM (default %(default)s)")
    # What it tells.
    add("--log-level", default="info", choices=LEVELS, help="messages of this level or higher (default %(default)s)")
    add("--no-access-log", action="store_true", help="no line for each request")

    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    defaults = {name: action.default for name, action in actions.items()}
    for action in parser._actions:
        if action.help:
            action.help = action.help.replace("%(default)s", str(action.default))
        action.default = argparse.SUPPRESS
    parser.set_defaults(settle=partial(settle, actions, defaults))


def settle(actions: Mapping[str, argparse.Action], defaults: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Fill in what the command line left open: from the environment, then from the file, then the defaults.

    Raises ValueError for a value that is none, and for an option in the file that there is not.
    """

    def find(name: str, file: Mapping[str, Any]) -> Any:
        text = os.environ.get(PREFIX + name.upper())
        if text:  # set but empty is not set
            return converted(actions[name], text, PREFIX + name.upper())
        if name in file:
            return converted(actions[name], file[name], f"{args.config}: {name}")
        return defaults[name]

    if not hasattr(args, "config"):
        args.config = find("config", {})
    file = read_file(args.config, actions) if args.config else {}
    for name in actions:
        if not hasattr(args, name):
            setattr(args, name, find(name, file))


def read_file(path: str, known: Iterable[str]) -> dict[str, Any]:
    try:
        data = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    options = {name.replace("-", "_"): value for name, value in data.items()}
    for name in options:
        if name not in known or name == "config":
            near = get_close_matches(name, list(known), 1)
            raise ValueError(f"{path}: there is no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return options


def converted(action: argparse.Action, value: Any, where: str) -> Any:
    """What the option's value is on the command line. `value`: a text, or what TOML makes of it."""
    kind: Any = action.type or str
    if action.nargs == 0:  # a flag
        words: dict[Any, bool] = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if str(value).lower() not in words:
            raise ValueError(f"{where} must be true or false; got {value!r}")
        return words[str(value).lower()]
    try:
        as_it_is = kind is json_object and isinstance(value, dict)
        as_it_is |= kind is names and isinstance(value, list) and all(isinstance(part, str) for part in value)
        if as_it_is:
            return value
        if isinstance(value, str) or (kind in (int, float) and type(value) in (int, kind)):
            found = kind(value)
        else:
            raise ValueError(f"it is of the type {type(value).__name__}")
    except ValueError as error:
        raise ValueError(f"{where} = {value!r} is no value for that option: {error}") from None
    if action.choices is not None and found not in action.choices:
        raise ValueError(f"{where} must be one of {', '.join(action.choices)}; got {value!r}")
    return found


# --- what they must be -----------------------------------------------------------------------------------------------


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those for `EngineConfig` that were chosen."""
    values = {name: getattr(args, name) for name in (*ALSO_ENGINE, *ENGINE)}
    chosen = {name: value for name, value in values.items() if value is not None and value is not False}
    return chosen | ({"enable_prefix_caching": False} if args.no_enable_prefix_caching else {})


def check(args: argparse.Namespace) -> None:
    """Raises ValueError or TypeError for options that must not or cannot be."""
    for key in args.api_key:
        if not re.fullmatch(r"[!-+\--~]+", key):
            raise ValueError("--api-key must be printable ASCII without spaces and commas, one character at least")
    for option in "allowed_hosts", "allowed_origins":
        for value in getattr(args, option):
            if not re.fullmatch(r"[!-+\--~]+", value):
                raise ValueError(f"--{option.replace('_', '-')} must be names with commas between; got {value!r}")
    if args.isolate_keys and not args.api_key:
        raise ValueError("--isolate-keys needs an --api-key for each client")
    if not is_loopback(args.host) and not args.api_key and not args.insecure:
        raise ValueError(
            f"--host {args.host} lets other machines use the model; set --api-key, or --insecure if that is meant"
        )
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535; got {args.port}")
    if args.api_servers is not None and not 1 <= args.api_servers <= 64:
        raise ValueError(f"--api-servers must be from 1 to 64; got {args.api_servers}")
    for name in "max_queue", "max_connections", "max_body_mib", "receive_timeout", "drain_timeout":
        if not 0 < getattr(args, name) < 2**31:
            raise ValueError(f"--{name.replace('_', '-')} must be positive; got {getattr(args, name)}")
    if args.root_path and not re.fullmatch(r"(/[\w.~-]+)+", args.root_path, flags=re.ASCII):
        raise ValueError(f"--root-path must begin with / and end without, like /llm; got {args.root_path!r}")
    if bool(args.ssl_certfile) != bool(args.ssl_keyfile):
        raise ValueError("--ssl-certfile and --ssl-keyfile need each other")
    for name in "ssl_certfile", "ssl_keyfile", "chat_template":
        if (path := getattr(args, name)) and not Path(path).is_file():
            raise ValueError(f"--{name.replace('_', '-')} {path}: there is no such file")
    check_files(args)
    if args.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", args.device):
        raise ValueError(f"--device must be cpu, cuda or cuda:N; got {args.device!r}")
    EngineConfig(**engine_options(args))
    if args.model is not None:
        check_model(args.model)


def check_files(args: argparse.Namespace) -> None:
    """Raises ValueError for files that an API process could not use, and OSError for those it may not read."""
    if args.chat_template:
        try:
            Path(args.chat_template).read_text("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"--chat-template {args.chat_template} is no text in UTF-8; save it as UTF-8") from None
    if args.ssl_certfile:
        import ssl

        try:  # without a password: a server has nobody to ask
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(args.ssl_certfile, args.ssl_keyfile, lambda: "")
        except ssl.SSLError as error:
            what = "are no certificate and its private key, in PEM and without a password"
            raise ValueError(
                f"--ssl-certfile {args.ssl_certfile}, --ssl-keyfile {args.ssl_keyfile} {what}: {error}"
            ) from None


def check_model(model: str) -> None:
    """Raises ValueError for what is neither a directory nor may be a hub id, as loading would."""
    from nanovllm.models.checkpoint import local_checkpoint

    local_checkpoint(model)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return False
