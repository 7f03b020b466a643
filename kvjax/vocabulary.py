"""A model's vocabulary, checked, and the `tokenizers` objects that are built from it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from gguf import TokenType
from tokenizers import Regex, models, normalizers, pre_tokenizers

from kvjax.detokenizer import BYTE_OF_CHAR, SPACE
from kvjax.errors import WeightsError, nearest

# Pre-tokenizers by tokenizer.ggml.pre: splits applied one after another, each isolating its
# matches. The expressions are those published with the models (GPT-2, Llama 3, Qwen 2, SmolLM),
# in the order that GGUF writers agreed on.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (_CASELESS.replace("DIGITS", r"\p{N}{1,3}"),)
_QWEN2 = (_CASELESS.replace("DIGITS", r"\p{N}"),)
_SINGLE_DIGITS = (r"\p{N}", _GPT2)
_SPLITS: Mapping[str, tuple[str, ...]] = {
  "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
  "gpt-2": (_GPT2,),
  "gpt2": (_GPT2,),
  "smollm": _SINGLE_DIGITS,
  "starcoder": _SINGLE_DIGITS,
  "llama-bpe": _LLAMA3,
  "llama-v3": _LLAMA3,
  "llama3": _LLAMA3,
  "qwen2": _QWEN2,
  "deepseek-r1-qwen": _QWEN2,
}
_WHOLE_WORDS = ("llama-bpe", "llama-v3", "llama3")  # a word in the vocabulary skips the merges

# Texts that end a turn or a document in the common chat formats, whatever eos_token_id says.
_END_TEXTS = (
  "<|im_end|>",
  "<|eot_id|>",
  "<|eom_id|>",
  "<end_of_turn>",
  "<|end|>",
  "<|endoftext|>",
  "<|end_of_text|>",
)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """The checked `tokenizer.ggml.*` metadata of a model.

  Attributes:
    kind: "gpt2" (byte-level BPE) or "llama" (SentencePiece pieces with scores).
    pre: name of the pre-tokenizer; only "gpt2" uses it.
    tokens: text of each id, in the writing of its kind.
    types: gguf.TokenType of each id.
    scores: of each id, the higher the earlier a piece is merged; only "llama" has them.
    merges: pairs "left right", the most important first; only "gpt2" has them.
    bos_id, unknown_id: None when the model has none.
    eos_ids: the end-of-sequence id first, then every other id that ends a turn or a document.
    add_bos, add_eos: what `encode` puts around a prompt.
    add_space_prefix: "llama" puts a space in front of text at the start and after special tokens.
  """

  kind: str
  pre: str
  tokens: Sequence[str]
  types: Sequence[int]
  scores: Sequence[float]
  merges: Sequence[str]
  bos_id: int | None
  unknown_id: int | None
  eos_ids: tuple[int, ...]
  add_bos: bool
  add_eos: bool
  add_space_prefix: bool

  @classmethod
  def from_gguf(cls, metadata: Mapping[str, Any]) -> "Vocabulary":
    """Reads and checks the metadata; WeightsError says which key is wrong."""

    def get(name: str, default: Any = None) -> Any:
      value = metadata.get(f"tokenizer.ggml.{name}")
      return default if value is None else value

    kind = get("model")
    if kind not in ("gpt2", "llama"):
      raise WeightsError(
        f"tokenizer.ggml.model: expected 'gpt2' or 'llama', got {kind!r}. "
        "Use a model whose tokenizer is of one of these kinds, or give prompts as token ids"
      )
    pre = get("pre", "default")
    if kind == "gpt2" and pre not in _SPLITS:
      raise WeightsError(
        f"tokenizer.ggml.pre: expected one of {', '.join(sorted(_SPLITS))}, got {pre!r}."
        + nearest(str(pre), _SPLITS)
      )
    tokens = list(get("tokens", ()))
    if not tokens:
      raise WeightsError("tokenizer.ggml.tokens: expected the texts of all tokens, got none")
    types = list(get("token_type", (TokenType.NORMAL,) * len(tokens)))
    needed = "scores" if kind == "llama" else "merges"
    if get(needed) is None:
      raise WeightsError(f"tokenizer.ggml.{needed}: expected for the {kind!r} kind, got nothing")
    scores = list(get("scores", ()))
    for name, values in (("token_type", types), ("scores", scores if kind == "llama" else tokens)):
      if len(values) != len(tokens):
        raise WeightsError(
          f"tokenizer.ggml.{name}: expected one entry for each of {len(tokens)} tokens, "
          f"got {len(values)}"
        )

    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "eot", "eom", "unknown"):
      key = f"{name}_token_id"
      ids[name] = value = None if get(key) is None else int(get(key))
      if value is not None and not 0 <= value < len(tokens):
        raise WeightsError(
          f"tokenizer.ggml.{key}: expected an id in [0, {len(tokens)}), got {value}"
        )
    place = {text: token for token, text in enumerate(tokens)}
    ends = [ids["eos"], ids["eot"], ids["eom"], *(place.get(text) for text in _END_TEXTS)]
    eos_ids = tuple(dict.fromkeys(token for token in ends if token is not None))
    for token in eos_ids:  # some files call them normal tokens; a prompt could not contain them
      types[token] = TokenType.CONTROL
    return cls(
      kind=kind,
      pre=pre,
      tokens=tokens,
      types=types,
      scores=scores,
      merges=list(get("merges", ())),
      bos_id=ids["bos"],
      unknown_id=ids["unknown"],
      eos_ids=eos_ids,
      # A file that does not say follows the habit of its kind.
      add_bos=bool(get("add_bos_token", kind == "llama" or pre in _WHOLE_WORDS)),
      add_eos=bool(get("add_eos_token", False)),
      add_space_prefix=kind == "llama" and bool(get("add_space_prefix", True)),
    )


def byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
  """Byte-level BPE: the vocabulary's merges, inside what the pre-tokenizer splits off."""
  place = {text: token for token, text in enumerate(vocabulary.tokens)}
  merges = []
  for pair in vocabulary.merges:
    cut = pair.find(" ", 1)
    if cut < 0:
      raise WeightsError(f"tokenizer.ggml.merges: expected 'left right', got {pair!r}")
    merges.append((pair[:cut], pair[cut + 1 :]))
  core = tokenizers.Tokenizer(
    models.BPE(place, merges, ignore_merges=vocabulary.pre in _WHOLE_WORDS)
  )
  core.pre_tokenizer = pre_tokenizers.Sequence(
    [
      *(pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[vocabulary.pre]),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  return core


def sentencepiece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
  """SentencePiece merges any two neighbours that form a piece, the highest score first.

  As BPE merges: each way to cut a piece in two pieces, ranked by the score of the whole.
  """
  tokens, scores = vocabulary.tokens, vocabulary.scores
  # Control, byte and user-defined tokens are never the outcome or a part of a merge: the first
  # must not arise from plain text, the last are cut out of the text beforehand.
  plain = (TokenType.NORMAL, TokenType.UNUSED)
  ids = [token for token, kind in enumerate(vocabulary.types) if kind in plain]
  ids.sort(key=lambda token: -scores[token])
  pieces = {tokens[token] for token in ids}
  merges = [
    (left, right)
    for piece in (tokens[token] for token in ids)
    for cut in range(1, len(piece))
    if (left := piece[:cut]) in pieces and (right := piece[cut:]) in pieces
  ]
  place = {text: token for token, text in enumerate(tokens)}
  unknown = None if vocabulary.unknown_id is None else tokens[vocabulary.unknown_id]
  core = tokenizers.Tokenizer(models.BPE(place, merges, unk_token=unknown, byte_fallback=True))
  steps: list[Any] = [normalizers.Replace(" ", SPACE)]
  if vocabulary.add_space_prefix:
    steps.insert(0, normalizers.Prepend(SPACE))
  core.normalizer = normalizers.Sequence(steps)
  return core


def missing_bytes(vocabulary: Vocabulary) -> bytes:
  """The bytes that no token of the vocabulary can stand for in plain text."""
  if vocabulary.kind == "gpt2":
    known = set(vocabulary.tokens)
    return bytes(byte for char, byte in BYTE_OF_CHAR.items() if char not in known)
  types = vocabulary.types
  named = {t for t, kind in zip(vocabulary.tokens, types, strict=True) if kind == TokenType.BYTE}
  missing = {f"<0x{byte:02X}>" for byte in range(256)} - named
  if (missing and vocabulary.unknown_id is None) or len(named) > 256 - len(missing):
    raise WeightsError(
      "tokenizer.ggml.tokens: expected the byte tokens <0x00> to <0xFF>, or else an "
      f"unknown_token_id, got {len(named)} byte tokens without {', '.join(sorted(missing)[:4])}"
    )
  return b""
