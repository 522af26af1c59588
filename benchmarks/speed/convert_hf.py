"""`launch/convert_hf.py` in both directions, against a plain copy of the same files on the same disk.

    python -m benchmarks.speed.convert_hf [--shape llama2-7b|llama3-8b|small] [--folder DIR] [--disk "what it is"]

A Hugging Face folder with random BF16 weights is made, copied with large reads and writes and fsync, converted, copied
again, and converted back. Files are dropped from the system's memory before they are read. Needs three times the
model's bytes on the disk (llama2-7b: 41 GB, llama3-8b: 49 GB) for the time of the program. Times are of the conversion
with all its checks, without the program's imports; memory is what the process has beyond what it had before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import positive_int
from benchmarks.common import argument_parser, options, write_result
from launch import convert_hf
from launch.hf.config_out import config_for
from launch.hf.convert import HUGGING_FACE, Conversion
from launch.hf.folder import CONFIG
from launch.hf.recipes import to_hugging_face
from launch.model.gpt import load_model_config
from launch.weights.sums import bytes_of
from launch.weights.tensor_files import TensorFiles, read_header
from launch.weights.write import Planned, write_tensors

SMALL = ["num_layers=4", "hidden_size=2048", "ffn_hidden_size=5632", "num_attention_heads=16", "num_query_groups=16"]
BLOCK = 1 << 24


def make(folder: Path, shape: str) -> Conversion:
    """A Hugging Face folder with random weights."""
    model = load_model_config("llama2-7b" if shape == "small" else shape, SMALL if shape == "small" else [])
    config, family = config_for(model, torch.bfloat16)
    recipes = to_hugging_face(model, family)
    tensors = [Planned(name, torch.bfloat16, recipe.shape) for name, recipe in recipes.items()]
    noise = torch.randn(BLOCK // 2).bfloat16()

    def blocks(tensor: Planned) -> Iterator[torch.Tensor]:
        left = tensor.bytes // 2
        while left:
            yield noise[: min(left, len(noise))]
            left -= min(left, len(noise))

    (folder / CONFIG).write_text(json.dumps(config))
    write_tensors(folder, "model", tensors, blocks, shard_bytes=5 * 10**9)
    return Conversion(HUGGING_FACE, "model", tensors, recipes, {}, {})


def forget(folder: Path) -> None:
    """Drop a folder's files from the system's memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def copy(source: Path, target: Path) -> None:
    """Every file, with large reads and writes, brought to disk."""
    target.mkdir()
    buffer = memoryview(bytearray(BLOCK))
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        to = target / path.name
        with path.open("rb", buffering=0) as reading, to.open("wb", buffering=0) as writing:
            while got := reading.readinto(buffer):
                writing.write(buffer[:got])
            os.fsync(writing.fileno())


def convert(source: Path, target: Path) -> None:
    """The program."""
    assert convert_hf.main(["--from", str(source), "--to", str(target)]) == 0


def memory(key: str) -> int:
    """Bytes of this process, by a line of the system's account of it."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def measure(name: str, work: Callable[[Path, Path], None], source: Path, target: Path) -> dict[str, Any]:
    """Seconds, and how far memory grew."""
    forget(source)
    os.sync()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts again
    before, start = memory("VmRSS"), time.perf_counter()
    busy = time.process_time()
    work(source, target)
    return {
        "way": name,
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - busy,
        "peak_growth_bytes": memory("VmHWM") - before,
    }


def checksums(folder: Path) -> dict[str, int]:
    """CRC-32 of each tensor."""
    entries = {n: e for file in sorted(folder.glob("*.safetensors")) for n, e in read_header(file).items()}
    files = TensorFiles(entries)
    found = {}
    for name, entry in entries.items():
        found[name] = 0
        for row in range(0, entry.shape[0], 4096):
            block = files.rows(name, row, min(row + 4096, entry.shape[0]))
            found[name] = zlib.crc32(bytes_of(block), found[name])
    return found


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", choices=["llama2-7b", "llama3-8b", "small"], default="small")
    parser.add_argument("--repeat", type=positive_int, default=1, help="of both directions and the copies beside them")
    parser.add_argument("--folder", help="where models go for the time of this program (a temporary folder)")
    parser.add_argument("--disk", default="", help="what the disk is, to be written into the result")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a killed run leaves no 40 GB behind
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        source, ours, back, copied = (folder / name for name in ("source", "ours", "back", "copied"))
        source.mkdir()
        conversion = make(source, arguments.shape)
        if shutil.disk_usage(folder).free < 2.02 * conversion.bytes:
            raise SystemExit(f"{folder}: needs {2 * conversion.bytes:,} more bytes")
        rows = []
        for _ in range(arguments.repeat):
            for name, work, start, end in (
                ("copy", copy, source, copied),
                ("Hugging Face to ours", convert, source, ours),
                ("copy", copy, ours, copied),
                ("ours to Hugging Face", convert, ours, back),
            ):
                rows.append(measure(name, work, start, end))
                print(f"{name:<24} {rows[-1]['seconds']:7.1f} s", flush=True)
                shutil.rmtree(copied, ignore_errors=True)
            same = checksums(source) == checksums(back)
            assert same, "the round trip changed a tensor"
            shutil.rmtree(ours)
            shutil.rmtree(back)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    copies = [row["seconds"] for row in rows if row["way"] == "copy"]
    for row in rows:
        row["to copy"] = row["seconds"] / (sum(copies) / len(copies))
    largest = max(tensor.bytes for tensor in conversion.tensors)
    print(f"{conversion.bytes / 1e9:.1f} GB, largest tensor {largest / 1e6:.0f} MB, round trip equal to the byte")
    means = {}
    for way in dict.fromkeys(row["way"] for row in rows):
        times = [row["to copy"] for row in rows if row["way"] == way]
        means[way] = sum(times) / len(times)
        most = max(row["peak_growth_bytes"] for row in rows if row["way"] == way)
        spread = f"{min(times):.2f} to {max(times):.2f}"
        print(f"{way:<24} {means[way]:5.2f} x ({spread}), memory + {most / 1e6:.0f} MB", flush=True)
    result = {
        **options(arguments, "folder"),
        "bytes": conversion.bytes,
        "largest_tensor": largest,
        "to copy": means,
        "ways": rows,
    }
    print("wrote", write_result(f"speed/convert-hf-{arguments.shape}", result, arguments.output))


if __name__ == "__main__":
    main()
