"""Checkpoints on disk: folders that survive a kill, ZeRO's files, DeepSpeed's universal format and loading it.

``manifest``, ``publish``, ``durable`` and ``lock`` keep folders whole. ``zero_files`` and ``zero_partitions`` know
where a parameter lies, in ZeRO's files and in its memory. ``universal_*`` convert and load. ``native_load`` and
``load_checks`` look at a checkpoint before anything of it is loaded.
"""
