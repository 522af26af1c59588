"""What engines on ranks hold, beside what the planner says of them."""

MODEL = {
    "num_layers": 3,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 500,
}


def settings_of(stage, coat, **more):
    """A DeepSpeed configuration; ``coat`` is a block, or None for torch's AdamW."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        # Buckets of tests' sizes; threshold 0: ZeRO-3 would keep small parameters whole on every
        # rank.
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 100000,
            "contiguous_gradients": True,
            "stage3_param_persistence_threshold": 0,
        },
        "optimizer": {"type": "AdamW" if coat is None else "CoatAdamW", "params": {"lr": 1e-3}},
        **({} if coat is None else {"coat": coat}),
        **more,
    }


def planned(model, settings, dp=1, tp=1, recompute=None):
    """The planner's run."""
    from coat_dist import CoatConfig
    from launch.memory.run import Run
    from launch.model.gpt import ModelConfig

    return Run(
        model=ModelConfig.model_validate(model),
        settings=settings,
        coat=CoatConfig.from_deepspeed(settings),
        dp=dp,
        tp=tp,
        sequence_parallel=tp > 1,
        micro=settings["train_micro_batch_size_per_gpu"],
        recompute=recompute or {},
    )


def kept_for_backward(run):
    """Bytes that one forward pass keeps for backward, the loss's included, without parameters."""
    from launch.memory.peak import activations

    logits = 0 if run.chunked else 2 * (run.model.padded_vocab // run.tp) * run.tokens
    full = run.recompute.get("recompute_granularity") == "full"
    block = run.recompute.get("recompute_method") == "block"
    again = run.recompute["recompute_num_layers"] if block else full * run.model.num_layers
    shared = set(range(again, run.model.num_layers)) - run.bf16_layers and not run.model.qk_norm
    # Frequencies, which a layer that is computed again keeps, and their cosines and sines, which
    # patched layers share.
    per_position = (4 if again else 0) + (8 if shared else 0)
    tables = per_position * run.model.seq_length * run.model.head_channels
    return activations(run) + logits + tables + 28 * run.tokens


def measured(rank, world, model, settings, tp=1, recompute=None):
    """Rows of a ``MemoryReport`` after one step: bytes by name, of this rank."""
    from launch.scale.timed_steps import random_batch
    from launch.train import runtime, training_engine
    from launch.train.memory_report import MemoryReport
    from launch.train.plan import assemble
    from launch.train.pretrain_options import PretrainOptions
    from megatron_patches import initialize_model_parallel

    device, run = runtime.start(rank), planned(model, settings)
    initialize_model_parallel(tp, seed=3, create_gloo_process_groups=False)
    shared = {"tensor_parallel": tp, "sequence_parallel": tp > 1, **(recompute or {})}
    options = PretrainOptions(deepspeed_config="", data=[], train_steps=1, **shared)
    p = assemble(options, world, settings, run.coat, run.model)
    engine, batch = (
        training_engine.build_engine(p, lambda text: None),
        random_batch(p.model, p.batch.micro),
    )
    report = MemoryReport(engine, run.tokens)
    with report.forward():
        loss = training_engine.language_model_loss(tp, device)(engine, batch)
    engine.backward(loss)
    report.backward_done()
    engine.step()
    report.step_done()
    buffer = getattr(engine.optimizer, "grad_partitions_flat_buffer", None)
    found = {name: row["bytes"] for name, row in report.to_dict().items()}
    return (
        found
        if buffer is None
        else found | {"gradients of this rank's share": buffer.numel() * buffer.itemsize}
    )
