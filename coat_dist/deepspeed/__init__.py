"""The DeepSpeed side: ``coat_dist.initialize``, what it refuses, and what it replaces on
DeepSpeed's objects.

- ``engine.py``: ``initialize`` in three steps, ``validate``, ``agree`` (both ``request.py``) and
  ``build``. ``hook.py`` sends calls of ``deepspeed.initialize`` there; ``optimizer_from_json.py``
  makes the optimizer that a configuration names. What is refused is the table in
  ``coat_dist/settings.py``.
- ``attach.py``: the ordered list of what is replaced on DeepSpeed's objects, and why.
- ``parallel/``: pipelines, divided experts, replicated gradients. ``step/``, below it: passes of
  the step, master weights, accessors, FP8 gathers; ``step/step.py`` lists the verified DeepSpeed
  builds, by file hash.
- ``heartbeat.py`` names ranks that hang or have ended. ``zero_init.py`` builds ZeRO-3 models in
  shards, and ``without_launcher.py`` starts ranks: both before the engine.

No module here imports DeepSpeed when it is imported itself, so ``coat_dist`` works where DeepSpeed
is not installed.
"""
