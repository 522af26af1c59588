"""Frozen weights as FP8 codes while transformers loads a model: ``from_pretrained`` holds no more
than one of them in BF16.

transformers calls a quantizer for the model on the meta device. What :func:`patch_model` would keep
as codes is planned there, and torch's hook on registered parameters then quantizes each weight as
it arrives. Weights that no checkpoint has stay what transformers makes of them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..config import ActivationConfig, refuse
from ..flow.core.frozen import FrozenWeight
from ..patching.settings import Config, coat_block
from .patch import frozen_weights, plan_model


@register_quantization_config("coat")
class FrozenWeightsConfig(QuantizationConfigMixin):
    """``quantization_config`` of ``from_pretrained``: what ``patch_model`` keeps as FP8 codes is
    loaded as such. Nothing else of the model changes; patch it as usual, with the same ``config``.

    Args:
        config: what ``deepspeed.initialize`` takes, with ``"frozen_weights": "fp8"``.

    Raises:
        CoatConfigError: ``frozen_weights`` is another; transformers is older than 5.
    """

    def __init__(self, config: Config) -> None:
        # Before, nothing tells weights of a checkpoint from others.
        if not hasattr(HfQuantizer, "get_quantize_ops"):
            refuse("FrozenWeightsConfig", "got transformers 4", "transformers 5")
        self.quant_method: Any = "coat"
        # Values of JSON, which loggers of configurations write.
        self.activation = coat_block(config).activation.model_dump(mode="json")
        if self.activation["frozen_weights"] != "fp8":
            refuse("coat.activation.frozen_weights", 'got "bf16"', '"fp8" while a model is loaded')


@register_quantizer("coat")
class _Quantizer(HfQuantizer):
    quantization_config: Any
    is_trainable: Any = True
    is_serializable: Any = True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.settings = ActivationConfig(**self.quantization_config.activation)
        model.requires_grad_(False)
        planned = frozen_weights(plan_model(model, self.settings))
        model.requires_grad_(True)
        self.weights = {
            module: {name: planned.get(id(p)) for name, p in module._parameters.items()}
            for module in model.modules()
        }
        # A load that fails leaves no hook, which would keep what it has loaded.
        quantized: Any = weakref.WeakMethod(self._quantized)
        handle = register_module_parameter_registration_hook(lambda *given: quantized()(*given))
        self.remove = weakref.finalize(self, handle.remove)

    def _quantized(self, module: Any, name: str, p: Any) -> Any:
        if p.is_meta or module not in self.weights:
            return None
        known = module._parameters.get(name)
        if known is not None and known.shape != p.shape:  # transformers 5.17 does not look
            refuse(
                name, f"got {list(p.shape)} in a checkpoint", f"{list(known.shape)}, the model's"
            )
        transposed = self.weights[module].get(name)
        if transposed is None or not getattr(p, "_is_hf_initialized", False):
            return None
        codes = FrozenWeight.of(p, self.settings.format, transposed)
        found: Any = torch.nn.Parameter(codes, requires_grad=False)
        found._is_hf_initialized = True
        return found

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        """Bytes of an element, of which transformers allocates all at once."""
        module, _, name = param_name.rpartition(".")
        frozen = self.weights[model.get_submodule(module)].get(name) is not None
        return 1 if frozen else param.element_size()

    def postprocess_model(self, model: Any, **kwargs: Any) -> None:
        """Leave a model without a trace of a quantizer: its weights say what they are."""
        self.remove()
        self.remove_quantization_config(model)
