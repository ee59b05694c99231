"""The command line: `nanovllm generate`, `chat`, `serve`, `simulate` and so on. A user's mistake gets one line."""

import argparse
import io
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm import __version__
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.logs import set_up
from nanovllm.server.options import ABOUT, ALSO_ENGINE, add_options, check, json_object
from nanovllm.simulate.options import add_plan, add_simulate, run_plan, run_simulate
from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.trace_view.recording import Recording, add_trace_commands, page

MAX_TOKENS = 256  # of an answer, where neither the user nor the checkpoint says how many

if TYPE_CHECKING:
    from nanovllm.llm import LLM


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for a mistake, 130 for Ctrl-C, 141 where nobody reads the output any more."""
    args = parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" for what it does not have
    try:
        args.run(args)
        if sys.stdout is not None:  # it is None if the shell has closed it
            sys.stdout.flush()  # while a closed pipe can still be caught
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return 141
    except (ValueError, TypeError, OSError) as error:
        print(f"nanovllm: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


class Command(argparse.ArgumentParser):
    """The parser of one command. An argument that the command does not have is refused with the command's own usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1, cutoff=0.75)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {near[0]}?' if near else ''}")
        return found, unknown


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="nanovllm", description="An LLM inference engine to read in an afternoon.")
    top.epilog = "`nanovllm COMMAND --help` lists the options of a command."
    top.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", parser_class=Command)

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        sub.add_argument("--model", help="directory or hub id; without it, the story model that comes with nanovllm")
        sub.add_argument("--device", help="cpu or cuda; without it, a GPU if there is one")
        sub.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
        sub.add_argument("--quantization", help="fp8: quantise linear layers and experts, but no draft model")
        sub.add_argument("--kv-cache-dtype", default="auto", help="auto, or fp8: half the memory for keys and values")
        sub.add_argument("--attention-backend", default="auto", help="auto, torch_ref, triton or flash_attn")
        if name != "serve":  # which has it among its own
            sub.add_argument("--tensor-parallel-size", type=int, default=1, help=ABOUT["tensor_parallel_size"])
        sub.add_argument("--enable-expert-parallel", action="store_true", help="give each rank whole experts")
        sub.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: a quicker start, slower steps")
        return sub

    def sampling(sub: argparse.ArgumentParser) -> None:
        default = "(default: the checkpoint's)"
        sub.add_argument("--temperature", type=float, help=f"0 always takes the most likely token {default}")
        sub.add_argument("--top-p", type=float, help=f"the most likely tokens that reach this probability {default}")
        sub.add_argument("--top-k", type=int, help=f"so many of the most likely tokens {default}")
        sub.add_argument("--max-tokens", type=int, help=f"output tokens (default: the checkpoint's, or {MAX_TOKENS})")
        sub.add_argument("--seed", type=int, help="the same seed gives the same output")
        sub.add_argument("--bad-words", nargs="+", metavar="TEXT", help="texts that the output must not contain")
        sub.add_argument(
            "--logit-bias", type=bias_by_token, metavar="JSON", help="such as '{\"17\": -100}', by token id"
        )
        sub.add_argument("--allowed-token-ids", type=int, nargs="+", metavar="ID", help="only these tokens")
        shape = sub.add_mutually_exclusive_group()
        shape.add_argument("--json-schema", metavar="FILE", help="answer in JSON that matches the schema in this file")
        shape.add_argument("--regex", help="answer with a text that matches all of this expression")
        shape.add_argument("--choice", action="append", metavar="TEXT", help="answer with this; may be given again")
        shape.add_argument("--grammar", metavar="FILE", help="answer by the grammar in this file, in Lark or GBNF")
        sub.add_argument(
            "--generation-config", default="auto", help="auto, or vllm for none of the checkpoint's sampling defaults"
        )

    generate = command("generate", run_generate, "complete a text, and show it while it is written")
    generate.add_argument("prompt", help="the text to complete, in quotation marks")
    generate.add_argument(
        "--trace", type=Path, metavar="FILE", help="what the engine did: a page if FILE ends in .html, or a recording"
    )
    sampling(generate)
    chat = command("chat", run_chat, "talk to an instruction model")
    chat.add_argument("--system-prompt", metavar="TEXT", help="a system message before the conversation")
    sampling(chat)
    add_options(command("serve", run_serve, "answer requests over HTTP, as OpenAI's API does"))
    bench = command("bench", run_bench, "throughput on random prompts of mixed lengths")
    bench.add_argument("--num-requests", type=int, default=16, help="all at once (default 16)")
    help = "tokens of the longest prompt and output (default 256); the shortest have 10%% of it"
    bench.add_argument("--max-length", type=int, default=256, help=help)
    bench.add_argument("--load-format", default="auto", help="dummy: random weights, only config.json is needed")
    info = command("info", run_info, "what was detected and chosen, and why")
    for sub in chat, bench, info:
        sub.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model")
    help = "a fleet of engines in virtual time: who waits how long, and what it costs"
    simulate = commands.add_parser("simulate", help=help, description=help)
    simulate.set_defaults(run=run_simulate)
    add_simulate(simulate)
    help = "the fewest GPUs that answer so many queries in time, by simulation"
    plan = commands.add_parser("plan", help=help, description=help)
    plan.set_defaults(run=run_plan)
    add_plan(plan)
    help = "look at a run that `generate --trace FILE` recorded"
    add_trace_commands(commands.add_parser("trace", help=help, description=help))
    return top


def make_llm(args: argparse.Namespace, **config: Any) -> "LLM":
    from nanovllm import LLM  # torch takes seconds, and --help needs none of it

    names = *ALSO_ENGINE, "tensor_parallel_size"
    return LLM(args.model, **{name: getattr(args, name) for name in names}, **config)


def params_of(args: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    """What the user said, and for the rest the checkpoint's defaults."""
    names = "temperature top_p top_k max_tokens seed bad_words logit_bias allowed_token_ids".split()
    said = {name: value for name in names if (value := getattr(args, name)) is not None}
    shape: dict[str, Any] = {"regex": args.regex, "choice": args.choice}
    for name, file in ("json", args.json_schema), ("grammar", args.grammar):
        try:
            shape[name] = None if file is None else Path(file).read_text("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{file} is no text in UTF-8; save it as UTF-8") from None
    if any(value is not None for value in shape.values()):
        said["structured_outputs"] = StructuredOutputsParams(**shape)
    return SamplingParams(**{"max_tokens": MAX_TOKENS, **defaults, **said})


def bias_by_token(text: str) -> dict[int, float]:
    """Biases by token id. Raises ArgumentTypeError if the text is not a JSON object whose keys are token ids."""
    try:
        return {int(token): bias for token, bias in json_object(text).items()}
    except ValueError:
        raise argparse.ArgumentTypeError(f"must map token ids to biases: '{{\"17\": -100}}'; got {text!r}") from None


def stream(llm: "LLM", prompt_token_ids: list[int], params: SamplingParams, echo: str = "") -> RequestOutput:
    """Print one answer as it grows, behind `echo`, then return it."""
    llm.engine.add_request("0", prompt_token_ids, llm.prepare(params))
    print(echo, end="", flush=True)
    shown = 0
    while True:
        for output in llm.engine.step():
            text = output.outputs[0].text
            print(text[shown:], end="", flush=True)
            shown = len(text)
            if output.finished:
                print()
                return output


def run_generate(args: argparse.Namespace) -> None:
    params_of(args, {})  # a mistake shows before a model is loaded
    if any("\ud800" <= character <= "\udfff" for character in args.prompt):  # Python's sign for bytes that are no text
        raise ValueError("the prompt is no text in UTF-8; write it in UTF-8")
    if args.trace is not None and not args.trace.parent.is_dir():
        raise ValueError(f"--trace {args.trace}: there is no directory {args.trace.parent}")
    trace = None if args.trace is None else Recording(title=args.prompt)
    with make_llm(args, generation_config=args.generation_config, on_event=trace) as llm:
        assert llm.tokenizer is not None
        params = params_of(args, llm.sampling_defaults)
        summary(stream(llm, llm.tokenizer.encode(args.prompt), params, echo=args.prompt))
        if trace is not None:
            trace.about |= {name: getattr(llm.config, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
            trace.about |= {"block_size": llm.config.kvcache_block_size, "num_blocks": llm.config.num_kv_blocks}
            if args.trace.suffix == ".html":
                args.trace.write_text(page(trace, llm.tokenizer.decode), encoding="utf-8")
            else:
                trace.save(args.trace)


def run_chat(args: argparse.Namespace) -> None:
    params_of(args, {})  # a mistake shows before a model is loaded
    with make_llm(args, generation_config=args.generation_config) as llm:
        assert llm.tokenizer is not None
        params = params_of(args, llm.sampling_defaults)
        messages = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]
        # If there is no template, or it has no place for system messages, say so before anybody types.
        llm.tokenizer.encode_chat([*messages, {"role": "user", "content": "?"}])
        print("Type a message; an empty line or Ctrl-D ends the conversation.", file=sys.stderr)
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                return
            if not line:
                return
            messages.append({"role": "user", "content": line})
            output = stream(llm, llm.tokenizer.encode_chat(messages), params)
            messages.append({"role": "assistant", "content": output.outputs[0].text})


def run_serve(args: argparse.Namespace) -> None:
    args.settle(args)
    check(args)  # before anything heavy is imported
    set_up(args.log_level)
    for package in "fastapi", "uvicorn", "prometheus_client", "zmq", "msgspec":
        if find_spec(package) is None:
            raise ValueError(f"the server needs {package}, which is not installed: pip install 'nanovllm[serve]'")
    from nanovllm.server.serve import serve

    serve(args)


def run_bench(args: argparse.Namespace) -> None:
    if min(args.num_requests, args.max_length) < 1:
        raise ValueError(
            f"--num-requests and --max-length must be at least 1; got {args.num_requests}, {args.max_length}"
        )
    draw = random.Random(0)
    low, high = max(1, args.max_length // 10), args.max_length
    with make_llm(args, load_format=args.load_format, skip_tokenizer_init=True) as llm:
        vocab = llm.engine.vocab_size
        prompts = [[draw.randrange(vocab) for _ in range(draw.randint(low, high))] for _ in range(args.num_requests)]
        params = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=draw.randint(low, high), seed=i)
            for i in range(args.num_requests)
        ]
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=8), use_tqdm=False)  # warm up
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        seconds = time.perf_counter() - start
    generated = sum(len(o.outputs[0].token_ids) for o in outputs)
    print(f"{args.num_requests} requests, {sum(map(len, prompts))} prompt tokens, {generated} output tokens")
    print(f"{seconds:.2f} s, {generated / seconds:.1f} output tokens/s")


def run_info(args: argparse.Namespace) -> None:
    import logging
    import platform

    import torch

    from nanovllm.facts import checkpoint_facts

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)  # choices log their reasons

    print(f"python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads")
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_name(i)
        print(f"GPU {i}: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    if not torch.cuda.is_available():
        print("no usable CUDA GPU")
    with make_llm(args, skip_tokenizer_init=True) as llm:
        print(f"model: {llm.path}")
        print_table(("fact", "value", "from"), checkpoint_facts(llm.path))
        print(f"attention backend: {llm.attention_backend}")
        for name, value in vars(llm.config).items():
            print(f"  {name} = {value}")


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """In columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, ["-" * width for width in widths], *rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def summary(output: RequestOutput) -> None:
    """One line on standard error: how much, how fast, why it ended."""
    choice, m = output.outputs[0], output.metrics
    if m.first_token_time is None or m.finished_time is None or m.time_to_first_token is None:
        return
    decode = m.finished_time - m.first_token_time
    speed = f", {(len(choice.token_ids) - 1) / decode:.1f} tokens/s after that" if len(choice.token_ids) > 1 else ""
    print(
        f"[{len(output.prompt_token_ids)} prompt tokens, {len(choice.token_ids)} generated; first token after "
        f"{m.time_to_first_token * 1e3:.0f} ms{speed}; ended by {choice.finish_reason}]",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
