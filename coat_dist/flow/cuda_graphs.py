"""A function of one tensor and some parameters, such as a layer, run as two CUDA graphs: forward and backward.

With few tokens a GPU has done a layer before Python has started its kernels: some thirty launches, allocations and
calls of libraries. A graph starts them all at once. What it holds are addresses, so three things must not change
between calls: where inputs lie, where parameters lie, and which memory is free for what the function makes.

* **Inputs** are copied to where the graph reads them, and results from where it leaves them. So outputs and gradients
  are tensors like any others, and the parameters' ``.grad`` belongs to whoever adds to it.
* **Parameters** are used where they are. If one has moved, graphs are made anew.
* **Memory** of all graphs of a device is one pool (:class:`_Pool`), in which tensors are freed and their places used
  again as in eager execution: what forward saves is free once backward has read it, and one layer's gradients lie where
  the last one's were. That is right only in the order in which the graphs were made. The pool knows which forward
  passes wait for their backward (*waiting*); where those are others than when a graph was made (two micro-batches in
  flight, a layer left out), or a graph is to be made while data lie where it would take memory, the function runs as
  it is.

The first call with a key runs as it is, which compiles kernels and makes workspaces; the second one makes the graph of
forward, and its backward the other.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from .function import shaped

__all__ = ["GraphedFunction", "Waiting", "pool_bytes", "run_without_graphs"]

Function = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""``(x, parameters) -> y``; what it reads besides these has to stay where it is."""

MOST = 4
"""Keys, such as shapes of the input, for which one function has graphs: each takes memory."""
_REMEMBERED = 16


class GraphedFunction:
    """Calls a function, from the second call with the same key on as a CUDA graph.

    Copies and pickles have no graphs: the memory that these read is the original's.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: set[Hashable] = set()
        """Keys of one call."""
        self._places: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), ()

    @property
    def captured(self) -> int:
        """For how many keys there are graphs."""
        return len(self._graphs)

    def __call__(
        self, function: Function, x: torch.Tensor, parameters: Sequence[torch.Tensor], held: Any = None
    ) -> torch.Tensor:
        """``function(x, parameters)``, differentiable in both; without gradients it runs as it is.

        Args:
            function: as :data:`Function`. No dropout, nothing that waits for the GPU, nothing that differs from call to
                call: Python runs once. Its output is one tensor.
            x: on a GPU.
            held: an object that the function reads, kept alive by its graphs; another one is another key.

        Raises:
            RuntimeError: the function cannot be captured.
        """
        if not torch.is_grad_enabled() or not (x.requires_grad or any(p.requires_grad for p in parameters)):
            return function(x, parameters)
        places = tuple(p.data_ptr() for p in parameters)
        if places != self._places:
            self._graphs.clear()
            self._places = places
        needs = x.requires_grad, *(p.requires_grad for p in parameters)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        key = x.shape, x.dtype, x.device, needs, stream, id(held)  # an id does not come back while a graph holds it
        if key not in self._graphs:
            if not self._is_second(key):
                return function(x, parameters)
            pool = _pool(x.device)
            if not pool.can_capture():
                run_without_graphs("parameters of some layers were moved, frozen or unfrozen, or passes overlap")
                return function(x, parameters)
            self._graphs[key] = _Graph(pool, function, x, parameters, held)
        graph = self._graphs[key]
        if not graph.fits():
            return function(x, parameters)
        return _Replay.apply(graph, x, *parameters)

    def _is_second(self, key: Hashable) -> bool:
        """Whether a call with this key is to be captured: it came before, and there is room."""
        if key in self._seen:
            if len(self._graphs) < MOST:
                return True
            run_without_graphs(f"{MOST} other shapes of the input have some")
            return False
        if len(self._seen) == _REMEMBERED:
            run_without_graphs(f"none of {_REMEMBERED} calls had the shape, or the rotary embedding, of another one")
            self._seen.clear()
        self._seen.add(key)
        return False


def run_without_graphs(why: str) -> None:
    """Warn, once for each reason, that a function runs as it is."""
    warnings.warn(f"activation.cuda_graphs: layers run without CUDA graphs: {why}", stacklevel=2)


class Waiting:
    """Forward passes whose backward is to come, in their order. One that nobody can run backward any more (its part of
    the autograd graph is gone) does not count."""

    def __init__(self) -> None:
        self._passes: list[weakref.ref[Pass]] = []

    def now(self) -> tuple[Any, ...]:
        """The owners of those that wait, first to last."""
        alive = [(ref, one) for ref in self._passes if (one := ref()) is not None and one.waits]
        self._passes = [ref for ref, _ in alive]
        return tuple(one.owner for _, one in alive)

    def add(self, one: Pass) -> None:
        """``one`` has begun."""
        self._passes.append(weakref.ref(one))

    def finish(self, one: Pass) -> None:
        """``one`` runs backward now. Those that began after it lose what they have saved.

        Raises:
            RuntimeError: its backward has run already, or that of an earlier one has.
        """
        if not one.waits:
            raise RuntimeError(
                "activation.cuda_graphs: a layer's backward ran twice, or after that of a layer before it, and what it "
                "had saved is overwritten; accepted: one backward for each forward pass (no retain_graph), or false"
            )
        while self._passes:
            last = self._passes.pop()()
            if last is not None:
                last.waits = False
            if last is one:
                return


class Pass:
    """One forward pass by a graph; whoever can run its backward holds it."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.waits = True


class _Pool:
    """Memory of a device's graphs, which they share, and the forward passes that hold some of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waiting = Waiting()
        self.handle: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def can_capture(self) -> bool:
        """Whether what waiting passes have saved is out of a new graph's reach: once their backward has been captured,
        it lies where captured memory is free."""
        return not any(graph.is_whole for graph in self.waiting.now())

    def record(self, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """A graph of what ``work`` starts, and what it returns; nothing is computed yet.

        Raises:
            RuntimeError: it cannot be captured. Torch's random numbers may be of no use after that.
        """
        users = [*self._graphs]  # torch forgets a pool with its last graph: none may go between this line and the next
        with torch.cuda.device(self.device):
            if not users:
                self.handle = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads (NCCL's watchdog, loaders that pin memory) go on calling CUDA.
                with torch.cuda.graph(graph, pool=self.handle, capture_error_mode="thread_local"):
                    result = work()
            except Exception as problem:
                raise RuntimeError(
                    f"activation.cuda_graphs: got true, accepted: false, as a layer could not be captured: {problem}"
                ) from problem
        del users
        self._graphs.add(graph)
        return graph, result


_pools: dict[torch.device, _Pool] = {}


def _pool(device: torch.device) -> _Pool:
    if device not in _pools:
        _pools[device] = _Pool(device)
    return _pools[device]


def pool_bytes(device: torch.device) -> int:
    """GPU memory that is kept for graphs; what they use of it does not count as allocated."""
    if device not in _pools:
        return 0
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == _pools[device].handle)


class _Graph:
    """Forward and backward of a function for one key."""

    def __init__(
        self, pool: _Pool, function: Function, x: torch.Tensor, parameters: Sequence[torch.Tensor], held: Any
    ) -> None:
        """Captures forward. Backward is captured when it first runs, as the pool is then as it will be."""
        self.pool = pool
        self.held = held
        self.before = pool.waiting.now()
        """Whose passes waited when this was captured, and have to whenever it runs."""
        # Leaves of their own: hooks of the parameters are for the gradients that leave the graph.
        leaves = [torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in parameters]

        def work() -> tuple[torch.Tensor, torch.Tensor]:
            entered = torch.empty_like(x, memory_format=torch.contiguous_format, requires_grad=False)
            if x.requires_grad:
                entered = _Enter.apply(entered, torch.empty(0, device=x.device, requires_grad=True))
            return entered, function(entered, leaves).contiguous()

        with torch.enable_grad():
            self._forward, (entered, y) = pool.record(work)
        self._x, self._y = _without_owner(entered), _without_owner(y)
        # With these two, what forward has saved is kept, until backward is captured.
        self._end = get_gradient_edge(y)
        self._wanted: list[Any] = [get_gradient_edge(entered)] if x.requires_grad else []
        self._wanted += [leaf for leaf in leaves if leaf.requires_grad]
        self._needs = [x.requires_grad, *(p.requires_grad for p in parameters)]
        self._backward: torch.cuda.CUDAGraph | None = None
        self._dy: torch.Tensor
        self._gradients: list[torch.Tensor | None]

    @property
    def is_whole(self) -> bool:
        """Whether backward is captured, too."""
        return self._backward is not None

    def fits(self) -> bool:
        """Whether the memory that this uses is free."""
        if self.pool.waiting.now() == self.before:
            return True
        run_without_graphs("other forward passes than usual wait for their backward")
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
        if self._backward is None and self.pool.can_capture():
            self._capture_backward(dy)
        found: Sequence[torch.Tensor | None]
        if self._backward is None:  # the backward of layers before this was captured when this one's was not wanted
            found = torch.autograd.grad([self._end], self._wanted, [dy], retain_graph=True, allow_unused=True)
        else:
            self._dy.copy_(dy)
            self._backward.replay()
            found = _copies(self._gradients)
        wanted = iter(found)
        return [next(wanted) if need else None for need in self._needs]

    def _capture_backward(self, dy: torch.Tensor) -> None:
        end, wanted = self._end, self._wanted
        del self._end, self._wanted  # with them what forward has saved, as far as backward has read it

        def work() -> tuple[torch.Tensor, list[torch.Tensor | None]]:
            given = torch.empty_like(dy, memory_format=torch.contiguous_format)
            made = torch.autograd.grad([end], wanted, [given], allow_unused=True)
            return given, [None if one is None else one.contiguous() for one in made]

        recorded, (given, made) = self.pool.record(work)
        self._backward = recorded
        self._dy = _without_owner(given)
        self._gradients = [None if one is None else _without_owner(one) for one in made]


class _Enter(torch.autograd.Function):
    """A tensor whose gradient can be asked for, and which is no leaf: those live as long as the autograd graph, and
    the input's place is to be free as soon as the function has read it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return shaped(x, *x.shape)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[None, None]:  # never asked for
        return None, None


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        y, ctx.run = graph.forward(x)
        ctx.graph, ctx.count = graph, 1 + len(parameters)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return None, *[None] * ctx.count
        return None, *ctx.graph.backward(ctx.run, dy)


def _copies(tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Copies of tensors, by few kernels."""
    given = [one for one in tensors if one is not None]
    made = [torch.empty_like(one) for one in given]
    torch._foreach_copy_(made, given)
    rest = iter(made)
    return tuple(None if one is None else next(rest) for one in tensors)


class _Bytes:
    """Memory by its address, for torch to look at without keeping it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _without_owner(tensor: torch.Tensor) -> torch.Tensor:
    """The same contiguous memory, which stays free for others: a graph's pool keeps it from the rest of the program."""
    if tensor.numel() == 0:
        return tensor.detach()
    return torch.as_tensor(_Bytes(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
