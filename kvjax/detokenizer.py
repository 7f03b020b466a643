"""Text out of token ids: all at once, or one at a time with stop strings."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gguf import TokenType

from kvjax.errors import RequestError

if TYPE_CHECKING:
  from kvjax.tokenizer import Tokenizer

SPACE = "▁"  # U+2581, how SentencePiece writes a space inside a piece
SKIPPED = (TokenType.CONTROL, TokenType.UNKNOWN)  # not part of what a model says
SPECIAL = (*SKIPPED, TokenType.USER_DEFINED)  # their text is what the vocabulary says, unescaped


def _stand_ins() -> dict[str, int]:
  itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in itself]
  table = {chr(byte): byte for byte in itself}
  return table | {chr(256 + place): byte for place, byte in enumerate(others)}


# The printable stand-in of each byte in byte-level BPE (Radford et al. 2019, GPT-2).
BYTE_OF_CHAR: Mapping[str, int] = _stand_ins()


def _replace_each(error: UnicodeError) -> tuple[str, int]:
  """One U+FFFD for each byte that is not UTF-8, as SentencePiece writes byte pieces."""
  if not isinstance(error, UnicodeDecodeError):
    raise error
  return "\ufffd" * (error.end - error.start), error.end


_REPLACE_EACH = "kvjax.replace_each"
codecs.register_error(_REPLACE_EACH, _replace_each)


class Detokenizer:
  """Bytes and text of token ids.

  Bytes that are not UTF-8 become U+FFFD: one for each byte in the "llama" kind, one for each
  maximal subpart of a character (Unicode 16, table 3-8) in the "gpt2" kind, as their own
  tokenizers do.

  Attributes:
    errors: name of the codec error handler that does so.

  Args:
    kind: "gpt2" or "llama", see `kvjax.vocabulary.Vocabulary`.
    tokens, types: text and gguf.TokenType of each id.
    add_space_prefix: encoding put a space in front of text after special tokens.
  """

  def __init__(
    self, kind: str, tokens: Sequence[str], types: Sequence[int], add_space_prefix: bool
  ):
    self.errors = _REPLACE_EACH if kind == "llama" else "replace"
    self._kind = kind
    self._tokens = tokens
    self._types = types
    self._add_space_prefix = add_space_prefix

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Text of `ids`.

    The space that add_space_prefix puts after special tokens is taken out again, so a prompt with
    its bos comes back as it was. Ids without one in front are read as the continuation of
    something: they keep their first space.

    Args:
      skip_special: leave out control and unknown tokens.
    """
    pieces = []
    previous = None
    for token in ids:
      pieces.append(self.bytes_after(token, previous, skip_special))
      previous = token
    return b"".join(pieces).decode("utf-8", errors=self.errors)

  def bytes_after(self, token: int, previous: int | None, skip_special: bool = True) -> bytes:
    """What `token` adds to a text whose last id is `previous`: UTF-8, maybe part of a character."""
    data = self.token_bytes(token)
    kind = self._types[token]
    if skip_special and kind in SKIPPED:
      return b""
    prefixed = self._add_space_prefix and kind == TokenType.NORMAL
    if prefixed and previous is not None and self._types[previous] in SPECIAL:
      return data.removeprefix(b" ")
    return data

  def token_bytes(self, token: int) -> bytes:
    """The bytes that one token stands for; RequestError for an id outside the vocabulary."""
    if not 0 <= token < len(self._tokens):
      raise RequestError("token_ids", f"ids in [0, {len(self._tokens)})", token)
    text, kind = self._tokens[token], self._types[token]
    if kind in SPECIAL:
      return text.encode()
    if self._kind == "llama":
      if kind == TokenType.BYTE:
        return bytes.fromhex(text[3:5])
      return text.replace(SPACE, " ").encode()
    if all(char in BYTE_OF_CHAR for char in text):
      return bytes(BYTE_OF_CHAR[char] for char in text)
    return text.encode()


class _Stop:
  """How much of one stop string the text ends with (Knuth, Morris, Pratt 1977)."""

  def __init__(self, text: str):
    self.text = text
    self.matched = 0
    # fallback[k]: length of the longest proper prefix of text[:k] that is also its suffix
    self._fallback = [0] * (len(text) + 1)
    length = 0
    for k in range(1, len(text)):
      while length and text[k] != text[length]:
        length = self._fallback[length]
      length += text[k] == text[length]
      self._fallback[k + 1] = length

  def feed(self, char: str) -> bool:
    """Advances by one character; True when the stop string is complete."""
    while self.matched and char != self.text[self.matched]:
      self.matched = self._fallback[self.matched]
    self.matched += char == self.text[self.matched]
    return self.matched == len(self.text)


class IncrementalDetokenizer:
  """Turns the ids of one completion into text as they come.

  What it has given never changes later: half a UTF-8 sequence and the beginning of a possible
  stop string are held back until they are decided. Without a stop, all it gives is
  `tokenizer.decode(ids)`. The cost of `push` and `take` does not grow with the length of the text;
  `text` makes a copy of it.

  The stop string that is complete first wins, as if the text came character by character, so the
  result does not depend on where the borders between tokens fall; of several that are complete
  with the same character the longest wins.

  Attributes:
    stopped: the stop string that was found, else None. The text ends before it, and further
      tokens are ignored.
  """

  def __init__(self, tokenizer: "Tokenizer", stop: Sequence[str] = (), skip_special: bool = True):
    self.stopped: str | None = None
    self._detokenizer = tokenizer.detokenizer
    self._skip_special = skip_special
    self._previous: int | None = None
    self._decoder = codecs.getincrementaldecoder("utf-8")(errors=tokenizer.detokenizer.errors)
    self._stops = [_Stop(text) for text in sorted(set(stop), key=len, reverse=True)]
    self._held = ""  # decoded, but perhaps the beginning of a stop string
    self._given: list[str] = []
    self._taken = 0  # pieces of _given that take() has handed out

  def push(self, token: int) -> None:
    """Adds one token id."""
    if self.stopped is None:
      data = self._detokenizer.bytes_after(token, self._previous, self._skip_special)
      self._previous = token
      self._add(self._decoder.decode(data))

  @property
  def text(self) -> str:
    """All text that is safe to emit so far."""
    taken = "".join(self._given[: self._taken])
    fresh = "".join(self._given[self._taken :])
    # Joined pieces stay joined: asking after every token then costs one copy of the text.
    self._given = [taken, fresh] if self._taken else [fresh]
    self._taken = min(self._taken, 1)
    return taken + fresh

  def take(self) -> str:
    """The text that became safe to emit since the last call."""
    fresh = "".join(self._given[self._taken :])
    self._taken = len(self._given)
    return fresh

  def finish(self) -> str:
    """Ends the text: half a character becomes U+FFFD, held text is given. Returns all of it."""
    if self.stopped is None:
      self._add(self._decoder.decode(b"", final=True))
    if self.stopped is None:
      self._give(self._held)
      self._held = ""
    return self.text

  def _add(self, piece: str) -> None:
    if not self._stops:
      self._give(piece)
      return
    held = self._held + piece
    for end, char in enumerate(piece, start=len(self._held) + 1):
      # Every stop must see the character, so no early exit; the longest is first.
      found = [stop for stop in self._stops if stop.feed(char)]
      if found:
        self.stopped = found[0].text
        self._give(held[: end - len(self.stopped)])
        self._held = ""
        return
    open_chars = max(stop.matched for stop in self._stops)
    self._give(held[: len(held) - open_chars])
    self._held = held[len(held) - open_chars :]

  def _give(self, text: str) -> None:
    if text:
      self._given.append(text)
