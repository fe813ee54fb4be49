"""Stop strings: the same token as decoding every whole prefix finds, however the tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from unittest.mock import Mock

from hypothesis import example, given
from hypothesis import strategies as st
from launch_ranks import ROOT
from tiny import EOS, byte_tokenizer, embedded_decoder, embedded_tokenizer
from tokenizers import Tokenizer, decoders, models

from tlt_hpc.config import load_config
from tlt_hpc.rollout.stops import StopStrings
from tlt_hpc.run.session import Session

LINES = [
    "the answer is 42.\n\nQuestion: how many?\n\n",
    "Größe und Maß, naïve café, façade",
    "日本語のテキスト、終わり。答えは四十二です。",
    "emoji 🙂🙃🚀 and 👩‍🚀 stop here </answer>",
]
BYTES = byte_tokenizer(LINES, 330, ["<eos>", "<tool>"])
STOPS = ["\n\n", "</answer>", "終わり", "🚀", "ß", " is 4", "é", "e", "👩‍🚀 s"]


@cache
def space_stripping_tokenizer() -> Tokenizer:
    """As SentencePiece models: spaces are part of words, and the decoder drops a text's first one."""
    words = ["▁", "▁the", "▁end", "end", "▁of", ".", "<0xC3>", "<0xA9>", "<0xE2>", "<0x82>", "<0xAC>", "<s>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="."))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def by_brute_force(strings: Sequence[str], tokenizer: Tokenizer, tokens: Sequence[int]) -> int | None:
    for index in range(len(tokens)):
        text = tokenizer.decode(list(tokens[: index + 1]))
        if any(string in text for string in strings):
            return index
    return None


def check(strings: Sequence[str], tokenizer: Tokenizer, tokens: Sequence[int]) -> None:
    """As an engine asks: after each round, of all the tokens so far."""
    expected, stops = by_brute_force(strings, tokenizer, tokens), StopStrings(strings, tokenizer.decode)
    for size in (1, 3, max(1, len(tokens))):
        asked = (stops.first_stop(tokens[: start + size], start) for start in range(0, len(tokens), size))
        found = next((index for index in asked if index is not None), None)
        assert found == expected, (strings, list(tokens), size)


def embedded_stops(*strings: str) -> StopStrings:
    return StopStrings(strings, embedded_tokenizer().decode)


def test_one_that_was_complete_before_does_not_count_again() -> None:
    """What an engine has looked at in earlier rounds does not stop it now."""
    ids = embedded_tokenizer().encode("1,2;3,1,2").ids
    stops = embedded_stops("1,2", "1")
    assert [stops.first_stop(ids, start) for start in range(len(ids) + 1)] == [0, 2, 2, 6, 6, 6, 6, 8, 8, None]
    assert embedded_stops("1", "999").first_stop(ids[:1] + ids[5:7], 1) == 2  # 1,1


def test_special_tokens_have_their_text_in_a_run() -> None:
    """A chat's turn ends with one, and a base model's end token is another."""
    config = load_config(ROOT / "jobs" / "tiny.toml", ["rollout.stop_strings=['<eos>']"])
    assets = SimpleNamespace(tokenizer=embedded_tokenizer(), shape=embedded_decoder().shape, eos_token_ids=(0,))
    session = SimpleNamespace(config=config, assets=assets, decoder=SimpleNamespace(dtype=None), world=Mock(rank=0))
    settings = Session.engine_settings(session)  # type: ignore[arg-type]
    assert settings.detokenize is not None
    stops = StopStrings(settings.params.stop_strings, settings.detokenize)
    assert stops.first_stop([3, 0, 4, EOS, 5]) == 3


def test_work_is_bounded() -> None:
    """No decoding of more than a window: a response's length does not matter."""
    longest = 0

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return embedded_tokenizer().decode(tokens)

    ids = embedded_tokenizer().encode("1,2;" * 500).ids
    assert StopStrings(["1,3", "99999"], decode).first_stop(ids) is None
    assert longest <= 5 + 1 + 3


def test_what_stands_before_the_response_completes_nothing() -> None:
    """A response is looked at where it stands, behind its prompt: to cut it out for each round would copy all of it."""
    ids = embedded_tokenizer().encode("1,2;1,2").ids
    stops = embedded_stops("1,2", ";1")
    assert [stops.first_stop(ids, start, start) for start in range(len(ids))] == [2, 4, 4, 4, 6, None, None]


token_lists = st.lists(st.integers(0, 329), max_size=30)
pieces = st.lists(st.one_of(st.sampled_from(STOPS + LINES), st.text("aeß🚀終 \n4", max_size=4)), max_size=4)
stop_lists = st.lists(st.one_of(st.sampled_from(STOPS), st.text("ae ß🚀終\n", min_size=1, max_size=4)), max_size=3)


@given(stop_lists, pieces, st.integers(0, 7))
def test_encoded_text(strings: list[str], parts: list[str], spread: int) -> None:
    """Pieces encoded apart, so that tokens do not follow the words, with special tokens strewn in."""
    ids = [token for part in parts for token in BYTES.encode(part).ids]
    check(strings, BYTES, [x for i, token in enumerate(ids) for x in ([0, token] if i == spread else [token])])


@given(stop_lists, token_lists)
@example(["🚀"], [BYTES.encode("🚀").ids[0], *BYTES.encode("🚀").ids])
def test_any_tokens(strings: list[str], tokens: list[int]) -> None:
    """Broken characters included."""
    check(strings, BYTES, tokens)


SPELLED = {"é": ["<0xC3>", "<0xA9>"], "€": ["<0xE2>", "<0x82>", "<0xAC>"]}


@given(st.lists(st.sampled_from(["▁", "▁the", "▁end", "end", "▁of", ".", "é", "€"]), max_size=20))
@example(["é", "é", "."])
def test_decoders_that_strip_a_space_and_join_bytes(words: list[str]) -> None:
    """Such a decoder makes nothing of a run of bytes that starts inside a character."""
    tokenizer = space_stripping_tokenizer()
    ids = [tokenizer.token_to_id(piece) for word in words for piece in SPELLED.get(word, [word])]
    for strings in ([" end"], ["é."], ["é end", " of end"], ["  "], ["€é"]):
        check(strings, tokenizer, ids)
