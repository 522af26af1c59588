"""Checkpoints on disk: folders that survive a kill, ZeRO's files, DeepSpeed's universal format.

Saving, which is ``engine.save_checkpoint`` of a coat engine (``save``), is one transaction:

1. Prepare: ``team`` has the ranks that share the folder. They agree on the arguments; an error on one rank is one on
   all. ``write.publish`` makes a folder with a temporary name.
2. Write: DeepSpeed and the caller write into it; ``write.engine_writes`` takes checksums meanwhile.
3. Publish: ``manifest`` brings every file to disk and lists size and checksum of each; ``write.publish`` gives the
   folder its final name, lets ``latest`` name it and removes older checkpoints. ``write.durable`` holds the writes that
   this is made of.

``write.lock`` lets one program at a time write to a folder; the programs of ``launch`` take it.

Loading a checkpoint that DeepSpeed wrote, into an engine of the same layout:

1. ``read.tags`` and ``read.whole``: which checkpoint is meant, and whether its files are what the manifest says.
2. ``read.load_checks``: calls these and whatever else must be checked before ``engine.load_checkpoint`` changes
   anything, with one answer on all ranks. ``read.native_check`` is such a check: whether stage, numbers of ranks and
   places of parameters are the engine's. So is ``read.other_engines``.
3. DeepSpeed loads it.

Universal checkpoints, for another layout (ZeRO stage, numbers of ranks, optimizer), in ``universal``:

1. ``convert``: ``convert_to_universal`` reads the files of all ranks (``zero_files``: which there are, where a
   parameter lies in them; ``zero_checkpoint``: all of them as one model) and writes one folder a parameter. ``codes``
   adds the FP8 codes of moments, so that they need not be decoded and encoded again.
2. ``folder``: reads such a checkpoint, and gives one tensor-parallel rank its part of each tensor.
3. ``check``: what in it does not fit the engine; called through ``read.load_checks``.
4. ``load``: fills the engine, and ``schedule`` its learning rates.

``zero_partitions`` says where a parameter lies in ZeRO's memory, ``expert_names`` and ``stage_names`` what a rank's
parameter is called in the whole model.
"""
