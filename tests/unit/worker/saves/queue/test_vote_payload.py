"""What ranks say beside their votes: a number and a word, which may be any bytes."""

from hypothesis import given
from hypothesis import strategies as st

from muster.worker.saves.queue.vote_payload import MAX_WORD, encoded, numbers, words

counts = st.none() | st.integers(0, 2**63)
some_words = st.binary(max_size=2 * MAX_WORD) | st.sampled_from([b" ", b"7", b" 7 ", b"\0\xff", b"a b"])


def said(since_abort: int | None) -> bytes:
    return b"" if since_abort is None else str(since_abort).encode()


@given(st.dictionaries(st.integers(0, 9), st.tuples(counts, some_words), max_size=4))
def test_numbers_and_words_of_all_ranks_are_read_back(spoken: dict[int, tuple[int | None, bytes]]):
    payloads = {rank: encoded(count, word) for rank, (count, word) in spoken.items()}
    assert numbers(payloads) == {rank: said(count) for rank, (count, _) in spoken.items()}
    assert words(payloads) == {rank: word[:MAX_WORD] for rank, (_, word) in spoken.items() if word}


def test_rank_that_says_nothing_sends_nothing():
    assert encoded(None, b"") == b""
    assert (numbers({}), words({})) == ({}, {})
    assert (numbers({3: b""}), words({3: b""})) == ({3: b""}, {})


@given(counts, st.integers(0, 5 * MAX_WORD))
def test_payload_is_bounded(since_abort: int | None, size: int):
    assert len(encoded(since_abort, b"x" * size)) <= MAX_WORD + 20


@given(st.dictionaries(st.integers(0, 9), st.binary(max_size=40), max_size=4))
def test_payloads_of_another_program_are_read_without_an_error(payloads: dict[int, bytes]):
    assert numbers(payloads).keys() == payloads.keys()
    assert words(payloads).keys() <= payloads.keys()
    for rank, word in words(payloads).items():
        assert payloads[rank] == numbers(payloads)[rank] + b" " + word


@given(st.dictionaries(st.integers(0, 99), st.just(b" w")))
def test_words_come_in_the_order_of_the_ranks(payloads: dict[int, bytes]):
    assert list(words(payloads)) == sorted(payloads)
