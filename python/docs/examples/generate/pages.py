"""Which pages of the cache are used, by how many requests, and what the full ones hold."""

from __future__ import annotations

from collections.abc import Sequence

Tokens = tuple[int, ...]


class Pages:
    """The pages' numbers only; model.py has their memory.

    A page that is given back keeps what it holds until the room is needed: a prompt that comes
    again later finds it.
    """

    def __init__(self, count: int, page_size: int, sharing: bool) -> None:
        self.page_size = page_size
        self.sharing = sharing
        self.users = [0] * count
        self.free = dict.fromkeys(range(count))  # in the order in which they are taken
        # A full page by all tokens up to its end, since its keys depend on those before it, too.
        self.page_of: dict[Tokens, int] = {}
        self.holds: dict[int, Tokens] = {}

    def take(self) -> int | None:
        """A page for one user, whose content is forgotten; None if all are used."""
        if not self.free:
            return None
        page = next(iter(self.free))
        del self.free[page]
        if page in self.holds:
            del self.page_of[self.holds.pop(page)]
        self.users[page] = 1
        return page

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The full pages that hold the first of `tokens`; each has one more user now."""
        found: list[int] = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self.page_of.get(tuple(tokens[:end]))
            if page is None:
                break
            found.append(page)
        for page in found:
            self.users[page] += 1
            self.free.pop(page, None)
        return found

    def remember(self, pages: Sequence[int], tokens: Sequence[int], filled: int) -> None:
        """`pages` hold the first `filled` of `tokens`; the full ones may be shared from now on."""
        if not self.sharing:
            return
        for index, page in enumerate(pages[: filled // self.page_size]):
            key = tuple(tokens[: (index + 1) * self.page_size])
            if page not in self.holds and key not in self.page_of:
                self.page_of[key] = page
                self.holds[page] = key

    def give_back(self, pages: Sequence[int]) -> None:
        """One user less of each. A text's last pages are the first to be taken again: without its
        first ones nothing finds them."""
        for page in reversed(pages):
            self.users[page] -= 1
            if self.users[page] == 0:
                self.free[page] = None
