"""What a run on several nodes finds in their folders, and what it prepares on each of them. No engine, no launcher."""

import argparse
import json
import os
from contextlib import ExitStack
from pathlib import Path

from coat_dist.checkpoint.manifest import FORMAT
from coat_dist.ranks import check_same_on_all_ranks
from launch import to_universal
from launch.train.node_folders import open_on_nodes, sharers, team_of_checkpoints
from tests.coat_dist.checkpoint.test_team import error_of, on_a_node
from tests.support import run_ranks

OWN = {"checkpoint": {"use_node_local_storage": True}}


def checkpoint(folder, step):
    path = Path(folder, f"step{step:08d}")
    path.mkdir(parents=True)
    content = {"format": FORMAT, "progress": {"step": step}, "run": {}, "files": {}}
    (path / "manifest.json").write_text(json.dumps(content))
    (Path(folder) / "latest").write_text(path.name)


def opened(load="auto", settings=OWN, **more):
    args = argparse.Namespace(load=load, save="disk", output="run", tensorboard=None, overwrite=False, **more)
    with ExitStack() as locks:
        found = open_on_nodes(args, settings, locks)
        return found.source and found.source.relative_to(os.getcwd()).as_posix(), Path("disk/.lock").exists()


def own_disks(rank, world, folder):
    on_a_node(rank, folder)
    check_same_on_all_ranks({})
    found = [opened()]  # nothing there yet
    checkpoint("disk", 2)
    found.append(opened())
    if rank:  # killed between the two nodes' `latest`
        Path("disk/step00000004").mkdir()
        (Path("disk/step00000004/manifest.json")).write_text(
            Path("disk/step00000002/manifest.json").read_text().replace('"step": 2', '"step": 4')
        )
    else:
        checkpoint("disk", 4)
    found.append(opened())
    if rank:  # a damaged one that is not what is loaded is in nobody's way
        checkpoint("disk", 1)
        Path("disk/step00000001/manifest.json").write_text("{")
    Path("disk/latest").write_text(f"step0000000{2 if rank else 6}")
    if rank == 0:
        checkpoint("disk", 6)
    found.append(opened())  # 2 is the newest that node b names, and node a has it
    if rank:  # and was killed there between the two names of a step that is saved again
        Path("disk/step00000002").rename("disk/.unfinished-replaced-step00000002")
    found.append(opened())
    if rank == 0:
        Path("disk/step00000002").rename("elsewhere")
    apart = error_of(opened)
    shared = error_of(opened, None, {})
    return found, apart, shared, list(team_of_checkpoints(OWN).ranks), list(team_of_checkpoints({}).ranks)


def test_checkpoints_on_own_disks(tmp_path):
    for rank, (found, apart, shared, ranks, whole) in enumerate(run_ranks(2, own_disks, str(tmp_path))):
        names = [name for name, _ in found]
        own = "disk/.unfinished-replaced-step00000002" if rank else "disk/step00000002"
        assert names == [None, "disk/step00000002", "disk/step00000004", "disk/step00000002", own]
        assert all(locked for _, locked in found)
        assert apart == (
            "--load: got auto, whose newest checkpoints are step00000006 on rank 0 (host node-a), step00000002 on rank "
            "1 (host node-b), accepted: folders that have a step in common, each with its node's part (--load DIR/STEP "
            "names one)"
        )
        assert "--save: got disk, which holds checkpoints of an earlier run" in shared
        assert (ranks, whole) == ([rank], [0, 1])


def test_a_part_is_not_converted(tmp_path, capsys):
    checkpoint(tmp_path, 2)
    path = tmp_path / "step00000002" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "part": {"ranks": [2, 3], "world_size": 4}}))
    assert to_universal.main(["--load", str(tmp_path), "--output", str(tmp_path / "universal")]) == 2
    assert (
        "holds the files of ranks 2-3 of 4, saved with checkpoint.use_node_local_storage, acc"
        in capsys.readouterr().err
    )


def prepared(rank, world, folder, data):
    from launch.data import dataset

    on_a_node(rank, folder)
    check_same_on_all_ranks({})
    made, samples = [], []
    replace = os.replace

    def counted(source, target):
        made.append(Path(target).parent.name)
        replace(source, target)

    os.replace = counted
    for cache in ("own", f"{folder}/common"):
        train, *_ = dataset.build_datasets([data], "80,10,10", 32, 40, 8, 0, 3, cache)
        samples.append([train[i]["tokens"].tolist() for i in range(0, 40, 7)])
    os.replace = replace
    return made, samples, sharers(Path("prepared"), "--data-cache"), Path("prepared").is_dir()


def test_caches_are_built_once_on_each_node_or_once_where_they_are_shared(work, tmp_path):
    (first, samples, teams, there), (second, others, _, too) = run_ranks(2, prepared, str(tmp_path), str(work / "data"))
    assert set(first) == {"own", "common"} and set(second) == {"own"}
    assert first.count("own") == second.count("own") == first.count("common") >= 2
    assert samples[0] == samples[1] == others[0] == others[1]
    assert teams == [[0], [1]] and there and too
    own = [tmp_path / f"node-{node}" / "own" for node in (0, 1)]
    one, other = ({p.relative_to(of): p.read_bytes() for p in of.rglob("*.npy")} for of in own)
    assert one == other and len(one) == 6


def missing(rank, world, folder):
    on_a_node(rank, folder)
    check_same_on_all_ranks({})
    if rank == 0:
        checkpoint("disk", 2)
    return error_of(opened)


def test_a_node_without_its_part_is_named(tmp_path):
    for error in run_ranks(2, missing, str(tmp_path)):
        assert "are step00000002 on rank 0 (host node-a), none on rank 1 (host node-b), accepted: " in error
