"""The study of gradients: its estimator finds what was planted, its simulation is the flow, and it writes all rows."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks.accuracy import gradients, gradients_report
from benchmarks.accuracy.bias_noise import Totals, estimates
from benchmarks.accuracy.gradient_variants import ALL, PRECISE, REAL, variants
from benchmarks.accuracy.gradients import MODELS, Gradients, check
from benchmarks.accuracy.roundings import EXACT, GRIDS, GROUP, ROW, TENSOR, Rounding, everywhere, on_grid, rounded_block
from benchmarks.small_gpt import GPT
from coat_dist.formats import E4M3, E5M2
from coat_dist.reference.quantize import amax, dequantize, quantize_groups, quantize_rows, quantize_tensor, tensor_scale

N, BLOCKS, SIZE = 4000, 8, 8


def totals(batches: torch.Tensor, exact: torch.Tensor) -> Totals:
    """Of vectors ``[batches, n]``, in two kinds."""
    found = Totals({"first": slice(0, N // 2), "second": slice(N // 2, N)})
    for i, (vector, truth) in enumerate(zip(batches, exact, strict=True)):
        found.add(vector, truth)
        if i % SIZE == SIZE - 1:
            found.close_block()
    return found


def test_a_planted_bias_is_found_and_noise_alone_has_none():
    generator = torch.Generator().manual_seed(0)
    noise, spread = (torch.randn(BLOCKS * SIZE, N, generator=generator) for _ in range(2))
    mean, bias = torch.randn(N, generator=generator), 0.1 * torch.randn(N, generator=generator)
    bias[N // 2 :] = 0
    exact = mean + spread
    own, differences = totals(exact, exact), totals(noise + bias, exact)
    planted, none = (estimates(differences, own, SIZE)[kind] for kind in ("first", "second"))
    true = bias.square().sum().item()
    naive = (noise + bias).mean(0)[: N // 2].square().sum().item()
    assert abs(planted.bias2 - true) < 3 * planted.bias2_error < true
    assert abs(naive - true) > 3 * planted.bias2_error  # |mean d|^2 alone takes noise for bias
    assert abs(none.bias2) < 3 * none.bias2_error
    for found in (planted, none):
        assert found.noise2 == pytest.approx(N / 2, rel=0.1) and found.spread2 == pytest.approx(N / 2, rel=0.1)
        assert abs(found.gain) < 4 * found.gain_error < 0.2
    assert planted.mean2 == pytest.approx(mean[: N // 2].square().sum().item(), rel=0.1)


def test_a_gradient_that_is_too_short_is_a_gain():
    exact = torch.randn(BLOCKS * SIZE, N, generator=torch.Generator().manual_seed(0)) + 1
    found = estimates(totals(-0.1 * exact, exact), totals(exact, exact), SIZE)["all"]
    assert found.gain == pytest.approx(-0.1) and found.bias2 == pytest.approx(0.01 * found.mean2)
    assert found.noise2 == pytest.approx(0.01 * found.spread2)


def test_one_block_is_refused():
    one = totals(torch.ones(SIZE, N), torch.ones(SIZE, N))
    with pytest.raises(ValueError, match="blocks of batches: got 1, accepted: at least 2"):
        estimates(one, one, SIZE)


def test_roundings_are_the_packages():
    x = torch.randn(48, 80) * torch.exp(3 * torch.randn(48, 80))
    assert torch.equal(TENSOR(x), dequantize(quantize_tensor(x, E4M3, tensor_scale(amax(x), E4M3))))
    assert torch.equal(ROW(x), dequantize(quantize_rows(x, E4M3)))
    assert torch.equal(Rounding("row", aligned=True)(x), dequantize(quantize_rows(x, E4M3, aligned=True)))
    assert torch.equal(GROUP(x), dequantize(quantize_groups(x, E4M3, 32, "e8m0")))
    assert torch.equal(Rounding("column")(x), ROW(x.t().contiguous()).t())
    assert torch.equal(Rounding("tokens", group=16)(x), Rounding("group", group=16)(x.t().contiguous()).t())


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_the_grid_is_the_format(fmt):
    x = torch.randn(4000) * torch.exp(4 * torch.randn(4000))
    expected = x.clamp(-fmt.max, fmt.max).to(fmt.dtype).float()
    assert torch.equal(on_grid(x, fmt, stochastic=False), expected)


@pytest.mark.parametrize("name", GRIDS)
def test_grids_have_eight_bits_and_stochastic_rounding_is_unbiased(name):
    grid = GRIDS[name]
    magnitudes = torch.cat([torch.zeros(1), grid.max * torch.exp2(-torch.linspace(0, 33, 2**18))])
    levels = on_grid(magnitudes, grid, stochastic=False).unique()
    assert 2**7 - 4 <= len(levels) <= 2**7 and levels[-1] == grid.max and levels[1] == grid.smallest
    x = torch.full((20_000,), 0.3 * grid.max + 0.01)
    drawn = on_grid(x, grid, stochastic=True)
    assert len(drawn.unique()) == 2 and drawn.mean().item() == pytest.approx(x[0].item(), rel=2e-3)


def tiny() -> tuple[GPT, torch.Tensor]:
    """A model whose weights are large enough for its layers to matter, and a window."""
    model = GPT(MODELS["tiny"], seed=0)
    for block in model.blocks:
        for m in (block.qkv, block.proj, block.fc1, block.fc2):
            m.weight.data *= 5
    return model, torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))


def test_the_simulation_is_the_flow_and_without_roundings_the_model():
    model, window = tiny()
    assert max(check(model, window).values()) < 0.01
    found = Gradients(model)
    exact = found(gradients.Variant(gradients.exact_block), window)
    plan = everywhere(EXACT)
    plain = found(gradients.Variant(lambda *args: rounded_block(plan, *args)), window)
    torch.testing.assert_close(plain, exact, rtol=1e-3, atol=1e-6)
    assert found.size == sum(p.numel() for p in model.parameters())
    assert sum(part.stop - part.start for part in found.slices.values()) == found.size


def test_another_simulation_stops_the_program(monkeypatch):
    known = variants(["check", "candidates"], layers=2)
    known[PRECISE] = known["dY for wgrad: scales of columns"]
    monkeypatch.setattr(gradients, "variants", lambda *_, **__: known)
    with pytest.raises(RuntimeError, match="the simulation is not the flow: distances .*'fc2'"):
        check(*tiny())


def test_main_writes_every_row(monkeypatch, tmp_path, capsys):
    text = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(gradients, "prepare_bytes", lambda *_: text)
    given = ["--tiny", "--sets", "flow", "roundings", "--steps", "2", "--device", "cpu", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gradients", *given])
    gradients.main()
    written = tmp_path / "accuracy/gradients-tiny.json"
    found = json.loads(written.read_text())
    chosen = variants(["flow", "roundings"], layers=2)
    assert [r["variant"] for r in found["rows"] if r["reference"] == "exact"] == list(chosen)
    straight = [r["variant"] for r in found["rows"] if r["reference"] == "straight through"]
    assert straight == [name for name, v in chosen.items() if v.straight] and found["batches"] == 4
    rows = {r["variant"]: r for r in found["rows"] if r["reference"] == "exact"}
    assert rows[ALL]["fc1 noise2"] == pytest.approx(rows[REAL]["fc1 noise2"], rel=0.02)
    assert rows["x for wgrad"]["embedding noise2"] < 1e-6 * rows["x for wgrad"]["qkv noise2"]
    assert "== noise, %, against straight through" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    gradients_report.plot(gradients_report.records(found), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_batches_are_whole_blocks(capsys):
    with pytest.raises(SystemExit):
        gradients.parse(["--tiny", "--batches", "3"])
    assert "--batches: got 3, accepted: a multiple of 2, at least 4" in capsys.readouterr().err
