"""What ZeRO-3 gathers: bytes sent, values of divided parameters, and training with codes and
without.
"""

import torch

KEPT = {"stage3_max_reuse_distance": 10**9}
LET_GO = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
AHEAD = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 40_000}
"""Options of ZeRO-3: weights stay from forward to backward, go after each use, come in advance."""


def values(engine):
    from deepspeed import zero

    found = {}
    for name, p in engine.module.named_parameters():
        with zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            found[name] = p.detach().clone()
    return found


class Sent:
    """Counts bytes that this rank gives to gathers of weights: DeepSpeed's, and those of codes."""

    def __init__(self):
        from deepspeed.runtime.zero import partition_parameters as deepspeeds

        from coat_dist.flow.parallel import gathered

        self.plain = self.codes = 0
        all_gather, allgather = gathered.all_gather, deepspeeds._dist_allgather_fn

        def count_codes(out, payload, **options):
            self.codes += payload.nbytes
            return all_gather(out, payload, **options)

        def count_plain(given, out, group=None):
            self.plain += given.nbytes
            return allgather(given, out, group)

        gathered.all_gather, deepspeeds._dist_allgather_fn = count_codes, count_plain

    def take(self):
        found = self.plain, self.codes
        self.plain = self.codes = 0
        return found


def compared(cases, build, train):
    """By case: whether training with codes is training without, to the bit, and bytes that were
    sent without and with codes, plain ones and codes.

    Args:
        build: makes an engine of a case and whether codes are gathered.
        train: trains it for a number of steps, and returns what has to be equal.
    """
    sent, found = Sent(), {}
    for case in cases:
        runs, counts = [], []
        for gather in (False, True):
            engine = build(case, gather)
            seen = train(engine, 4)
            sent.take()
            seen += train(engine, 1)
            counts.append(sent.take())
            runs.append((seen, values(engine)))
            engine.destroy()
        (plain, before), (coded, after) = runs
        different = [name for name, p in before.items() if not torch.equal(p, after[name])]
        found[case] = plain == coded and not different, *counts
    return found


def check_gathered(found, expected):
    """``expected``: by case what codes are of the bytes that they replace, 0.5, 1 or 0; or None
    for some of them.
    """
    for case, (same, (plain, none), (others, codes)) in found.items():
        assert same and none == 0, case
        replaced = plain - others
        if expected(case) is None:
            assert 0 < codes <= replaced, (case, codes, replaced)
        else:
            assert codes == expected(case) * replaced, (case, codes, replaced)
            assert bool(codes) == bool(expected(case)), case
