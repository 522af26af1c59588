"""CoatAdamW inside Megatron's distributed optimizer, on two data-parallel ranks (gloo), without DeepSpeed."""

from __future__ import annotations

import multiprocessing
from contextlib import contextmanager

import pytest
import torch

from coat_dist.config import CoatConfigError
from coat_dist.config import OptimizerConfig as Moments
from megatron_patches.compat import older_than
from tests.support import run_ranks

STEPS, SAVED_AFTER = 6, 3
FORMATS = ["torch", "dp_zero_gather_scatter"]
FORMATS += ["fully_sharded_model_space"] if older_than("0.15") else ["fully_reshardable", "dp_reshardable"]


class Run:
    """A patched GPT in Megatron's own loop; ``coat`` None: Megatron's AdamW."""

    def __init__(self, coat=None, **options):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        import megatron_patches as mp
        from tests.megatron_patches.tiny import tiny_gpt

        model = tiny_gpt()
        mp.patch_model(model, {"coat": {}})
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.model = DistributedDataParallel(model.config, ddp, model)
        settings = dict(optimizer="adam", lr=3e-3, min_lr=0.0, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0)
        settings |= dict(bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True)
        config = OptimizerConfig(**settings | options)
        if coat is None:
            self.optimizer = get_megatron_optimizer(config, [self.model])
        else:
            self.optimizer = mp.get_megatron_optimizer(config, [self.model], coat=coat)

    def train(self, steps):
        import torch.distributed as dist
        from megatron.core.distributed import finalize_model_grads

        from tests.megatron_patches.tiny import tiny_batch

        losses = []
        for step in steps:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            tokens, labels, positions = tiny_batch(2 * step + dist.get_rank())
            loss = self.model(tokens, positions, None, labels=labels).mean()
            loss.backward()
            finalize_model_grads([self.model])
            assert self.optimizer.step()[0]
            losses.append(loss.item())
        return losses

    def inner(self):
        return self.optimizer.chained_optimizers[0].optimizer

    def bytes(self):
        """Everything that the next steps depend on, on this rank."""
        states = [self.inner().state[p] for group in self.inner().param_groups for p in group["params"]]
        shards = [p.detach().clone() for group in self.inner().param_groups for p in group["params"]]
        weights = [p.detach().clone() for p in self.model.parameters()]
        return shards, weights, [{k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()} for s in states]

    def save(self, folder, kind):
        import torch.distributed as dist
        from megatron.core import dist_checkpointing

        rank = dist.get_rank()
        if rank == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        if kind == "torch":
            whole = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(whole, folder / f"model_{rank}.pt")
            self.optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
        else:
            dist_checkpointing.save(self._places(kind, False), str(folder))
        dist.barrier()

    def load(self, folder, kind, **metadata):
        import torch.distributed as dist
        from megatron.core import dist_checkpointing

        if kind == "torch":
            loaded = torch.load(folder / f"model_{dist.get_rank()}.pt", weights_only=False)
        else:
            loaded = dist_checkpointing.load(self._places(kind, True, **metadata), str(folder))
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        if kind == "torch":
            self.optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))

    def _places(self, kind, loading, **metadata):
        weights = self.model.module.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": kind, **metadata}
        options = {"sharding_type": kind} if older_than("0.15") else {}
        return {
            "model": weights,
            "optimizer": self.optimizer.sharded_state_dict(weights, loading, metadata=metadata, **options),
        }


def _same(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right


@contextmanager
def _with_a_child_process():
    """Megatron's dist_checkpointing starts a process and leaves it: daemons may not, and tests leave none."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    process = multiprocessing.current_process()
    process._config["daemon"] = False
    try:
        yield
    finally:
        if (queue := filesystem_async._results_queue) is not None:
            queue._manager.shutdown()


def _train_and_resume(rank, world, folder):
    with _with_a_child_process():
        return _runs(folder)


def _runs(folder):
    import warnings

    from megatron_patches import initialize_model_parallel

    initialize_model_parallel(1)
    adamw = Run().train(range(STEPS))
    plain = Run()
    run = Run({"coat": {"optimizer": {"stochastic_rounding": True}}})
    first = run.train(range(SAVED_AFTER))
    plain.train(range(1))  # without Transformer Engine Megatron saves and loads AdamW only after a step
    saved = run.bytes()
    for kind in FORMATS:
        run.save(folder / kind, kind)
    rest = run.train(range(SAVED_AFTER, STEPS))
    end = run.bytes()
    resumed = {}
    for kind in FORMATS:
        again = Run({"coat": {"optimizer": {"stochastic_rounding": True}}})
        again.load(folder / kind, kind)
        found = again.bytes()
        resumed[kind] = _same(found, saved), again.train(range(SAVED_AFTER, STEPS)) == rest, _same(again.bytes(), end)
    # Without codes, with other formats, and into Megatron's AdamW: moments in fp32 carry on.
    kind = FORMATS[2]
    anew = Run({"coat": {}})
    anew.load(folder / kind, kind, coat_codes=False)
    other = Run({"coat": {"optimizer": {"first_moment": "int8", "second_moment": "log8"}}})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        other.load(folder / kind, kind)
    said = [str(w.message) for w in warned if "rounded anew" in str(w.message)]
    plain.load(folder / FORMATS[-1], FORMATS[-1])  # the one that torch's AdamW can load: it has a "step"
    carried = [r.train(range(SAVED_AFTER, STEPS)) for r in (anew, other, plain)]

    inner = run.inner()
    groups = [(g["wd_mult"], g["moments"], {tuple(inner.state[p]) for p in g["params"]}) for g in inner.param_groups]
    coded = [p for g in inner.param_groups if g["moments"] == "fp8" for p in g["params"]]
    held = sum(t.numel() * t.element_size() for p in coded for t in inner.state[p].values() if torch.is_tensor(t))
    counts = held, sum(p.numel() for p in coded), sum(p.numel() for p in run.model.parameters() if p.dim() > 1)
    return dict(
        adamw=adamw, losses=first + rest, resumed=resumed, carried=carried, said=said, groups=groups, counts=counts
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_ranks(2, _train_and_resume, tmp_path_factory.mktemp("megatron"))


def test_losses_follow_adamw(runs):
    for run in runs:
        assert run["losses"] != run["adamw"]
        assert run["losses"] == pytest.approx(run["adamw"], rel=0.02) and run["losses"][-1] < run["losses"][0]


def test_moments_are_fp8_and_sharded(runs):
    """Both ranks together hold each weight's moments once, in little more than two bytes; vectors keep fp32."""
    for run in runs:
        assert {(wd, kind) for wd, kind, _ in run["groups"]} == {(1.0, "fp8"), (0.0, "fp32")}
        assert all("exp_avg" not in keys for _, kind, states in run["groups"] for keys in states if kind == "fp8")
    held, mine, whole = (sum(run["counts"][i] for run in runs) for i in range(3))
    assert mine == whole // 2 and 2.0 < held / mine < 2.1


@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_resumes_to_the_bit(runs, kind):
    for run in runs:
        assert run["resumed"][kind] == (True, True, True)


def test_moments_without_their_codes_carry_on(runs):
    for run in runs:
        for losses in run["carried"]:
            assert losses != run["losses"][SAVED_AFTER:]
            assert losses == pytest.approx(run["losses"][SAVED_AFTER:], rel=0.02)
        assert len(run["said"]) == 1


@pytest.mark.parametrize(
    ("coat", "options", "said"),
    [
        ({"coat": {}}, {"optimizer": "sgd"}, "optimizer: got 'sgd', accepted with CoatAdamW: 'adam'"),
        ({"coat": {}}, {"use_distributed_optimizer": False}, "use_distributed_optimizer: got False"),
        ({"coat": {}}, {"optimizer": "CoatAdamW"}, "optimizer: got 'CoatAdamW', accepted with CoatAdamW: 'adam'"),
        (
            {"coat": {"activation": {"enabled": False}}},
            {},
            "coat.activation.enabled: got false for a model that is pat",
        ),
        ({"optimizer": {}}, {}, 'coat: got a dict without a "coat" block'),
        (Moments(master_weights="bf16_remainder"), {}, "coat.optimizer.master_weights"),
    ],
)
def test_what_is_refused(coat, options, said):
    with pytest.raises(CoatConfigError) as caught:
        Run(coat, **options)
    assert said in str(caught.value)
