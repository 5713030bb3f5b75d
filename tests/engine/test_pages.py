"""The page pool against a plain model of it, and the prefix cache."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lilicorr.engine.pages import PAGE_SIZE, PagePool, num_pages_for

NUM_PAGES = 7


class PoolMachine(RuleBasedStateMachine):
    """Requests come and go in any order; steps end late. `held` is what each request holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.held: list[tuple[list[bytes], list[int]]] = []  # keys and pages
        self.content: dict[int, bytes] = {}  # what was last written to a page
        self.step_id = 0
        self.late: dict[int, int] = {}

    def pages_held(self) -> set[int]:
        return {page for _, pages in self.held for page in pages}

    @rule(text=st.lists(st.integers(0, 1), max_size=4))
    def join(self, text: list[int]) -> None:
        keys: list[bytes] = []
        self.pool.extend_keys(keys, [token for token in text for _ in range(PAGE_SIZE)])
        found = self.pool.find(keys)
        assert [self.content[page] for page in found] == keys[: len(found)]
        needed = len(text) - len(found)
        if needed > self.pool.num_free_without(found):
            return
        self.pool.share(found)
        new = self.pool.allocate(needed)
        assert len(set(new)) == needed and not set(new) & (self.pages_held() | set(found))
        assert not any(self.late.get(page, 0) > self.step_id for page in new)
        for page in found:
            self.late.pop(page, None)
        for index, page in enumerate(new, start=len(found)):
            self.content[page] = keys[index]
            self.late.pop(page, None)
        self.held.append((keys, found + new))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        keys, pages = data.draw(st.sampled_from(self.held))
        for key, page in zip(keys, pages):
            self.pool.register(page, key)
        assert len(self.pool.find(keys)) == len(keys)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), steps=st.integers(0, 2))
    def leave(self, data: st.DataObject, steps: int) -> None:
        _, pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(pages, self.step_id + steps)
        for page in set(pages) - self.pages_held():
            self.late[page] = self.step_id + steps

    @rule()
    def end_step(self) -> None:
        self.pool.collect(self.step_id)
        self.late = {page: last for page, last in self.late.items() if last > self.step_id}
        self.step_id += 1

    @invariant()
    def pages_are_counted(self) -> None:
        assert self.pool.num_used == len(self.pages_held())
        assert self.pool.num_free == NUM_PAGES - len(self.pages_held()) - len(self.late)

    def teardown(self) -> None:
        for _, pages in self.held:
            self.pool.release(pages, self.step_id)
        self.pool.collect(self.step_id + 2)
        assert self.pool.num_free == NUM_PAGES and self.pool.num_used == 0


PoolMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestPool = PoolMachine.TestCase


def keys_of(pool: PagePool, token_ids: list[int], salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    pool.extend_keys(keys, token_ids, salt)
    return keys


def test_keys_cover_everything_before_a_page() -> None:
    pool, tokens = PagePool(4), list(range(200))
    keys = keys_of(pool, tokens)
    assert len(keys) == 3 and len(set(keys)) == 3
    again = keys[:1]
    pool.extend_keys(again, tokens)
    assert again == keys == keys_of(PagePool(9), tokens)
    assert keys_of(pool, [1, *tokens[1:]])[2] != keys[2]
    assert keys_of(pool, tokens, salt="other")[0] != keys[0]
    assert keys_of(PagePool(4, identity="other"), tokens)[0] != keys[0]


def test_the_page_given_back_longest_ago_is_taken_first_and_the_end_of_a_chain_before_its_beginning() -> None:
    pool = PagePool(4)
    first, second = keys_of(pool, 128 * [1]), keys_of(pool, 128 * [2])
    chains = []
    for keys in (first, second):
        pages = pool.allocate(2)
        for page, key in zip(pages, keys):
            pool.register(page, key)
        chains.append(pages)
    for pages in chains:
        pool.release(pages, 0)
    pool.collect(0)
    assert pool.num_free == 4 and pool.find(first) == chains[0]
    assert pool.allocate(1) == [chains[0][1]]
    assert pool.find(first) == chains[0][:1] and pool.find(second) == chains[1]
    pool.share(pool.find(first))  # now the second chain's end is the oldest
    assert pool.allocate(1) == [chains[1][1]]


def test_a_page_given_back_waits_for_its_step() -> None:
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.release(pages, step_id=5)
    assert pool.num_free == 0
    pool.collect(4)
    assert pool.num_free == 0
    pool.collect(5)
    assert pool.allocate(1) == pages
    with pytest.raises(AssertionError, match="1 pages asked for, 0 are free"):
        pool.allocate(1)


def test_the_second_page_of_the_same_content_stays_unknown() -> None:
    pool = PagePool(2)
    (key,) = keys_of(pool, 64 * [3])
    for page in pool.allocate(2):
        pool.register(page, key)
    assert pool.find([key]) == [0]
    pool.release([1], 0)
    pool.collect(0)
    assert pool.allocate(1) == [1] and pool.find([key]) == [0]


def test_pages_of_other_models_are_forgotten() -> None:
    pool = PagePool(3)
    old = keys_of(pool, 128 * [3])
    pages = pool.allocate(2)
    for page, key in zip(pages, old):
        pool.register(page, key)
    pool.release(pages, 0)
    with pytest.raises(AssertionError, match="2 pages are in use"):
        pool.forget("other")
    pool.collect(0)
    pool.forget("other")
    assert pool.num_free == 3 and pool.find(old) == [] and sorted(pool.allocate(3)) == [0, 1, 2]
    assert keys_of(pool, 128 * [3]) == keys_of(PagePool(3, "other"), 128 * [3]) != old


def test_sizes() -> None:
    assert [num_pages_for(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        PagePool(0)
