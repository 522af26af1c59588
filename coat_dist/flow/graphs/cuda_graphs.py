"""A function of one tensor and some parameters, such as a layer, run as two CUDA graphs: forward
and backward.

With few tokens a GPU has done a layer before Python has started its kernels: some thirty launches,
allocations and calls of libraries. A graph starts them all at once. What it holds are addresses, so
three things must not change between calls: where inputs lie, where parameters lie, and which memory
is free for what the function makes.

* **Inputs** are copied to where the graph reads them, and results from where it leaves them. So
  outputs and gradients are tensors like any others, and the parameters' ``.grad`` belongs to the
  code that adds to it.
* **Parameters** are used where they are. If one has moved, graphs are made anew.
* **Memory** is that of ``graph_pool.py``. Where other forward passes wait for their backward than
  when a graph was made, or a graph is to be made while data lie where it would take memory, the
  function runs as it is. With two passes in flight the first one goes on to use graphs; where a
  layer was left out, frozen or moved, all are made anew.

The first call with a key runs as it is, which compiles kernels and makes workspaces; the second one
makes the graph of forward, and its backward the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ..function import once_differentiable, shaped
from .graph_pool import Pass, Pool, pool_of, run_without_graphs, without_filling, without_owner

Function = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""``(x, parameters) -> y``; what it reads besides these has to stay where it is."""

MOST = 4
"""Keys, such as shapes of the input, for which one function has graphs: each takes memory."""
_REMEMBERED = 16
_CAPTURES = 32


class GraphedFunction:
    """Calls a function, from the second call with the same key on as a CUDA graph.

    Copies and pickles have no graphs: the memory that these read is the original's.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Graph] = {}
        """The last one was used last."""
        self._seen: dict[Hashable, Any] = {}
        """Keys of one call, with what was held then: as long as it lives, no other object has
        its id.
        """
        self._places: tuple[int, ...] = ()
        self._captures = self._generation = 0

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), ()

    def __call__(
        self,
        function: Function,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        held: Any = None,
    ) -> torch.Tensor:
        """``function(x, parameters)``, differentiable in both; without gradients it runs as it is.

        Args:
            function: as :data:`Function`. No dropout, nothing that waits for the GPU, nothing that
                differs from call to call: Python runs once. Its output is one tensor.
            x: on a GPU.
            held: an object that the function reads, kept alive by its graphs; another one is
                another key.

        Raises:
            RuntimeError: the function cannot be captured.
        """
        if not torch.is_grad_enabled() or not (
            x.requires_grad or any(p.requires_grad for p in parameters)
        ):
            return function(x, parameters)
        pool = pool_of(x.device)
        places = tuple(p.data_ptr() for p in parameters)
        if (places, generation := pool.generation()) != (self._places, self._generation):
            self._graphs.clear()
            self._places, self._generation = places, generation
        needs = x.requires_grad, *(p.requires_grad for p in parameters)
        key = x.shape, x.dtype, x.device, needs, id(pool), id(held)
        graph = self._graphs.pop(key, None)
        if graph is None:
            if not self._may_capture(key, held, pool):
                return function(x, parameters)
            self._captures += 1
            graph = _Graph(pool, function, x, parameters, held)
        self._graphs[key] = graph
        if not graph.fits():
            return function(x, parameters)
        return _Replay.apply(graph, x, *parameters)

    def _may_capture(self, key: Hashable, held: Any, pool: Pool) -> bool:
        """Whether a call is to be captured: its key came before, and no data lie where the graph
        may take memory.
        """
        if key not in self._seen:
            if len(self._seen) == _REMEMBERED:
                run_without_graphs(
                    f"the last {_REMEMBERED} inputs had as many shapes, or rotary embeddings of "
                    "their own"
                )
                self._seen.clear()
            self._seen[key] = held
        elif self._captures == _CAPTURES:
            run_without_graphs(
                f"a layer was captured {_CAPTURES} times: shapes, places of parameters or order "
                "change"
            )
        elif any(graph in self._graphs.values() for graph in pool.waiting.now()):
            run_without_graphs("another forward pass waits for its backward")
        elif not pool.can_capture():
            pool.stale = True
        else:
            if len(self._graphs) == MOST:
                del self._graphs[next(iter(self._graphs))]
            return True
        return False


class _Graph:
    """Forward and backward of a function for one key."""

    def __init__(
        self,
        pool: Pool,
        function: Function,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        held: Any,
    ) -> None:
        """Captures forward. Backward is captured when it first runs, as the pool is then as it
        will be.
        """
        self.pool = pool
        self.held = held
        self.places = [p.data_ptr() for p in parameters]
        self.before = [weakref.ref(graph) for graph in pool.waiting.now()]
        """Whose passes waited when this was captured, and have to whenever it runs."""
        # Leaves of their own: hooks of the parameters are for the gradients that leave the graph,
        # and a step of the optimizer before backward is captured changes nothing of what was saved.
        leaves = [torch.nn.Parameter(p.data, requires_grad=p.requires_grad) for p in parameters]

        def work() -> tuple[torch.Tensor, torch.Tensor]:
            with without_filling():
                entered = torch.empty_like(
                    x, memory_format=torch.contiguous_format, requires_grad=False
                )
            if x.requires_grad:
                entered = _Enter.apply(entered, torch.empty(0, device=x.device, requires_grad=True))
            return entered, function(entered, leaves).contiguous()

        with torch.enable_grad():
            self._forward, (entered, y) = pool.record(work)
        self._x, self._y = without_owner(entered), without_owner(y)
        # With these two, what forward has saved is kept, until backward is captured.
        self._end = get_gradient_edge(y)
        self._wanted: list[Any] = [get_gradient_edge(entered)] if x.requires_grad else []
        self._wanted += [leaf for leaf in leaves if leaf.requires_grad]
        self._needs = [x.requires_grad, *(p.requires_grad for p in parameters)]
        self._broken = False
        self._backward: torch.cuda.CUDAGraph | None = None
        self._dy: torch.Tensor
        self._gradients: list[torch.Tensor | None]

    @property
    def is_whole(self) -> bool:
        """Whether backward is captured, too."""
        return self._backward is not None

    def _waits_as_before(self) -> bool:
        return self.pool.waiting.now() == tuple(graph() for graph in self.before)

    def fits(self) -> bool:
        """Whether the memory that this uses is free."""
        if self._waits_as_before() and not self._broken:
            return True
        if self in self.pool.waiting.now():
            run_without_graphs("another forward pass waits for its backward")
        else:  # other functions than before run as graphs, or in another order
            self.pool.stale = True
        return False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Pass]:
        """y, and what is to be held for :meth:`backward`."""
        self._x.copy_(x)
        self._forward.replay()
        run = Pass(self)
        self.pool.waiting.add(run)
        return self._y.clone(), run

    def backward(self, run: Pass, dy: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradients of x and the parameters, None for those that need none."""
        self.pool.waiting.finish(run)
        if self._backward is None:
            # All that may wait when it runs has to wait now, and to hold its memory: else it would
            # take that.
            if self._waits_as_before() and self.pool.can_capture():
                self._capture_backward(dy)
            else:
                self.pool.stale = True
        found: Sequence[torch.Tensor | None]
        if self._backward is None:
            found = torch.autograd.grad(
                [self._end], self._wanted, [dy], retain_graph=True, allow_unused=True
            )
        else:
            self._dy.copy_(dy)
            self._backward.replay()
            found = _copies(self._gradients)
        wanted = iter(found)
        return [next(wanted) if need else None for need in self._needs]

    def _capture_backward(self, dy: torch.Tensor) -> None:
        def work() -> tuple[torch.Tensor, list[torch.Tensor | None]]:
            with without_filling():
                given = torch.empty_like(dy, memory_format=torch.contiguous_format)
            made = torch.autograd.grad([self._end], self._wanted, [given], allow_unused=True)
            return given, [None if one is None else one.contiguous() for one in made]

        try:
            recorded, (given, made) = self.pool.record(work)
        except BaseException:
            self._broken = True  # what forward has saved is gone
            raise
        del self._end, self._wanted
        self._backward = recorded
        self._dy = without_owner(given)
        self._gradients = [None if one is None else without_owner(one) for one in made]


class _Enter(torch.autograd.Function):
    """A tensor whose gradient can be asked for, and which is no leaf: those live as long as the
    autograd graph, and the input's place is to be free as soon as the function has read it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return shaped(x, *x.shape)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[None, None]:  # never asked for
        return None, None


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graph: _Graph, x: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        y, ctx.run = graph.forward(x)
        ctx.graph, ctx.count = graph, 1 + len(parameters)
        # So that autograd refuses those that were changed in the meantime.
        ctx.save_for_backward(*parameters)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return None, *[None] * ctx.count
        if [p.data_ptr() for p in ctx.saved_tensors] != ctx.graph.places:
            raise RuntimeError(
                "activation.cuda_graphs: parameters of a layer moved between its forward and "
                "backward (as fully_shard has them do), accepted: parameters that stay where they "
                "are, or false"
            )
        return None, *ctx.graph.backward(ctx.run, dy)


def _copies(tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Copies of tensors, by few kernels."""
    given = [one for one in tensors if one is not None]
    made = [torch.empty_like(one) for one in given]
    torch._foreach_copy_(made, given)
    rest = iter(made)
    return tuple(None if one is None else next(rest) for one in tensors)
