"""The JSON of requests: the fields of all requests, and those of completions. `chat` has the fields of chats.

A request has OpenAI's fields and vLLM's additions; `tolerance` decides about other fields. `null` means the same as an
absent field. An absent field has the checkpoint's default, if the checkpoint names one. Types are strict: a number in
quotes is a mistake. Bounds stand here only if the server is stricter than `SamplingParams`, which checks the rest. The
check of a list ends at the first mistake: a million mistakes, each with an error of its own, would delay all clients.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields as fields_of
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from nanovllm.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, RequestOutputKind, SamplingParams
from nanovllm.server.openai.tolerance import HARMLESS, NO_MATTER, Harmless, refused, settle
from nanovllm.structured_outputs import StructuredOutputsParams

MAX_CHOICES = 128
MAX_PROMPTS = 256
MAX_LOGPROBS = 20
MAX_TOKEN_IDS = 2**18  # of a list that is no prompt
MAX_FIELDS = 100  # of any object, checked before the names of the fields
INT32 = 2**31 - 1
Json = dict[str, Any]


# --- requests ---


def encodable(text: str) -> str:
    """The same text. Raises ValueError for half a surrogate pair, which JSON may hold but which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no text") from None
    return text


def by_token(bias: Any) -> Any:
    """The biases by token id; in JSON the keys are strings. Raises ValueError for too many biases or a wrong key."""
    if not isinstance(bias, dict):
        return bias
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(bias)} tokens; at most {MAX_LOGIT_BIAS} are possible")
    if not all(key.isascii() and key.isdecimal() and len(key) < 20 for key in bias):
        raise ValueError("must have token ids for keys: integers from 0, as strings")
    return {int(key): value for key, value in bias.items()}


Text = Annotated[str, AfterValidator(encodable)]
Short = Annotated[Text, Field(min_length=1, max_length=1000)]
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]


class Fields(BaseModel):
    """An object of a request. Fields that the server does not know are in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True)
    harmless: ClassVar[Harmless] = {}
    no_matter: ClassVar[Collection[str]] = ()
    known: ClassVar[Collection[str]] = ()  # the fields, by the names that a client writes

    @classmethod
    def __pydantic_init_subclass__(cls, **more: Any) -> None:
        super().__pydantic_init_subclass__(**more)
        cls.known = [field.alias or name for name, field in cls.model_fields.items()]

    @model_validator(mode="before")
    @classmethod
    def settled(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise ValueError(f"an object has {len(data)} fields, more than there are; leave out what is not supported")
        return settle(data, cls.known, cls.harmless, cls.no_matter)


class StreamOptions(Fields):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(Fields):
    """vLLM's field. `StructuredOutputsParams` checks the values; an unknown name is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: Json | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(fail_fast=True)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: Text | None = None


class JsonSchema(Fields):
    """OpenAI's field. The schema is enforced, `strict` or not; `name` and `description` are not read."""

    name: Text
    description: Text | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool = False


class ResponseFormat(Fields):
    harmless: ClassVar[Harmless] = {"schema": ()}  # other servers take a schema here

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def a_schema_where_one_is_announced(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema needs json_schema, and no other type has it")
        return self

    def params(self) -> StructuredOutputsParams | None:
        if self.json_schema is not None and self.json_schema.schema_ is not None:
            return StructuredOutputsParams(json=self.json_schema.schema_)
        return None if self.type == "text" else StructuredOutputsParams(json_object=True)


class SamplingFields(Fields):
    """The fields of every endpoint that generates."""

    harmless: ClassVar[Harmless] = HARMLESS
    no_matter = NO_MATTER

    model: str | None = None
    stream: bool = False

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Short | Annotated[list[Short], Field(max_length=16)] = []

    top_k: int | None = Field(None, ge=-1, le=INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.1, le=10)
    min_tokens: int = Field(0, ge=0, le=INT32)
    stop_token_ids: list[int] = Field([], max_length=128)
    logit_bias: Annotated[dict[int, float], BeforeValidator(by_token)] | None = None
    bad_words: list[Short] = Field([], max_length=MAX_BAD_WORDS)
    allowed_token_ids: Annotated[TokenIds, Field(max_length=MAX_TOKEN_IDS)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: int = Field(0, ge=-INT32, le=INT32)
    cache_salt: Short | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def without_empty_stops(cls, stop: Any) -> Any:
        if isinstance(stop, list):
            return [one for one in stop if one != ""]
        return [] if stop == "" else stop


class GenerationRequest(SamplingFields):
    """The fields of completions and chats."""

    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=0, le=INT32)  # 0 only reads the prompt
    truncate_prompt_tokens: Literal[-1] | Annotated[int, Field(ge=1, le=INT32)] | None = None
    return_token_ids: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat = ResponseFormat(type="text")
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def a_stream_has_no_place_for_prompt_logprobs(self) -> "GenerationRequest":
        if self.stream and self.prompt_logprobs is not None:
            raise refused("prompt_logprobs", "is not available with stream; leave one of them out")
        return self

    def most_tokens(self) -> int | None:
        """The largest number of output tokens, where the client names one."""
        return self.max_tokens

    def num_scores(self) -> int | None:
        """How many of the likeliest tokens are wanted per prompt token, with log-probabilities; None for no scores."""
        return self.prompt_logprobs

    def sampling_params(self, max_tokens: int, logprobs: int | None, defaults: Mapping[str, Any]) -> SamplingParams:
        """The engine's parameters. `defaults` are the values of absent fields.

        A request for no tokens draws one token, which `Generation` leaves out: the engine ends no request without a
        token. Raises ValueError for fields that contradict each other.
        """
        kind = RequestOutputKind.CUMULATIVE if self.stream else RequestOutputKind.FINAL_ONLY
        said = {name: value for name in SAME if (value := getattr(self, name)) is not None}
        if self.seed is not None:
            said["seed"] = None if self.seed == -1 else self.seed % 2**63
        values = {**defaults, **said, "max_tokens": max(max_tokens, 1), "structured_outputs": self.structure()}
        return SamplingParams(logprobs=logprobs, prompt_logprobs=self.num_scores(), output_kind=kind, **values)

    def structure(self) -> StructuredOutputsParams | None:
        """The structure that the output must have. Raises ValueError or TypeError if the fields make no sense."""
        wanted = self.response_format.params()
        if self.structured_outputs is None:
            return wanted
        if wanted is not None:
            raise ValueError("response_format and structured_outputs both say what the output must be; leave one out")
        return StructuredOutputsParams(**self.structured_outputs.model_dump(by_alias=True, exclude_unset=True))

    def field_of_structure(self) -> str:
        """The field that an error in the structure of the output is to name; "" if there is none."""
        given = self.structured_outputs
        if given is None:
            return "response_format"
        names = ((field.alias or name, getattr(given, name)) for name, field in StructuredOutputs.model_fields.items())
        return next((f"structured_outputs.{name}" for name, value in names if value not in (None, False)), "")


# Fields that mean the same in `SamplingParams`.
SAME = {field.name for field in fields_of(SamplingParams)} & {"n", *SamplingFields.model_fields}


class CompletionRequest(GenerationRequest):
    harmless: ClassVar[Harmless] = {
        **HARMLESS,
        "add_special_tokens": (True,),
        "messages": (),
        "max_completion_tokens": (),
        "max_output_tokens": (),
        "top_logprobs": (0,),
    }

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    def num_scores(self) -> int | None:
        wanted = self.prompt_logprobs, self.logprobs if self.echo else None
        return max((number for number in wanted if number is not None), default=None)

    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        many: list[str | list[int]] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        return many


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
