"""The JSON of chat requests: messages, tools, and what a chat template gets of them."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from nanovllm.server.json_size import num_values
from nanovllm.server.openai.protocol import INT32, MAX_LOGPROBS, Fields, GenerationRequest, Json, Short, Text, encodable
from nanovllm.server.openai.tolerance import HARMLESS, NO_MATTER, Harmless, refused
from nanovllm.text.chat import check_variables
from nanovllm.text.tool_grammars import Tool

MAX_MESSAGES = 2048  # of a conversation
MAX_PARTS = 2048  # of all messages together: text parts and tool calls
MAX_ARGUMENTS = 2**15  # strings, lists and objects in the JSON of one call
MAX_TOOLS = 128
MAX_DEPTH = 100  # levels of a schema


class TextPart(Fields):
    no_matter = frozenset({"cache_control"})

    type: Literal["text"]
    text: Text


def with_few_values(arguments: str) -> str:
    """The same JSON. Raises ValueError if a template's reader would take long for it."""
    if len(arguments) > MAX_ARGUMENTS and (number := num_values(arguments)[0]) > MAX_ARGUMENTS:
        raise ValueError(f"holds {number} strings, lists and objects; at most {MAX_ARGUMENTS} are possible")
    return arguments


class CalledFunction(Fields):
    name: Text
    arguments: Annotated[Text, AfterValidator(with_few_values)] | Json = ""  # JSON, as in the answer, or the object


class ToolCall(Fields):
    """A call in an earlier answer of the model."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Fields):
    harmless: ClassVar[Harmless] = {
        "function_call": (),
        "audio": (),
        "images": ([],),
        "prefix": (False,),
        "partial": (False,),
    }
    no_matter = frozenset({"cache_control"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] = ""
    name: Text | None = None
    tool_calls: list[ToolCall] = Field([], fail_fast=True)
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # vLLM's name of reasoning_content

    @model_validator(mode="after")
    def only_an_assistant_may_say_nothing(self) -> "ChatMessage":
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise refused("content", "Field required")
        if self.role != "assistant" and self.tool_calls:
            raise refused("tool_calls", "only an assistant calls tools")
        return self

    def for_template(self) -> Json:
        """What a chat template gets to see."""
        content = self.content
        said: Json = {"role": "system" if self.role == "developer" else self.role}
        if "content" in self.model_fields_set or not self.tool_calls:
            parts = content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]
            said["content"] = parts
        if self.tool_calls:
            shown: Any = {"id": True, "type": True, "function": {"name", "arguments"}}
            said["tool_calls"] = [call.model_dump(include=shown, exclude_none=True) for call in self.tool_calls]
        thought = self.reasoning_content or self.reasoning
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": thought}
        return said | {name: value for name, value in more.items() if value is not None}


def with_few_parts(messages: Any) -> Any:
    """The same messages, or items, whatever they are. Raises ValueError for more than MAX_PARTS parts of messages: each
    costs some microseconds, in which all other clients wait."""
    number = 0
    for message in messages if isinstance(messages, list) and len(messages) <= MAX_MESSAGES else ():
        for name in ("content", "tool_calls", "output") if isinstance(message, dict) else ():
            number += len(parts) if isinstance(parts := message.get(name), list) else 0
    if number > MAX_PARTS:
        raise ValueError(f"there are {number} text parts and tool calls; at most {MAX_PARTS} are possible")
    return messages


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(with_few_parts, json_schema_input_type=list[ChatMessage]),
]


def not_reserved(variables: Json) -> Json:
    check_variables(variables)
    return variables


TemplateVariables = Annotated[Json, AfterValidator(not_reserved)]


def is_deeper(value: Any, most: int) -> bool:
    """Whether JSON is nested deeper than `most` levels."""
    level = [value]
    for _ in range(most):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [value for values in inner for value in values]
    return bool(level)


class Function(Fields):
    """A function that a model may call. Without the field `parameters`, the function has no parameters."""

    name: Short
    description: Text | None = None
    parameters: Json = Field({"type": "object", "properties": {}})
    strict: bool = False

    @field_validator("parameters")
    @classmethod
    def of_an_object(cls, parameters: Json) -> Json:
        if parameters.get("type", "object") != "object":
            raise ValueError("must be the JSON schema of an object")
        if is_deeper(parameters, MAX_DEPTH):
            raise ValueError(f"is nested more than {MAX_DEPTH} levels deep")
        encodable(json.dumps(parameters, ensure_ascii=False, allow_nan=False))
        return parameters

    def tool(self) -> Tool:
        return Tool(self.name, self.parameters, self.strict)

    def for_template(self) -> Json:
        """What a chat template gets to see."""
        said = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in said.items() if value is not None}}


class ChatTool(Fields):
    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    name: Short


class NamedTool(Fields):
    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChatRequest(GenerationRequest):
    harmless: ClassVar[Harmless] = {
        **HARMLESS,
        "add_special_tokens": (False,),
        "prompt": (),
        "max_output_tokens": (),
    }
    no_matter = NO_MATTER - {"parallel_tool_calls"}

    messages: Messages
    tools: Tools = Field([])
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateVariables = Field({})
    max_completion_tokens: int | None = Field(None, ge=0, le=INT32)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def either_continues_or_begins(self) -> "ChatRequest":
        check_continues(self)
        return self

    @model_validator(mode="after")
    def top_logprobs_need_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "needs logprobs to be true")
        return self

    @model_validator(mode="after")
    def a_choice_needs_tools(self) -> "ChatRequest":
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if name not in [tool.function.name for tool in self.tools]:
                raise refused("tool_choice", f"names the function {name[:100]!r}, which is not in tools")
        elif self.tool_choice == "required" and not self.tools:
            raise refused(
                "tool_choice", 'would change the answer, and there are no tools; leave it out, or send "none"'
            )
        return self

    def continued(self) -> str | None:
        """The text that the output continues; None if the output is a new message."""
        content = self.messages[-1].content
        texts = [content] if isinstance(content, str) else [part.text for part in content]
        return "\n".join(texts) if self.continue_final_message else None

    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def callable(self) -> list[Function]:
        """The functions that the model may call in its answer."""
        functions = [tool.function for tool in self.tools]
        if isinstance(self.tool_choice, NamedTool):
            return [function for function in functions if function.name == self.tool_choice.function.name]
        return [] if self.tool_choice == "none" else functions

    def must_call(self) -> bool:
        return self.tool_choice not in ("none", "auto")

    def calls_once(self) -> bool:
        return isinstance(self.tool_choice, NamedTool) or not self.parallel_tool_calls

    def shown_tools(self) -> list[Json]:
        """The tools that a chat template gets to see: all of them, unless none may be called."""
        return [tool.function.for_template() for tool in self.tools if self.tool_choice != "none"]


class TokenizeRequest(Fields):
    """A request to /tokenize, as in vLLM: for a text or for a conversation."""

    harmless, no_matter = HARMLESS, NO_MATTER

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools = Field([])
    chat_template_kwargs: TemplateVariables = Field({})
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise refused("prompt", "give either prompt or messages")
        check_continues(self)
        return self


def check_continues(body: ChatRequest | TokenizeRequest) -> None:
    """Refuses a prompt that would end both with a message to continue and with the beginning of another."""
    if body.continue_final_message and body.add_generation_prompt:
        raise refused("continue_final_message", "needs add_generation_prompt to be false")
