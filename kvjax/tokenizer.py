"""Text to token ids and back, from the tokenizer that a GGUF file carries in its metadata."""

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken

from kvjax.chat import ChatTemplate, check_text
from kvjax.detokenizer import SPECIAL, Detokenizer
from kvjax.errors import RequestError, WeightsError
from kvjax.vocabulary import Vocabulary, byte_level, missing_bytes, sentencepiece


class Tokenizer:
  """Encodes prompts and chats, decodes token ids. Safe to share between threads.

  Attributes:
    vocabulary: what it was built from.
    detokenizer: the way back from ids.
    chat_template: Jinja source of the model's chat template, None for a model without.
  """

  def __init__(self, vocabulary: Vocabulary, chat_template: str | None = None):
    self.vocabulary = vocabulary
    self.chat_template = chat_template
    self.detokenizer = Detokenizer(
      vocabulary.kind, vocabulary.tokens, vocabulary.types, vocabulary.add_space_prefix
    )
    self._missing_bytes = missing_bytes(vocabulary)
    self._lock = threading.Lock()
    build = byte_level if vocabulary.kind == "gpt2" else sentencepiece
    try:
      self._core = build(vocabulary)
    except WeightsError:
      raise
    except Exception as error:  # the library raises bare Exception for a merge without a token
      raise WeightsError(
        f"tokenizer.ggml.*: expected a {vocabulary.kind!r} vocabulary that can be built, "
        f"got one that fails with: {error}"
      ) from error
    self._core.add_tokens(
      [
        AddedToken(text, special=kind != TokenType.USER_DEFINED, normalized=False)
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if text and kind in SPECIAL
      ]
    )
    self._template: ChatTemplate | None = None
    if chat_template is not None:
      marks = {"bos_token": vocabulary.bos_id, "eos_token": next(iter(vocabulary.eos_ids), None)}
      self._template = ChatTemplate(
        chat_template,
        {name: "" if i is None else vocabulary.tokens[i] for name, i in marks.items()},
      )

  @classmethod
  def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
    """Builds it from GGUF metadata: key -> plain Python value.

    Raises:
      WeightsError: a key is missing, has the wrong length, or names an unknown kind of tokenizer.
    """
    return cls(Vocabulary.from_gguf(metadata), metadata.get("tokenizer.chat_template") or None)

  @property
  def vocab_size(self) -> int:
    return len(self.vocabulary.tokens)

  @property
  def bos_id(self) -> int | None:
    return self.vocabulary.bos_id

  @property
  def eos_ids(self) -> tuple[int, ...]:
    return self.vocabulary.eos_ids

  def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
    """Token ids of `text`.

    Args:
      text: any Unicode text without lone surrogates.
      add_special: put bos and eos around it where the model's rule says so.
      parse_special: read control tokens written in the text, as "<|im_end|>", as those tokens;
        False reads them as plain text. User-defined tokens are read either way.

    Raises:
      RequestError: key `prompt`; not a string, or a lone surrogate.
    """
    ids = self._encode(text, "prompt", parse_special)
    if add_special:
      if self.vocabulary.add_bos and self.bos_id is not None:
        ids = [self.bos_id, *ids]
      if self.vocabulary.add_eos and self.eos_ids:
        ids = [*ids, self.eos_ids[0]]
    return ids

  def render_chat(
    self, messages: Any, *, add_generation_prompt: bool = True, **variables: Any
  ) -> str:
    """The text that the model's chat template makes of `messages`.

    Args:
      messages: a list of {"role", "content", ...}; see `kvjax.chat.check_messages`.
      add_generation_prompt: end with the opening of the assistant's turn.
      **variables: what else the template may read, such as `tools` (JSON schemas of functions).

    Raises:
      RequestError: the model has no template, a message is malformed, or the template refuses.
    """
    if self._template is None:
      raise RequestError(
        "messages",
        "a model with a chat template (this model has no chat template)",
        messages,
        "Use `prompt` with the text itself",
      )
    given = {"tools": None, **variables, "add_generation_prompt": add_generation_prompt}
    return self._template.render(messages, given)

  def encode_chat(
    self, messages: Any, *, add_generation_prompt: bool = True, **variables: Any
  ) -> list[int]:
    """Token ids of the rendered chat; bos once where the model wants it. See `render_chat`.

    Control tokens are read in the whole text, the messages' contents included.
    """
    text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
    ids = self._encode(text, "messages", True)
    if self.vocabulary.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
      ids = [self.bos_id, *ids]
    return ids

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Text of `ids`, without the control tokens unless asked for. See `Detokenizer.decode`."""
    return self.detokenizer.decode(ids, skip_special)

  def token_bytes(self, token: int) -> bytes:
    """The bytes that one token stands for; those of its name for a control token."""
    return self.detokenizer.token_bytes(token)

  def token_text(self, token: int) -> str:
    """`token_bytes` as text, with U+FFFD for what is not a whole character."""
    return self.detokenizer.decode([token], skip_special=False)

  def _encode(self, text: Any, key: str, parse_special: bool) -> list[int]:
    check_text(key, text)
    self._check_writable(key, text)
    with self._lock:  # the library has one switch per tokenizer, not per call
      self._core.encode_special_tokens = not parse_special
      ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
      return ids

  def _check_writable(self, key: str, text: str) -> None:
    # The library leaves out in silence what a byte-level vocabulary lacks a byte for.
    missing = self._missing_bytes
    if missing and len(data := text.encode()) != len(data.translate(None, missing)):
      place = next(i for i, char in enumerate(text) if any(b in missing for b in char.encode()))
      raise RequestError(
        key,
        "characters that the model's vocabulary can write",
        text[place],
        f"Character {place} (U+{ord(text[place]):04X}) needs a byte that has no token: remove it",
      )
