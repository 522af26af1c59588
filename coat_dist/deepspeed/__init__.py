"""The DeepSpeed side: ``coat_dist.initialize``, what it refuses, and what it replaces on DeepSpeed's objects.

- ``engine.py`` is ``initialize``; ``compare_ranks.py`` and ``optimizer_from_json.py`` are steps of it. By ``hook.py``
  calls of ``deepspeed.initialize`` go the same way; ``roll_call.py`` finds ranks whose calls went another.
- ``refusals.py`` says which DeepSpeed settings are refused: by the table in ``refusal_rules.py``, by ``json_types.py``
  where a value is of a wrong kind, by ``near_misses.py`` and ``known_keys.py`` where a name is wrong, and by
  ``monitors.py`` where a package is not installed.
- ``attach.py`` is the one list of what is replaced on DeepSpeed's objects, in its order, with the reason for it. Each
  line calls a file of its own: ``step*.py``, ``master_weights.py``, ``deepspeed_accessors.py`` (what DeepSpeed's
  accessors answer, mostly by way of ours in ``coat_accessors.py``), ``round_robin.py``, ``cached_weights.py``,
  ``pipeline.py``, ``expert_parallel.py``, ``fp8_gather.py``, ``heartbeat.py`` (which names
  ranks that hang or have ended), and files of ``coat_dist/checkpoint``.
- ``zero_init.py`` builds ZeRO-3 models in shards, before there is an engine.
- ``reviewed.py`` knows which DeepSpeed was read; ``registration.py`` makes it know CoatAdamW by name.

No module here imports DeepSpeed when it is imported itself, so ``coat_dist`` works where DeepSpeed is not installed.
"""
