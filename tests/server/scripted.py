"""An application over an engine whose outputs are given, for what becomes of a text: no model, no socket."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai
from starlette.testclient import TestClient

from nanovllm.admission import Checked
from nanovllm.config import EngineConfig
from nanovllm.llm import EMBEDDED_MODEL
from nanovllm.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.server.app import build_app
from nanovllm.server.client import Uncounted
from nanovllm.server.options import AppOptions
from nanovllm.stream import OutputStream
from nanovllm.text.grammars import TokenGrammars
from nanovllm.text.tokenizer import Tokenizer

# Shows all that a template may be told, in Qwen3's way.
TEMPLATE = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{% for m in messages %}<|{{ m.role }}{{ ' ' + m.tool_call_id if m.tool_call_id }}|>
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{% for call in m.tool_calls %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% if open %}<think>
{% elif enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


@dataclass
class Script:
    """What the engine says next: these pieces, each in an output of its own if the client streams."""

    pieces: Sequence[str] = ("",)
    finish_reason: FinishReason = "stop"
    # What the engine was asked last.
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: str = ""


class ScriptedStream(OutputStream):
    def __init__(self, script: Script, request: Checked) -> None:
        super().__init__("0", lambda: None)
        streamed = request.params.output_kind is not RequestOutputKind.FINAL_ONLY
        self._pieces = list(script.pieces) if streamed else ["".join(script.pieces)]
        self._script, self._request = script, request

    async def accepted(self) -> None: ...

    async def __anext__(self) -> RequestOutput:
        if not self._pieces:
            raise StopAsyncIteration
        text = self._pieces.pop(0)
        reason = None if self._pieces else self._script.finish_reason
        choices = [CompletionOutput(i, text, [5], finish_reason=reason) for i in range(self._request.params.n)]
        prompt = self._request.prompt_token_ids
        return RequestOutput("0", None, prompt, None, choices, not self._pieces, RequestMetrics(0.0))


class ScriptedEngine:
    vocab_size = 4096
    sampling_defaults: Mapping[str, Any] = {}

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.script = tokenizer, Script()
        self.config = EngineConfig(max_model_len=4096, num_kv_blocks=512, kvcache_block_size=16)
        self.grammars = TokenGrammars(tokenizer, self.vocab_size, {0})

    def check(self, prompt: Mapping[str, Any], params: SamplingParams) -> Checked:
        if params.structured_outputs is not None:
            self.grammars.compile(params.structured_outputs)
        return Checked(list(prompt["prompt_token_ids"]), params, prompt.get("cache_salt"), None)

    def submit(self, requests: Sequence[Checked], *, priority: int = 0) -> list[ScriptedStream]:
        [request] = requests
        self.script.params = request.params
        self.script.prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        return [ScriptedStream(self.script, request)]

    def check_health(self) -> None: ...
    async def shutdown(self, drain: bool = True) -> None: ...


class NoMeters:
    def count(self, name: str, *labels: str) -> None: ...

    def observe(self) -> Uncounted:
        return Uncounted()

    async def scrape(self) -> bytes:
        return b""


class Scripted:
    """An application, and clients for it."""

    def __init__(self, chat_template: str, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        self.engine = ScriptedEngine(tokenizer or Tokenizer(EMBEDDED_MODEL))
        self.options = AppOptions(chat_template=chat_template, **options)
        app = build_app(self.engine, model_name="story", options=self.options, meters=NoMeters())
        self.engine.tokenizer.renderer = None  # the templates are ours; a process for them takes a second
        self.http = TestClient(app, base_url="http://test/v1")
        self.openai = openai.OpenAI(base_url="http://test/v1", api_key="any", max_retries=0, http_client=self.http)

    def says(self, *pieces: str, finish_reason: FinishReason = "stop") -> Script:
        self.engine.script = Script(pieces, finish_reason)
        return self.engine.script
