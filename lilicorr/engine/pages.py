"""Which pages hold whose keys and values: the allocator, the prefix cache, and late freeing.

Place in the flow: the scheduler takes pages for requests here and gives them back; the tensors behind the ids
are in `model`. One page is 64 positions of one request in every layer of target and drafter alike: both write
under the same id, so a page found in the prefix cache brings the drafter's context along.

A page is free, used (by one or more requests), late (given back, but a step that is still running may write to
it), or cached (unused, but its content is known and may be found again; the one that was given back longest ago
is taken first when no page is free).

Content is known by a chain of hashes: a page's key covers its 64 tokens, the key of the page before it, the
identity of the models, and the salt of the request, so equal keys mean equal keys and values.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

PAGE_SIZE = 64  # positions


def num_pages_for(num_positions: int) -> int:
    """How many pages hold so many positions."""
    return -(-num_positions // PAGE_SIZE)


def _root_of(identity: str) -> bytes:
    """What the chains of all keys begin with."""
    return hashlib.blake2b(identity.encode(), digest_size=16).digest()


class PagePool:
    """`num_pages` pages and what is known of their content. `identity` stands for the weights of the models."""

    def __init__(self, num_pages: int, identity: str = "") -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._root = _root_of(identity)
        self._free = list(range(num_pages - 1, -1, -1))  # a stack; low ids first
        self._references = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._by_key: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # first in, first taken
        self._late: OrderedDict[int, int] = OrderedDict()  # page -> the last step that may write to it

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that some request holds."""
        return self.num_pages - self.num_free - len(self._late)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages of unknown content; there must be as many free."""
        assert 0 <= count <= self.num_free, f"{count} pages asked for, {self.num_free} are free"
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            assert self._references[page] == 0 and self._keys[page] is None, f"page {page} is not free"
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: list[int], step_id: int) -> None:
        """Give pages back; none is taken again before `collect(step_id)`."""
        # From the end: of a chain of cached pages the last must go first, the others are of use without it.
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} is given back more often than it was taken"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._late[page] = step_id

    def collect(self, step_id: int) -> None:
        """Steps up to `step_id` have ended: what was given back for them may be taken again."""
        for page in [page for page, last in self._late.items() if last <= step_id]:
            del self._late[page]
            if self._keys[page] is None:
                self._free.append(page)
            else:
                self._cached[page] = None

    def extend_keys(self, keys: list[bytes], token_ids: list[int], salt: str = "") -> None:
        """Append the keys of the full pages of `token_ids` that `keys` does not have yet."""
        for index in range(len(keys), len(token_ids) // PAGE_SIZE):
            # a salt opens a chain of its own, so it need not be in every link
            parent = keys[-1] if keys else hashlib.blake2b(self._root + salt.encode(), digest_size=16).digest()
            tokens = array("q", token_ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE])
            keys.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest())

    def find(self, keys: list[bytes]) -> list[int]:
        """The pages of the longest known beginning of a chain; `share` takes them."""
        pages = []
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_free_without(self, pages: list[int]) -> int:
        """How many pages `allocate` could hand out once these are shared."""
        return self.num_free - sum(page in self._cached for page in pages)

    def share(self, pages: list[int]) -> None:
        """Take pages of known content, whether others use them or not."""
        for page in pages:
            assert self._keys[page] is not None, f"the content of page {page} is not known"
            self._references[page] += 1
            self._cached.pop(page, None)
            self._late.pop(page, None)

    def register(self, page: int, key: bytes) -> None:
        """The content of a used page is known from now on: keys and values of target and drafter are written.

        A second page of the same content stays unknown.
        """
        assert self._references[page] > 0, f"page {page} is not used"
        if key not in self._by_key and self._keys[page] is None:
            self._keys[page] = key
            self._by_key[key] = page

    def forget(self, identity: str) -> None:
        """The models have changed and are those of `identity` now: nothing that is written is known any more.

        No page may be in use or late.
        """
        assert self.num_free == self.num_pages, f"{self.num_pages - self.num_free} pages are in use"
        while self._cached:
            self._free.append(self._evict())
        self._root = _root_of(identity)

    def _evict(self) -> int:
        """Forget the content of the cached page that was given back longest ago."""
        page, _ = self._cached.popitem(last=False)
        del self._by_key[self._keys[page]]
        self._keys[page] = None
        return page
