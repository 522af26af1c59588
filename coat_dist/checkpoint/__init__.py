"""Checkpoints on disk: atomic saves, verified loads, DeepSpeed's universal format.

Saving, which is ``engine.save_checkpoint`` of a coat engine (``save``), is one transaction.
``team`` has the ranks that share the folder: they agree on the arguments, and an error on one rank
is raised on all.

1. Prepare: ``write.publish`` makes a folder with a temporary name.
2. Write: DeepSpeed and the caller write into it; ``write.engine_writes`` keeps errors meanwhile.
3. Publish: ``manifest`` flushes and sums every file, and lists them; ``write.publish`` gives the
   folder its final name, lets ``latest`` name it and removes older checkpoints, by the writes of
   ``write.durable``.

Loading a checkpoint that DeepSpeed wrote is ``engine.load_checkpoint`` (``read.load_checks``).
``read.tags`` finds the checkpoint, ``manifest`` verifies its files, and ``read.native_check``
compares it with the engine, before DeepSpeed loads it.

Universal checkpoints, for another layout (ZeRO stage, numbers of ranks, optimizer), are in
``universal``. ``convert`` writes one from the files of all ranks (``zero_checkpoint``,
``zero_files``), with the FP8 codes of moments (``codes``). ``load`` checks that one (``folder``)
fits an engine, and fills it.

``zero_partitions`` says where a parameter lies in ZeRO's memory, ``names`` what a rank's parameter
is called in the whole model.
"""
