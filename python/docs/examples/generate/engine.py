"""Requests that come and go while the model works, as continuous batches over one paged cache."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from guesses import NOTHING, Guesses
from model import Feed, PagedGPT
from pages import Pages


@dataclass(eq=False)
class Request:
    prompt: list[int]
    new: int  # so many tokens are wanted
    tokens: list[int] = field(default_factory=list)  # the prompt, and what has been generated
    pages: list[int] = field(default_factory=list)
    filled: int = 0  # rows of the pages: the keys of so many tokens

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def missing(self) -> int:
        return self.new - len(self.answer)

    @property
    def reads(self) -> bool:
        """Its prompt is not in the cache yet."""
        return len(self.tokens) - self.filled > 1


class Engine:
    """Greedy generation. A step is one pass of the model. It reads a piece of at most one prompt,
    and goes on with all other requests, each by a token and the guesses that are right."""

    def __init__(
        self, model: PagedGPT, sharing: bool, guesses: Guesses | None, batch: int, chunk: int
    ) -> None:
        self.model = model
        self.pages = Pages(*model.pool.shape[2:4], sharing)
        self.guesses = guesses
        self.batch = batch  # requests that run at the same time
        self.chunk = chunk  # tokens of a prompt that a step reads
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.steps = 0
        self.fed = 0  # tokens that the model was given

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        length = len(request.prompt) + request.new
        room = len(self.pages.users) * self.pages.page_size
        allowed = min(self.model.gpt.places.num_embeddings, room - self._guesses_at_most())
        if not request.prompt or request.new < 1 or length > allowed:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and {request.new} new ones; at least "
                f"one of each is needed, and {allowed} together are allowed"
            )
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """Returns the requests that are done; their pages are free again."""
        self._admit()
        feeds = self._feeds()
        chosen = self.model.step([feed for _, feed in feeds])
        for (request, feed), tokens in zip(feeds, chosen, strict=True):
            self._accept(request, feed, tokens)
        self.steps += 1
        self.fed += sum(len(feed.tokens) for _, feed in feeds)
        done = [request for request in self.running if request.missing == 0]
        for request in done:
            self._stop(request)
        return done

    def _guesses_at_most(self) -> int:
        return self.guesses.size if self.guesses else 0

    def _admit(self) -> None:
        """One prompt at a time is read: the next one may share the pages that it fills."""
        while self.waiting and len(self.running) < self.batch:
            if any(request.reads for request in self.running):
                return
            request = self.waiting.popleft()
            # Not the last token: what follows it is known only when the model was given it.
            request.pages = self.pages.find(request.tokens[:-1])
            request.filled = len(request.pages) * self.pages.page_size
            self.running.append(request)

    def _feeds(self) -> list[tuple[Request, Feed]]:
        feeds = []
        for request in list(self.running):
            if request not in self.running:
                break  # it and all younger ones had to make room
            feed = self._feed(request)
            if self._make_room(request, request.filled + len(feed.tokens)):
                feeds.append((request, feed))
        return feeds

    def _feed(self, request: Request) -> Feed:
        tokens = request.tokens[request.filled :][: self.chunk]
        sure = len(tokens)
        complete = request.filled + sure == len(request.tokens)
        tree = NOTHING
        if self.guesses and complete:
            tree = self.guesses.tree(request.tokens, request.missing - 1)
        parents = [*range(-1, sure - 1), *(sure + parent for parent in tree.parents)]
        return Feed(tokens + tree.tokens, parents, sure, request.filled, request.pages, complete)

    def _make_room(self, request: Request, rows: int) -> bool:
        """Pages for so many rows. Where none is left, the youngest request gives up its own, and
        waits again; False if that was this one."""
        while len(request.pages) * self.pages.page_size < rows:
            page = self.pages.take()
            if page is not None:
                request.pages.append(page)
                continue
            youngest = self.running[-1]
            self._stop(youngest)
            self.waiting.appendleft(youngest)
            if youngest is request:
                return False
        return True

    def _accept(self, request: Request, feed: Feed, chosen: list[int]) -> None:
        path = feed.kept(chosen)
        self.model.keep(feed, path)
        request.tokens += [feed.tokens[i] for i in path[feed.sure :]]
        request.filled += len(path)
        if feed.complete:
            request.tokens.append(chosen[path[-1]])
        self.pages.remember(request.pages, request.tokens, request.filled)

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.give_back(request.pages)
        request.pages, request.filled = [], 0
