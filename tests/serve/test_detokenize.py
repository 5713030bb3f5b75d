"""Incremental text equals the tokenizer's own, never breaks a character, and finds every stop string."""

from __future__ import annotations

import random

import pytest
from fakes import UNICODE, chat_tokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import WordPiece
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from serve_app.detokenize import TextStream, text_of, token_table


def ids_of(text: str) -> list[int]:
    """One id per byte."""
    return list(text.encode())


TABLE = token_table(chat_tokenizer())


def stream(token_ids: list[int], cuts: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], int, bool]:
    """Pieces of text, tokens of the answer, and whether a stop string ended it, for ids cut into pushes."""
    text = TextStream(TABLE, stop)
    pieces, num_tokens = [], 0
    for begin, end in zip([0, *cuts], [*cuts, len(token_ids)]):
        piece = text.push(token_ids[begin:end])
        pieces.append(piece.text)
        num_tokens += piece.num_tokens
        if piece.stop is not None:
            return pieces, num_tokens, True
    return [*pieces, text.finish()], num_tokens, False


def test_one_byte_per_token_gives_whole_characters() -> None:
    ids = ids_of(UNICODE)
    pieces, num_tokens, stopped = stream(ids, list(range(1, len(ids))))
    assert "".join(pieces) == UNICODE
    assert not any("\ufffd" in piece for piece in pieces)
    assert (num_tokens, stopped) == (len(ids), False)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 16])
def test_cut_mid_character_is_dropped(width: int) -> None:
    ids = ids_of(UNICODE)
    for length in range(len(ids)):
        pieces, _, _ = stream(ids[:length], list(range(width, length, width)))
        assert "".join(pieces) == UNICODE.encode()[:length].decode(errors="ignore")


def test_same_text_as_the_tokenizer_for_any_bytes() -> None:
    tokenizer, rng = chat_tokenizer(), random.Random(0)
    for _ in range(300):
        ids = [rng.choice([*range(256), 195, 240, 159, 128, *range(len(tokenizer))]) for _ in range(rng.randint(1, 30))]
        ids.append(ids_of("x")[0])  # a complete end: only an incomplete last character may differ
        cuts = sorted(rng.sample(range(len(ids)), min(3, len(ids))))
        assert "".join(stream(ids, cuts)[0]) == tokenizer.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_silent_and_added_text_is_not() -> None:
    tokenizer = chat_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<think>", "<a b>", "<|im_end|>"])
    assert "".join(stream([*ids, 10_000], [2])[0]) == "<think><a b>"


@pytest.mark.parametrize("block", [1, 2, 4, 7])
def test_stop_string_at_every_offset_of_a_block(block: int) -> None:
    for offset in range(3 * block):
        answer = "a" * offset + "STOP" + "tail of the block"
        ids = ids_of(answer)
        pieces, num_tokens, stopped = stream(ids, list(range(block, len(ids), block)), ("STOP",))
        assert stopped
        assert "".join(pieces) == "a" * offset
        assert num_tokens == offset + len("STOP")


def test_nothing_of_a_possible_stop_string_leaves_early() -> None:
    pieces, _, stopped = stream(ids_of("xxSTOxSTOP"), list(range(1, 10)), ("STOP",))
    assert stopped
    assert pieces == ["x", "x", "", "", "", "STOx", "", "", "", ""]


def test_unfinished_stop_string_is_text() -> None:
    assert "".join(stream(ids_of("abSTO"), [3], ("STOP",))[0]) == "abSTO"


def test_repeating_stop_string_is_found() -> None:
    assert "".join(stream(ids_of("aaab"), [1, 2, 3], ("aab",))[0]) == "a"


@pytest.mark.parametrize("cuts", [[], [1, 2, 3], [2]])
def test_first_complete_stop_string_wins_then_the_longest(cuts: list[int]) -> None:
    assert "".join(stream(ids_of("xabcd"), cuts, ("abc", "b"))[0]) == "xa"
    assert "".join(stream(ids_of("xabcd"), cuts, ("bc", "abc"))[0]) == "x"


def test_stop_string_of_split_characters() -> None:
    ids = ids_of("漢字🙂end")
    pieces, num_tokens, stopped = stream(ids, list(range(1, len(ids))), ("🙂",))
    assert stopped
    assert "".join(pieces) == "漢字"
    assert num_tokens == len("漢字🙂".encode())


def test_text_after_merges_and_several_characters_per_token() -> None:
    vocabulary = {character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {"ab": 256, "abc": 257}
    backend = Tokenizer(BPE(vocabulary, [("a", "b"), ("ab", "c")]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    table = token_table(PreTrainedTokenizerFast(tokenizer_object=backend))
    text = TextStream(table, ("b",))
    assert text.push([257]).text == "a"


def test_other_tokenizers_are_refused() -> None:
    backend = Tokenizer(BPE({"a": 0}, []))
    backend.decoder = WordPiece()
    backend.add_special_tokens([AddedToken("<s>")])
    with pytest.raises(ValueError, match="byte-level.*WordPiece"):
        token_table(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4, 5], [3]])
def test_stop_string_can_be_kept(cuts: list[int]) -> None:
    text = TextStream(TABLE, ("b", "bc"), include_stop=True)
    ids = ids_of("abcdef")
    pieces = []
    for begin, end in zip([0, *cuts], [*cuts, len(ids)]):
        pieces.append(text.push(ids[begin:end]))
        if pieces[-1].stop is not None:
            break
    assert "".join(piece.text for piece in pieces) == "ab"
    assert pieces[-1].stop == "b" and sum(piece.num_tokens for piece in pieces) == 2


@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4, 5], [3]])
def test_no_stop_string_within_the_least_tokens(cuts: list[int]) -> None:
    """Nor one that began there: what was sent cannot be taken back."""
    ids = ids_of("ab|c|de|f")
    text = TextStream(TABLE, ("|", "c|d"), min_tokens=4)
    joined = ""
    for begin, end in zip([0, *cuts], [*cuts, len(ids)]):
        piece = text.push(ids[begin:end])
        joined += piece.text
        if piece.stop is not None:
            break
    assert (joined, piece.stop) == ("ab|c", "|")


def test_special_tokens_can_be_spelled() -> None:
    tokenizer = chat_tokenizer()
    ids = [*ids_of("a"), *tokenizer.convert_tokens_to_ids(["<|im_end|>", "<think>"])]
    spelled = token_table(tokenizer, special=True)
    assert TextStream(spelled).push(ids).text == text_of(spelled, ids) == tokenizer.decode(ids)
    assert text_of(TABLE, [*ids, 240, 10_000]) == "a<think>\ufffd"
