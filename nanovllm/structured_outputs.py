"""Structured outputs, as a request asks for them: JSON, a regular expression, one text from a list, or a grammar.

Names and meanings are vLLM's.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

KINDS = "json", "regex", "choice", "grammar", "json_object"  # exactly one is given
MAX_CHARACTERS = 2**17  # of a schema, an expression or a grammar, and of all choices together


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What shape an output must have. Give exactly one of the first five fields.

    Immutable, and validated when made. Whether a grammar can be compiled is found out when a request is added.

    json:         a JSON schema, as a dict or as its text. Properties come in the order of the schema.
    regex:        a regular expression that the whole output matches, in the syntax of Rust's regex crate.
    choice:       the output is one of these texts.
    grammar:      a context-free grammar: Lark with a rule `start`, or GBNF with a rule `root`.
    json_object:  any JSON object.
    disable_any_whitespace:  no whitespace between the parts of JSON. The default allows a line break and 20 blanks.
    whitespace_pattern:      a regular expression for the whitespace between the parts of JSON, where there is some.

    Raises ValueError for a value that makes no sense, and TypeError for one of the wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    @property
    def kind(self) -> str:
        """The name of the one field of KINDS that is given."""
        return next(name for name in KINDS if getattr(self, name))

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping):  # a text can be hashed and sent, and keeps the order of properties
            try:
                object.__setattr__(self, "json", json.dumps(self.json, ensure_ascii=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"structured_outputs.json must be a JSON schema: {error}") from None
        if self.choice is not None:
            if isinstance(self.choice, str) or not isinstance(self.choice, Iterable):
                raise TypeError(f"structured_outputs.choice must be a list of strings; got {self.choice!r:.100}")
            object.__setattr__(self, "choice", tuple(self.choice))
        self._check_types()
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"structured_outputs needs exactly one of {', '.join(KINDS)}; got {given or 'none'}")
        [kind] = given
        texts = getattr(self, kind) if kind == "choice" else [getattr(self, kind)]
        if not texts or not all(texts):
            raise ValueError(f"structured_outputs.{kind} must not be empty; got {getattr(self, kind)!r:.100}")
        if kind != "json_object" and (length := sum(map(len, texts))) > MAX_CHARACTERS:
            raise ValueError(f"structured_outputs.{kind} has {length} characters, more than {MAX_CHARACTERS}; cut it")
        if self.json is not None:
            self._check_schema(str(self.json))
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError("structured_outputs: give disable_any_whitespace or whitespace_pattern, not both")
        if self.whitespace_pattern == "":
            raise ValueError("structured_outputs.whitespace_pattern must not be empty; use disable_any_whitespace")

    def _check_types(self) -> None:
        for name in ("json", "regex", "grammar", "whitespace_pattern"):
            if not isinstance(value := getattr(self, name), str | None):
                wanted = "a JSON schema, as a dict or as its text" if name == "json" else "a string"
                raise TypeError(f"structured_outputs.{name} must be {wanted}; got {value!r:.100}")
        if not all(isinstance(text, str) for text in self.choice or ()):
            raise TypeError(f"structured_outputs.choice must be a list of strings; got {self.choice!r:.100}")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise TypeError(f"structured_outputs.{name} must be true or false; got {value!r:.100}")

    def _check_schema(self, text: str) -> None:
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.json must be a JSON schema: {error}") from None
        if not isinstance(schema, dict):
            raise ValueError(f"structured_outputs.json must be a JSON schema, which is an object; got {text[:100]!r}")
