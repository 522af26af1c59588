"""Checkpoints on disk: folders that survive a kill, ZeRO's files, DeepSpeed's universal format.

Saving, which is ``engine.save_checkpoint`` of a coat engine:

1. ``lock``: one program at a time writes to a folder (``launch/pretrain.py``).
2. ``save``: DeepSpeed and the caller write into a folder with a temporary name. An error on one rank is one on all.
   ``engine_writes``, ``summed_file`` and ``checksums`` take checksums meanwhile; ``team``: which ranks share a folder.
3. ``manifest``: every file is brought to disk; ``manifest.json`` lists size and checksum of each.
4. ``publish``: the folder gets its final name, ``latest`` names it, older checkpoints are removed.
   ``durable`` holds the writes that 1 to 4 are made of.

Loading a checkpoint that DeepSpeed wrote, into an engine of the same layout:

1. ``tags`` and ``whole``: which checkpoint is meant, and whether its files are what the manifest says.
2. ``load_checks``: calls these and whatever else must be checked before ``engine.load_checkpoint`` changes anything,
   with one answer on all ranks. ``native_check`` is such a check: whether stage, numbers of ranks and places of
   parameters are the engine's.
3. DeepSpeed loads it.

Universal checkpoints, for another layout (ZeRO stage, numbers of ranks, optimizer):

1. ``universal_convert``: ``convert_to_universal`` reads the files of all ranks (``zero_files``: which there are, where
   a parameter lies in them; ``zero_checkpoint``: all of them as one model) and writes one folder a parameter.
   ``universal_codes`` adds the FP8 codes of moments, so that they need not be decoded and encoded again.
2. ``universal_folder``: reads such a checkpoint, and gives one tensor-parallel rank its part of each tensor.
3. ``universal_check``: what in it does not fit the engine; called through ``load_checks``.
4. ``universal_load``: fills the engine (``zero_partitions``, ``zero_shards``: where a parameter lies in ZeRO's memory).
"""
