"""The byte tokenizer: any text exactly, and nothing that is not a byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_course.tokenizer import BOS, EOS, FIRST_BYTE, PAD, SEP, ByteTokenizer

tokenizer = ByteTokenizer()


def test_reserved_ids_come_first_and_bytes_follow():
    assert (PAD, BOS, EOS, SEP, FIRST_BYTE) == (0, 1, 2, 3, 4)
    assert tokenizer.vocab_size == 260
    assert tokenizer.encode("\x00") == [4]


def test_a_signature_is_seventeen_tokens():
    ids = tokenizer.encode("def increment(x):")
    assert len(ids) == 17
    # d e f _ i n c r e m e n t ( x ) :
    expected = [104, 105, 106, 36, 109, 114, 103, 118, 105, 113, 105, 114, 120, 44, 124, 45, 62]
    assert ids == expected


def test_a_character_beyond_ascii_is_several_tokens():
    assert tokenizer.encode("é") == [0xC3 + 4, 0xA9 + 4]
    assert len(tokenizer.encode("語")) == 3
    assert len(tokenizer.encode("🙂")) == 4


def test_bos_and_eos_are_added_where_asked():
    assert tokenizer.encode("a") == [101]
    assert tokenizer.encode("a", bos=True) == [1, 101]
    assert tokenizer.encode("a", eos=True) == [101, 2]
    assert tokenizer.encode("", bos=True, eos=True) == [1, 2]
    assert tokenizer.encode("") == []


@given(st.text(), st.booleans(), st.booleans())
def test_any_text_comes_back(text, bos, eos):
    ids = tokenizer.encode(text, bos=bos, eos=eos)
    assert len(ids) == len(text.encode("utf-8")) + bos + eos
    assert tokenizer.decode(ids) == text


@given(st.binary())
def test_any_bytes_decode_with_replacement(data):
    decoded = tokenizer.decode(b + 4 for b in data)
    assert decoded == data.decode("utf-8", errors="replace")


def test_invalid_utf8_becomes_the_replacement_character():
    assert tokenizer.decode([0xFF + 4]) == "\ufffd"
    assert tokenizer.decode([101, 0xC3 + 4]) == "a\ufffd"  # a character cut in half
    assert tokenizer.decode([0xC3 + 4, 101]) == "\ufffda"


@given(st.lists(st.integers(3, 259)), st.lists(st.integers(-9, 999)))
def test_decoding_stops_at_the_first_eos(before, after):
    assert tokenizer.decode([*before, EOS, *after]) == tokenizer.decode(before)


@given(st.text(), st.lists(st.tuples(st.sampled_from([PAD, BOS, SEP]), st.integers(0, 50))))
def test_reserved_ids_are_skipped_even_inside_a_character(text, reserved):
    ids = tokenizer.encode(text)
    for i, position in reserved:
        ids.insert(position, i)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("wrong", [-1, -260, 260, 262, 154_880])
def test_an_id_that_is_no_byte_is_refused(wrong):
    with pytest.raises(ValueError, match=f"id {wrong} is no byte"):
        tokenizer.decode([101, wrong])


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\udc80b"])
def test_a_lone_surrogate_is_refused(text):
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode(text)
