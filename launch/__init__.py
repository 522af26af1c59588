"""Programs: prepare data, pretrain, plot."""

import warnings

# megatron-core says this five times at import, and nothing here uses what it falls back from.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
# Its comment on its own default, at every construction of a TransformerConfig.
warnings.filterwarnings("ignore", message="full scope is deprecated")
