"""CoatAdamW without DeepSpeed on two ranks: DDP, FSDP2, and torch's distributed checkpoints."""

import contextlib
import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from coat_dist.optim import CoatAdamW, fp32_state_dict, param_groups
from tests.support import equal, run_ranks, slow

REMAINDER = {"master_weights": "bf16_remainder"}


class Model(torch.nn.Module):
    """Rows that do not divide by the ranks, shards of different numbers of groups, and one rank
    without any row.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(129, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.down = torch.nn.Linear(7, 129)
        self.last = torch.nn.Linear(129, 1, bias=False)

    def forward(self, x):
        x = x.to(self.up.weight.dtype)
        return (self.last(torch.tanh(self.down(self.norm(self.up(x))))) - 1).square().mean()


class Rows(torch.nn.Module):
    """Every row that is trained is made of whole groups; the rows of one weight do not divide by
    the ranks.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(128, 129), torch.nn.Linear(129, 128)
        self.down.requires_grad_(False)
        self.experts = torch.nn.Parameter(torch.randn(5, 4, 64))

    def forward(self, x):
        y = self.up(x[:, :128].to(self.up.weight.dtype))
        return self.down(y).square().mean() + self.experts.square().mean()


def sharded(mesh=None, kind=Model, **options):
    whole = kind().bfloat16() if options.get("master_weights") == "bf16_remainder" else kind()
    model = fully_shard(whole, mesh=mesh) if mesh is not None else fully_shard(whole)
    return model, CoatAdamW(param_groups(model, 0.1), lr=0.01, **options)


def train(model, optimizer, first, last, rank=0):
    losses = []
    for step in range(first, last):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 129) + 1)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def snapshot(model, optimizer):
    """This rank's bytes."""

    def mine(t):
        return (t.to_local() if isinstance(t, DTensor) else t).detach().clone()

    states = [
        {k: mine(x) if isinstance(x, torch.Tensor) else x for k, x in optimizer.state[p].items()}
        for g in optimizer.param_groups
        for p in g["params"]
    ]
    return states + [{"weight": mine(p)} for p in model.parameters()]


def save(model, optimizer, folder):
    states = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(states, checkpoint_id=folder)


def load(model, optimizer, folder):
    states = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(states, checkpoint_id=folder)
    set_model_state_dict(model, states["model"])
    set_optimizer_state_dict(model, optimizer, states["optimizer"])


def states_in_host_memory(rank, world, folder):
    """Bytes after each run: with states on the device and in host memory, and each resumed as
    the other.
    """
    from coat_dist.optim import host

    host.DEVICES, host.CHUNK = ("cpu", "cuda"), 16 * 128
    found, places = [], ("parameter", "cpu")
    for mine, other in (places, places[::-1]):
        one, again = (sharded(**REMAINDER, state_device=place) for place in (mine, other))
        train(*one, 0, 3, rank)
        save(*one, f"{folder}/{mine}")
        load(*again, f"{folder}/{mine}")
        for model in (one, again):
            train(*model, 3, 5, rank)
            found.append(snapshot(*model))
    return all(equal(found[0], x) for x in found), bool(host._lanes)


def test_states_in_host_memory_are_the_same_shards_and_checkpoints(tmp_path):
    assert run_ranks(2, states_in_host_memory, str(tmp_path)) == [(True, True)] * 2


def shards_follow_the_whole_model(rank, world, moments):
    """FSDP2 against the same optimizer on each rank's slice of the unsharded model: equal bytes."""
    model, optimizer = sharded(**(REMAINDER if moments == "remainder" else {}))
    if moments == "fp32":
        optimizer = CoatAdamW([{"params": list(model.parameters()), "moments": "fp32"}], lr=0.01)
    train(model, optimizer, 0, 1)
    params = [p for g in optimizer.param_groups for p in g["params"]]
    slices = [torch.nn.Parameter(p.to_local().detach().clone()) for p in params]
    groups, rest = [], iter(slices)
    for g in optimizer.param_groups:
        groups.append({**g, "params": [next(rest) for _ in g["params"]]})
    plain = CoatAdamW(groups)
    for p, q in zip(params, slices, strict=True):
        plain.state[q] = {
            k: copy.deepcopy(x.to_local() if isinstance(x, DTensor) else x)
            for k, x in optimizer.state[p].items()
        }
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 129)).backward()
        for p, q in zip(params, slices, strict=True):
            q.grad = p.grad.to_local().clone()
        optimizer.step()
        plain.step()
    codes = [
        x
        for s in optimizer.state.values()
        for k, x in s.items()
        if k.startswith("coat_") and k[-1] in "qakw"
    ]
    assert moments != "remainder" or sum(
        "coat_p_low" in s for s in optimizer.state.values()
    ) == len(slices)
    assert moments == "fp32" or (codes and not any(isinstance(x, DTensor) for x in codes))
    return equal([p.to_local() for p in params], slices)


@pytest.mark.parametrize("moments", ["fp8", "fp32", "remainder"])
def test_each_rank_updates_its_shard(moments):
    assert run_ranks(2, shards_follow_the_whole_model, moments) == [True, True]


def straight_and_resumed(rank, world, folder, options):
    model, optimizer = sharded(**options)
    losses = train(model, optimizer, 0, 3, rank)
    save(model, optimizer, folder)
    at_save = snapshot(model, optimizer)
    losses += train(model, optimizer, 3, 6, rank)
    again, other = sharded(**options)
    train(again, other, 20, 21, rank)  # state that loading has to replace
    load(again, other, folder)
    loaded = equal(at_save, snapshot(again, other))
    more = train(again, other, 3, 6, rank)
    return (
        loaded,
        losses[3:] == more,
        equal(snapshot(model, optimizer), snapshot(again, other)),
        losses,
    )


@pytest.mark.parametrize(
    "options", [{}, {"stochastic_rounding": True, "group_size": 64}, REMAINDER]
)
def test_a_distributed_checkpoint_restores_every_byte(options, tmp_path):
    results = run_ranks(2, straight_and_resumed, str(tmp_path), options)
    for loaded, losses_equal, end, losses in results:
        assert loaded and losses_equal and end
        assert losses[-1] < losses[0]


def hybrid(rank, world, folder):
    """Replicas of shards, and shards in two dimensions of the mesh."""
    found = []
    for names in (("replicate", "shard"), ("fsdp", "tp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        if names[1] == "tp":
            from torch.distributed.tensor.parallel import (
                ColwiseParallel,
                RowwiseParallel,
                parallelize_module,
            )

            whole = Model()
            whole.up = torch.nn.Linear(129, 10)
            whole.norm, whole.down = torch.nn.Identity(), torch.nn.Linear(10, 129)
            parallelize_module(
                whole, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            model = fully_shard(whole, mesh=mesh["fsdp"])
            optimizer = CoatAdamW(
                [p for n, p in model.named_parameters() if n.startswith(("up", "down"))], lr=0.01
            )
        else:
            model, optimizer = sharded(mesh)
        train(model, optimizer, 0, 2)
        save(model, optimizer, f"{folder}/{names[1]}")
        before = snapshot(model, optimizer)
        train(model, optimizer, 2, 3)
        assert not equal(before, snapshot(model, optimizer))
        load(model, optimizer, f"{folder}/{names[1]}")
        found.append(equal(before, snapshot(model, optimizer)))
    return found


@pytest.mark.slow
def test_meshes_of_two_dimensions(tmp_path):
    for found in run_ranks(4, hybrid, str(tmp_path)):
        assert found == [True, True]


FLAT, FULL = (
    StateDictOptions(flatten_optimizer_state_dict=True),
    StateDictOptions(full_state_dict=True),
)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def write(rank, world, folder, options, kind):
    model, optimizer = sharded(kind=kind, **options)
    train(model, optimizer, 0, 3)
    for way, flat in (("sharded", None), ("flat", FLAT)):
        dcp.save(
            get_optimizer_state_dict(model, optimizer, options=flat),
            checkpoint_id=f"{folder}/{way}",
        )
        with fp32_state_dict(optimizer):
            dcp.save(
                get_optimizer_state_dict(model, optimizer, options=flat),
                checkpoint_id=f"{folder}/{way}32",
            )
    torch.save(get_optimizer_state_dict(model, optimizer, options=FULL), f"{folder}/full-{rank}.pt")
    torch.save(get_model_state_dict(model, options=FULL), f"{folder}/model.pt")
    return moments_of(model, optimizer)


def moments_of(model, optimizer):
    """Whole fp32 moments, and master weights where there are such, by name, and steps."""
    with fp32_state_dict(optimizer):
        state = get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True)
        )["state"]
    keys = ("exp_avg", "exp_avg_sq", "master")
    return {n: (int(s["step"]), *(s[k].clone() for k in keys if k in s)) for n, s in state.items()}


def columns(**options):
    """The matrices sharded by columns."""
    model, mesh = Model(), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = model.bfloat16() if options else model
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            placement = Shard(1) if p.dim() == 2 else Replicate()
            module.register_parameter(
                name, torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [placement]))
            )
    return model, CoatAdamW(param_groups(model, 0.1), lr=0.01, **options)


def read(rank, world, folder, options, way, build):
    found = []
    for fp32 in (False, True):
        model, optimizer = build(**options)
        if build is not columns:  # which is no model that runs
            train(model, optimizer, 0, 1)  # states that loading has to replace
        # Upper halves of master weights.
        set_model_state_dict(model, torch.load(f"{folder}/model.pt"), options=FULL)
        with fp32_state_dict(optimizer) if fp32 else contextlib.nullcontext():
            if way in ("full", "rank 0"):
                saved = torch.load(f"{folder}/full-0.pt") if way == "full" or rank == 0 else {}
                if not fp32:
                    chosen = FULL if way == "full" else FROM_RANK_0
                    set_optimizer_state_dict(model, optimizer, saved, options=chosen)
            else:
                chosen = FLAT if way == "flat" else None
                state = get_optimizer_state_dict(model, optimizer, options=chosen)
                dcp.load(state, checkpoint_id=f"{folder}/{way}{'32' * fp32}")
                set_optimizer_state_dict(model, optimizer, state, options=chosen)
        if not (fp32 and way in ("full", "rank 0")):
            found.append(moments_of(model, optimizer))
            assert {"coat_m_q", "exp_avg"} <= {k for p in optimizer.state.values() for k in p}
    return found


def whole_rows(**options):
    return sharded(kind=Rows, **options)


@pytest.mark.parametrize(
    ("world", "options", "way", "build"),
    [
        (2, {}, "flat", columns),
        (3, {}, "rank 0", sharded),
        (3, REMAINDER, "sharded", sharded),
        (1, {}, "sharded", whole_rows),
        (3, REMAINDER, "flat", whole_rows),
        *(
            slow(*case)
            for case in (
                (1, REMAINDER, "full", sharded),
                (4, {}, "rank 0", sharded),
                (4, REMAINDER, "full", columns),
                (4, {}, "sharded", columns),
                (2, {}, "flat", whole_rows),
                (3, {}, "full", whole_rows),
            )
        ),
    ],
)
def test_a_state_loads_on_any_sharding(world, options, way, build, tmp_path):
    """Codes and fp32 moments: to the bit but for one more rounding where shards cut groups, or
    where codes are made of fp32 moments.
    """
    uncut = build is whole_rows
    kind = Rows if uncut else Model
    saved = run_ranks(2, write, str(tmp_path), options, kind)[0]
    assert all(len(x) == (4 if options else 3) for x in saved.values())
    if uncut:
        assert set(saved) == {"up.weight", "up.bias", "experts"}
    for found in run_ranks(world, read, str(tmp_path), options, way, build):
        assert len(found) == (1 if way in ("full", "rank 0") else 2)
        for name, (step, m, v, *master) in saved.items():
            for i, one in enumerate(found):
                assert one[name][0] == step == 3
                assert equal(one[name][3:], master)
                if uncut and i == 0:
                    assert equal(one[name][1:], (m, v, *master))
                # one more encoding: 2**-4 of an element, and steps of the smallest code below the
                # group's amax
                root = v.sqrt().clamp(min=1e-30)
                for wanted, got, unit in (
                    (m, one[name][1], (m / root).abs().max() * root),
                    (v, one[name][2], v.max()),
                ):
                    assert got.shape == wanted.shape
                    assert ((got - wanted).abs() <= 0.08 * wanted.abs() + 2**-8 * unit).all(), name


def ddp(rank, world):
    model = torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = CoatAdamW(param_groups(model, 0.1), lr=0.01, stochastic_rounding=True)
    losses = train(model, optimizer, 0, 3, rank)
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 3, 4, rank)
    optimizer.load_state_dict(saved)
    return snapshot(model, optimizer), losses


def test_replicas_of_ddp_stay_equal_to_the_byte():
    (a, losses), (b, other) = run_ranks(2, ddp)
    assert equal(a, b) and losses != other  # each rank has its own data
