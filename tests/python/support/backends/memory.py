"""Where a call's tensors lie while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from backends.cuda_driver import CudaDriver
from oracle.attention import Array


class HostMemory:
    """The storages themselves."""

    @contextlib.contextmanager
    def resident(self, storages: Sequence[Array]) -> Iterator[list[int]]:
        yield [storage.ctypes.data for storage in storages]

    def synchronize(self) -> None:
        pass


class CudaMemory:
    """Copies of exactly the storages' sizes, copied back at the end."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver

    @contextlib.contextmanager
    def resident(self, storages: Sequence[Array]) -> Iterator[list[int]]:
        blocks: list[int] = []
        try:
            for storage in storages:
                blocks.append(self.driver.allocate(storage.nbytes))
                self.driver.upload(blocks[-1], storage)
            yield blocks
            self.driver.synchronize()
            for block, storage in zip(blocks, storages, strict=True):
                if storage.flags.writeable:
                    self.driver.download(storage, block)
        finally:
            for block in blocks:
                self.driver.free(block)

    def synchronize(self) -> None:
        self.driver.synchronize()
