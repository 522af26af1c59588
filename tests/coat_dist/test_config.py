"""Every wrong key of the block, and every DeepSpeed feature that is refused, gives one line that says what to write."""

import base64
import json
from pathlib import Path

import pytest

from coat_dist.config import ActivationConfig, CoatConfig, CoatConfigError, load_json
from coat_dist.deepspeed.config.validate import check_deepspeed
from tests.coat_dist.configurations import BASE, config


def test_the_documented_block_is_accepted():
    coat = CoatConfig.from_deepspeed(BASE)
    assert coat.optimizer.first_moment == "e4m3" and coat.activation.bf16_layers == (0, -1)
    check_deepspeed(BASE, tp=2, mpu=True)


def test_a_block_is_parsed_once(monkeypatch):
    coat = CoatConfig.from_deepspeed(BASE)
    monkeypatch.setattr(CoatConfig, "model_validate", None)
    assert CoatConfig.from_deepspeed({**BASE, "coat": coat}) == CoatConfig.parse(coat) == coat
    check_deepspeed(BASE, coat=coat)
    with pytest.raises(CoatConfigError, match=r'^coat.activation.wgrad: got "main_grad"'):
        check_deepspeed(BASE, coat=coat.model_copy(update={"activation": ActivationConfig(wgrad="main_grad")}))


def test_defaults_are_those_of_the_documented_block():
    assert CoatConfig.parse({}) == CoatConfig.parse(
        {**BASE["coat"], "activation": {**BASE["coat"]["activation"], "bf16_layers": []}}
    )


def test_no_block_is_none_and_unchecked():
    plain = {k: v for k, v in config(zero_optimization__stage=0).items() if k != "coat"}
    plain["optimizer"] = {"type": "AdamW"}
    assert CoatConfig.from_deepspeed(plain) is None
    check_deepspeed(plain)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (3, ["coat: got 3", "optimizer, activation"]),
        (None, ["coat: got null, accepted: an object with keys optimizer, activation, or no such key"]),
        ({"optimiser": {}}, ["coat.optimiser: unknown key", "did you mean 'optimizer'"]),
        ({"first_moment": "int8"}, ["coat.first_moment: unknown key (did you mean 'coat.optimizer.first_moment'?)"]),
        ({"optimizer": {"attention": "fp8"}}, ["optimizer.attention: unknown key (did you mean 'coat.activation.att"]),
        ({"group_size": 64}, ["did you mean 'coat.optimizer.group_size' or 'coat.activation.group_size'?"]),
        ({"optimizer": {"expend": True}}, ["coat.optimizer.expend", "did you mean 'expand'", "second_moment"]),
        ({"optimizer": 3}, ["coat.optimizer: got 3", "an object with keys first_moment"]),
        ({"optimizer": {"group_size": 100}}, ["coat.optimizer.group_size: got 100", "64, 128 or 256"]),
        ({"optimizer": {"expand": "yes"}}, ['coat.optimizer.expand: got "yes"', "true or false"]),
        ({"optimizer": {"expand": 1}}, ["coat.optimizer.expand: got 1", "true or false"]),
        (
            {"optimizer": {"second_moment": "fp8"}},
            ['coat.optimizer.second_moment: got "fp8"', "'e4m3', 'e5m2' or 'log8'"],
        ),
        ({"optimizer": {"first_moment": "log8"}}, ['coat.optimizer.first_moment: got "log8"', "'int8'"]),
        ({"optimizer": {"second_moment": "int8"}}, ['coat.optimizer.second_moment: got "int8"', "'log8'"]),
        ({"optimizer": {"second_moment": "log8", "expand": False}}, ["coat.optimizer.expand: got false", "log8"]),
        ({"optimizer": {"stochastic_rounding": 1}}, ["coat.optimizer.stochastic_rounding: got 1", '"auto"']),
        ({"optimizer": {"stochastic_rounding": "on"}}, ['stochastic_rounding: got "on"', "true, false"]),
        ({"activation": {"forward": "fast"}}, ['coat.activation.forward: got "fast"', "'exact' or 'quantized'"]),
        (
            {"activation": {"forward_scales": "rows"}},
            ['coat.activation.forward_scales: got "rows"', "'row' or 'tensor'"],
        ),
        (
            {"activation": {"saved_format": "fp8"}},
            ['coat.activation.saved_format: got "fp8"', "'mixed', 'e3m4', 'int8', 'e4m3' or 'e5m2'"],
        ),
        (
            {"activation": {"saved_formats": "int8"}},
            ["activation.saved_formats: unknown", "did you mean 'saved_format'"],
        ),
        ({"activation": {"format": "int8"}}, ['coat.activation.format: got "int8"', "'e4m3' or 'e5m2'"]),
        ({"activation": {"attention": "fp16"}}, ['coat.activation.attention: got "fp16"', "'bf16' or 'fp8'"]),
        ({"activation": {"weights": "kept"}}, ['coat.activation.weights: got "kept"', "'on_use' or 'cached'"]),
        ({"activation": {"wgrad": "fp32"}}, ['coat.activation.wgrad: got "fp32"', "'grad' or 'main_grad'"]),
        ({"activation": {"loss": "fused"}}, ['coat.activation.loss: got "fused"', "'chunked'", "'plain'"]),
        ({"activation": {"z_loss": -1e-4}}, ["coat.activation.z_loss: got -0.0001, accepted: a finite number from 0"]),
        (
            {"activation": {"z_loss": float("nan")}},
            ["coat.activation.z_loss: got NaN, accepted: a finite number from 0"],
        ),
        (
            {"activation": {"z_loss": "small"}},
            ['coat.activation.z_loss: got "small", accepted: a finite number from 0'],
        ),
        ({"activation": {"z_loss": True}}, ["coat.activation.z_loss: got true"]),
        ({"activation": {"z_loss": 10**400}}, ["accepted: a finite number from 0"]),  # JSON's integers have no end
        ({"activation": {"z_loss": 1e-4, "loss": "plain"}}, ['coat.activation.z_loss: got 0.0001 with loss "plain"']),
        ({"activation": {"z_loss": 1e-4, "enabled": False}}, ["coat.activation.z_loss: got 0.0001 with enabled false"]),
        ({"activation": {"bf16_layers": ["first"]}}, ["coat.activation.bf16_layers.0", "an integer"]),
        ({"activation": {"bf16_layers": [0, 0]}}, ["coat.activation.bf16_layers", "distinct"]),
        *(
            (
                {"activation": {"cuda_graphs": True, key: value}},
                [f"cuda_graphs: got true with {key} {given}", "or false"],
            )
            for key, value, given in (
                ("weights", "cached", '"cached"'),
                ("wgrad", "main_grad", '"main_grad"'),
                ("tp_invariant", True, "true"),
            )
        ),
        (
            {"activation": {"tp_invariant": True, "fp8_gather": False}},
            ["coat.activation.tp_invariant", "fp8_gather true"],
        ),
    ],
)
def test_wrong_block(block, words):
    with pytest.raises(CoatConfigError) as error:
        CoatConfig.from_deepspeed({"coat": block})
    for word in words:
        assert word in str(error.value)


def test_all_problems_are_listed_at_once():
    with pytest.raises(CoatConfigError) as error:
        CoatConfig.parse({"optimizer": {"group_size": 1}, "activation": {"format": "int8", "x": 1}})
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("changes", "context", "words"),
    [
        ({"zero_optimization__elastic_checkpoint": True}, {}, ["zero_optimization.elastic_checkpoint: got true"]),
        (
            {"zero_optimization__offload_optimizer": {"device": "cpu"}},
            {},
            ['offload_optimizer.device: got "cpu"', '"none"'],
        ),
        ({"zero_optimization__offload_optimizer": {"device": "nvme"}}, {}, ['offload_optimizer.device: got "nvme"']),
        ({"zero_optimization__offload_optimizer": {"super_offload": True}}, {}, ["super_offload: got true"]),
        *(
            (
                {f"zero_optimization__{key}": value, "zero_optimization__stage": 3},
                {},
                [f"zero_optimization.{key}: got "],
            )
            for key, value in (
                ("zero_quantized_weights", True),
                ("zero_quantized_nontrainable_weights", True),
                ("zero_quantized_gradients", True),
                ("mics_shard_size", 2),
                ("mics_hierarchical_params_gather", True),
            )
        ),
        (
            {"zero_optimization__zero_hpz_partition_size": 2, "zero_optimization__stage": 2},
            {},
            ["zero_optimization.zero_hpz_partition_size: got 2, accepted: 1, or zero_optimization.stage 3"],
        ),
        (
            {"zero_optimization__zero_hpz_partition_size": 2, "zero_optimization__stage": 3},
            {"tp": 2},
            ["zero_optimization.zero_hpz_partition_size: got 2, accepted: 1 with tensor parallelism 2"],
        ),
        ({"zero_optimization__cpu_offload": True}, {}, ["zero_optimization.cpu_offload: got true"]),
        ({"zero_optimization__zenflow": {}}, {}, ["zero_optimization.zenflow: got {}"]),
        (
            {"zero_optimization__stage": 3, "coat__activation__weights": "cached"},
            {},
            ['coat.activation.weights: got "cached"', '"on_use" with zero_optimization.stage 3'],
        ),
        (
            {"zero_optimization__stage": 3, "coat__activation__cuda_graphs": True},
            {},
            ["coat.activation.cuda_graphs: got true", "false with zero_optimization.stage 3"],
        ),
        (
            {"coat__activation__wgrad": "main_grad"},
            {},
            ['coat.activation.wgrad: got "main_grad"', '"grad" under DeepSpeed'],
        ),
        ({"tensor_parallel__autotp_size": 2}, {"tp": 2}, ["tensor_parallel.autotp_size: got 2"]),
        (
            {"checkpoint__load_universal": True, "zero_optimization__stage": 3, "optimizer__type": "AdamW"},
            {"tp": 2},
            ["checkpoint.load_universal: got true"],
        ),
        ({"fp16__enabled": True, "bf16__enabled": False}, {}, ["fp16.enabled: got true"]),
        ({"optimizer__type": "AdamW"}, {}, ['optimizer.type: got "AdamW"', '"CoatAdamW"']),
        ({}, {"cp": 2}, ["context_parallel_size: got 2"]),
        ({"optimizer__params__moments": "fp8"}, {}, ["optimizer.params.moments: unknown key, accepted: lr, betas"]),
        (
            {"optimizer__params__learning_rate": 1},
            {},
            ['params.learning_rate: unknown key (did you mean "lr"?), accepted'],
        ),
        ({"optimizer__params__beta2": 0.9}, {}, ['optimizer.params.beta2: unknown key (did you mean "betas"?)']),
        ({"optimizer__params__expand": True}, {}, ["optimizer.params.expand: given beside coat.optimizer"]),
        ({}, {"pipeline": True, "mpu": True}, ["mpu: got an mpu with a PipelineModule"]),
    ],
)
def test_refused_deepspeed_features(changes, context, words):
    with pytest.raises(CoatConfigError) as error:
        check_deepspeed(config(**changes), **context)
    for word in words:
        assert word in str(error.value)


MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bf16": {"enabled": True, **MASTERS}}, []),
        ({"bf16": {"enabled": True, **MASTERS}, "data_types": {"grad_accum_dtype": "fp32"}}, []),
        ({}, ["bf16.bf16_master_weights_and_grads: got null, accepted: true with coat.optimizer.master_weights"]),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            ["bf16.bf16_optimizer_states: got null, accepted: true"],
        ),
        ({"bf16": {"enabled": False, **MASTERS}}, ["bf16.enabled: got false"]),
        (
            {
                "bf16": {"enabled": True, **MASTERS},
                "zero_optimization__stage": 1,
                "data_types__grad_accum_dtype": "fp32",
            },
            ['data_types.grad_accum_dtype: got "fp32", accepted: "bf16" with', "stage 2 or 3"],
        ),
        (
            {
                "bf16": {"enabled": True, **MASTERS},
                "zero_optimization__stage": 3,
                "zero_optimization__offload_param": {"device": "cpu"},
            },
            ['zero_optimization.offload_param.device: got "cpu", accepted: "none" with coat.optimizer.master_weights'],
        ),
        ({"bf16": {"enabled": True, **MASTERS}, "zero_optimization__stage": 0}, []),
    ],
)
@pytest.mark.parametrize("place", ["block", "params"])
def test_remainders_need_deepspeeds_keys(changes, words, place):
    where = "coat__optimizer__master_weights" if place == "block" else "optimizer__params__master_weights"
    settings = config(**{where: "bf16_remainder"}, **changes)
    if place == "params":
        del settings["coat"]["optimizer"]  # not beside it
    if not words:
        return check_deepspeed(settings)
    with pytest.raises(CoatConfigError) as error:
        check_deepspeed(settings)
    assert len(str(error.value).splitlines()) == (2 if not changes else 1)
    for word in words:
        assert word in str(error.value)


def test_bf16_masters_without_remainders_are_refused():
    for block in ("bf16", "bfloat16"):
        settings = config()
        del settings["bf16"]
        settings[block] = {"enabled": True, **MASTERS}
        with pytest.raises(CoatConfigError, match=f"{block}.bf16_master_weights_and_grads: got true, accepted: false"):
            check_deepspeed(settings)
        check_deepspeed({**settings, "optimizer": {"type": "AdamW"}, "coat": {"activation": {}}})


def test_offload_is_refused_for_the_bare_type_too():
    bare = config(zero_optimization__offload_optimizer={"device": "cpu"})
    del bare["coat"]
    with pytest.raises(CoatConfigError, match="offload_optimizer"):
        check_deepspeed(bare)


def test_deepcompile_offload_warns():
    with pytest.warns(UserWarning, match="offload_opt_states"):
        check_deepspeed(config(compile={"deepcompile": True, "offload_opt_states": True}))


def test_config_sources(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BASE))
    encoded = base64.urlsafe_b64encode(json.dumps(BASE).encode()).decode()
    commented = base64.urlsafe_b64encode(f"{{ # HJSON\n{json.dumps(BASE)[1:]}".encode()).decode()
    assert load_json(path) == load_json(str(path)) == load_json(BASE) == load_json(encoded) == load_json(commented)
    copied = load_json(BASE)
    copied["coat"]["optimizer"]["expand"] = False
    assert BASE["coat"]["optimizer"]["expand"] is True


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not JSON"),
        ("", "holds nothing"),
        ("# a\n", "holds nothing"),
        ("[]", "list"),
        ('{"a": 1, "a": 2}', "twice"),
    ],
)
def test_broken_files(tmp_path, text, word):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(CoatConfigError, match=word):
        load_json(path)


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "ds.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CoatConfigError, match="ds.json is not JSON: 'utf-8' codec"):
        load_json(tmp_path / "ds.json")


def test_missing_file():
    with pytest.raises(CoatConfigError, match="cannot read 'nowhere.json'"):
        load_json("nowhere.json")
    with pytest.raises(CoatConfigError, match="got int"):
        load_json(3)


def test_the_page_lists_every_key_with_its_default():
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    for name, block in CoatConfig.model_fields.items():
        for key, field in block.annotation.model_fields.items():
            default = json.dumps(list(field.default) if isinstance(field.default, tuple) else field.default)
            assert f"| `{name}.{key}` | `{default}` |" in page, f"{name}.{key}"
