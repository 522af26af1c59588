"""In processes that a program under ``python -m coat_dist`` starts: ``import coat_dist`` before
DeepSpeed is imported.

Python imports this by itself where the folder is on ``PYTHONPATH``. Nothing is imported before
DeepSpeed is, so that processes without it stay as they are. A ``sitecustomize`` of the environment
behind this one runs as well. In an environment other than the program's, such as that of an
inference server, coat_dist may be absent or not work.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder


class _BeforeDeepSpeed:
    """A finder that imports coat_dist when it is asked for DeepSpeed, and then finds it as
    others do.
    """

    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed" and self in sys.meta_path:
            sys.meta_path.remove(self)
            try:
                import coat_dist  # noqa: F401
            except Exception:
                if sys.prefix == os.environ.get("COAT_DIST_PREFIX"):
                    raise

            found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
            return next((spec for spec in found if spec is not None), None)
        return None


def _run_shadowed_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [path for path in sys.path if os.path.abspath(path or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _BeforeDeepSpeed())
_run_shadowed_sitecustomize()
