"""The cache as GPU kernels want it: pages of one block each, a token's heads side by side."""

from __future__ import annotations

import torch

from outrider.lm.attention import KVCache


class PagedCache(KVCache):
    """A `KVCache` whose tensors are views of pages, [num_pages, block_size, K, D] each, with one page to spare.

    The eager path reads and writes the views, static steps the pages. The last page is scratch: rows that only fill a
    step up write there. All slots hold numbers from the start, since attention may read what it then gives no weight.
    """

    def __init__(
        self,
        head_shapes: list[tuple[int, int, int]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        read_dtype: torch.dtype | None = None,
    ) -> None:
        """head_shapes: (K, D, E) of each layer. dtype, read_dtype: as in `KVCache`."""
        self.read_dtype = read_dtype or dtype
        self.block_size = block_size
        self.scratch_block = num_blocks
        pages = num_blocks + 1
        self.key_pages = [_zeros((pages, block_size, k, d), dtype, device) for k, d, _ in head_shapes]
        self.value_pages = [_zeros((pages, block_size, k, e), dtype, device) for k, _, e in head_shapes]
        self.keys = [p.flatten(0, 1).transpose(0, 1) for p in self.key_pages]
        self.values = [p.flatten(0, 1).transpose(0, 1) for p in self.value_pages]

    @property
    def is_rounded(self) -> bool:
        """Whether keys and values are kept in another number type than attention reads."""
        return bool(self.key_pages) and self.key_pages[0].dtype != self.read_dtype

    def write_rows(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys [N, K, D], values [N, K, E] to int64[N] slots; of rows with the same slot any one stays."""
        for pages, new in ((self.key_pages[layer], keys), (self.value_pages[layer], values)):
            pages.flatten(0, 1).index_copy_(0, slots, new.to(pages.dtype))

    @property
    def num_pages(self) -> int:
        """The scratch page included."""
        return self.scratch_block + 1


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
