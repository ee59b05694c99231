"""The JSON of requests at OpenAI's newer endpoint, /v1/responses, and the chat request that each stands for.

Nothing is stored: the client sends the whole conversation in each request. `response_items` has the answers.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)

from nanovllm.server.openai.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ChatTool,
    Function,
    FunctionName,
    NamedTool,
    TemplateVariables,
    TextPart,
    ToolCall,
    with_few_parts,
)
from nanovllm.server.openai.protocol import INT32, Fields, JsonSchema, ResponseFormat, SamplingFields, Text
from nanovllm.server.openai.tolerance import HARMLESS, NO_MATTER, Harmless, refused

# Fields of an earlier answer that a client sends back, and that change nothing.
ECHOED = frozenset({"id", "status", "annotations", "logprobs", "summary", "encrypted_content", "phase"})


# --- items of the conversation ---


class Echoed(Fields):
    no_matter = ECHOED


class ItemText(Echoed):
    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    text: Text


Texts = Text | Annotated[list[ItemText], Field(fail_fast=True)]


class Message(Echoed):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts


class FunctionCall(Echoed):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class FunctionCallOutput(Echoed):
    type: Literal["function_call_output"]
    call_id: Text
    output: Texts


class Reasoning(Echoed):
    type: Literal["reasoning"]
    content: Texts = ""


def type_of(item: Any) -> str:
    return str(item.get("type") or "message") if isinstance(item, dict) else str(getattr(item, "type", ""))


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(
        type_of,
        custom_error_type="item_type",
        custom_error_message="an item must be a message, a function_call, a function_call_output or reasoning",
    ),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def as_items(given: Any) -> Any:
    """The items, which may be given as the text of one message. Raises ValueError for too many parts."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else with_few_parts(given)


def texts(content: str | Sequence[ItemText]) -> str | list[TextPart]:
    return content if isinstance(content, str) else [TextPart(type="text", text=part.text) for part in content]


def one_after_the_other(*contents: str | list[TextPart]) -> list[TextPart]:
    lists = ([TextPart(type="text", text=one)] if isinstance(one, str) else one for one in contents)
    return [part for parts in lists for part in parts]


def joined(content: str | Sequence[ItemText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def messages_of(items: Sequence[Message | FunctionCall | FunctionCallOutput | Reasoning]) -> list[ChatMessage]:
    """The messages of a chat. The reasoning, the text and the calls of one answer, each an item, become one message.

    What stands between a call and its result belongs to the answer with the call: a chat template wants the results
    right behind the calls.
    """
    messages: list[ChatMessage] = []
    answer: dict[str, Any] = {}  # of the assistant, from the items so far

    def end_answer() -> None:
        if answer:
            messages.append(ChatMessage(role="assistant", **answer))
            answer.clear()

    for item in items:
        if isinstance(item, FunctionCall):
            function = CalledFunction(name=item.name, arguments=item.arguments)
            answer.setdefault("tool_calls", []).append(ToolCall(id=item.call_id, function=function))
        elif isinstance(item, Reasoning):
            if "tool_calls" not in answer:
                end_answer()
            before = [thought] if (thought := answer.get("reasoning_content")) else []
            answer["reasoning_content"] = "\n".join([*before, joined(item.content)])
        elif isinstance(item, FunctionCallOutput):
            end_answer()
            messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=texts(item.output)))
        elif item.role == "assistant":
            if "tool_calls" not in answer and "content" in answer:
                end_answer()
            said = texts(item.content)
            answer["content"] = one_after_the_other(answer["content"], said) if "content" in answer else said
        else:
            end_answer()
            messages.append(ChatMessage(role=item.role, content=texts(item.content)))
    end_answer()
    return messages


# --- requests ---

# Of what the answer repeats, without fields that nobody knows: these may hold what cannot be sent.
ECHO = ConfigDict(extra="ignore", strict=True)


class TextFormat(JsonSchema):
    """The field `format`: as `response_format` in chats, but with the fields of the schema beside the type."""

    model_config = ECHO

    type: Literal["text", "json_object", "json_schema"]
    name: Text = ""

    def response_format(self) -> ResponseFormat:
        said: dict[str, Any] = {"type": self.type}
        if self.type == "json_schema":
            said["json_schema"] = {"name": self.name, "schema": self.schema_}
        return ResponseFormat.model_validate(said)


class TextConfig(Fields):
    no_matter = frozenset({"verbosity"})

    format: TextFormat = TextFormat(type="text")


class FunctionTool(Function):
    model_config = ECHO

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def only_functions(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") != "function":
            raise refused("type", 'must be "function": this server has no tools of its own')
        return data


class NamedFunction(Fields):
    model_config = ECHO

    type: Literal["function"]
    name: Text


class ResponsesRequest(SamplingFields):
    harmless: ClassVar[Harmless] = {
        **HARMLESS,
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "messages": (),
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),
        "truncation": ("disabled",),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "prompt_logprobs": (),
        "n": (1,),
        "max_tokens": (),
        "max_completion_tokens": (),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
    }
    no_matter = NO_MATTER - {"parallel_tool_calls", "metadata"} | {"reasoning", "stream_options"}

    input: Annotated[Items, BeforeValidator(as_items, json_schema_input_type=str | Items)]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT32)
    tools: list[FunctionTool] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    metadata: dict[Text, Text] = Field({})
    chat_template_kwargs: TemplateVariables = Field({})
    _chat: ChatRequest = PrivateAttr()

    @property
    def chat(self) -> ChatRequest:
        """The same request as a chat."""
        return self._chat

    @model_validator(mode="after")
    def stands_for_a_chat(self) -> "ResponsesRequest":
        try:
            self._chat = self._as_chat()
        except ValidationError as error:  # of fields that contradict each other
            first = error.errors()[0]
            field = str(first.get("ctx", {}).get("field") or first["loc"][0])
            raise refused(
                {"response_format": "text.format", "messages": "input"}.get(field, field), first["msg"]
            ) from None
        return self

    def _as_chat(self) -> ChatRequest:
        given = {name: getattr(self, name) for name in SamplingFields.model_fields if name in self.model_fields_set}
        if self.logit_bias:
            given["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        said = [Message(role="system", content=self.instructions)] if self.instructions is not None else []
        choice = self.tool_choice
        if isinstance(choice, NamedFunction):
            given["tool_choice"] = NamedTool(type="function", function=FunctionName(name=choice.name))
        else:
            given["tool_choice"] = choice
        return ChatRequest(
            **given,
            messages=messages_of([*said, *self.input]),
            tools=[ChatTool(type="function", function=tool) for tool in self.tools],
            parallel_tool_calls=self.parallel_tool_calls,
            max_completion_tokens=self.max_output_tokens,
            response_format=self.text.format.response_format(),
            chat_template_kwargs=self.chat_template_kwargs,
        )
