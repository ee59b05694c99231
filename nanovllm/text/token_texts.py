"""What a token adds to a text, given what stands before it. Whatever shows tokens as text asks here.

A token is not a piece of text but a piece of UTF-8: an emoji may be spread over four tokens. Some tokenizers write the
space before a word only if something stands before the word. So a token's bytes depend on the token before it, and its
text also on the bytes that wait to become a character.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no character
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
LONGEST_RUN = 256  # bytes
# The steps of decoders that can be followed token by token. A space at the beginning may be stripped once all is fused.
DECODERS = re.compile(
    "(ByteLevel )?(Fuse )*|(Replace |Metaspace |WordPiece )*(ByteFallback )?((Fuse )+(Strip )?)?"  # each with a space
)


class Tokenizer(Protocol):
    """A `tokenizers.Tokenizer`, or an object that has one as `fast` or, in `transformers`, as `backend_tokenizer`."""

    def decode(self, ids: Sequence[int], /, skip_special_tokens: bool = True) -> str: ...


class Token(NamedTuple):
    raw: bytes | None  # None: depends on the token before
    byte: bytes  # of a tokenizer that spells rare characters in bytes, as "<0xF0>"; b"" for all other tokens
    is_special: bool
    exists: bool  # models have more rows than their tokenizer has tokens


class Tokens(dict[int, Token]):
    """What is true of a token wherever it stands, looked up when the token is first asked for."""

    def __init__(self, look_up: Callable[[int], Token]) -> None:
        super().__init__()
        self._look_up = look_up

    def __missing__(self, token_id: int) -> Token:
        found = self[token_id] = self._look_up(token_id)
        return found


class TokenTexts:
    """The bytes and texts of one tokenizer's tokens. Threads may share it.

    Three kinds of tokenizers differ. Byte-level ones (Qwen, Llama 3) write each byte as a letter. Those with byte
    fallback (Llama 2) have 256 tokens for bytes, and words that begin with "▁". All others (Unigram, WordPiece) have
    no parts of characters. What a word adds is taken from the tokenizer's own decoder: the text of two tokens without
    the text of the first. `check_decoder` refuses decoders with which a token may change more than that.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Any = getattr(tokenizer, "fast", getattr(tokenizer, "backend_tokenizer", tokenizer))
        steps = [step["type"] for step in decoder_steps(self._tokenizer)]
        self._byte_level = steps[:1] == ["ByteLevel"]
        self.has_byte_tokens = "ByteFallback" in steps
        self.tokens = Tokens(self._look_up)

    def _look_up(self, token_id: int) -> Token:
        alone = self._decode(token_id)
        is_special = bool(alone) and not self._tokenizer.decode([token_id], skip_special_tokens=True)
        # A stand-in of a test may know texts only.
        name = self._tokenizer.id_to_token(token_id) if hasattr(self._tokenizer, "id_to_token") else alone
        if name is None:
            return Token(b"", b"", False, False)
        if self._byte_level:
            known = all(letter in BYTE_OF_LETTER for letter in name)
            raw = bytes(BYTE_OF_LETTER[letter] for letter in name) if known else name.encode()
            return Token(raw, b"", is_special, True)
        byte = BYTE_TOKEN.fullmatch(name) if self.has_byte_tokens else None
        raw = None if byte is None else bytes.fromhex(byte[1])
        return Token(raw, raw or b"", is_special, True)

    def is_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the token is part of the text at all."""
        token = self.tokens[token_id]
        return token.exists and not (skip_special_tokens and token.is_special)

    def last(self, token_ids: Sequence[int], skip_special_tokens: bool) -> int | None:
        """The last of the tokens that is part of the text."""
        return next((i for i in reversed(token_ids) if self.is_text(i, skip_special_tokens)), None)

    def after(self, previous: int | None, token_id: int) -> bytes:
        """The bytes that a token adds after the token `previous`; None is the beginning of the text."""
        raw = self.tokens[token_id].raw
        if raw is not None and (self._byte_level or previous is not None):
            return raw
        if previous is not None:
            return self._decode(previous, token_id)[len(self._decode(previous)) :].encode()
        alone = self._decode(token_id)
        return raw if raw is not None and alone else alone.encode()  # "" for a space that shows only after something

    def _decode(self, *token_ids: int) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def characters(self) -> codecs.IncrementalDecoder:
        """A decoder of the bytes, which gives each character with its last byte. Bytes that are no character are
        written as the tokenizer writes them: byte fallback has one U+FFFD for each, all others one for as much as could
        have been the beginning of a character."""
        return codecs.getincrementaldecoder("utf-8")("nanovllm.each_byte" if self.has_byte_tokens else "replace")


class TextStream:
    """Token ids in, text out. The pieces joined are what the tokenizer makes of all ids, and no piece is taken back.

    The work for each token is bounded. With byte fallback one byte that is no part of a character spoils its whole run
    of byte tokens: all of them are U+FFFD then. So a run waits for its end (but for `LONGEST_RUN` bytes at most).

    pending: characters that wait, and will be text unless their run is spoilt.
    previous: the last token that is part of the text, of the prompt where there is none yet.
    """

    def __init__(self, texts: TokenTexts, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self.pending = ""
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self.previous = texts.last(prompt_token_ids, skip_special_tokens)
        self._characters = texts.characters()
        self._run = b""
        self._num_dropped = 0  # characters at the beginning of the run: a space at the beginning of the text
        self._spoilt = False

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        texts, tokens, skip = self._texts, self._texts.tokens, self._skip_special_tokens
        read = [i for i in token_ids if tokens[i].exists and not (skip and tokens[i].is_special)]
        if not texts.has_byte_tokens:
            pieces = []
            for token_id in read:
                pieces.append(texts.after(self.previous, token_id))
                self.previous = token_id
            return self._characters.decode(b"".join(pieces))
        new = []
        for token_id in read:
            raw = texts.after(self.previous, token_id)
            self.previous = token_id
            if byte := tokens[token_id].byte:
                self._num_dropped += not raw
                new.append(self._go_on(byte))
            else:
                new += self.flush(), raw.decode()
        return "".join(new)

    def flush(self) -> str:
        """No more tokens will come, or no more bytes: what is incomplete stays so."""
        if not self._texts.has_byte_tokens:
            return self._characters.decode(b"", final=True)
        whole = self._num_dropped + len(self.pending.encode()) == len(self._run)
        text = self.pending if whole else INCOMPLETE * len(self._run)
        self._run, self.pending, self._num_dropped, self._spoilt = b"", "", 0, False
        return text

    def _go_on(self, raw: bytes) -> str:
        """One more byte of a run."""
        self._run += raw
        complete = len(self._run)
        try:
            self._run.decode()
        except UnicodeDecodeError as error:
            complete = error.start
            self._spoilt = self._spoilt or error.reason != "unexpected end of data"
        if self._spoilt:
            text, self.pending, self._run, self._num_dropped = INCOMPLETE * len(self._run), "", b"", 0
            return text
        self.pending = self._run[:complete].decode()[self._num_dropped :]
        if complete < LONGEST_RUN:
            return ""
        text, self.pending, self._run, self._num_dropped = self.pending, "", self._run[complete:], 0
        return text


class TokenCursor:
    """Goes through an output token by token, and says for each position what tokens would add there.

    The texts of the chosen tokens joined are the text, and their bytes joined are the text's bytes: a token that only
    begins a character has no text, and the token that completes it has the character. Where the text ends within a
    character, its U+FFFD at the end belongs to no token: when a stream sends a token, nobody knows that no other will
    follow. Special tokens that are not part of the text show their own text all the same. (Not so where the bytes of a
    tokenizer with byte fallback are no characters: see `TextStream`.)

    offset: number of characters of the text before the position.
    """

    def __init__(self, texts: TokenTexts, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self.offset = 0
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self._previous = texts.last(prompt_token_ids, skip_special_tokens)
        self._characters = texts.characters()

    def look(self, token_id: int) -> tuple[str, bytes]:
        """Text and bytes of a token, if it came next."""
        if not self._texts.is_text(token_id, self._skip_special_tokens):
            raw = self._texts.after(None, token_id)
            return raw.decode(errors="replace"), raw
        state = self._characters.getstate()
        raw = self._texts.after(self._previous, token_id)
        text = self._characters.decode(raw)
        self._characters.setstate(state)
        return text, raw

    def go(self, token_id: int) -> None:
        """Take the token that was chosen."""
        if self._texts.is_text(token_id, self._skip_special_tokens):
            self.offset += len(self._characters.decode(self._texts.after(self._previous, token_id)))
            self._previous = token_id


def check_decoder(tokenizer: Any) -> None:
    """Raises ValueError if a `tokenizers.Tokenizer` decodes in a way in which a text cannot grow token by token.

    CTC's, for example, writes a repeated token once, GPT 1's needs to know which token is the last, and one that strips
    a text's end would take text back.
    """
    steps = list(decoder_steps(tokenizer))
    names = [step["type"] for step in steps]
    strips = [step for step in steps if step["type"] == "Strip" and (step["start"] > 1 or step["stop"])]
    if strips or not DECODERS.fullmatch("".join(f"{name} " for name in names)):
        how = "".join(f" with start={step['start']} and stop={step['stop']}" for step in strips)
        raise ValueError(
            f"the decoder {', '.join(names)}{how} is not supported, as a text could not be streamed; pass token ids "
            "with skip_tokenizer_init=True"
        )


def decoder_steps(tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The steps in which a `tokenizers.Tokenizer` makes text of tokens."""
    decoder = getattr(tokenizer, "decoder", None)
    waiting = [] if decoder is None else [json.loads(decoder.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = step["decoders"] + waiting
        else:
            yield step


def byte_letters() -> dict[str, int]:
    """The letters in which byte-level tokenizers write bytes: printable Latin-1 ones stand for themselves, and the
    others are numbered from 256 on (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_LETTER = byte_letters()


def each_byte(error: UnicodeError) -> tuple[str, int]:
    """An error handler for `codecs`: one U+FFFD for each byte."""
    assert isinstance(error, UnicodeDecodeError)
    return INCOMPLETE * (error.end - error.start), error.end


codecs.register_error("nanovllm.each_byte", each_byte)
