"""Which rows of a sequence each rank holds."""

from __future__ import annotations

from typing import NamedTuple

LAYOUTS = ("zigzag", "contiguous")


class Run(NamedTuple):
    """Rows [start, stop) of the whole; the first of them is row ``at`` of the rank's own."""

    start: int
    stop: int
    at: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def own(self) -> slice:
        return slice(self.at, self.at + self.rows)


class Layout(NamedTuple):
    """A sequence is cut into chunks of equal length, a multiple of ``multiple``; the last ones are
    shorter, or empty. Contiguous: rank r has chunk r. Zigzag: of twice as many chunks rank r has
    chunk r and chunk 2 size - 1 - r, so that under a causal mask all ranks have the same work.

    Two axes of ranks are numbered along the second one first. What a rank of the first axis would
    have is then shared by `inner_size` ranks of the second, in one piece each."""

    name: str
    size: int
    multiple: int
    inner_size: int = 1

    @property
    def outer(self) -> Layout:
        return Layout(self.name, self.size // self.inner_size, self.multiple)

    @property
    def inner(self) -> Layout:
        """Of the rows that a rank of the first axis would have."""
        return Layout("contiguous", self.inner_size, self.multiple)

    def runs(self, rank: int, length: int) -> tuple[Run, ...]:
        """The rows of a rank, in order; neighbouring chunks are one run."""
        if self.inner_size == 1:
            return self._runs(rank, length)
        first, second = divmod(rank, self.inner_size)
        shared = self.outer.runs(first, length)
        runs: list[Run] = []
        at = 0
        for part in self.inner.runs(second, sum(run.rows for run in shared)):
            for run in shared:
                begin, end = max(run.at, part.start), min(run.own.stop, part.stop)
                if begin < end:
                    moved = run.start - run.at
                    runs.append(Run(begin + moved, end + moved, at))
                    at += end - begin
        return tuple(runs)

    def _runs(self, rank: int, length: int) -> tuple[Run, ...]:
        zigzag = self.name == "zigzag"
        parts = self.size * 2 if zigzag else self.size
        chunk = -(-length // parts)
        chunk += -chunk % self.multiple
        runs: list[Run] = []
        at = 0
        for number in (rank, parts - 1 - rank) if zigzag else (rank,):
            start, stop = (min(n * chunk, length) for n in (number, number + 1))
            if stop == start:
                continue
            if runs and runs[-1].stop == start:
                runs[-1] = runs[-1]._replace(stop=stop)
            else:
                runs.append(Run(start, stop, at))
            at += stop - start
        return tuple(runs)

    def rows(self, rank: int, length: int) -> int:
        return sum(run.rows for run in self.runs(rank, length))

    def all_rows(self, length: int) -> list[int]:
        return [self.rows(rank, length) for rank in range(self.size)]
