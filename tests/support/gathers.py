"""What ZeRO-3 gathers: bytes sent, and values of divided parameters."""


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
        gather_into, allgather = gathered.gather_into, deepspeeds._dist_allgather_fn

        def count_codes(out, payload, group):
            self.codes += payload.nbytes
            return gather_into(out, payload, group)

        def count_plain(given, out, group=None):
            self.plain += given.nbytes
            return allgather(given, out, group)

        gathered.gather_into, deepspeeds._dist_allgather_fn = count_codes, count_plain

    def take(self):
        found = self.plain, self.codes
        self.plain = self.codes = 0
        return found
