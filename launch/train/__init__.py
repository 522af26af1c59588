"""The parts of a training run: settings and plan, engine, loop, metrics, checkpoints."""
