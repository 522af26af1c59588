"""Results as programs of ``benchmarks`` write them, with made up numbers."""

import json

from benchmarks.measured_code import digests

OTHER = dict.fromkeys(digests(), "other")
"""Of code that is not here."""
KERNELS = {"products": {"ms": 70.0, "count": 9.0, "top": {}}, "communication": {"ms": 30.0, "count": 9.0, "top": {}}}
STEP = {
    "settings": {"variant": "both"},
    "wall_ms": 140.0,
    "alone": {"forward": {"host_ms": 10.0, "done_ms": 30.0}},
    "kernels": KERNELS,
    "gpu": {"steps": 2, "span_ms": 280.0, "busy_ms": 260.0, "communication_alone_ms": 12.0},
}
"""Of a step's trace."""


def put(folder, name, content, code=None) -> None:
    """A result."""
    environment = {"code": code or digests(), "commit": "0123456789", "gpus": ["NVIDIA H200"] * 2}
    content = content | {"environment": content.get("environment", {}) | environment}
    (folder / "speed" / f"{name}.json").write_text(json.dumps(content))


def training(first_loss):
    """Four runs of ``train.py``."""
    memory = {"optimizer moments": {"bytes": 8, "elements": 1}, "activations": {"bytes": 2**30, "elements": 1}}
    return {
        "settings": {"ranks": 2, "layers": 8, "micro_batch": [2], "steps": 50, "vocabulary": 32000},
        "runs": [
            {
                **{"config": name, "step_ms": ms, "tokens_per_second_per_gpu": 1e6 / ms, "memory": memory},
                **{"peak_memory_gib": 20.0, "losses": [loss, 1.0], "largest_loss_gap": 0.01, "last_ten_loss_gap": 0.02},
            }
            for name, ms, loss in [
                ("TE bf16", 200.0, first_loss),
                ("TE fp8 delayed", 160.0, 11.2),
                ("zero2-bf16", 250.0, 11.0),
                ("zero2", 100.0, 11.1),
            ]
        ],
    }
