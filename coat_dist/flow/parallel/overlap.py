"""Products whose rows come from other ranks or go to them, part by part, while parts that are here
are multiplied.

Only over ``peer_memory.py``. Two parts are multiplied at a time, so that the last tiles of one
leave no multiprocessor idle. Every part is the product that it is within the whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...formats import QuantizedTensor
from ..function import outside_of_graphs
from .peer_memory import PeerMemory
from .tensor_parallel import Pending

Product = Callable[[QuantizedTensor, torch.Tensor], Any]
"""Writes the product with one set of rows into a tensor ``[rows, n]``."""


class Rows:
    """FP8 rows of all ranks: this one's are here, the others' are coming."""

    def __init__(self, peers: PeerMemory, own: QuantizedTensor) -> None:
        self.peers, self.own = peers, own
        tensors = [
            own.codes.contiguous(),
            *([own.scales.contiguous()] if own.layout == "row" else []),
        ]
        outs, self._coming = peers.gather(tensors)
        self._whole = QuantizedTensor(outs[0], outs[1] if len(outs) > 1 else own.scales, own.layout)

    @property
    def scales(self) -> torch.Tensor:
        """This rank's."""
        return self.own.scales

    def whole(self) -> QuantizedTensor:
        """All rows, waited for."""
        for coming in self._coming.values():
            coming.wait()
        return self._whole

    @outside_of_graphs
    def multiply(self, product: Product, n: int, dtype: torch.dtype) -> torch.Tensor:
        """The product with all rows, ``[rows, n]``."""
        m, rank = self.own.codes.shape[0], self.peers.rank
        out = torch.empty(self.peers.size * m, n, dtype=dtype, device=self.own.codes.device)
        self.peers.fork()
        product(self.own, out[rank * m : (rank + 1) * m])
        with self.peers.beside():
            self._part((rank + 1) % self.peers.size, product, out)
        for step in range(2, self.peers.size):
            self._part((rank + step) % self.peers.size, product, out)
        self.peers.join()
        self.whole()  # nothing of this is freed before it has come
        return out

    def _part(self, rank: int, product: Product, out: torch.Tensor) -> None:
        m = self.own.codes.shape[0]
        self._coming[rank].wait()
        product(rows_of(self._whole, rank * m, m), out[rank * m : (rank + 1) * m])


@outside_of_graphs
def scattered_product(
    peers: PeerMemory, a: QuantizedTensor, product: Product, n: int, dtype: torch.dtype
) -> Pending[torch.Tensor]:
    """This rank's rows of the sum over ranks of the product with a, ``[m / ranks, n]``, under way.

    Others' rows are multiplied first and fetched while the rest is. Two ranks' parts are added as a
    reduce-scatter adds them; of more, the sum is fp32 and rounded once.
    """
    m, rank, size = a.codes.shape[0] // peers.size, peers.rank, peers.size
    own, *others = (torch.empty(m, n, dtype=dtype, device=a.codes.device) for _ in range(size))
    sizes = (own.nbytes,) * (size - 1)
    room, fetched = peers.room(*sizes), []
    peers.fork()
    for step, other in enumerate(others, 1):
        to, source = (rank + step) % size, (rank - step) % size
        product(rows_of(a, to * m, m), room[step - 1].view(dtype).view(m, n))
        if step == 1:
            with peers.beside():
                product(rows_of(a, rank * m, m), own)
        peers.written()
        fetched.append(peers.fetch(sizes, {source: {step - 1: other}})[source])
    peers.join()

    def total() -> torch.Tensor:
        if size == 2:
            return torch.add(own, others[0], out=others[0])
        sums = own.float() + others[0]
        for other in others[1:]:
            sums += other
        return sums.to(dtype)

    return Pending(total, tuple(fetched))


def rows_of(q: QuantizedTensor, first: int, count: int) -> QuantizedTensor:
    """Some rows of a tensor of any layout."""
    scales = q.scales if q.layout == "tensor" else q.scales[first : first + count]
    return QuantizedTensor(q.codes[first : first + count], scales, q.layout, q.group_size)
