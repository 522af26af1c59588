"""Updates of reinforcement learning as frameworks make them, in a few lines: verl's actor under
FSDP2, OpenRLHF's under DeepSpeed, with TRL's reference model.
"""

import pytest
import torch

from coat_dist import CoatAdamW
from coat_dist.hf import patch_model
from tests.support import equal, run_ranks
from tests.support.gathers import values

from .test_parallel import config
from .tiny import relative, tiny, tokens

BLOCK = {"activation": {"evaluation": "flow"}}
OF_TRL = ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")


def log_probs(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float().div_(0.7)
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def scored(model, ids):
    """Log-probabilities in eval mode; the model is in training mode afterwards."""
    model.eval()
    with torch.no_grad():
        found = log_probs(model, ids)
    model.train()
    return found


def clipped(ratios):
    """GRPO's loss of rows whose advantages have a mean of zero."""
    advantages = torch.linspace(-1, 1, len(ratios))[:, None]
    return -torch.min(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages).mean()


def cached(model, ids):
    """Logits with a cache, as in generation."""
    from transformers import DynamicCache

    with torch.no_grad():
        return model(input_ids=ids, past_key_values=DynamicCache(), use_cache=True).logits


def verl():
    """The actor, how it is read, and a step of some losses."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = tiny()
    patch_model(model, {"coat": BLOCK})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=policy)
    optimizer = CoatAdamW(model.parameters(), lr=1e-2)

    def backward(loss):
        (loss / 2).backward()

    def step():
        optimizer.step()
        optimizer.zero_grad()

    def read():
        return {name: p.full_tensor() for name, p in model.state_dict().items()}

    return model, read, backward, step


def openrlhf(stage):
    import deepspeed

    given = config(stage, coat=BLOCK, gradient_accumulation_steps=2)
    engine, *_ = deepspeed.initialize(model=tiny(dtype=torch.bfloat16), config=given)
    return engine, lambda: values(engine), engine.backward, engine.step


def reference(stage):
    """TRL's model that is not trained."""
    import deepspeed

    given = config(stage if stage == 3 else 0, coat=BLOCK)
    del given["optimizer"]
    given |= {f"zero_optimization.{key}": 64 for key in OF_TRL}
    return deepspeed.initialize(model=tiny(dtype=torch.bfloat16), config=given)[0]


def updates(rank, world, stage, offloads):
    """Losses of two generations, each with two steps of two micro-batches."""
    model, read, backward, step = openrlhf(stage) if stage else verl()
    untrained = tiny(dtype=next(model.parameters()).dtype)
    assert equal(read(), dict(untrained.named_parameters()))
    rollout, losses = tiny(dtype=torch.bfloat16, seed=1).eval(), []
    for generation in range(2):
        ids = tokens(4, seed=generation)
        rollout.load_state_dict(read())
        if offloads:
            model.offload_states()
        generated = cached(rollout, ids)
        if offloads:
            model.reload_states()
        assert torch.equal(cached(model, ids), generated)
        old = scored(model, ids)
        assert generation or not stage or torch.equal(old, scored(reference(stage), ids))
        for epoch in range(2):
            for rows in ([0, 3], [2, 1]):
                ratios = (log_probs(model, ids[rows]) - old[rows]).exp()
                assert (ratios == 1).all() == (epoch == 0)
                losses.append(clipped(ratios).item())
                backward(clipped(ratios))
                if stage or rows == [2, 1]:
                    step()
    return losses


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_ratios_are_1_until_a_step_and_a_rollout_engine_reads_the_models_weights(stage):
    (losses,) = run_ranks(1, updates, stage, False)
    if stage:
        assert [losses] == run_ranks(1, updates, stage, True)


class Actor(torch.nn.ModuleList):
    """As OpenRLHF's: it also returns the output, with logits."""

    def forward(self, ids):
        out = self[0](input_ids=ids, use_cache=False)
        out["logits"] = out.logits.float()
        return out.logits.div_(0.7)[:, :-1].logsumexp(-1), out


def steps_of_actor(rank, world, loss):
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=Actor([tiny(dtype=torch.bfloat16)]),
        config=config(2, coat={"activation": {"loss": loss}}),
    )
    for _ in range(3):
        found, out = engine(tokens())
        assert loss == "plain" or out.logits.late.made is None
        engine.backward(found.mean())
        engine.step()
    return found.mean().item()


def test_an_actor_that_also_returns_logits():
    found, plain = (run_ranks(1, steps_of_actor, loss)[0] for loss in ("chunked", "plain"))
    assert found == pytest.approx(plain, rel=1e-3)


def test_gradients_of_a_clipped_loss_are_near_those_of_bf16():
    """A quarter of the tokens has a clipped ratio and no gradient, the same in both."""
    found, ids = [], tokens(8)
    noise = 0.3 * torch.randn(8, ids.shape[1] - 1, generator=torch.Generator().manual_seed(0))
    for patched in (False, True):
        model = tiny(dtype=torch.bfloat16)
        if patched:
            patch_model(model, {"coat": BLOCK})
        old = scored(model, ids) + noise
        clipped((log_probs(model, ids) - old).exp()).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert relative(*reversed(found)) < 0.07  # 0.05 without noise
