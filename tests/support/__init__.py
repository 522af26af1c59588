"""What tests of several folders share: ranks in processes of their own, and ways to watch a
model.
"""

from coat_dist.nodes import free_port

from .marks import slow
from .models import Adds, Largest, residuals_apart
from .nodes import Node, Nodes
from .processes import held_elsewhere, megatron_on_one_rank, saves_by_dist_checkpointing
from .programs import Program, forked_programs
from .ranks import run_ranks, start_ranks
from .tensors import equal

__all__ = [
    "Adds",
    "Largest",
    "Node",
    "Nodes",
    "Program",
    "equal",
    "forked_programs",
    "free_port",
    "held_elsewhere",
    "megatron_on_one_rank",
    "residuals_apart",
    "run_ranks",
    "saves_by_dist_checkpointing",
    "slow",
    "start_ranks",
]
