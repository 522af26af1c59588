"""``activation.cuda_graphs``: the bits of the same layers without graphs, whatever a program does between calls."""

from __future__ import annotations

import warnings

import pytest
import torch

from coat_dist.config import ActivationConfig
from coat_dist.flow import graph_pool
from tests.support import megatron_on_one_rank, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GRAPHS = ActivationConfig(cuda_graphs=True)


@pytest.fixture(autouse=True)
def one_rank():
    with megatron_on_one_rank():
        yield


@pytest.fixture
def models():
    """Two models with equal weights, patched: without and with graphs; and an input."""
    return pair()


def pair(settings: ActivationConfig = GRAPHS, **changes):
    from megatron_patches import patch_model
    from tests.megatron_patches.tiny import tiny_gpt

    plain, graphed = (tiny_gpt(num_layers=3, **changes) for _ in range(2))
    patch_model(plain, settings.model_copy(update={"cuda_graphs": False}))
    patch_model(graphed, settings)
    return plain, graphed


def batch(seed: int):
    from tests.megatron_patches.tiny import tiny_batch

    return tiny_batch(seed, "cuda")


def loss_of(model, seed: int) -> torch.Tensor:
    from tests.megatron_patches.tiny import tiny_loss

    return tiny_loss(model, batch(seed))


def captured(model) -> list[int]:
    return [layer.coat.graphs.captured for layer in model.decoder.layers]


def gradients(model) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def same(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def train(model, steps: int, seed: int = 0) -> list[float]:
    """Losses of steps of two micro-batches, evaluated in between."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(seed, seed + steps):
        for half in range(2):
            loss = loss_of(model, 2 * step + half)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(loss_of(model, 1000 + step).item())
    return losses


@pytest.mark.parametrize(
    "settings",
    [GRAPHS, ActivationConfig(cuda_graphs=True, forward_scales="tensor", attention="fp8", saved_format="e4m3")],
)
@pytest.mark.parametrize("changes", [{}, {"add_bias_linear": True, "qk_layernorm": True}])
def test_training_is_the_same_to_the_bit(settings, changes):
    plain, graphed = pair(settings, **changes)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*cuda_graphs.*")
        assert train(plain, 5) == train(graphed, 5)
    assert captured(graphed) == [1, 1, 1]
    assert same(plain.parameters(), graphed.parameters())


def test_norms_after_the_blocks():
    from tests.megatron_patches.tiny import OLMO2

    plain, graphed = pair(**OLMO2)
    assert train(plain, 4) == train(graphed, 4)
    assert captured(graphed) == [1, 1, 1]


def test_frozen_parameters(models):
    for model in models:
        for layer in list(model.decoder.layers)[:2]:
            layer.requires_grad_(False)
        model.embedding.requires_grad_(False)
    losses = []
    for model in models:
        losses.append([])
        for step in range(4):
            loss = loss_of(model, step)
            loss.backward()
            losses[-1].append(loss.item())
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= p.grad
                        p.grad = None
    assert losses[0] == losses[1]
    assert captured(models[1]) == [0, 0, 1]


def test_tensors_belong_to_the_program(models):
    """Outputs and gradients stay what they are when the layers run again."""
    _, model = models
    layer = model.decoder.layers[0]
    rope = model.rotary_pos_emb(32)

    def call():
        x = torch.randn(32, 2, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y, _ = layer(hidden_states=x, attention_mask=None, rotary_pos_emb=rope)
        return x, y, torch.autograd.grad(y, [x, *layer.parameters()], torch.randn_like(y))

    for _ in range(2):
        call()
    x, y, grads = call()
    kept = [t.detach().clone() for t in (x, y, *grads)]
    call()
    assert captured(model)[0] == 1
    assert same(kept, [x, y, *grads])


def test_a_gradient_that_stays_grows(models):
    """``.grad`` over three backward passes, without zero_grad."""
    for model in models:
        for seed in range(5):
            if seed == 2:
                model.zero_grad()
            loss_of(model, seed).backward()
    assert same(*(gradients(model) for model in models))


def test_two_passes_in_flight(models):
    """The second one runs without graphs, as both have saved something."""
    plain, graphed = models
    train(graphed, 2), train(plain, 2)
    for order in ((0, 1), (1, 0)):
        results = []
        for model in models:
            model.zero_grad()
            losses = [loss_of(model, 50), loss_of(model, 51)]
            for i in order:
                losses[i].backward()
            results.append(gradients(model))
        assert same(*results)
    train(graphed, 1), train(plain, 1)
    assert same(plain.parameters(), graphed.parameters())


def test_passes_without_backward(models):
    """A loss that is kept while others go their way, and one that is dropped."""
    plain, graphed = models
    train(graphed, 2), train(plain, 2)
    for model in models:
        kept = loss_of(model, 7)
        loss_of(model, 8)
        loss_of(model, 9).backward()
        kept.backward()
        loss_of(model, 10).backward()
    assert same(*(gradients(model) for model in models))


def test_no_second_backward(models):
    _, graphed = models
    train(graphed, 2)
    loss = loss_of(graphed, 3)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"activation.cuda_graphs: a layer's backward ran twice"):
        loss.backward()
    assert train(graphed, 1)


def test_backward_in_another_order(models):
    """Two losses of the same layers: the first layer's backward runs before the last one's. Never other numbers."""
    _, model = models
    rope, layers = model.rotary_pos_emb(32), list(model.decoder.layers)

    def call():
        x = torch.randn(32, 2, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        first = layers[0](hidden_states=x, attention_mask=None, rotary_pos_emb=rope)[0]
        return first, layers[1](
            hidden_states=first.detach().requires_grad_(), attention_mask=None, rotary_pos_emb=rope
        )[0]

    for _ in range(3):
        first, second = call()
        second.sum().backward()
        first.sum().backward()
    first, second = call()
    assert captured(model)[:2] == [1, 1]
    first.sum().backward()
    with pytest.raises(RuntimeError, match="overwritten"):
        second.sum().backward()


def test_parameters_that_move(models):
    for model in models:
        train(model, 2)
        for p in model.parameters():
            p.data = p.data * 1.5
    heals(models)


def test_shapes_in_turn(models):
    """Each has graphs of its own, in the same memory."""
    found = []
    for model in models:
        rope = {s: model.rotary_pos_emb(s) for s in (16, 32, 64)}
        torch.manual_seed(0)
        found.append([])
        for i in range(12):
            s = (16, 32, 64)[i % 3]
            x = y = torch.randn(s, 2, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for layer in model.decoder.layers:
                y, _ = layer(hidden_states=y, attention_mask=None, rotary_pos_emb=rope[s])
            grads = torch.autograd.grad(y, [x, *model.decoder.layers.parameters()], torch.randn_like(y))
            found[-1] += [y.detach(), *grads]
    assert same(*found)
    assert captured(models[1]) == [3, 3, 3]


def test_hooks_are_called(models):
    """Of parameters once; of modules in a layer, which then runs without graphs."""
    calls = []
    for model in models:
        train(model, 2)
        calls.append([])
        layer = model.decoder.layers[1]
        layer.mlp.linear_fc1.weight.register_hook(lambda grad, mine=calls[-1]: mine.append(grad.clone()))
        loss_of(model, 5).backward()
        layer.self_attention.register_forward_hook(lambda *_, mine=calls[-1]: mine.append(torch.zeros(1)))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            loss_of(model, 6).backward()
    assert any("layer.self_attention has a hook" in str(one.message) for one in found)
    assert len(calls[0]) == 3 and same(*calls)


def test_memory_is_used_again():
    """A layer more takes what it saves: not its input, output and gradients."""
    from coat_dist.flow.graph_pool import pool_bytes
    from megatron_patches import patch_model
    from tests.gpu.test_megatron import BATCH, SEQ, SHAPE, _loss, _model

    sizes = []
    for layers in (4, 12):
        model = _model(layers=layers)
        patch_model(model, GRAPHS)
        for _ in range(3):
            _loss(model).backward()
        assert captured(model) == [1] * layers
        sizes.append(pool_bytes(torch.device("cuda", 0)))
        del model
    h, f = SHAPE["hidden_size"], SHAPE["ffn_hidden_size"]
    planned = BATCH * SEQ * (2 * (h + h // 32 + 4) + 4 * 2 * h + 4 * SHAPE["num_attention_heads"] + 2 * f + 2 * f // 32)
    assert planned < (sizes[1] - sizes[0]) / 8 < 1.15 * planned, sizes


def test_hooks_of_saved_tensors(models):
    """Offloading, for one: graphs save nothing that it could take, so they are neither made nor used."""
    plain, graphed = models
    for model in models:
        with torch.autograd.graph.save_on_cpu(), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for seed in range(3):
                loss_of(model, seed).backward()
        assert any("hooks of saved tensors" in str(one.message) for one in found) == (model is graphed)
    assert captured(graphed) == [0, 0, 0]
    for model in models:
        for seed in range(3):
            loss_of(model, seed).backward()
    assert captured(graphed) == [1, 1, 1]
    assert same(*(gradients(model) for model in models))


def recorded() -> int:
    """How many graphs were ever captured in this process."""
    return sum(pool._recorded for pool in graph_pool._pools.values())


def heals(models) -> None:
    """Training is the same, all layers have graphs after a while, and no more are made."""
    assert train(models[0], 4, seed=40) == train(models[1], 4, seed=40)
    before = recorded()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*cuda_graphs.*")
        assert train(models[0], 2, seed=50) == train(models[1], 2, seed=50)
    assert recorded() == before and min(captured(models[1])) > 0
    assert same(models[0].parameters(), models[1].parameters())


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_an_exception_between_layers(models, when):
    for model in models:
        for seed in range(when):
            loss_of(model, seed).backward()
        layer = model.decoder.layers[1]
        whole = layer.forward

        def fails(*args, **kwargs):
            raise OSError("in the middle")

        layer.forward = fails
        with pytest.raises(OSError, match="in the middle"):
            loss_of(model, 9)
        layer.forward = whole
        del layer.forward
        model.zero_grad()
    heals(models)


def test_parameters_of_one_layer_that_move(models):
    for model in models:
        train(model, 2)
        for p in model.decoder.layers[1].parameters():
            p.data = p.data * 1.5
    heals(models)


def test_parameters_that_always_move(models):
    """Captured some times, then no more; always the right numbers."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for model in models:
            for seed in range(50):
                loss_of(model, seed).backward()
                for p in model.parameters():
                    p.data = p.data * 1.001
    assert any("was captured 32 times" in str(one.message) for one in found)
    assert same(*(gradients(model) for model in models))


def test_a_parameter_that_changes_before_backward(models):
    for model in models:
        train(model, 2)
        loss = loss_of(model, 1)
        with torch.no_grad():
            model.decoder.layers[2].mlp.linear_fc1.weight.add_(0.1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_parameter_that_moves_before_backward(models):
    _, model = models
    train(model, 2)
    loss = loss_of(model, 1)
    weight = model.decoder.layers[2].mlp.linear_fc1.weight
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match="activation.cuda_graphs: parameters of a layer moved"):
        loss.backward()


def test_deterministic_algorithms(models):
    """Torch fills new memory with NaN then."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        heals(models)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_norm_and_a_parameter_in_two_places():
    from megatron_patches import patch_model
    from tests.megatron_patches.tiny import tiny_gpt

    models = []
    for settings in (ActivationConfig(), GRAPHS):
        model = tiny_gpt(num_layers=2)
        first, second = model.decoder.layers
        first.pre_mlp_layernorm = first.input_layernorm
        second.pre_mlp_layernorm.weight = second.input_layernorm.weight
        patch_model(model, settings)
        models.append(model)
    heals(models)
    first, second = models[1].decoder.layers
    assert first.pre_mlp_layernorm is first.input_layernorm
    assert second.pre_mlp_layernorm.weight is second.input_layernorm.weight


def test_evaluation_mode_with_gradients(models):
    for model in models:
        model.eval()
    heals(models)


def test_hooks_on_all_modules(models):
    calls = []
    for model in models:
        train(model, 2)
        calls.append([])
        handle = torch.nn.modules.module.register_module_forward_hook(lambda m, *_, mine=calls[-1]: mine.append(m))
        loss_of(model, 5).backward()
        handle.remove()
    assert len(calls[0]) == len(calls[1]) > 20
    heals(models)


def test_more_shapes_than_are_kept(models):
    """The last one of a warm-up of sequences gets its graphs."""
    found = []
    for model in models:
        found.append([])
        torch.manual_seed(0)
        for s in (8, 16, 24, 32, 40, 48):
            rope = model.rotary_pos_emb(s)
            for _ in range(3):
                x = y = torch.randn(s, 2, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for layer in model.decoder.layers:
                    y, _ = layer(hidden_states=y, attention_mask=None, rotary_pos_emb=rope)
                grads = torch.autograd.grad(y, [x, *model.decoder.layers.parameters()], torch.randn_like(y))
                found[-1] += [y.detach(), *grads]
    assert same(*found)
    assert captured(models[1]) == [4, 4, 4]


def test_a_rotary_embedding_of_its_own_at_each_call(models):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for model in models:
            for _ in range(40):
                x = torch.randn(32, 2, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                rope = model.rotary_pos_emb(32).clone()
                y, _ = model.decoder.layers[0](hidden_states=x, attention_mask=None, rotary_pos_emb=rope)
                y.sum().backward()
    assert any("rotary embeddings of their own" in str(one.message) for one in found)
    assert captured(models[1])[0] == 0


def test_streams_have_pools_of_their_own(models):
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    for model in models:
        found.append([])
        for step in range(4):
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    model.zero_grad()
                    loss_of(model, step).backward()
                    found[-1] += gradients(model)
                torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert same(*found)
    assert captured(models[1]) == [2, 2, 2]


def _fully_sharded(rank, world, parts):
    from torch.distributed.fsdp import fully_shard

    import megatron_patches

    megatron_patches.initialize_model_parallel(1)
    found = []
    for model in pair():
        for layer in model.decoder.layers if parts else ():
            fully_shard(layer)
        fully_shard(model)
        found.append([])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in range(6):
                loss = loss_of(model, seed)
                loss.backward()
                found[-1].append(loss.item())
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                        p.grad = None
    return found


@pytest.mark.parametrize("parts", [True, False])
def test_fully_shard_runs_as_it_is_or_says_why_not(parts):
    try:
        ((plain, graphed),) = run_ranks(1, _fully_sharded, parts, backend="nccl")
    except Exception as problem:
        assert not parts and "activation.cuda_graphs: parameters of a layer moved" in str(problem)
    else:
        assert plain == graphed


def test_unfreezing_a_layer(models):
    """Its graphs cannot be made beside those of the layers below; nothing is overwritten."""
    losses = []
    for model in models:
        model.decoder.layers[1].requires_grad_(False)
        losses.append(train(model, 3))
        model.decoder.layers[1].requires_grad_(True)
        losses[-1] += train(model, 4)
    assert losses[0] == losses[1]
    heals(models)


def test_a_backward_that_was_not_wanted_at_first(models):
    """The loss of some steps reads the first layer alone, whose backward is captured before the second one's."""
    found = []
    for model in models:
        rope, layers = model.rotary_pos_emb(32), list(model.decoder.layers)[:2]
        torch.manual_seed(0)
        found.append([])
        for step in range(6):
            x = torch.randn(32, 2, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            first = layers[0](hidden_states=x, attention_mask=None, rotary_pos_emb=rope)[0]
            last = layers[1](hidden_states=first, attention_mask=None, rotary_pos_emb=rope)[0]
            out = first if step in (1, 2) else last
            del last, first
            parameters = layers[0].parameters() if step in (1, 2) else [p for one in layers for p in one.parameters()]
            found[-1] += torch.autograd.grad(out, [x, *parameters], torch.randn_like(out))
            del out
    assert same(*found)


def test_losses_of_parts(models):
    """Of two layers that no gradient connects, first the one, then the other, then both: a backward that is captured
    while the layer below waits for none may not take that one's memory."""
    found = []
    for model in models:
        rope, (lower, upper) = model.rotary_pos_emb(32), list(model.decoder.layers)[:2]
        torch.manual_seed(0)
        found.append([])
        for part in (*["lower"] * 3, *["upper"] * 2, *["both"] * 4):
            x = torch.randn(32, 2, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            first = lower(hidden_states=x, attention_mask=None, rotary_pos_emb=rope)[0]
            second = upper(hidden_states=first.detach(), attention_mask=None, rotary_pos_emb=rope)[0]
            losses = {"lower": first.float().sin().sum(), "upper": second.float().sin().sum()}
            del first, second
            loss = losses["lower"] + losses["upper"] if part == "both" else losses[part]
            del losses
            model.zero_grad()
            loss.backward()
            found[-1] += [p.grad.clone() for layer in (lower, upper) for p in layer.parameters() if p.grad is not None]
    assert same(*found)


@pytest.mark.parametrize("when", [1, 2, 3])
def test_an_optimizer_step_between_a_forward_and_the_next(models, when):
    """The loss of a call is dropped, perhaps of the one that captures; weights change; training goes on."""
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(4):
            loss = loss_of(model, seed)
            if seed != when:
                loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    heals(models)


def _not_captured(rank, world):
    from coat_dist.flow.cuda_graphs import GraphedFunction

    weight = torch.ones((), device="cuda", requires_grad=True)
    graphs = GraphedFunction()
    for _ in range(2):
        x = torch.ones(8, device="cuda", requires_grad=True)
        graphs(lambda x, p: x * p[0] * x.abs().max().item(), x, (weight,)).sum().backward()


def test_what_cannot_be_captured_is_an_error():
    with pytest.raises(Exception, match="activation.cuda_graphs: got true, accepted: false, as a layer could not be"):
        run_ranks(1, _not_captured, backend="nccl")


def test_a_pool_outlives_its_graphs():
    """Torch forgets a pool with its last graph."""
    from coat_dist.flow.cuda_graphs import GraphedFunction

    for _ in range(3):
        weight, graphs = torch.ones((), device="cuda", requires_grad=True), GraphedFunction()
        for _ in range(3):
            x = torch.ones(8, device="cuda", requires_grad=True)
            graphs(lambda x, p: x * p[0], x, (weight,)).sum().backward()
        assert weight.grad.item() == 24 and graphs.captured == 1
        del graphs


def test_unpatched_models(models):
    from megatron_patches import unpatch_model

    plain, graphed = models
    train(graphed, 2), train(plain, 2)
    unpatch_model(graphed), unpatch_model(plain)
    assert loss_of(graphed, 3).item() == loss_of(plain, 3).item()


def _under_deepspeed(rank, world, graphs, stage):
    import megatron_patches
    from tests.megatron_patches.tiny import tiny_gpt

    megatron_patches.initialize_model_parallel(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-3}},
        "coat": {"activation": {"cuda_graphs": graphs}},
    }
    model = tiny_gpt(num_layers=3)
    engine, *_ = megatron_patches.initialize(model=model, config=config)
    losses = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*cuda_graphs.*")
        for step in range(12):
            tokens, labels, positions = batch(step * world + rank)
            loss = engine(tokens, positions, None, labels=labels).mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses, captured(model) if graphs else None


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_under_deepspeed(stage, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    plain, graphed = (run_ranks(world, _under_deepspeed, graphs, stage, backend="nccl") for graphs in (False, True))
    for (losses, _), (expected, _) in zip(graphed, plain, strict=True):
        assert losses == expected
    assert all(count == [1, 1, 1] for _, count in graphed)
