"""Whether memory grows: what is compared, and a short run of everything."""

import json
import subprocess
import sys

import pytest

from benchmarks.common import result_path
from benchmarks.reliability import memory


def test_what_counts_as_growth():
    flat = [{"rss": 5 * 10**8 + i % 2, "descriptors": 9} for i in range(20)]
    assert memory.grown(flat, memory.LIMITS) == {}
    leak = [{"rss": 5 * 10**8 + i * 10**6, "descriptors": 9 + (i > 15)} for i in range(20)]
    assert memory.grown(leak, memory.LIMITS) == {"rss": 10**7, "descriptors": 1}
    early = [{"rss": 5 * 10**8 + min(i, 5) * 10**7} for i in range(20)]
    assert memory.grown(early, memory.LIMITS) == {}, "caches fill at the beginning"


def test_the_result_of_this_machine_does_not_grow():
    found = json.loads(result_path("reliability/memory").read_text())
    assert found["options"]["steps"] >= 2000 and found["grown"] == [{}]


@pytest.mark.slow
def test_a_short_run(tmp_path):

    line = [
        sys.executable,
        "-m",
        "benchmarks.reliability.memory",
        "--steps",
        "40",
        "--every",
        "5",
        "--save-every",
        "10",
    ]
    done = subprocess.run([*line, "--output", str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0: does not grow: rss " in done.stdout
