"""The contract of resuming: what a run saves, a run goes on with, to the bit; what does not fit is
refused by name before anything changes.

A row is a pair of engines (``engines.py``) and a way:

* "as it is": DeepSpeed's own files. The same kind of engine has every byte of its state, and two
  steps later still has the bytes of the run that saved. Another kind loads to the bit or refuses.
* "converted": through a universal checkpoint. fp32 weights, fp32 moments, 16-bit weights, steps,
  frozen parameters and buffers have equal bits. FP8 groups decode to the saved moments or are their
  encoding, within its stated error. Where parameters and shards begin on 128-element borders and
  both store moments in the same way, the codes are the same.

Rows that need the same processes share them. Rows marked slow have layouts of more ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from coat_dist.checkpoint.manifest import CheckpointError
from tests.coat_dist.checkpoint.universal_runs import contents, wrong_codes
from tests.coat_dist.deepspeed.zero_runs import differences, snapshot
from tests.contracts.engines import (
    DP,
    KINDS,
    SHAPES,
    STAGES,
    TP,
    build,
    codes,
    cut,
    layout,
    start,
    stepped,
    train,
    unlinked,
)
from tests.support import run_ranks

AS_IT_IS, CONVERTED, SAME = "as it is", "converted", "loaded"
LAYOUT = "stages and numbers of ranks"


class Row(NamedTuple):
    """One case."""

    source: str
    target: str
    way: str
    why: str
    expected: tuple[str, ...] = (SAME,)
    """What loading as it is says: ``SAME``, or lines that the error has."""


LAYOUTS = {layout(s, d, t): (s, d, t) for t in TP for d in DP for s in STAGES}
QUICK = {name for name, (_, d, t) in LAYOUTS.items() if (d, t) in ((1, 1), (4, 1), (1, 2), (2, 2))}


def refusals(source: str, target: str) -> tuple[str, ...]:
    """What an engine of another layout says of DeepSpeed's own files."""
    (stage, dp, tp), (to_stage, to_dp, to_tp) = LAYOUTS[source], LAYOUTS[target]
    lines = []
    if (stage == 3) != (to_stage == 3):  # stages 1 and 2 write the same files
        lines.append(f"zero_optimization.stage: checkpoint has {stage}, this run has {to_stage}")
    if dp != to_dp:
        lines.append(f"data-parallel size: checkpoint has {dp}, this run has {to_dp}")
    if tp != to_tp:
        lines.append(f"tensor-parallel size: checkpoint has {tp}, this run has {to_tp}")
    return (*lines, "to_universal") if lines else (SAME,)


def layouts() -> Iterator[Row]:
    """Every layout into every other one of as many tensor-parallel ranks, or of its stage."""
    for source, (stage, _, tp) in LAYOUTS.items():
        for target, (to_stage, _, to_tp) in LAYOUTS.items():
            if tp == to_tp or stage == to_stage:
                yield Row(source, target, AS_IT_IS, LAYOUT, refusals(source, target))
                yield Row(source, target, CONVERTED, LAYOUT)


def one(kind: str, why: str) -> Row:
    return Row(kind, kind, AS_IT_IS, why)


MOMENT = "normalize of parameter group 0: checkpoint has {}, this run has {}"
GROUPS = "group_size of parameter group 0: checkpoint has 128, this run has 64"
OTHERS = 'optimizer.type: checkpoint has "{}", this run has "{}"'
ROWS = [
    *layouts(),
    one("BF16_Optimizer", "another optimizer class of DeepSpeed"),
    one("round robin", "places of parameters that DeepSpeed records wrongly"),
    one("bf16 sums, overlap, scattered, round robin", "gradients reduced in other ways"),
    one("sub-groups", "several partitions of one parameter group"),
    one("remainders, stage 2", "master weights of two halves"),
    one("remainders, stage 2, round robin", "master weights of two halves, in other places"),
    one("remainders, stage 3", "master weights of two halves"),
    one("remainders, persistent sub-groups", "small parameters that every rank keeps"),
    one("m by itself, stage 2", "first moments that are no ratios"),
    one("stochastic", "noise goes on where it was"),
    one("int8 and log8", "noise, and formats that are not FP8"),
    one("fp32, stage 0", "no ZeRO"),
    one("fp32, stage 2", "parameters that are their own master weights"),
    one("torch's older format", "files that are no zip files"),
    one("the program's CoatAdamW", "no optimizer in the configuration"),
    Row("BF16_Optimizer", "z2d1t1", CONVERTED, "another class, fewer ranks"),
    Row("z3d2t1", "BF16_Optimizer", CONVERTED, "another class and stage"),
    Row("sub-groups", "z3d1t1", CONVERTED, "one partition of several"),
    Row("z1d2t1", "sub-groups", CONVERTED, "several partitions of one"),
    Row("round robin", "z3d2t1", CONVERTED, "parameters in other places"),
    Row("remainders, stage 2", "remainders, stage 3", CONVERTED, "masters keep their lower half"),
    Row("remainders, stage 3", "z1d2t1", CONVERTED, "fp32 master weights of two halves"),
    Row("z1d1t1", "remainders, stage 2", CONVERTED, "two halves of fp32 master weights"),
    Row("AdamW, stage 1", "z3d1t1", CONVERTED, "a BF16 run goes on with FP8 moments"),
    Row("AdamW, stage 3, one rank", "z2d2t1", CONVERTED, "a BF16 run goes on with FP8 moments"),
    Row("z3d1t1", "AdamW, stage 1", CONVERTED, "and back"),
    Row("z2d2t1", "AdamW, stage 3, one rank", CONVERTED, "and back"),
    *(
        Row(source, target, way, "first moments of another meaning", expected)
        for source, target, now in (
            ("m by itself, stage 2", "z2d2t1", True),
            ("z3d2t1", "m by itself, stage 3", False),
        )
        for way, expected in (
            (
                AS_IT_IS,
                (MOMENT.format(json.dumps(not now), json.dumps(now)), "convert_to_universal"),
            ),
            (CONVERTED, (SAME,)),
        )
    ),
    Row("z1d2t1", "groups of 64", AS_IT_IS, "codes of another group size", (GROUPS,)),
    Row("z1d2t1", "groups of 64", CONVERTED, "groups are made anew"),
    Row(
        "AdamW, stage 1",
        "z1d2t1",
        AS_IT_IS,
        "moments of another optimizer",
        (OTHERS.format("another one", "CoatAdamW"),),
    ),
]


def is_slow(row: Row) -> bool:
    of_layouts = {row.source, row.target} <= LAYOUTS.keys() and row.why == LAYOUT
    return of_layouts and not {row.source, row.target} <= QUICK


CASES = [
    pytest.param(
        row,
        id=f"{row.source} to {row.target}, {row.way}: {row.why}",
        marks=pytest.mark.slow if is_slow(row) else (),
    )
    for row in ROWS
]


def save_all(rank, world, tp, names, folder):
    """Each kind trains two steps, saves and goes on. Contents and codes as saved; bytes go to a
    file of the rank.
    """
    mpu, found = start(tp), {}
    for name in names:
        engine = build(KINDS[name], mpu)
        engine.module.seen.add_(torch.tensor([KINDS[name].stage, world, tp]))
        train(engine, mpu, 0, 2)
        engine.save_checkpoint(folder, tag=name)
        if KINDS[name].stage and "bf16" not in KINDS[name].config:
            found[name] = contents(engine), codes(engine)
        elif "remainders" in name:
            found[name] = contents(engine), {}
        at_save = snapshot(engine)
        train(engine, mpu, 2, 4)
        torch.save((at_save, snapshot(engine)), f"{folder}/{name}-{rank}.pt")
        engine.destroy()
    return mpu.get_tensor_model_parallel_rank(), found


def resume(engine, mpu, folder, name, rank):
    """What differs from the run that saved: of what was loaded, and after two steps more."""
    at_save, later = torch.load(f"{folder}/{name}-{rank}.pt", weights_only=False)
    engine.load_checkpoint(folder, tag=name)
    wrong = differences(at_save, snapshot(engine))
    train(engine, mpu, 2, 4)
    return wrong + differences(later, snapshot(engine))


def load_as_it_is(engine, folder, row, wanted):
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    before = snapshot(engine)
    engine._config.load_universal_checkpoint = False
    try:
        engine.load_checkpoint(folder, tag=row.source)
    except ValueError as error:
        assert isinstance(error, CheckpointError) and isinstance(error, ZeRORuntimeException)
        changed = differences(before, snapshot(engine))
        return f"changed {changed}" if changed else str(error)
    wrong = unequal(contents(engine), wanted, exact=True)
    return f"wrong: {wrong}" if wrong else SAME


def load_converted(engine, mpu, folder, row, wanted, there):
    from coat_dist.optim import CoatAdamW

    source, target = KINDS[row.source], KINDS[row.target]
    if source.remainders != target.remainders:  # half-way cases are rounded in another way
        wanted["weights"] |= {n: target.rounded(x) for n, x in wanted["fp32"].items()}
    engine._config.load_universal_checkpoint = True
    scales = hasattr(engine.optimizer, "loss_scaler") and "BF16" not in row.source
    if scales:
        engine.optimizer.loss_scaler.cur_scale = 7.0
    engine.load_checkpoint(f"{folder}/universal", tag=row.source)
    wrong = unlinked(engine)
    ours = isinstance(stepped(engine), CoatAdamW)
    wrong += unequal(contents(engine), wanted, exact=not ours)
    if ours:
        wrong += wrong_codes(engine, wanted)
        for state in stepped(engine).state.values():
            if {"coat_m_q", "exp_avg"} <= state.keys():
                wrong.append("fp32 moments beside codes")
    if scales and engine.optimizer.loss_scaler.cur_scale != 1.0:
        wrong.append("loss scale")
    if source.tp == target.tp and source.coat == target.coat and there:
        for key, row_of_codes in codes(engine).items():
            if not torch.equal(row_of_codes, there[key]):
                wrong.append(f"codes {key}")
    train(engine, mpu, 7, 8)
    if contents(engine)["steps"] != [3]:
        wrong.append("steps")
    return wrong


def load_all(rank, world, tp, rows, folder):
    """New engines load what others have saved; what each row came to."""
    mpu, found = start(tp), {}
    truth = torch.load(f"{folder}/truth.pt", weights_only=False)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    for target in dict.fromkeys(row.target for row in rows):
        engine = build(KINDS[target], mpu)
        for row in [row for row in rows if row.target == target]:
            train(engine, mpu, 7, 8)  # state that loading has to replace
            if row.source == target and row.way == AS_IT_IS:
                engine._config.load_universal_checkpoint = False
                found[row] = resume(engine, mpu, folder, target, rank) or SAME
                continue
            whole, by_tp_rank = truth[row.source]
            wanted = dict(whole)
            for kind in ("fp32", "first", "second", "weights"):
                wanted[kind] = {n: cut(n, value, tp_rank, tp) for n, value in whole[kind].items()}
            if row.way == AS_IT_IS:
                found[row] = load_as_it_is(engine, folder, row, wanted)
            else:
                there = by_tp_rank[tp_rank] if KINDS[row.source].tp == tp else {}
                found[row] = load_converted(engine, mpu, folder, row, wanted, there) or SAME
        engine.destroy()
    return found


def unequal(found, wanted, exact=False):
    """Names of what is not equal to the bit and has to be: FP8 moments only if ``exact``."""
    wrong = [] if found["steps"] == wanted["steps"] else ["steps"]
    for kind in ("fp32", "weights", "first", "second"):
        names = wanted[kind] if exact or kind in ("fp32", "weights") else ["vector"]
        for name in names:
            if not torch.equal(found[kind][name], wanted[kind][name]):
                wrong.append(f"{kind} {name}")
    return wrong


def joined(ranks, name, tp):
    """Contents of a kind, whole, and codes by tensor-parallel rank, of what its ranks have
    returned.
    """
    local = [next(found[name][0] for r, found in ranks if r == t) for t in range(tp)]
    whole = {"steps": local[0]["steps"]}
    for kind in ("fp32", "first", "second", "weights"):
        whole[kind] = {}
        for key in local[0][kind]:
            pieces, dim = [mine[kind][key] for mine in local], SHAPES.get(key, (None, None))[1]
            whole[kind][key] = pieces[0] if dim is None else torch.cat(pieces, dim)
    by_tp_rank = [{} for _ in range(tp)]
    for tp_rank, found in ranks:
        by_tp_rank[tp_rank] |= found[name][1]
    return whole, by_tp_rank


def by_processes(names):
    """Kinds by the processes that they run in: {(DP, TP): [names]}."""
    found = {}
    for name in sorted(set(names), key=list(KINDS).index):
        found.setdefault(KINDS[name].processes, []).append(name)
    return found


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """What each chosen row came to, on every rank."""
    from coat_dist import convert_to_universal

    folder, truth, found = tmp_path_factory.mktemp("resume"), {}, {}
    rows = [i.callspec.params["row"] for i in request.session.items if i.module is request.module]
    converted = {row.source for row in rows if row.way == CONVERTED}
    for (dp, tp), names in by_processes(row.source for row in rows).items():
        ranks = run_ranks(dp * tp, save_all, tp, names, str(folder))
        for name in names:
            if name in ranks[0][1]:
                truth[name] = joined(ranks, name, tp)
            if name in converted:
                convert_to_universal(folder / name, folder / "universal" / name)
    torch.save(truth, folder / "truth.pt")
    for (dp, tp), names in by_processes(row.target for row in rows).items():
        mine = [row for row in rows if row.target in names]
        for of_rank in run_ranks(dp * tp, load_all, tp, mine, str(folder)):
            for row, outcome in of_rank.items():
                found.setdefault(row, []).append(outcome)
    return found


@pytest.mark.parametrize("row", CASES)
def test_a_run_goes_on_to_the_bit_or_is_refused_by_name(outcomes, row):
    for outcome in outcomes[row]:
        if row.expected == (SAME,):
            assert outcome == SAME
        else:
            assert all(line in outcome for line in row.expected), outcome
            if row.why == LAYOUT:  # no line about what is equal
                assert outcome.count("checkpoint has") == len(row.expected) - 1
