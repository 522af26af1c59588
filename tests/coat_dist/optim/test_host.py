"""States in host memory: chunks give the bits of whole tensors, in every order that streams and
events allow.

Here the CPU plays both the host and the device; ``tests/gpu/test_host.py`` does the same with a
GPU.
"""

import contextlib
import copy
import gc
import random
import types

import pytest
import torch

from coat_dist.optim import CoatAdamW, export_master, export_moments, fp32_state_dict, host
from coat_dist.optim.moments import read_moment, write_moment
from coat_dist.reference.adamw import adamw_steps
from tests.coat_dist.optim.common import assert_same_state, equal_bytes

SIZES = (1, 57, 128 * 16 + 5, 128 * 70, 128 * 71 + 48)
BOTH = {"master_weights": "bf16_remainder"}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(host, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(host, "CHUNK", 16 * 128)
    monkeypatch.setattr(host, "_lanes", {})


def pair(sizes=SIZES, **options):
    """Two optimizers on equal parameters: one keeps states with the parameters, the other in
    host memory.
    """
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    first = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in sizes]
    second = copy.deepcopy(first)
    options = {"lr": 0.01, **options}
    return (first, CoatAdamW(first, **options)), (
        second,
        CoatAdamW(second, **options, state_device="cpu"),
    )


def train(*both, steps=3, copies=False):
    """Equal gradients for both; returns the 16-bit copies of each, if they are to be written."""
    written = [[torch.zeros_like(p, dtype=torch.bfloat16) for p in params] for params, _ in both]
    for _ in range(steps):
        factor = torch.rand((), device=both[0][0][0].device)
        grads = [
            torch.randn_like(p) * 10 ** torch.empty_like(p).uniform_(-4, 0) for p in both[0][0]
        ]
        for (params, optimizer), mine in zip(both, written, strict=True):
            optimizer.grad_factor = factor
            optimizer.copies = dict(zip(params, mine, strict=True)) if copies else {}
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.to(p.dtype)
            optimizer.step()
    return written


def assert_equal(one, other):
    assert_same_state(one[1], other[1])
    assert all(equal_bytes(a, b) for a, b in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize("rows", [16, 48, 1 << 17])
@pytest.mark.parametrize(
    "options",
    [
        BOTH,
        {**BOTH, "stochastic_rounding": True, "first_moment": "int8"},
        {"stochastic_rounding": False},
        {"second_moment": "log8", "group_size": 64},
        {**BOTH, "normalize": False, "group_size": 256, "maximize": True},
    ],
    ids=str,
)
def test_chunks_of_any_size_and_tails_of_any_length_give_equal_bits(
    small_chunks, monkeypatch, rows, options
):
    monkeypatch.setattr(host, "CHUNK", rows * options.get("group_size", 128))
    resident, hosted = pair(**options)
    copies = train(resident, hosted, copies="master_weights" not in options)
    assert_equal(resident, hosted)
    assert all(map(equal_bytes, *copies))


def test_the_kernel_numbers_the_groups_of_a_chunk_as_those_of_the_whole(small_chunks, monkeypatch):
    monkeypatch.setenv("COAT_KERNELS", "1")
    resident, hosted = pair((128 * 35 + 51,), **BOTH, stochastic_rounding=True)
    train(resident, hosted, steps=2)
    assert_equal(resident, hosted)
    for _, optimizer in (resident, hosted):  # a loop that sets it in groups
        optimizer.param_groups[0]["capturable"] = True
    train(resident, hosted, steps=2)
    assert_equal(resident, hosted)


class Device:
    """Streams and events that do their work late, in any order that they allow, as a GPU may."""

    def __init__(self):
        self.default = types.SimpleNamespace(queue=[])
        self.streams, self.at, self.busy = [], [], 0
        self.default = self.Stream()
        device = self

        class Event:
            recorded = done = 0

            def record(self, stream):
                self.recorded += 1
                stream.queue.append((None, setattr, (self, "done", self.recorded)))

            def synchronize(self):
                device.run(lambda: self.done >= self.recorded)

        self.Event = Event

    def Stream(self, device=None):
        stream = types.SimpleNamespace(queue=[])
        stream.wait_event = lambda e: stream.queue.append(((e, e.recorded), None, ()))
        stream.wait_stream = lambda other: None  # memory that is new here belongs to nobody else
        self.streams.append(stream)
        return stream

    @contextlib.contextmanager
    def stream(self, stream):
        self.at.append(stream)
        yield
        self.at.pop()

    def current_stream(self, device=None):
        return self.at[-1] if self.at else self.default

    def later(self, work):
        return lambda *args: self.current_stream().queue.append((None, work, args))

    @torch.no_grad()
    def run(self, done=lambda: False):
        """Until ``done`` or nothing is left: one piece of work at a time, of a stream that has
        to wait for nothing.
        """
        while not done():
            heads = [(s, s.queue[0][0]) for s in self.streams if s.queue]
            ready = [s for s, after in heads if after is None or after[0].done >= after[1]]
            if not ready:
                assert not heads, "streams wait for one another"
                return
            _, work, args = random.choice(ready).queue.pop(0)
            if work:
                work(*args)


@pytest.fixture
def late(small_chunks, monkeypatch):
    """Makes two optimizers with equal states, of which one's copies and kernels run late."""

    def make(sizes=(128 * 130 + 7, 57, 128 * 40)):
        device, (resident, hosted) = Device(), pair(sizes, **BOTH)
        train(resident)  # states are there, unlike the other's
        resident[1].load_state_dict(resident[1].state_dict())
        for a, b in zip(resident[0], hosted[0], strict=True):
            b.data.copy_(a.data)
        hosted[1].load_state_dict(resident[1].state_dict())
        monkeypatch.setattr(torch, "get_device_module", lambda _: device)
        monkeypatch.setattr(host, "_copy", device.later(host._copy))
        monkeypatch.setattr(host, "adamw_steps", device.later(adamw_steps))
        return device, resident, hosted

    return make


@pytest.mark.parametrize(
    "sizes", [(128 * 130 + 7, 57, 128 * 40), (128 * 20,)], ids=["many chunks", "two chunks"]
)
@pytest.mark.parametrize("attempt", range(3))
def test_whatever_order_streams_and_events_allow_gives_equal_bits(late, attempt, sizes):
    random.seed(torch.initial_seed() + attempt)
    device, resident, hosted = late(sizes)
    train(resident, hosted, steps=3)
    assert sum(len(s.queue) for s in device.streams) > 50  # nothing has run yet
    assert_equal(resident, hosted)  # `state` waits; weights are written before what it waits for
    device.run()
    assert_equal(resident, hosted)


def test_states_that_travel_arrive_before_a_group_keeps_them_elsewhere(late):
    device, resident, hosted = late()
    train(resident, hosted)
    hosted[1].param_groups[0]["state_device"] = "parameter"
    # A program sees its own stream's work done, and not the stores.
    while left := len(device.default.queue):
        device.run(lambda left=left: len(device.default.queue) < left)
    train(resident, hosted, steps=1)
    device.run()
    assert_equal(resident, hosted)


def test_a_state_dict_that_is_held_over_steps_is_complete_after_each(late):
    device, resident, hosted = late()
    saved = hosted[1].state_dict()
    for _ in range(2):
        train(resident, hosted, steps=1)
        found = copy.deepcopy(saved["state"])
        device.run()
        for mine, now in zip(found.values(), hosted[1].state.values(), strict=True):
            assert all(equal_bytes(x, now[k]) for k, x in mine.items() if torch.is_tensor(x))


def test_buffers_go_with_the_last_state(small_chunks):
    both = pair()
    train(*both)
    assert host._lanes
    kept = both[1][1].state_dict()
    del both
    gc.collect()
    assert host._lanes and kept
    del kept
    gc.collect()
    assert not host._lanes


def test_a_state_dict_is_loaded_as_the_steps_after_it_have_left_it(late):
    _, resident, hosted = late()
    others = pair([p.numel() for p in hosted[0]], **BOTH)
    for _, other in others:
        saved = hosted[1].state_dict()
        train(resident, hosted)
        other.load_state_dict(saved)
        assert_same_state(resident[1], other)


def test_chunks_before_one_that_fails_are_stored_before_anybody_reads_them(late, monkeypatch):
    device, _, ((p,), optimizer) = late((128 * 130,))
    kernels = iter([*[host.adamw_steps] * 4, None])
    monkeypatch.setattr(host, "adamw_steps", lambda *args: next(kernels)(*args))
    with pytest.raises(TypeError):
        train(([p], optimizer), steps=1)
    found = copy.deepcopy(optimizer.state[p])
    device.run()
    assert all(
        equal_bytes(v, found[k]) for k, v in optimizer.state[p].items() if torch.is_tensor(v)
    )


def test_moments_and_master_weights_read_and_write_as_those_on_the_device(small_chunks):
    read_and_write(*pair((1000,), **BOTH))


def read_and_write(resident, hosted):
    train(resident, hosted)
    found = []
    for (p, *_), optimizer in (resident, hosted):
        state, group = optimizer.state[p], optimizer.param_groups[0]
        write_moment(state, group, "second", 130, torch.full((70,), 2.0, device=p.device))
        part = read_moment(state, group, "first", 5, 900, p.device)
        found.append((*export_moments(p, state, group), export_master(p, state), part))
        with fp32_state_dict(optimizer):
            optimizer.load_state_dict(optimizer.state_dict())
    assert all(map(equal_bytes, *found))
    train(resident, hosted)
    assert_equal(resident, hosted)


def test_every_tensor_of_a_state_has_its_own_storage_in_one_block():
    tensors = {
        "q": torch.randint(0, 255, (3, 128)).to(torch.uint8),
        "a": torch.randn(3).bfloat16(),
        "new": torch.empty(5, device="meta"),
    }
    found = host.to_host(tensors, pin=False)
    assert all(torch.equal(found[k], tensors[k]) for k in "qa") and torch.equal(
        found["new"], torch.zeros(5)
    )
    assert [t.untyped_storage().nbytes() for t in found.values()] == [384, 6, 20]
    addresses = [t.data_ptr() - found["q"].data_ptr() for t in found.values()]
    assert addresses == [0, 512, 1024]


@pytest.mark.parametrize(
    "options, match",
    [
        ({"state_device": "nvme"}, "state_device: got \"nvme\", accepted: 'parameter' or 'cpu'"),
        ({"state_device": "cpu", "capturable": True}, "capturable: got True, accepted: False"),
    ],
)
def test_other_places_and_graphs_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        CoatAdamW([torch.nn.Parameter(torch.ones(2))], **options)
