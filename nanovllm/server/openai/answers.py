"""How the served model writes tool calls and reasoning: grammars that force the format, and splitters that read it."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nanovllm.engine.request import ContextLengthExceeded
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import ApiError
from nanovllm.server.interface import Engine
from nanovllm.server.openai.chat import ChatRequest
from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.text import reasoning
from nanovllm.text.parts import Answer, Splitter
from nanovllm.text.reasoning import Beginning, ReasoningSplitter, beginning, reasoning_parser
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.text.tool_calls import HERMES, LLAMA3_JSON, TOOL_FORMATS, ToolCallSplitter, tool_format
from nanovllm.text.tool_grammars import AnswerGrammar, Tool

NUM_LAST = 16  # tokens of a prompt, which are enough to see whether it ends with a marker
TOOLS_IN_TEMPLATE = re.compile(r"\btools\b")
MakeAnswer = Callable[[], Answer]


class AnswerForm:
    """The formats of a model's tool calls and reasoning, from its chat template and the options of the server.

    tool_parser, reasoning_parser_:  the name of a format, "none", or "auto": the format that the chat template tells.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str, reasoning_parser_: str) -> None:
        self.tokenizer, self.reads_no_tools = tokenizer, tool_parser == "none"
        template = chat_template(tokenizer.hf)
        self.tools = tool_format(template) if tool_parser == "auto" else TOOL_FORMATS.get(tool_parser)
        found = reasoning_parser(template) if reasoning_parser_ == "auto" else reasoning_parser_
        self.reasoning = None if found == "none" else found
        self.shows_tools = bool(TOOLS_IN_TEMPLATE.search(template))
        markers = {
            reasoning.OPEN,
            reasoning.CLOSE,
            *(m for form in TOOL_FORMATS.values() for m in (form.begin, form.end)),
        }
        added = tokenizer.fast.get_added_tokens_decoder().items()
        # Markers that are special tokens: an output hides them, unless it shows all special tokens.
        self.special = {token.content: i for i, token in added if token.special and token.content in markers}

    def adapt(
        self, body: ChatRequest, prompt: Sequence[int], params: SamplingParams
    ) -> tuple[SamplingParams, MakeAnswer | None]:
        """The parameters, with a grammar for the answer where one is needed, and a function that makes the reader of an
        answer. The function is None if an answer is content and nothing else. If there are structured outputs beside
        tools that need not be called, the answer is either calls or has this structure.

        Raises ApiError if the model may call tools, need not, and writes calls in a format that is not known; and if
        the grammar is too long. Raises ValueError if calls could not be told from an answer with the structure.
        """
        begins = self._begins(prompt, body.continued())
        grammar = AnswerGrammar(self.special, begins)
        tools, one = [function.tool() for function in body.callable()], body.calls_once()
        form = self.tools
        if tools and form is None:
            if not body.must_call():
                unknown = "the chat template of this model does not tell how tools are called"
                what = "this server was started with --tool-parser none" if self.reads_no_tools else unknown
                remedy = "start the server with the --tool-parser of the model"
                choice = 'set tool_choice to "required", "none" or a function'
                raise ApiError(400, f"{what}; {remedy}, or {choice}", param="tools")
            form = HERMES  # a grammar can force this form from any model
        structure = params.structured_outputs
        if structure is not None and form is LLAMA3_JSON and tools and not body.must_call():
            # Both begin with a brace. The lexer of a grammar would follow the longer word, which is a call.
            clash = f"calls in the format {form.name} could not be told from such an answer; leave one out"
            raise ValueError(f"structured_outputs.{structure.kind} cannot be combined with tools here: {clash}")
        needed = structure is not None or body.must_call() or any(tool.strict for tool in tools)
        if tools and form is not None and needed:
            try:
                structure = grammar.of_calls(form, tools, body.must_call(), one, structure)
            except ValueError as error:  # too long
                raise of_all_tools(error) from None
        elif structure is not None:
            structure = grammar.of_answer(structure)
        thinks, calls = begins in ("before", "inside"), form if tools else None
        if not thinks and calls is None:
            return params, None
        hidden = (thinks and reasoning.CLOSE in self.special) or (calls is not None and calls.begin in self.special)
        shown = params.skip_special_tokens and not hidden

        def make() -> Answer:
            splitters: list[Splitter] = []
            if thinks and begins is not None:
                splitters.append(ReasoningSplitter(begins))
            if calls is not None:
                splitters.append(ToolCallSplitter(calls, one))
            return Answer(splitters)

        return replace(params, structured_outputs=structure, skip_special_tokens=shown), make

    def _begins(self, prompt: Sequence[int], continued: str | None) -> Beginning | None:
        if self.reasoning is None:
            return None
        if continued is not None:
            return "inside" if continued.rfind(reasoning.OPEN) > continued.rfind(reasoning.CLOSE) else "after"
        return beginning(self.reasoning, self.tokenizer.decode(prompt[-NUM_LAST:], skip_special_tokens=False))


def chat_template(hf: Any) -> str:
    """The text of the template for chats with tools; "" if the tokenizer has no template."""
    try:
        return str(hf.get_chat_template(tools=[]))
    except ValueError:
        return ""


async def check_tools(
    llm: Engine, tools: Sequence[Tool], prompt: Sequence[int], params: SamplingParams, field: str
) -> None:
    """Check that the grammar of these tools can be enforced.

    field: the field of a tool that has its parameters. Raises ApiError, which names the tool that is to blame, or all
    tools, if the grammar cannot be enforced.
    """

    def check(structure: StructuredOutputsParams | None) -> str | None:
        try:
            llm.check({"prompt_token_ids": prompt}, replace(params, structured_outputs=structure))
        except ContextLengthExceeded:  # adding the request will raise this error
            pass
        except ValueError as error:
            return str(error)
        return None

    if (whole := await asyncio.to_thread(check, params.structured_outputs)) is None:
        return
    for i, tool in enumerate(tools):
        if error := await asyncio.to_thread(check, StructuredOutputsParams(json=tool.schema())):
            param = f"tools.{i}.{field}"
            raise ApiError(400, error.replace("structured_outputs.json", param), param=param)
    raise of_all_tools(whole)


def of_all_tools(error: object) -> ApiError:
    """What is wrong with the grammar of all tools together."""
    return ApiError(400, str(error).replace("structured_outputs.grammar", "tools: their grammar"), param="tools")
