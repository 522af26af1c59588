"""Programs: prepare data, pretrain, plot."""

import warnings

# megatron-core says this four times at import, and nothing here uses what it falls back from.
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
