"""Fine-tuning on gloo ranks: from a Hugging Face folder to one, exact restarts, any layout,
refusals.
"""

import json

import pytest
import torch

from launch.chat.template import PLAIN_TEMPLATE
from launch.train.metrics import read_metrics
from tests.launch.chat.support import chat, make_llama, make_tokenizer
from tests.launch.pretrain_runs import configuration, losses
from tests.support import forked_programs, run_ranks

transformers = pytest.importorskip("transformers")


def rank_main(rank, world, argv):
    """:func:`starting_processes` with the export in a fork of this one: its imports take longer
    than all else.
    """
    with forked_programs():
        return starting_processes(rank, world, argv)


def starting_processes(rank, world, argv):
    """``finetune.train`` in a process group that exists; how it ended, or the error."""
    from launch import finetune, pretrain
    from launch.chat import arguments, plan
    from launch.train import runtime

    try:
        device = runtime.start(rank)
        return finetune.train(plan.draft(arguments.parse(argv), world), device)
    except (*pretrain.USER_ERRORS, pretrain.BadSteps) as problem:
        return f"{type(problem).__name__}: {problem}"


def one_after_the_other(rank, world, commands):
    """:func:`rank_main` of several commands in one process: of runs that are refused, and so
    leave nothing behind.
    """
    return [rank_main(rank, world, argv) for argv in commands]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A model and a file of 40 conversations, some answers long and some short."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = make_tokenizer(texts=["hello hello"] * 9)
    make_llama(folder / "model", tokenizer, vocab=384, hidden_size=128, attention_dropout=0.0)
    lines = [chat(f"user: {n}?", "assistant: " + "hello " * (1 + n * n % 20)) for n in range(40)]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return folder


def command(work, run, config, *more):
    return [
        *(
            "--deepspeed_config",
            config,
            "--model",
            str(work / "model"),
            "--data",
            str(work / "chats.jsonl"),
        ),
        *("--seq-length", "64", "--output", str(run), *map(str, more)),
    ]


def sizes(folder, micro, accumulation, stage=2, coat=False):
    return configuration(
        folder,
        stage,
        coat,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=accumulation,
        data_types={"grad_accum_dtype": "fp32"},
    )


def exported(run):
    """The tensors of a run's export, as transformers loads them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.bfloat16)
    return dict(model.state_dict())


@pytest.mark.slow
def test_restart_is_exact(work, tmp_path):
    """Straight = stopped and started again, to the last bit of losses and of exported weights;
    with held-out data.
    """
    config, straight, parts = (
        sizes(tmp_path, 1, 2, coat=True),
        tmp_path / "straight",
        tmp_path / "parts",
    )
    more = ("--epochs", "2", "--valid-share", "0.2")
    assert (
        "exported to"
        in run_ranks(2, starting_processes, command(work, straight, config, *more), timeout=60)[0]
    )
    steps = len(read_metrics(straight))
    assert steps >= 4 and sum("valid_loss" in r for r in read_metrics(straight)) == 2
    both = (*more, "--load", "auto")
    stopped = run_ranks(
        2, rank_main, command(work, parts, config, *both, "--stop-at-step", steps // 2 + 1)
    )[0]
    assert "--stop-at-step" in stopped and "exported" not in stopped and not (parts / "hf").exists()
    assert "exported to" in run_ranks(2, rank_main, command(work, parts, config, *both))[0]
    (end, _) = run_ranks(2, rank_main, command(work, parts, config, *both, "--seed", "5"))
    assert end.startswith(
        "CheckpointError: --valid-share: got 0.2, which holds out other conversations than"
    ), end
    assert losses(straight) == losses(parts)
    assert [r.get("valid_loss") for r in read_metrics(straight)] == [
        r.get("valid_loss") for r in read_metrics(parts)
    ]
    one, other = exported(straight), exported(parts)
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    before = transformers.AutoModelForCausalLM.from_pretrained(
        work / "model", dtype=torch.bfloat16
    ).state_dict()
    assert one.keys() == before.keys() and not all(torch.equal(one[k], before[k]) for k in one)
    tokenizer = transformers.AutoTokenizer.from_pretrained(straight / "hf")
    # The model's own eos_token_id is another one: generate() would not stop behind a turn.
    assert transformers.GenerationConfig.from_pretrained(straight / "hf").eos_token_id == [
        tokenizer.eos_token_id,
        2,
    ]
    assert (straight / "dropped.jsonl").read_text() == ""


def test_a_step_is_the_same_in_every_layout(work, tmp_path):
    """Losses and gradient norms of 2 ranks x 2 x 2, one rank x 1 x 8 and 8 x 1, ZeRO-3, tensor
    parallelism.
    """
    found = {}
    for name, ranks, micro, accumulation, stage, more in (
        ("8x1", 1, 8, 1, 2, ()),
        ("1x8", 1, 1, 8, 2, ()),
        ("dp2", 2, 2, 2, 3, ()),
        ("tp2", 2, 2, 4, 1, ("--tensor-parallel", "2")),
    ):
        config, run = sizes(tmp_path, micro, accumulation, stage), tmp_path / name
        end = run_ranks(
            ranks,
            rank_main,
            command(work, run, config, "--train-steps", "2", "--lr", "1e-3", *more),
        )[0]
        assert "exported to" in end, end
        found[name] = [(r["loss"], r["grad_norm"]) for r in read_metrics(run)]
        assert exported(run)
    for name in ("1x8", "dp2", "tp2"):
        for (loss, norm), (wanted, wanted_norm) in zip(found[name], found["8x1"], strict=True):
            assert loss == pytest.approx(wanted, rel=2e-3) and norm == pytest.approx(
                wanted_norm, rel=2e-2
            ), found


def test_errors_of_a_user_are_one_line(work, tmp_path):
    config = sizes(tmp_path, 1, 1)
    (tmp_path / "bad.jsonl").write_text(chat("user: q", "assistant: a") + "\n{}\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    wrong = (
        (
            ("--data", tmp_path / "bad.jsonl"),
            f"DataError: {tmp_path}/bad.jsonl:2: got an object with no keys",
        ),
        (("--model", tmp_path), "CheckpointError: "),
        (("--tokenizer", tmp_path), "DataError: --tokenizer: "),
        (("--seq-length", 1000), "CoatConfigError: --seq-length: got 1000"),
        (("--valid-share", 1.5), "CoatConfigError: --valid-share: got 1.5"),
        (("--valid", work / ".." / work.name / "chats.jsonl"), "DataError: --valid: got "),
        (
            ("--epochs", 1, "--train-steps", 2),
            "CoatConfigError: --epochs: got 1.0, accepted: nothing with",
        ),
        (
            ("--epochs", 1, "--warmup-steps", 50),
            "CoatConfigError: --warmup-steps: got 50, accepted: 0 to the end (12)",
        ),
        (("--eval-interval", 5), "CoatConfigError: --eval-interval: got 5"),
        (("--micro-batch", "auto"), 'CoatConfigError: train_micro_batch_size_per_gpu: got "auto"'),
        # A flag that is always given must not replace another model, nor what is read.
        *(
            (("--overwrite", "--export-to", folder), "CoatConfigError: --export-to: got")
            for folder in (work / "model", tmp_path / "full", tmp_path / "run" / "checkpoints")
        ),
        (("--load", "auto", "--export-to", tmp_path / "full"), "CoatConfigError: --export-to: got"),
    )
    commands = [command(work, tmp_path / "run", config, *more) for more, _ in wrong]
    (ends,) = run_ranks(1, one_after_the_other, commands)
    for end, (_, named) in zip(ends, wrong, strict=True):
        assert end.startswith(named), end


def test_skip_bad_lists_lines_and_goes_on(work, tmp_path):
    (tmp_path / "bad.jsonl").write_text(chat("user: q", "assistant: a") + "\n{}\n")
    config, run = sizes(tmp_path, 1, 1), tmp_path / "run"
    more = (
        "--data",
        tmp_path / "bad.jsonl",
        "--skip-bad",
        "--no-packing",
        "--no-export",
        "--epochs",
        1,
    )
    more += ("--chat-template", "plain", "--seq-length", 128)
    (end,) = run_ranks(1, rank_main, command(work, run, config, *more))
    assert end.startswith("finished 1 steps") and "exported" not in end, end
    # Neither padding nor positions beyond the end of a shorter row count as tokens.
    (prepared,) = (run / "prepared").glob("*/summary.json")
    assert (
        json.loads((run / "summary.json").read_text())["tokens"]
        == json.loads(prepared.read_text())["tokens"]
        < 64
    )
    assert json.loads((run / "memory.json").read_text())["activations"]["elements"] == 64
    (listed,) = map(json.loads, (run / "dropped.jsonl").read_text().splitlines())
    assert (
        listed["file"].endswith("bad.jsonl")
        and listed["line"] == 2
        and listed["what"] == "malformed"
    )
    # A later convert_hf.py --from the checkpoint gives the template that was trained with, not the
    # model's.
    beside = run / "checkpoints" / "step00000001" / "hugging_face"
    assert transformers.AutoTokenizer.from_pretrained(beside).chat_template == PLAIN_TEMPLATE
    assert (beside / "config.json").read_bytes() == (work / "model" / "config.json").read_bytes()


def test_a_padding_token_beyond_the_model_trains(work, tmp_path):
    tokenizer = make_tokenizer(texts=["hello hello"] * 9)
    vocab = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert tokenizer.pad_token_id == vocab
    make_llama(tmp_path / "model", tokenizer, vocab=vocab)
    config, more = (
        sizes(tmp_path, 4, 1),
        ("--model", tmp_path / "model", "--no-packing", "--train-steps", "1"),
    )
    (end,) = run_ranks(1, rank_main, command(work, tmp_path / "run", config, *more, "--no-export"))
    assert end.startswith("finished 1 steps"), end
    # The rate falls to 0 at the last step, which is the first here.
    assert read_metrics(tmp_path / "run")[0]["lr"] > 0


def test_a_run_goes_on_with_another_batch_size(work, tmp_path):
    """Every conversation as often as --epochs says: the steps that are left follow from what has
    been taken.
    """
    run, often = tmp_path / "run", ("--epochs", "2", "--load", "auto", "--no-export")
    (end,) = run_ranks(
        1, rank_main, command(work, run, sizes(tmp_path, 1, 4), *often, "--stop-at-step", 2)
    )
    assert "--stop-at-step" in end, end
    (end,) = run_ranks(1, rank_main, command(work, run, sizes(tmp_path, 2, 1), *often))
    records = read_metrics(run)
    assert end.startswith("finished 10 steps") and len(records) == 10, end
    assert [r["consumed_samples"] for r in records] == [4, *range(8, 26, 2)]
    assert all(r["loss"] > 0 for r in records)
    # And with more epochs: what the last step lacks is no part of the next epoch, which would begin
    # behind it.
    longer = ("--epochs", "3", *often[2:])
    (end,) = run_ranks(1, rank_main, command(work, run, sizes(tmp_path, 7, 1), *longer))
    assert end.startswith("finished 12 steps"), end
    assert [r["consumed_samples"] for r in read_metrics(run)[10:]] == [31, 36]
    manifest = run / "checkpoints" / "step00000012" / "manifest.json"
    written = json.loads(manifest.read_text())
    del written["run"]["data"]["packed"]  # as another program has it
    manifest.write_text(json.dumps(written))
    (end,) = run_ranks(1, rank_main, command(work, run, sizes(tmp_path, 2, 1), *often))
    assert end.startswith("CheckpointError: --load: got") and "--model" in end


def test_more_ranks_begin_with_what_one_has_trained(work, tmp_path, monkeypatch):
    """One rank leaves out the embedding's padding, and tensor parallelism cannot divide an odd
    number of rows.
    """
    from launch.chat import arguments, plan

    weights = plan.open_weights(work / "model")
    weights.model = weights.model.model_copy(update={"vocab_size": 385, "vocab_multiple": 1})
    monkeypatch.setattr(plan, "open_weights", lambda path, tensors: weights)
    for tp, rows in ((1, 385), (2, 512), (4, 512)):
        argv = command(work, tmp_path / "run", sizes(tmp_path, 1, 1), "--tensor-parallel", tp)
        assert plan.draft(arguments.parse(argv), 4).model.padded_vocab == rows


def test_a_dry_run_trains_nothing(work, tmp_path, capsys):
    from launch import finetune

    argv = command(
        work,
        tmp_path / "run",
        sizes(tmp_path, 1, 1),
        "--dry-run",
        "--json",
        "--gpu",
        "h100",
        "--gpus",
        "4",
    )
    assert finetune.main(argv) == 0
    one = json.loads(capsys.readouterr().out)
    more = (
        "--micro-batch",
        "4",
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
    )
    assert finetune.main([*argv, *more, "--recompute-num-layers", "1"]) == 0
    four = json.loads(capsys.readouterr().out)
    assert one != four and not (tmp_path / "run").exists()
