"""The DeepSpeed side: ``coat_dist.initialize``, what it refuses, and what it replaces on DeepSpeed's objects.

- ``engine.py`` is ``initialize``: ``validate``, ``agree``, ``build``. By ``hook.py`` calls of ``deepspeed.initialize``
  go the same way; ``optimizer_from_json.py`` makes the optimizer that a configuration names.
- ``config/`` has the first two: which settings are refused (``table.py``), which keys DeepSpeed reads (``schema.py``),
  names that are nearly right (``misspellings.py``), and the exchange of errors between ranks (``agreement.py``).
- ``attach.py`` is the one list of what is replaced on DeepSpeed's objects, in its order, with the reason for it. Each
  line calls a file of its own: in ``step/`` the passes of the step, weights, gradients, accessors and FP8 gathers, in
  ``build/`` pipelines, the layout of ``round_robin_gradients``, replicated gradients and SLURM's ranks, beside them
  ``heartbeat.py`` (which names ranks that hang or have ended), and files of ``coat_dist/checkpoint``.
- ``zero_init.py`` builds ZeRO-3 models in shards, before there is an engine.
- ``reviewed.py`` lists the verified DeepSpeed builds, by file hash.

No module here imports DeepSpeed when it is imported itself, so ``coat_dist`` works where DeepSpeed is not installed.
"""
