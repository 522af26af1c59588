"""``torch.compile`` of patched models: no code of the flow is traced, few graphs serve all layers
and lengths, and results are those of an uncompiled model.
"""

import functools

import pytest
import torch
from torch._dynamo.utils import counters

pytest.importorskip("transformers")

from coat_dist.config import ActivationConfig
from coat_dist.hf import patch_model, unpatch_model
from coat_dist.hf.modules import UnfusedNorm

from .tiny import same, step, tiny, tokens

GRAPHS = []
NO_CACHE = {"use_cache": False}


def backend(graph, inputs):
    GRAPHS.append(graph)
    return graph.forward


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """A compiler without compiled code, and without what earlier tests compiled."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.compiler.reset()
    counters.clear()
    GRAPHS.clear()


def compiled(model, way):
    if way == "torch":
        return torch.compile(model)
    modules = model.model.layers if way == "layers" else [model]
    for module in modules:
        module.compile(dynamic=True)
    return model


def check_same(model, ids, plain, **given):
    """To the bit, where norms of both run the model's own code, as they do in graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnfusedNorm, "coat_forward", lambda self, plain, x: plain(self, x))
        (loss, grads), (eager, expected) = (step(m, ids, **given) for m in (model, plain))
    grads = {name.removeprefix("_orig_mod."): grad for name, grad in grads.items()}
    assert torch.equal(loss, eager) and same(grads, expected)


def check_traced():
    """Graphs break at blocks of the flow, and for no other reason."""
    assert all("Skip inlining" in why for why in counters["graph_break"]), counters["graph_break"]
    assert not any("recompile" in why for why in counters["unimplemented"])


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("olmo2", "layers"),
        ("olmo2", "torch"),
        ("llama", "model"),
        ("llama", "torch"),
    ],
)
def test_compiled_models_train_as_others(name, way):
    plain, model = tiny(name), tiny(name)
    for m in (plain, model):
        patch_model(m, ActivationConfig())
    called = compiled(model, way)
    for length in (24, 31):
        check_same(called, tokens(length=length), plain, **NO_CACHE)
    check_traced()
    assert GRAPHS or name == "llama"


@pytest.mark.parametrize("checkpoints", [True, False])
def test_layers_compiled_by_the_block_share_their_graphs(checkpoints):
    """Nine layers: the compiler keeps eight graphs of a code object."""
    settings, models = ActivationConfig(compile=True), []
    for block in (ActivationConfig(), settings):
        models.append(tiny("olmo2", num_hidden_layers=9))
        patch_model(models[-1], block)
        models[-1].gradient_checkpointing_enable({"use_reentrant": checkpoints})
    plain, model = models
    for length in (24, 31):
        check_same(model, tokens(length=length), plain)
    check_traced()
    # With reentrant checkpoints, forward runs without gradients first.
    assert 0 < len(GRAPHS) <= (16 if checkpoints else 8)
    ids = tokens()
    with torch.no_grad():
        texts = [m.eval().generate(ids[:, :5], max_new_tokens=6) for m in models]
    assert torch.equal(*texts)
    unpatch_model(model)
    GRAPHS.clear()
    torch.compiler.reset()
    step(model.train())
    assert not GRAPHS


def test_fifty_lengths_share_their_graphs():
    model = tiny("olmo3")
    patch_model(model, ActivationConfig(compile=True))
    for length in range(12, 62):
        model(tokens(length=length))
        if length == 13:
            first = len(GRAPHS)
    check_traced()
    assert len(GRAPHS) <= 3 * first
    assert any("rsqrt" in graph.code for graph in GRAPHS), "the compiler fuses norms"


def test_own_code_is_compiled_in_one_graph():
    plain, model = tiny("olmo2"), tiny("olmo2")
    patch_model(model, ActivationConfig())
    ids = tokens()
    with torch.no_grad():
        found = torch.compile(model.eval(), fullgraph=True)(ids, **NO_CACHE).logits
        assert torch.equal(found, plain.eval()(ids, **NO_CACHE).logits)
