"""What a transformer layer keeps for backward, tensor by tensor, counted in autograd's own storage.

    python -m benchmarks.speed.saved_bytes [--presets llama2-7b ...] [--plot \\
        docs/figures/speed-saved-bytes.png]

Builds one Megatron layer of each preset and runs it forward on a few tokens, on any device: in
BF16, patched, and patched with FP8 attention. Every storage that autograd is given is counted once,
under the block that saved it first; parameters and the table of cosines and sines, which all layers
share, are not. Bytes a token do not depend on the number of tokens, but for a few scalars.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import argument_parser
from benchmarks.common import show, write_figure, write_result
from coat_dist import CoatConfig
from launch.model.gpt import build_model, load_model_config
from megatron_patches import initialize_model_parallel, patched

SEQUENCE, BATCH = 32, 2
TOKENS = SEQUENCE * BATCH
VARIANTS: dict[str, dict[str, Any]] = {
    "coat": {},
    'coat, attention: "fp8"': {"attention": "fp8"},
}
BLOCKS = {
    "norm, qkv": ("input_layernorm", "self_attention.linear_qkv"),
    "attention": ("self_attention",),
    "projection": ("self_attention.linear_proj",),
    "norm, MLP": ("pre_mlp_layernorm", "mlp"),
}


def count(layer: Any, run: Callable[[], Any]) -> list[dict[str, Any]]:
    """What ``run()`` saves for backward: block, dtype, shape, the number of storages alike in
    these, bytes a token.
    """
    running = ["residual"]
    handles = []
    for block, names in BLOCKS.items():
        for name in names:
            module = layer.get_submodule(name)
            handles.append(
                module.register_forward_pre_hook(lambda *_, block=block: running.append(block))
            )
            handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
    known = {t.untyped_storage().data_ptr() for t in layer.parameters()}
    found: dict[int, dict[str, Any]] = {}
    alive = []  # or an address could be given twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.dim() and not _is_table(tensor):
            about = {
                "block": running[-1],
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": [*tensor.shape],
            }
            found.setdefault(
                storage.data_ptr(), about | {"bytes_per_token": storage.nbytes() / TOKENS}
            )
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = run()
        del out
    finally:
        for handle in handles:
            handle.remove()
    alike: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in found.values():
        same = alike.setdefault(
            (one["block"], one["dtype"], *one["shape"]),
            one | {"storages": 0, "bytes_per_token": 0.0},
        )
        same["storages"] += 1
        same["bytes_per_token"] += one["bytes_per_token"]
    return list(alike.values())


def _is_table(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a table of cosines or sines: positions, but no batch and no heads."""
    return (
        tensor.shape[0] == SEQUENCE and tensor.dim() > 2 and all(n == 1 for n in tensor.shape[1:-1])
    )


def measure(preset: str, device: str) -> dict[str, list[dict[str, Any]]]:
    """Tensors saved by one layer of a preset, by variant."""
    model = load_model_config(preset, ["num_layers=1", "vocab_size=128"])
    gpt: Any = build_model(model)
    gpt.train()
    rope, layer = gpt.rotary_pos_emb(SEQUENCE), gpt.decoder.layers[0]
    x = torch.randn(
        SEQUENCE, BATCH, model.hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True
    )

    def run() -> torch.Tensor:
        return layer(hidden_states=x, attention_mask=None, rotary_pos_emb=rope)[0]

    results = {"BF16": count(layer, run)}
    for name, changes in VARIANTS.items():
        with patched(gpt, CoatConfig.parse({"activation": changes}).activation):
            results[name] = count(layer, run)
    return results


def sums(tensors: list[dict[str, Any]]) -> dict[str, float]:
    """Bytes a token by block."""
    found = dict.fromkeys(("residual", *BLOCKS), 0.0)
    for one in tensors:
        found[one["block"]] += one["bytes_per_token"]
    return found


def plot(results: dict[str, dict[str, list[dict[str, Any]]]], path: Path) -> None:
    """One bar a preset and variant, made of blocks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = [
        (preset, name, sums(tensors))
        for preset, found in results.items()
        for name, tensors in found.items()
    ]
    places = [i + 0.6 * (i // (1 + len(VARIANTS))) for i in range(len(bars))]
    figure, axis = plt.subplots(figsize=(9, 0.33 * len(bars) + 1.4), layout="constrained")
    ends = [0.0] * len(bars)
    for block in BLOCKS:
        widths = [found[block] / 1000 for _, _, found in bars]
        if any(widths):
            axis.barh(places, widths, left=ends, label=block)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, end in zip(places, ends, strict=True):
        axis.text(end + 1, place, f"{end:.1f}", va="center", fontsize=8)
    axis.set(yticks=places, xlabel="kB a token and layer, saved for backward")
    axis.set_yticklabels([f"{preset}, {name}" for preset, name, _ in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(right=1.08 * max(ends))
    axis.legend(fontsize=8)
    write_figure(path, figure, dpi=120)
    print("wrote", path)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    presets = ["llama2-7b", "llama2-13b", "llama3-8b", "olmo-1b"]
    return argument_parser(__doc__, presets=presets, plot=None).parse_args(given)


def main() -> None:
    arguments = parse()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize_model_parallel(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = {}
    for preset in arguments.presets:
        results[preset] = measure(preset, device)
        for name, tensors in results[preset].items():
            blocks = sums(tensors)
            blocks["bytes a token"] = sum(blocks.values())
            show(f"{preset}, {name}", blocks, **dict.fromkeys(blocks, ",.0f"))
    if arguments.plot is not None:
        plot(results, Path(arguments.plot))
    settings = {"presets": arguments.presets, "tokens": TOKENS}
    found = {"settings": settings, "results": results}
    print("wrote", write_result("speed/saved-bytes", found, arguments.output))


if __name__ == "__main__":
    main()
