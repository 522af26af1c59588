"""README's two parts: numbers of the present code alone."""

import json

import pytest

from benchmarks import results_headline, results_page, results_readme, results_tables
from benchmarks.measured_code import digests
from tests.benchmarks.made_up import OTHER, put, training
from tests.benchmarks.speed.test_whole import case

TABLES = results_tables.TABLES
SPEED = {"train": "**Training", "whole": "**A whole", "layer": "**One layer", "optimizer": "**The optimizer"}
NO_13B = case("BF16", {}, 1, model="llama2-13b", ranks=1)
ONLY_13B = case("both, remainders", {1: 600.0, 2: 700.0, 3: 650.0}, 4, model="llama2-13b", ranks=1)


def layer(coat):
    """As ``layer.py`` writes it: Transformer Engine takes 20 ms."""
    runs = {
        "TE bf16": {"ms": 20.0, "saved_bytes_per_token": 4000.0, "ratio_to_te_bf16": 1.0},
        "coat": {"ms": coat, "saved_bytes_per_token": 1000.0, "ratio_to_te_bf16": coat / 20},
    }
    return {"results": [{"preset": "llama2-7b", "tokens": 16384, "runs": runs}]}


def test_readmes_parts_are_what_the_program_writes() -> None:
    text = results_readme.README.read_text()
    assert text == results_page.readme(text), "python -m benchmarks.results_page"


def test_readme_has_the_first_three_tables_of_the_present_code(results, tmp_path) -> None:
    put(results, "train-2-ranks", training(11.0))
    text = results_readme.readme_part(results, tmp_path)
    shown = [name for name, start in SPEED.items() if start in text]
    assert shown == ["train", "whole", "layer"] and "Also measured with the present code: the optimizer's step." in text
    flat = text.replace("\n", " ")
    assert "Here are some, all of the present code." in flat and max(map(len, text.split("\n"))) < 300
    assert "two H200s" in flat and "with the layers of Transformer Engine" in flat and "one H200" in flat


def test_readme_has_training_on_one_gpu_where_two_were_not_measured_with_this_code(results, tmp_path) -> None:
    one = training(11.0)
    one["settings"]["ranks"] = 1
    for name, code in (("train-2-ranks", OTHER), ("train-1-rank", digests())):
        put(results, name, training(11.0) if name == "train-2-ranks" else one, code)
    assert "ZeRO-2, one H200, 50 steps" in results_readme.readme_part(results, tmp_path).replace("\n", " ")
    put(results, "train-1-rank", one | {"notes": ["One of them on another day."]})
    assert results_tables.lines_of(TABLES["train_one"], results)[-2:] == ["", "One of them on another day."]
    put(results, "train-2-ranks", training(11.0))
    assert "ZeRO-2, two H200s, 50 steps" in results_readme.readme_part(results, tmp_path).replace("\n", " ")


def test_what_readme_says_of_losses_and_moments_is_of_the_present_code(results, tmp_path) -> None:
    for room, name, words in (
        ("convergence", "branches", "ended **+0.12 % ± "),
        ("accuracy", "trajectories", "an error of 0.12 % where gradients are random, "),
    ):
        file = results / f"{room}/{name}.json"
        found = json.loads(file.read_text())
        for rows in (found.get("gaps", []), found.get("rows", [])):
            for row in rows[:1]:
                row |= {"held_out_loss_gap": 0.00123, "random 2000 error": 0.00123}
        for code, shown in ((None, False), (OTHER, False), (digests(), True)):
            file.write_text(json.dumps(found | {"environment": {"code": code, "commit": "0123456789"}}))
            assert (words in results_readme.readme_part(results, tmp_path).replace("\n", " ")) == shown
        file.unlink()
        assert words not in results_readme.readme_part(results, tmp_path)


@pytest.mark.parametrize(
    "commit, code, difference, shown",
    [
        ("0123456", digests(), None, True),
        ("0123456", digests(), 7, False),
        ("0123456", OTHER, None, False),
        ("89abcde", digests(), None, False),
    ],
)
def test_losses_hold_as_long_as_the_code_trains_to_the_same_bits(
    results, tmp_path, commit, code, difference, shown
) -> None:
    file = results / "convergence/branches.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps(found | {"environment": {"code": None, "commit": "0123456789"}}))
    same = {
        "environment": {"code": code, "commit": "fedcba9", "gpus": []},
        "settings": {"commit": commit},
        "now": [{}] * 50,
    }
    (results / "convergence/same-bits.json").write_text(json.dumps(same | {"first_difference": difference}))
    text = results_readme.readme_part(results, tmp_path).replace("\n", " ")
    words = "measured at commit 0123456, and on a CPU the present code takes 50 steps with the same losses"
    assert (words in text) == shown == ("**Losses.**" in text)


def test_a_table_of_other_code_is_not_in_readme(results, tmp_path) -> None:
    for name in ("train-2-ranks", "train-1-rank", "layer-peers-7b", "optimizer"):
        put(results, name, results_tables.read(name, results), OTHER)
    text = results_readme.readme_part(results, tmp_path)
    assert [name for name, start in SPEED.items() if start in text] == ["whole"]
    ms = results_tables.read("layer-peers-7b", results)["results"][0]["runs"]["coat"]["ms"]
    assert f"{ms:.2f} ms" in results_page.page(results) and f"{ms:.2f} ms" not in text
    words = "training end to end, one layer and the optimizer's step have not been measured with it yet"
    assert words in text.replace("\n", " ")
    for cases in (
        [case("BF16", {1: 1000.0}, 2), case("both", {1: 1200.0}, 2, code=OTHER)],
        [case("BF16", {1: 1000.0}, 2), case("both", {1: 1200.0}, cut=True)],
        [case("BF16", {1: 1000.0}, 2, gpu_memory=80.0), case("both", {1: 1200.0}, 2, gpu_memory=80.0)],
    ):
        put(results, "whole", {"cases": cases})
        text = results_readme.readme_part(results, tmp_path)
        assert "|---" not in text and "at the moment there are none" in text.replace("\n", " ")
    for ranks in ("2-ranks", "1-rank"):
        (results / f"speed/train-{ranks}.json").unlink()
    assert "|---" not in results_readme.readme_part(results, tmp_path)


def test_cases_of_other_code_are_left_out_of_readmes_table(results, tmp_path) -> None:
    cases = [
        case("BF16", {1: 1000.0}, 2), case("both", {1: 1200.0}), case("flow only", {1: 1111.0}, 2, code=OTHER),
        case("BF16", {1: 600.0}, 2, ranks=1), case("both", {1: 700.0}, 2, ranks=1),
    ]  # fmt: skip
    put(results, "whole", {"cases": cases})
    text = results_readme.readme_part(results, tmp_path)
    assert "| both | 1+ |" in text and "1 111" not in text and "| 700 |" not in text
    assert "1 111" in results_page.page(results)


def test_the_largest_comparison_that_is_whole_is_in_readme(results, tmp_path) -> None:
    """Of two GPUs BF16 is not there yet; what is not finished of one GPU is named, of other stages it is not."""
    cases = [
        case("both", {1: 1200.0}, 2), case("BF16", {}, cut="without a step"),
        case("BF16", {1: 600.0}, 2, ranks=1), case("both", {1: 700.0}, 2, ranks=1),
        case("flow only", {}, ranks=1, error="so it went"), case("optimizer only", {}, ranks=1, stage=3, cut="so"),
    ]  # fmt: skip
    put(results, "whole", {"cases": cases})
    text = results_readme.readme_part(results, tmp_path).replace("\n", " ")
    assert "| both | 1 | " in text and "| 700 |" in text and "1 200" not in text
    assert "Not finished: flow only (llama2-7b, 1 x H200, ZeRO-2; failed)." in text
    assert "2, and" not in text and "1 x H200" in results_headline.headline(results)


def test_the_first_numbers_are_ratios_of_the_present_code(results) -> None:
    put(results, "train-2-ranks", training(11.0))
    put(results, "layer-peers-7b", layer(coat=12.0))
    cases = [case("BF16", {1: 1000.0, 2: 1500.0}, 3), case("both", {2: 3000.0, 4: 4500.0, 8: 4000.0}), NO_13B, ONLY_13B]
    one_gpu = [
        case("BF16", {1: 100.0}, 2, ranks=1), case("both", {1: 200.0, 3: 400.0}, 4, ranks=1),
        case("both, remainders", {1: 9.0}, 2, ranks=1), case("TE fp8 delayed", {}, 1, ranks=1),
    ]  # fmt: skip
    peers = [case("TE fp8 delayed", {1: 1800.0}, 2), case("TE fp8 tensorwise", {1: 2500.0, 2: 2000.0}, 3)]
    put(results, "whole", {"cases": [*cases, *one_gpu, *peers]})
    put(results, "whole-h100", {"cases": []})
    lines = results_headline.headline(results).replace("\n  ", " ").split("\n")[2:]
    assert [line[: line.index("**", 4) + 2] for line in lines] == [
        "- **Faster at the same micro-batch**",
        "- **One layer**",
        "- **Larger micro-batches**",
        "- **Models that do not fit in BF16**",
    ]
    assert "8 Llama-2-7B layers" in lines[0] and "train 2.00 × as fast as [Transformer Engine]" in lines[0]
    assert "and 1.60 × as fast as with its FP8, in 1.00 × BF16's peak memory (ZeRO-2, two H200s)" in lines[0]
    assert "takes 0.60 × the time" in lines[1] and "saves 0.25 × the bytes" in lines[1]
    assert lines[2].endswith(
        "whole Llama-2-7B trains with micro-batch 4 where BF16 reaches 2, 3.00 × as many tokens a second and 1.80 × as "
        "many as Transformer Engine with FP8 (2 x H200, ZeRO-2); with micro-batch 3 where BF16 reaches 1, 4.00 × as "
        "many tokens a second (1 x H200, ZeRO-2)."
    )
    assert "(micro-batch): on 1 x H200, ZeRO-2: llama2-13b 700 (2). [How]" in lines[3]


@pytest.mark.parametrize(
    "name, content, left_out",
    [
        ("train-2-ranks", training(11.0), "Faster at"),
        ("layer-peers-7b", layer(coat=12.0), "One layer"),
        ("whole", {"cases": [case("BF16", {1: 1000.0}, 2, code=OTHER), case("both", {1: 1.0}), NO_13B]}, "Larger"),
        ("whole", {"cases": [case("BF16", {}, 1), case("both", {1: 1.0})]}, "Larger"),
        ("whole", {"cases": [case("BF16", {1: 1000.0}, 2), case("both", {}, 1), NO_13B]}, "Larger"),
        ("whole", {"cases": [NO_13B | {"error": "so it went"}, ONLY_13B]}, "Models that"),
        ("whole", {"cases": [NO_13B | {"out_of_memory_at": 4}, ONLY_13B]}, "Models that"),
        ("whole", {"cases": []}, "Models that"),
    ],
)
def test_first_numbers_of_other_code_are_left_out(results, name, content, left_out) -> None:
    put(results, "train-1-rank", training(11.0), OTHER)
    put(results, name, content, OTHER)
    put(results, "whole-h100", {"cases": []})
    text = results_headline.headline(results)
    assert left_out not in text and text.startswith("Measured (")


def test_readmes_picture_of_saved_bytes_is_of_the_present_code() -> None:
    assert "docs/figures/speed-saved-bytes.png" in results_readme.README.read_text(encoding="utf-8")
    again = "python -m benchmarks.speed.saved_bytes --plot docs/figures/speed-saved-bytes.png"
    assert results_tables.is_current(results_tables.read("saved-bytes"), results_tables.FLOW), again


def test_nothing_measured_says_nothing(tmp_path) -> None:
    assert results_headline.headline(tmp_path) == ""


@pytest.mark.parametrize("name", ["results", "headline"])
def test_readmes_marks(name) -> None:
    begin, end = f"<!-- {name}: begin; written by python -m benchmarks.results_page -->", f"<!-- {name}: end -->"
    found = results_readme.in_readme(f"a\n{begin}\nb\n{end}\nc", r"\1", name)
    assert found == f"a\n{begin}\n\\1\n{end}\nc"
    for text in ("", begin, f"{begin}{end}{end}"):
        with pytest.raises(ValueError, match="README.md: accepted: one"):
            results_readme.in_readme(text, "", name)
