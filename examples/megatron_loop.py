"""A Megatron-core GPT whose layers run the FP8 precision flow, in Megatron's own loop; no DeepSpeed.

    torchrun --nproc_per_node 2 examples/megatron_loop.py

patch_model is all that is added: DistributedDataParallel and the distributed optimizer are Megatron's, which keeps fp32
moments. Ranks are data-parallel. The model learns to continue sequences of numbers, on GPUs where there are some.
"""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch.overrides import TorchFunctionMode

from coat_dist.config import ActivationConfig
from megatron_patches import gpt_layer_spec, initialize_model_parallel, patch_model

gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")


class OnCPU(TorchFunctionMode):
    """Megatron's optimizers ask for CUDA tensors by name. A machine without a GPU has those of the CPU to give."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        asked = function is torch.Tensor.type and len(args) == 1 and not kwargs
        return result.replace("torch.", "torch.cuda.") if asked else result


def train(steps: int):
    sizes = dict(num_layers=2, hidden_size=128, num_attention_heads=4, ffn_hidden_size=256)
    llama = dict(gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, normalization="RMSNorm")
    types = dict(bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=not gpu)
    layers = TransformerConfig(**sizes, **llama, **types, hidden_dropout=0.0, attention_dropout=0.0)
    model = GPTModel(
        layers, gpt_layer_spec(layers), vocab_size=64, max_sequence_length=32, position_embedding_type="rope"
    ).to(device, torch.bfloat16)
    report = patch_model(model, ActivationConfig())  # before DistributedDataParallel wraps the model
    if dist.get_rank() == 0:
        print(report)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(layers, ddp, model)
    options = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(options, [model], use_gloo_process_groups=False)

    data = torch.Generator().manual_seed(1 + dist.get_rank())
    positions = torch.arange(32, device=device).expand(8, -1)
    losses = []
    for step in range(steps):
        start = torch.randint(0, 64, (8, 1), generator=data)
        text = ((start + 3 * torch.arange(33)) % 64).to(device)  # [8, 33]: every number is 3 more than the last
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(text[:, :-1], positions, None, labels=text[:, 1:]).mean()  # the causal mask is built in
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
    return report, losses


if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
initialize_model_parallel()
with contextlib.nullcontext() if gpu else OnCPU():
    report, losses = train(steps=30)
dist.destroy_process_group()
