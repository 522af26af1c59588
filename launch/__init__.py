"""Programs: prepare data, pretrain, convert, plan memory, measure scaling, plot."""

import warnings
from importlib.util import find_spec

_OF_TRAIN = (
    *("deepspeed", "hjson", "huggingface_hub", "matplotlib", "megatron", "psutil", "pyarrow"),
    *("safetensors", "sentencepiece", "tensorboard", "tokenizers", "tqdm", "yaml"),
)
if missing := [name for name in _OF_TRAIN if find_spec(name) is None]:
    raise ModuleNotFoundError(f"launch needs {', '.join(missing)}: pip install 'coat-dist[train]'")

# megatron-core says this five times at import, and nothing here uses what it falls back from.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
# Its comment on its own default, at every construction of a TransformerConfig.
warnings.filterwarnings("ignore", message="full scope is deprecated")
