"""The DeepSpeed side: ``coat_dist.initialize``, what it refuses, and what it replaces on DeepSpeed's objects.

- ``engine.py`` is ``initialize``: ``validate``, ``agree``, ``build``. By ``hook.py`` calls of ``deepspeed.initialize``
  go the same way; ``optimizer_from_json.py`` makes the optimizer that a configuration names.
- ``config/`` has the first two: which settings are refused (``table.py``), misspelt keys (``keys.py``), and the
  exchange of errors between ranks (``agreement.py``).
- ``attach.py`` is the one list of what is replaced on DeepSpeed's objects, in its order, with the reason for it. Its
  lines call ``step/`` (passes of the step, accessors, FP8 gathers), ``build/`` (pipelines, ``round_robin_gradients``,
  replicated gradients), ``heartbeat.py`` (which names ranks that hang or have ended) and ``coat_dist/checkpoint``.
- ``zero_init.py`` builds ZeRO-3 models in shards, ``without_launcher.py`` starts ranks, before there is an engine.
- ``reviewed.py`` lists the verified DeepSpeed builds, by file hash.

No module here imports DeepSpeed when it is imported itself, so ``coat_dist`` works where DeepSpeed is not installed.
"""
