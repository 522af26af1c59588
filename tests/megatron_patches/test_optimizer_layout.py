"""When CoatAdamW in Megatron's distributed optimizer takes codes over as they are."""

import pytest

from coat_dist.config import OptimizerConfig as Moments


@pytest.mark.parametrize("normalize", [False, True])
def test_codes_of_releases_that_did_not_say_normalize_fit_where_it_is_false(normalize):
    from megatron_patches.optimizer import CoatDistributedOptimizer

    class Shards:
        def _shards(self):
            return [([300, 0, 150], None, {"moments": "fp8", **Moments(normalize=normalize).model_dump()})]

    earlier = [[300, 0, 150, "fp8", "e4m3", "e4m3", True, 128, "parameter"]]
    assert (CoatDistributedOptimizer._layout(Shards()) == earlier) is not normalize
