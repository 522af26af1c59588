"""Models with experts: descriptions, sizes, refusals, and pretraining with the flow."""

import functools
import itertools
from pathlib import Path
from unittest import mock

import pytest
import torch

from coat_dist import CoatConfigError
from coat_dist.config import ActivationConfig
from launch import pretrain
from launch.model.gpt import build_model, flops_per_token, load_model_config, parameter_count
from launch.model.sizes import parameter_shapes
from launch.train.metrics import read_metrics
from megatron_patches import patch_model
from tests.launch.pretrain_runs import command, configuration, losses, rank_main, run_with
from tests.support import run_ranks

TINY = Path(__file__).parents[3] / "configs" / "models" / "tiny-moe.json"


@pytest.mark.parametrize(
    ("overrides", "routed", "shared"),
    [
        ([], 2, 2),
        (["moe_shared_expert_intermediate_size=null", "moe_layer_freq=2", "num_layers=3"], 2, 0),
        (
            [
                "activation=gelu",
                "moe_router_topk=1",
                "moe_router_pre_softmax=true",
                "moe_ffn_hidden_size=null",
            ],
            2,
            2,
        ),
    ],
)
def test_experts_are_built_counted_and_patched(one_rank, overrides, routed, shared):
    model = load_model_config(TINY, overrides).with_vocab(500)
    built = build_model(model)
    assert sum(p.numel() for p in built.parameters()) == parameter_count(model)
    listed = [name.split(".")[-2] for name in parameter_shapes(model) if ".local_experts." in name]
    assert [fc for fc, _ in itertools.groupby(listed)] == ["linear_fc1", "linear_fc2"] * routed, (
        "grouped: read once"
    )
    report = patch_model(built, ActivationConfig())
    for part, count in (
        ("experts", routed),
        ("shared_experts", shared),
        ("mlp", model.num_layers - routed),
    ):
        assert sum(name.endswith(f".{part}") for name in report.patched) == count, part
    assert len(report.left) == routed and all(name.endswith(".mlp.router") for name in report.left)
    expert = built.decoder.layers[0].mlp.experts.local_experts[0]
    assert expert.linear_fc2.weight.shape[1] == (model.moe_ffn_hidden_size or model.ffn_hidden_size)
    config = built.config
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("aux_loss", 0.01)


def test_operations_are_those_of_the_chosen_experts():
    model = load_model_config(TINY).with_vocab(500)
    idle = (8 - 2) * 3 * 256 * 256 * model.num_layers
    multiplied = (
        parameter_count(model) - idle - model.padded_vocab * 256 - (2 * model.num_layers + 1) * 256
    )
    attention = 3 * 2 * 128 * 256 * model.num_layers
    assert flops_per_token(model, 128) == pytest.approx(6 * multiplied + attention, rel=1e-12)


def test_sizes_that_ranks_cannot_share():
    model = load_model_config(TINY, ["moe_ffn_hidden_size=250"]).with_vocab(500)
    with pytest.raises(
        CoatConfigError,
        match="model.moe_ffn_hidden_size: got 250, accepted: .*\n--sequence-parallel",
    ):
        model.check_parallel(4, False)
    model = load_model_config(TINY, ["moe_grouped_gemm=true"]).with_vocab(500)
    with pytest.raises(
        CoatConfigError,
        match="model.moe_grouped_gemm: got true with --tensor-parallel 2, accepted: f",
    ):
        model.check_parallel(2, True)
    model.check_parallel(1, False)


EXPERTS = ["num_moe_experts=4", "moe_shared_expert_intermediate_size=64", "moe_aux_loss_coeff=0.01"]
WATCHED = (
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "mlp.experts.local_experts.0.linear_fc2.weight",
)


def report_and_gradients(rank, world, argv):
    """How a run ended, what it printed, and gradients of the first layer in the first
    micro-batch.
    """
    printed, grads = [], {}

    def keep(name, grad):
        grads.setdefault(name, grad.float().clone())

    def watch(loop):
        layer = loop.engine.module.decoder.layers[0]
        for name in WATCHED:  # after hooks that sum over ranks
            layer.get_parameter(name).register_hook(functools.partial(keep, name))

    with mock.patch.object(pretrain, "say", printed.append):
        end = run_with(rank, world, argv, watch)
    return end, "\n".join(printed), grads


def test_experts_pretrain(work, tmp_path):
    """A step on two data-parallel ranks, every expert on each, with the flow."""
    config = configuration(tmp_path, 3)
    argv = command(
        work, tmp_path / "run", config, "--model-override", *EXPERTS, "hidden_dropout=0.0", steps=1
    )
    end, printed, _ = run_ranks(2, report_and_gradients, argv)[0]
    assert end.startswith("finished 1 steps")
    assert "  patched  decoder.layers.[0-1].mlp.experts\n" in printed
    assert "  patched  decoder.layers.[0-1].mlp.shared_experts\n" in printed
    assert "  left     decoder.layers.[0-1].mlp.router: routing is not quantized\n" in printed


def test_the_load_balancing_loss_counts_once_a_step(work, tmp_path):
    """Its gradient on the router, as a difference of runs with and without it, is divided by the
    micro-batches.
    """
    grads = {}
    for accumulation in (1, 4):
        for coefficient in (0, 100):
            config = configuration(tmp_path, 2, gradient_accumulation_steps=accumulation)
            more = [*EXPERTS[:-1], f"moe_aux_loss_coeff={coefficient}.0", "hidden_dropout=0.0"]
            argv = command(
                work,
                tmp_path / f"{accumulation}-{coefficient}",
                config,
                "--model-override",
                *more,
                steps=1,
            )
            grads[accumulation, coefficient] = run_ranks(1, report_and_gradients, argv)[0][2][
                "mlp.router.weight"
            ]
    once, quarter = (grads[n, 100] - grads[n, 0] for n in (1, 4))
    assert once.norm() > 10 * grads[1, 0].norm()
    torch.testing.assert_close(4 * quarter, once, rtol=0.05, atol=0.02 * once.abs().max().item())


def router_losses(rank, world, argv):
    """How a run ended, and the mean of each router's losses over steps and micro-batches, by
    their definitions.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    seen = []

    def keep(module, args, kwargs, result):
        if module.training and torch.is_grad_enabled():
            logits = module.gating(args[0].detach()).reshape(-1, 4)
            probabilities, chosen = (
                logits.float().softmax(-1).mean(0),
                result[1].float().mean(0) / 2,
            )
            balance = 4 * (probabilities * chosen).sum()
            seen.append((float(balance), float(logits.logsumexp(-1).square().mean())))

    def watch(loop):
        for module in loop.engine.module.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(keep, with_kwargs=True)

    return run_with(rank, world, argv, watch), seen


@pytest.mark.slow
def test_router_losses_are_logged(work, tmp_path):
    """By their definitions, in the flow; and nearly the same without the block, where hidden
    states are exact.
    """
    model = [
        "--model-override",
        *EXPERTS,
        "hidden_dropout=0.0",
        "moe_z_loss_coeff=0.001",
        "moe_router_dtype=fp32",
    ]
    logged = {}
    for coat in (True, False):
        config = configuration(tmp_path, 2, coat=coat)
        argv = command(work, tmp_path / str(coat), config, *model, steps=1)
        [(end, seen), (_, others)] = run_ranks(2, router_losses, argv)
        assert end.startswith("finished 1 steps") and len(seen) == 2 * 2  # micro-batches, layers
        logged[coat] = [
            (record["load_balancing_loss"], record["router_z_loss"])
            for record in read_metrics(tmp_path / str(coat))
        ]
        torch.testing.assert_close(
            torch.tensor(logged[coat]),
            torch.tensor([*seen, *others]).mean(0)[None],
            rtol=1e-4,
            atol=0,
        )
    assert torch.tensor(logged[True][0]).allclose(torch.tensor(logged[False][0]), rtol=1e-2)


@pytest.mark.slow
def test_tensor_parallel_ranks_with_experts_share_the_tokens(work, tmp_path):
    """Refused without sequence parallelism; with it, losses and the first gradients are one
    rank's but for rounding.
    """
    # Every token to every expert, so that rounding cannot change the routing.
    model = ["--model-override", *EXPERTS, "moe_router_topk=4", "hidden_dropout=0.0"]
    config, runs, gradients = configuration(tmp_path, 2), [], []
    for tp in (1, 2):
        argv = command(work, tmp_path / f"tp{tp}", config, "--tensor-parallel", tp, *model, steps=4)
        if tp > 1:
            assert (
                "--sequence-parallel: got False, accepted: given"
                in run_ranks(tp, rank_main, argv)[0]
            )
            argv.append("--sequence-parallel")
        ranks = run_ranks(tp, report_and_gradients, argv)
        assert all(end.startswith("finished 4 steps") for end, *_ in ranks)
        runs.append(losses(tmp_path / f"tp{tp}"))
        gradients.append([grads for *_, grads in ranks])
    (_, alone, norms, _), (_, together, split_norms, _) = (zip(*run, strict=True) for run in runs)
    assert together == pytest.approx(alone, rel=1e-2) and split_norms[0] == pytest.approx(
        norms[0], rel=1e-2
    )
    (whole,), parts = gradients
    for name in WATCHED:
        shards = [grads[name] for grads in parts]
        split = "experts" in name
        assert split or torch.equal(*shards), name
        got = torch.cat(shards, 1) if split else shards[0]
        assert (got - whole[name]).norm() < 0.2 * whole[name].norm(), name  # up to 0.09 seen
