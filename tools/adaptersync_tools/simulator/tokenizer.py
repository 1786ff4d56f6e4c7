"""Text to token ids and back. Without a tokenizer a token is a byte of the UTF-8 text."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


class ByteTokenizer:
    """Ids 0..255 are bytes; any other id, like the end of text, has no text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        turns = "".join(f"<{message['role']}>{_content(message)}\n" for message in messages)
        return self.encode(turns + "<assistant>")


class ModelTokenizer:
    """The tokenizer of a model directory. Loads transformers, which takes seconds."""

    def __init__(self, directory: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
