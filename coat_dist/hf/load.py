"""Frozen weights as FP8 codes while transformers loads a model: ``from_pretrained`` holds no more
than one of them in BF16.

transformers calls a quantizer for the model on the meta device. What :func:`patch_model` would keep
as codes is planned there, and torch's hook on registered parameters then quantizes each weight as
it arrives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..config import CoatConfigError
from ..flow.core.frozen import FrozenWeight
from ..patching.settings import Config, coat_block
from .patch import frozen_weights, plan_model

__all__ = ["FrozenWeightsConfig"]


@register_quantization_config("coat")
class FrozenWeightsConfig(QuantizationConfigMixin):
    """``quantization_config`` of ``from_pretrained``: what ``patch_model`` keeps as FP8 codes is
    loaded as such. Nothing else of the model changes; patch it as usual, with the same ``config``.

    Args:
        config: as of ``patch_model``, with ``"frozen_weights": "fp8"``.

    Raises:
        CoatConfigError: ``frozen_weights`` is another.
    """

    def __init__(self, config: Config) -> None:
        self.quant_method: Any = "coat"
        self.settings = coat_block(config).activation
        if self.settings.frozen_weights != "fp8":
            raise CoatConfigError(
                f'coat.activation.frozen_weights: got "{self.settings.frozen_weights}", accepted: '
                '"fp8" while a model is loaded with FrozenWeightsConfig'
            )


@register_quantizer("coat")
class _Quantizer(HfQuantizer):
    quantization_config: Any
    is_trainable: Any = True
    is_serializable: Any = True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        model.requires_grad_(False)
        plan = plan_model(model, self.quantization_config.settings)
        planned = frozen_weights(plan)
        model.requires_grad_(True)
        self.weights = {
            (module, name): planned[id(p)]
            for module in model.modules()
            for name, p in module._parameters.items()
            if id(p) in planned
        }

        def quantized(module: Any, name: str, p: Any) -> Any:
            if (module, name) not in self.weights or p.is_meta or isinstance(p, FrozenWeight):
                return None
            codes = FrozenWeight.of(p, plan.settings.format, self.weights[module, name])
            found: Any = torch.nn.Parameter(codes, requires_grad=False)
            found._is_hf_initialized = True
            return found

        self.hook = register_module_parameter_registration_hook(quantized)

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        """Bytes of an element, of which transformers allocates all at once."""
        module, _, name = param_name.rpartition(".")
        return 1 if (model.get_submodule(module), name) in self.weights else param.element_size()

    def postprocess_model(self, model: Any, **kwargs: Any) -> None:
        """Leave a model without a trace of a quantizer: its weights say what they are."""
        self.hook.remove()
        self.remove_quantization_config(model)

    _process_model_after_weight_loading = postprocess_model  # abstract before transformers 5
