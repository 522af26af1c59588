"""CoatAdamW on tensors of every memory layout: the bits of contiguous ones, and nothing touched
in between.
"""

from itertools import cycle, product

import torch

from coat_dist.optim import CoatAdamW
from tests.support import equal

POISON = 3e29
"""Between elements. Read by mistake it would show, and so would writing over it."""
# shape: {name: (strides, offset)}
LAYOUTS = {
    (16, 24): {
        "contiguous": ((24, 1), 0),
        "unaligned": ((24, 1), 3),
        "transposed": ((1, 16), 0),
        "every second column": ((48, 2), 0),
        "every second column, odd row": ((49, 2), 1),
        "some columns": ((31, 1), 4),
        "every third row": ((72, 1), 0),
    },
    (5, 7): {
        "contiguous": ((7, 1), 0),
        "transposed": ((1, 5), 2),
        "every second column": ((14, 2), 0),
    },
    (384,): {"contiguous": ((1,), 0), "every second": ((2,), 1), "every fourth": ((4,), 0)},
    (2, 4, 6, 8): {
        "contiguous": ((192, 48, 8, 1), 0),
        "channels last": ((192, 1, 32, 4), 0),
        "some of channels last": ((480, 1, 80, 10), 5),
    },
    (): {"contiguous": ((), 0), "one of many": ((), 5)},
    (0, 4): {"contiguous": ((4, 1), 0), "strided": ((9, 2), 0)},
}
EXPANDED = {
    (16, 24): [((0, 1), 0), ((1, 0), 2), ((0, 0), 1)],
    (384,): [((0,), 0)],
    (2, 4, 6, 8): [((0, 1, 0, 4), 0)],
}
VARIANTS = {
    "fp8": {},
    "fp8, bf16": {"dtype": torch.bfloat16},
    "fp8, remainder, copies": {
        "master_weights": "bf16_remainder",
        "dtype": torch.bfloat16,
        "copy": torch.bfloat16,
        "stochastic_rounding": True,
    },
    "fp8, copies": {"copy": torch.float16, "maximize": True},
    "fp32": {"moments": "fp32"},
    "fp32, remainder, copies": {
        "moments": "fp32",
        "master_weights": "bf16_remainder",
        "dtype": torch.bfloat16,
        "copy": torch.float16,
    },
}


class Strided:
    """``view`` has the given values and layout; all other memory of ``buffer`` is poisoned."""

    def __init__(self, values, strides, offset, dtype, device):
        last = (
            sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True))
            if values.numel()
            else 0
        )
        poison = min(POISON, 6e4) if dtype == torch.float16 else POISON
        self.buffer = torch.full((offset + last + 9,), poison, dtype=dtype, device=device)
        self.view = self.buffer.as_strided(values.shape, strides, offset)
        self.between = torch.ones(self.buffer.shape, dtype=torch.bool, device=device)
        self.between.as_strided(values.shape, strides, offset).fill_(False)
        self.write(values)

    def write(self, values):
        if 0 in self.view.stride():  # elements that share memory: any value of theirs
            for n, s in enumerate(self.view.stride()):
                values = values.narrow(n, 0, 1).expand_as(values) if s == 0 else values
            narrow = tuple(slice(None, 1) if s == 0 else slice(None) for s in self.view.stride())
            self.view[narrow].copy_(values[narrow])
        else:
            self.view.copy_(values)
        self.poison = self.buffer[self.between].clone()

    def check(self):
        assert torch.equal(self.buffer[self.between], self.poison)


def combinations(few):
    """Shape, layout of the parameter, layout of the gradient: all of them, or ``few`` with every
    layout once.
    """
    for shape, layouts in LAYOUTS.items():
        mine, theirs = list(layouts.values()), [*layouts.values(), *EXPANDED.get(shape, ())]
        pairs = zip(cycle(mine), theirs[1:] + theirs[:1]) if few else product(mine, theirs)  # noqa: B905
        yield from ((shape, *pair) for pair in pairs)


def check(device="cpu", steps=2, few=False, dtype=torch.float32, copy=None, **options):
    """All combinations in one optimizer, some alone and some in shared launches, and as many
    that are contiguous.
    """
    cases = list(combinations(few))
    g = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=g).to(device, dtype) for shape, _, _ in cases]
    mine = [
        Strided(x, *layout, dtype, device) for x, (_, layout, _) in zip(start, cases, strict=True)
    ]
    params = [torch.nn.Parameter(one.view) for one in mine]
    plain = [torch.nn.Parameter(x.clone()) for x in start]
    runs = [
        CoatAdamW([{"params": ps, **options}], lr=0.1, betas=(0.9, 0.99)) for ps in (params, plain)
    ]
    if copy is not None:
        for run, ps in zip(runs, (params, plain), strict=True):
            run.copies = {p: torch.zeros(p.shape, dtype=copy, device=device) for p in ps}
    for step in range(steps):
        grads = [
            Strided(torch.randn(shape, generator=g).to(device, dtype), *layout, dtype, device)
            for shape, _, layout in cases
        ]
        before = [one.buffer.clone() for one in grads]
        versions = [p._version for p in params]
        for p, q, one in zip(params, plain, grads, strict=True):
            p.grad, q.grad = one.view, one.view.clone(memory_format=torch.contiguous_format)
        for optimizer in runs:
            optimizer.step()
        assert all(torch.equal(one.buffer, old) for one, old in zip(grads, before, strict=True))
        assert all(
            p._version > old or not p.numel() for p, old in zip(params, versions, strict=True)
        )
        for one in mine:
            one.check()
        compare(runs, params, plain)
        held = []
        # Moments of any layout, as somebody may have put there.
        if options.get("moments") == "fp32" and step == 0:
            held = move(runs[0], params, cases, device)
        for one in held:
            one.check()
    # Not of one element: in BF16 a few steps may well lead back to where it was.
    assert all(not torch.equal(p, x) for p, x in zip(params, start, strict=True) if x.numel() > 1)


def compare(runs, params, plain):
    for p, q in zip(params, plain, strict=True):
        place = tuple(p.shape), p.stride(), p.grad.stride()
        assert torch.equal(p, q), place
        a, b = (optimizer.state[x] for optimizer, x in zip(runs, (p, q), strict=True))
        assert a.keys() == b.keys() and a["step"] == b["step"]
        for key, value in a.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, b[key]), (key, *place)
        if p in runs[0].copies:
            assert torch.equal(runs[0].copies[p], runs[1].copies[q])


def move(optimizer, params, cases, device):
    """Give the fp32 moments of every parameter the layout of its gradient, unless that overlaps."""
    held = []
    for p, (_, _, layout) in zip(params, cases, strict=True):
        state = optimizer.state[p]
        for key in ("exp_avg", "exp_avg_sq") if 0 not in layout[0] or not p.numel() else ():
            held.append(Strided(state[key], *layout, torch.float32, device))
            state[key] = held[-1].view
    return held


def check_versions(moments, device="cpu"):
    """A step between forward and backward is an error of autograd's, as with torch's optimizers."""
    for size in ((64,), (7,)):  # a shared launch or not
        params = [torch.nn.Parameter(torch.ones(size, device=device)) for _ in range(3)]
        optimizer = CoatAdamW([{"params": params, "moments": moments}])
        copied = torch.zeros(size, dtype=torch.bfloat16, device=device)
        optimizer.copies = {params[0]: copied}
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        seen = [p._version for p in (*params, copied)]
        loss = sum(p.square().sum() for p in params)
        optimizer.step()
        assert all(p._version > old for p, old in zip((*params, copied), seen, strict=True))
        try:
            loss.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            raise AssertionError("autograd took the weights for unchanged")


def check_sizes(device="cpu"):
    """What no longer fits is one error, and nothing has been stepped: neither parameters before
    it nor after.
    """

    def enlarged(p, state):
        p.data = torch.ones(2 * p.numel(), device=device)

    def enlarged_with_gradient(p, state):
        enlarged(p, state)
        p.grad = torch.ones_like(p)

    def shrunk(p, state):
        p.data = p.data[: p.numel() // 2]

    def larger_gradient(p, state):
        p.grad.data = torch.ones(2 * p.numel(), device=device)

    def double(p, state):
        p.data = p.data.double()

    def cut(key):
        def change(p, state):
            state[key] = state[key][:1]

        return change

    def floats(key):
        def change(p, state):
            state[key] = state[key].float()

        return change

    def spread(key):
        def change(p, state):
            state[key] = torch.stack([state[key]] * 2, -1)[..., 0]

        return change

    def wrong_copy(p, state):
        optimizer.copies = {p: torch.zeros(p.numel() + 1, dtype=torch.bfloat16, device=device)}

    changes = [
        enlarged,
        enlarged_with_gradient,
        shrunk,
        larger_gradient,
        double,
        wrong_copy,
    ]
    state_changes = {
        "fp8": [
            cut("coat_m_q"),
            cut("coat_v_a"),
            floats("coat_m_a"),
            spread("coat_v_q"),
            spread("coat_m_k"),
        ],
        "fp32": [cut("exp_avg"), cut("exp_avg_sq")],
    }
    for moments, more in state_changes.items():
        for n in (256, 257):  # in a shared launch or not
            for change in (*changes, *more):
                params = [torch.nn.Parameter(torch.ones(n, device=device)) for _ in range(3)]
                named = [
                    (name, p) for name, p in zip(("first", "second", "third"), params, strict=True)
                ]
                optimizer = CoatAdamW([{"params": named, "moments": moments}])
                for p in params:
                    p.grad = torch.ones_like(p)
                optimizer.step()
                change(params[1], optimizer.state[params[1]])
                before = [p.detach().clone() for p in params]
                try:
                    optimizer.step()
                except (ValueError, TypeError) as error:
                    assert "CoatAdamW.step: group 0, parameter 1 (second)" in str(error), error
                    assert "got" in str(error) and "accepted" in str(error)
                else:
                    raise AssertionError((change, n, moments))
                assert equal(params, before)
                assert [optimizer.state[p]["step"] for p in params] == [1, 1, 1]
