"""Resume and reshard: ZeRO stages 1, 2, 3 x data-parallel 1, 2, 4 x tensor-parallel 1, 2.

Each cell is a test; the cells of all stages come out of one set of processes. Only layouts that the
chosen tests need are made. Not marked slow: DP 1 and 4 at TP 1, DP 1 and 2 at TP 2, at all stages,
each into each.

The same layout: every byte of state and weights, and of two steps more. Another layout, through a
universal checkpoint: equal bits of fp32 master weights, fp32 moments, 16-bit weights, steps, frozen
parameters and buffers; FP8 groups decode to the saved moments or are their encoding, within its
stated error; and where parameters and shards start on 128-element borders, the same codes. Without
conversion: loaded to the bit between stages 1 and 2, refused by name everywhere else.
"""

import pytest
import torch

from coat_dist.checkpoint.manifest import CheckpointError
from tests.coat_dist.checkpoint.universal_runs import contents, wrong_codes
from tests.coat_dist.deepspeed.zero_runs import BUCKETS, differences, snapshot
from tests.support import run_ranks

STAGES, DP, TP = (1, 2, 3), (1, 2, 4), (1, 2)
LAYOUTS = {f"z{s}d{d}t{t}": (s, d, t) for t in TP for d in DP for s in STAGES}
PAIRS = [
    (a, b)
    for a, (s, _, t) in LAYOUTS.items()
    for b, (s2, _, t2) in LAYOUTS.items()
    if t == t2 or s == s2
]
QUICK = [name for name, (_, d, t) in LAYOUTS.items() if (d, t) in ((1, 1), (4, 1), (1, 2), (2, 2))]


def marked(layouts):
    return () if set(layouts) <= set(QUICK) else pytest.mark.slow


each_layout = pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=marked([x])) for x in LAYOUTS]
)
each_pair = pytest.mark.parametrize(
    ("source", "target"), [pytest.param(*pair, marks=marked(pair)) for pair in PAIRS]
)

# Whole shape and the dimension that tensor parallelism divides. "a": rows of 128 elements at every
# layout; "o": of no layout. One element: most ranks' shards of its group are padding.
SHAPES = {
    "a_column": ((64, 64), 0),
    "a_row": ((32, 128), 1),
    "a_replicated": ((16, 64), None),
    "o_column": ((14, 17), 0),
    "o_row": ((13, 10), 1),
    "o_replicated": ((3, 7), None),
    "scale": ((1,), None),
    "vector": ((5,), None),
    "frozen": ((4, 6), 0),
}


def cut(name, whole, tp_rank, tp):
    dim = SHAPES.get(name, (None, None))[1]  # buffers are whole
    return whole if dim is None else whole.chunk(tp, dim)[tp_rank].contiguous()


class Model(torch.nn.Module):
    """Every element has a target of its own, so tensor-parallel shards need no communication."""

    def __init__(self, tp_rank, tp):
        super().__init__()
        self.tp_rank, self.tp = tp_rank, tp
        for name, (shape, dim) in SHAPES.items():
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
            p = torch.nn.Parameter(cut(name, whole, tp_rank, tp), requires_grad=name != "frozen")
            p.tensor_model_parallel, p.partition_dim = dim is not None, dim
            self.register_parameter(name, p)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, seed):
        generator = torch.Generator().manual_seed(seed)
        wholes = {n: torch.randn(shape, generator=generator) for n, (shape, _) in SHAPES.items()}
        targets = {n: cut(n, whole, self.tp_rank, self.tp) for n, whole in wholes.items()}
        return sum(
            (p.float() - targets[n]).square().sum()
            for n, p in self.named_parameters()
            if n != "frozen"
        )


def build(stage, mpu, **coat):
    from tests.coat_dist.deepspeed.small_engine import quiet_deepspeed

    quiet_deepspeed()
    import coat_dist
    from megatron_patches import universal_checkpoint_info

    model = Model(mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size())
    model.universal_checkpoint_info = universal_checkpoint_info(model)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if n.startswith("a_")]},
        {"params": [model.o_column, model.o_row], "lr": 0.02},
        # Never in one 128-element group with tensor-parallel shards.
        {"params": [model.o_replicated]},
        {"params": [model.scale], "weight_decay": 0.0},
        {"params": [model.vector], "moments": "fp32"},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": BUCKETS | {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 0.01}},
        "coat": {"optimizer": coat, "activation": {"enabled": False}},
        # Stage 1: another optimizer class.
        **({} if stage == 1 else {"data_types": {"grad_accum_dtype": "fp32"}}),
    }
    return coat_dist.initialize(model=model, model_parameters=groups, config=config, mpu=mpu)[0]


def train(engine, mpu, first, last):
    for step in range(first, last):
        engine.backward(
            engine(
                1000 * step + 10 * engine.zero_optimization_stage() + mpu.get_data_parallel_rank()
            )
        )
        engine.step()


def codes(engine):
    """This rank's groups of the parameters "a": {(parameter, key, index of the group in the
    parameter): bytes}.
    """
    from coat_dist.checkpoint.zero_partitions import partitions

    found = {}
    for part in partitions(engine.optimizer):
        for f in part.fragments:
            name = engine.param_names[f.param]
            if name.startswith("a_"):
                assert f.first % 128 == f.start % 128 == f.numel % 128 == 0, (name, f)
                for key, value in engine.optimizer.optimizer.state[part.flat].items():
                    if key.startswith("coat_") and isinstance(value, torch.Tensor):
                        for i in range(f.numel // 128):
                            found[name, key, f.first // 128 + i] = value[f.start // 128 + i].clone()
    return found


def start(tp):
    from megatron_patches import MPUAdapter, initialize_model_parallel

    initialize_model_parallel(tp)
    return MPUAdapter()


def save_all(rank, world, tp, stages, folder):
    """Each stage trains two steps, saves and goes on. Contents and codes as saved; bytes go to a
    file of the rank.
    """
    mpu, found = start(tp), {}
    for stage in stages:
        name = f"z{stage}d{world // tp}t{tp}"
        engine = build(stage, mpu)
        engine.module.seen.add_(torch.tensor([stage, world, tp]))
        train(engine, mpu, 0, 2)
        engine.save_checkpoint(folder, tag=name)
        found[name], at_save = (contents(engine), codes(engine)), snapshot(engine)
        train(engine, mpu, 2, 4)
        torch.save((at_save, snapshot(engine)), f"{folder}/{name}-{rank}.pt")
    return mpu.get_tensor_model_parallel_rank(), found


def resume(engine, mpu, folder, name, rank):
    """What differs from the run that saved this layout: of what was loaded, and after two steps
    more.
    """
    at_save, later = torch.load(f"{folder}/{name}-{rank}.pt", weights_only=False)
    engine.load_checkpoint(folder, tag=name)
    wrong = differences(at_save, snapshot(engine))
    train(engine, mpu, 2, 4)
    return wrong + differences(later, snapshot(engine))


def load_all(rank, world, tp, pairs, folder):
    """New engines load what layouts have saved, converted and as it is; what is wrong by
    (source, target, way).
    """
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    mpu, found = start(tp), {}
    truth = torch.load(f"{folder}/truth.pt", weights_only=False)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    for target in dict.fromkeys(b for _, b in pairs):
        engine = build(LAYOUTS[target][0], mpu)
        train(engine, mpu, 7, 8)  # state that loading has to replace
        found[target] = resume(engine, mpu, folder, target, rank)
        for source in [a for a, b in pairs if b == target]:
            wanted = {k: v for k, v in truth[source][0].items()}
            for kind in ("fp32", "first", "second", "weights"):
                wanted[kind] = {n: cut(n, whole, tp_rank, tp) for n, whole in wanted[kind].items()}
            before = snapshot(engine)
            engine._config.load_universal_checkpoint = False
            try:
                engine.load_checkpoint(folder, tag=source)
                wrong = unequal(contents(engine), wanted, exact=True)
                found[source, target, "as it is"] = f"wrong: {wrong}" if wrong else "loaded"
            except ValueError as error:
                assert isinstance(error, CheckpointError) and isinstance(
                    error, ZeRORuntimeException
                )
                changed = differences(before, snapshot(engine))
                found[source, target, "as it is"] = f"changed {changed}" if changed else str(error)
            engine._config.load_universal_checkpoint = True
            engine.load_checkpoint(f"{folder}/universal", tag=source)
            wrong = unequal(contents(engine), wanted) + wrong_codes(engine, wanted)
            if LAYOUTS[source][2] == tp:
                there = truth[source][1][tp_rank]
                wrong += [
                    f"codes {key}"
                    for key, row in codes(engine).items()
                    if not torch.equal(row, there[key])
                ]
            found[source, target, "converted"] = wrong
        train(engine, mpu, 7, 8)
        if contents(engine)["steps"] != [3]:
            found[source, target, "converted"].append("steps")
    return found


def unequal(found, wanted, exact=False):
    """Names of what is not equal to the bit and has to be: FP8 moments only if ``exact``."""
    wrong = [] if found["steps"] == wanted["steps"] else ["steps"]
    for kind in ("fp32", "weights", "first", "second"):
        names = wanted[kind] if exact or kind in ("fp32", "weights") else ["vector"]
        wrong += [f"{kind} {n}" for n in names if not torch.equal(found[kind][n], wanted[kind][n])]
    return wrong


def joined(ranks, name, tp):
    """Contents of a layout, whole, and codes by tensor-parallel rank, of what its ranks have
    returned.
    """
    local = [next(found[name][0] for r, found in ranks if r == t) for t in range(tp)]
    whole = {"steps": local[0]["steps"]}
    for kind in ("fp32", "first", "second", "weights"):
        pieces = {n: [one[kind][n] for one in local] for n in local[0][kind]}
        dims = {n: SHAPES.get(n, (None, None))[1] for n in pieces}
        whole[kind] = {
            n: p[0] if dims[n] is None else torch.cat(p, dims[n]) for n, p in pieces.items()
        }
    return whole, [
        {k: v for r, found in ranks if r == t for k, v in found[name][1].items()} for t in range(tp)
    ]


def by_processes(layouts):
    """Layouts by what their processes have in common: {(DP, TP): [names]}."""
    found = {}
    for name in sorted(set(layouts), key=list(LAYOUTS).index):
        found.setdefault(LAYOUTS[name][1:], []).append(name)
    return found


@pytest.fixture(scope="module")
def matrix(request, tmp_path_factory):
    """What each chosen layout's resuming, and each chosen pair of layouts, came to, on every
    rank.
    """
    from coat_dist import convert_to_universal

    folder = tmp_path_factory.mktemp("matrix")
    chosen = [
        item.callspec.params for item in request.session.items if item.module is request.module
    ]
    pairs = {(p["source"], p["target"]) for p in chosen if "source" in p} | {
        (p["layout"],) * 2 for p in chosen if "layout" in p
    }
    truth, outcomes = {}, {}
    for (dp, tp), names in by_processes(x for pair in pairs for x in pair).items():
        ranks = run_ranks(dp * tp, save_all, tp, [LAYOUTS[x][0] for x in names], str(folder))
        for name in names:
            truth[name] = joined(ranks, name, tp)
            convert_to_universal(folder / name, folder / "universal" / name)
    torch.save(truth, folder / "truth.pt")
    for (dp, tp), names in by_processes(target for _, target in pairs).items():
        for found in run_ranks(
            dp * tp, load_all, tp, [p for p in PAIRS if p in pairs and p[1] in names], str(folder)
        ):
            for key, outcome in found.items():
                outcomes.setdefault(key, []).append(outcome)
    return outcomes


@each_layout
def test_the_same_layout_resumes_to_the_bit(matrix, layout):
    assert matrix[layout] == [[]] * (LAYOUTS[layout][1] * LAYOUTS[layout][2])


@each_pair
def test_reshard(matrix, source, target):
    outcomes = matrix[source, target, "converted"]
    assert outcomes == [[]] * (LAYOUTS[target][1] * LAYOUTS[target][2])


@each_pair
def test_without_conversion_loaded_to_the_bit_or_refused_by_name(matrix, source, target):
    (stage, dp, tp), (to_stage, to_dp, to_tp) = LAYOUTS[source], LAYOUTS[target]
    lines = {
        f"zero_optimization.stage: checkpoint has {stage}, this run has {to_stage}": (stage == 3)
        != (to_stage == 3),
        f"data-parallel size: checkpoint has {dp}, this run has {to_dp}": dp != to_dp,
        f"tensor-parallel size: checkpoint has {tp}, this run has {to_tp}": tp != to_tp,
    }
    for outcome in matrix[source, target, "as it is"]:
        if any(lines.values()):
            assert [line in outcome for line in lines] == list(
                lines.values()
            ) and "to_universal" in outcome
        else:
            assert outcome == "loaded"
