"""DeepSpeed's ``PipelineModule``: stages with other groups, and weights that two stages hold."""

import pytest
import torch
import torch.distributed as dist

from tests.coat_dist.deepspeed.small_engine import quiet_deepspeed
from tests.support import run_ranks

SIZE = 64


def settings(optimizer="CoatAdamW", sums="bf16", stage=1, **coat):
    not_compiled = {"torch_adam": True} if optimizer == "AdamW" else {}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "data_types": {"grad_accum_dtype": sums},
        "gradient_clipping": 0.1,
        "optimizer": {
            "type": optimizer,
            "params": {"lr": 3e-3, "weight_decay": 0.1} | not_compiled,
        },
        **(
            {"coat": {"activation": {"enabled": False}, "optimizer": coat}}
            if optimizer == "CoatAdamW"
            else {}
        ),
    }


def build(layers, config, **given):
    deepspeed = quiet_deepspeed()
    import coat_dist  # noqa: F401

    deepspeed.init_distributed("gloo")

    torch.manual_seed(3)
    net = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    given = {name: make(net) for name, make in given.items()}
    return deepspeed.initialize(model=net, config=config, **given)[0]


def loss(output, wanted):
    return torch.nn.functional.mse_loss(output.float(), wanted.float())


def train(engine, steps):
    generator = torch.Generator().manual_seed(1)
    batches = (torch.randn(4, SIZE, generator=generator).bfloat16() for _ in iter(int, 1))
    data = ((x, x.roll(1, 1)) for x in batches)
    norms = []
    for _ in range(steps):
        engine.train_batch(data)
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def of_other_groups(rank, world, sums):
    """Norms of a first stage with biases and a second one without, under CoatAdamW, near those
    under AdamW, which has one group everywhere.
    """
    norms = {}
    for optimizer, groups in (("CoatAdamW", 2 - rank), ("AdamW", 1)):
        torch.manual_seed(2)
        linear = [torch.nn.Linear(SIZE, SIZE, bias=with_bias) for with_bias in (True, False, False)]
        engine = build([linear[0], torch.nn.GELU(), *linear[1:]], settings(optimizer, sums))
        norms[optimizer] = train(engine, 3)
        assert len(engine.optimizer.optimizer.param_groups) == groups
        name = "gradient norm of a PipelineModule with other groups on other stages"
        differ = sums == "bf16" and optimizer == "CoatAdamW"
        assert (name in getattr(engine, "coat_attached", ())) == differ
        assert ("scaled_global_norm" in vars(engine.optimizer)) == differ
    ours, plain = norms.values()
    assert ours == pytest.approx(plain, rel=0.02) and ours[0] == pytest.approx(plain[0], rel=1e-5)
    return norms


@pytest.mark.parametrize("sums", ["bf16", "fp32"])
def test_pipeline_module_with_other_groups_on_a_stage(sums):
    first, second = run_ranks(2, of_other_groups, sums)
    assert first == second, "every stage knows the same norm"


def tied_layers(middle=None):
    """The first stage holds the tied weight of the last one, and one more of its size before it;
    the last one a layer besides, without which DeepSpeed's BF16_Optimizer (sums in fp32) finds
    nothing there to make a norm of.
    """
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    tied = TiedLayerSpec("tied", torch.nn.Linear, SIZE, SIZE)
    other = TiedLayerSpec("alone", torch.nn.Linear, SIZE, SIZE)
    return [other, tied, middle or LayerSpec(torch.nn.Linear, SIZE, SIZE), tied]


def of_tied_weights(rank, world, sums, coat, alone):
    engine = build(tied_layers(torch.nn.GELU() if alone else None), settings(sums=sums, **coat))
    groups = [(g["name"], g["moments"]) for g in engine.optimizer.optimizer.param_groups]
    train(engine, 20)
    (weight,) = (
        p for name, p in engine.module.named_parameters() if name == "tied_modules.tied.weight"
    )
    both = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(both, weight.detach())
    return groups, torch.equal(*both)


@pytest.mark.parametrize(
    ("sums", "coat", "alone"), [("fp32", {}, False), ("bf16", {"stochastic_rounding": False}, True)]
)
def test_pipeline_module_keeps_tied_copies_equal(sums, coat, alone):
    (first, same), (last, _) = run_ranks(2, of_tied_weights, sums, coat, alone)
    assert same
    assert first == [("decay/fp8", "fp8"), ("decay/fp8/tied", "fp32"), ("no_decay/fp32", "fp32")]
    assert last == first[alone:], "alone, the last stage has no other matrix"


def of_given_groups(rank, world):
    engine = build(
        tied_layers(),
        settings(),
        model_parameters=lambda net: [{"params": net.parameters(), "lr": 0.5}],
    )
    return [(g["moments"], g["lr"]) for g in engine.optimizer.optimizer.param_groups]


def test_pipeline_module_splits_given_groups_at_tied_weights():
    expected = [("fp8", 0.5), ("fp32", 0.5), ("fp32", 0.5)]
    assert run_ranks(2, of_given_groups) == [expected, expected]
