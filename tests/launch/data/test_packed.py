"""Documents that share a sequence: from end-of-document ids to what Megatron's model takes, and
what a run makes of it.
"""

import pickle

import pytest
import torch

from launch.data.packed import document_lengths, pack_lengths, packed_documents, separate_documents
from launch.data.sampler import PretrainSampler, batches
from tests.launch.pretrain_runs import configuration, losses, pretrain_on
from tests.launch.tiny_data import make, train
from tests.support import equal

EOD = 9


def batch(*rows):
    tokens = torch.tensor(rows)
    count = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(tokens.shape)
    return {"tokens": tokens, "labels": tokens + 100, "position_ids": count, "loss_mask": mask}


def test_a_document_ends_with_its_id_and_with_its_row():
    rows = [1, 2, EOD, 3, EOD, 4], [5, 6, 7, 8, 1, EOD], [EOD, EOD, 1, 2, 3, 4]
    given = batch(*rows)
    assert document_lengths(given["tokens"], EOD) == [3, 2, 1, 6, 1, 1, 4]
    made = separate_documents(given, EOD)
    assert made["tokens"].tolist() == [sum(rows, [])] and made["labels"].tolist() == [
        [t + 100 for t in sum(rows, [])]
    ]
    assert made["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 3]]
    assert made["loss_mask"].tolist() == [[float(t != EOD) for t in sum(rows, [])]]
    assert (
        made["cu_seqlens"].tolist() == [0, 3, 5, 6, 12, 13, 14, 18]
        and made["cu_seqlens"].dtype == torch.int32
    )
    assert given["loss_mask"].all()  # not changed in place


def test_lengths_become_megatrons_parameters():
    params = pack_lengths([3, 1, 6])
    assert params.qkv_format == "thd" and params.cu_seqlens_q.tolist() == [0, 3, 4, 10]
    assert params.cu_seqlens_q.dtype == torch.int32 and params.cu_seqlens_kv is params.cu_seqlens_q
    assert params.max_seqlen_q == params.max_seqlen_kv == 8 and params.lengths == (3, 1, 6)
    assert [pack_lengths([n]).max_seqlen_q for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    again = pickle.loads(pickle.dumps(packed_documents(params.cu_seqlens_q)))
    assert again.cu_seqlens_kv.tolist() == [0, 3, 4, 10]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_keep_documents_apart(tmp_path, workers):
    dataset = train(make(tmp_path / "a"), 20)
    sampler = PretrainSampler(20, 4, 10, 0, 1)
    plain, apart = (next(batches(dataset, sampler, workers, eod)) for eod in (None, 0))
    assert "cu_seqlens" not in plain and apart["tokens"].tolist() == [
        plain["tokens"].flatten().tolist()
    ]
    wanted = separate_documents(plain, 0)
    assert apart.keys() == wanted.keys() and equal(apart, wanted)
    ends = (apart["tokens"][0, apart["cu_seqlens"][1:] - 1] == 0).sum()
    assert ends >= 3 and ends == (plain["tokens"] == 0).sum()


def test_separate_documents_changes_the_losses(work, tmp_path):
    config, still = configuration(tmp_path, 2), ("--model-override", "hidden_dropout=0.0")
    pretrain_on(2, work, tmp_path / "together", config, *still, steps=4)
    pretrain_on(2, work, tmp_path / "apart", config, *still, "--separate-documents", steps=4)
    together, apart = losses(tmp_path / "together"), losses(tmp_path / "apart")
    assert len(together) == len(apart) == 4
    assert together != apart  # one step may meet no document's end
