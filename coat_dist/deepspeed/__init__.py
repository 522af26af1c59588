"""The DeepSpeed side: ``coat_dist.initialize``, what it refuses, and what it replaces on
DeepSpeed's objects.

- ``engine.py``: ``initialize`` in three steps, ``validate``, ``agree`` and ``build``. ``hook.py``
  sends calls of ``deepspeed.initialize`` there; ``optimizer_from_json.py`` makes the optimizer that
  a configuration names.
- ``config/``: the first two steps. Refused settings (``table.py``), misspelt keys (``keys.py``),
  and the exchange of errors between ranks (``agreement.py``).
- ``attach.py``: the ordered list of what is replaced on DeepSpeed's objects, and why. Its lines
  call ``step/`` (passes of the step, accessors, FP8 gathers), ``build/`` (pipelines,
  ``round_robin_gradients``, replicated gradients), ``heartbeat.py`` (names ranks that hang or have
  ended) and ``coat_dist/checkpoint``.
- ``zero_init.py`` builds ZeRO-3 models in shards, and ``without_launcher.py`` starts ranks: both
  before the engine.
- ``reviewed.py`` lists the verified DeepSpeed builds, by file hash.

No module here imports DeepSpeed when it is imported itself, so ``coat_dist`` works where DeepSpeed
is not installed.
"""
