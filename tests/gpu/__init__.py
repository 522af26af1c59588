"""What only a GPU can show: whole layers and models, memory, host time, several GPUs.

The kernel of one operation is tested with its definition in ``tests/coat_dist/ops``, which runs on
a GPU where there is one: that of norms in ``test_norm.py`` there.
"""
