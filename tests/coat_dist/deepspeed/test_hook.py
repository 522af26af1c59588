"""``deepspeed.initialize`` is changed when DeepSpeed is imported, or at once, once, and also after
a reload.

With a package of that name that is no DeepSpeed and records its calls; engines are in
``test_callers.py``.
"""

import functools
import inspect
import os
import subprocess
import sys
import textwrap
import types

import pytest

from coat_dist.deepspeed import engine, hook

SOURCE = '''
def initialize(args=None, model=None, config=None):
    """Builds an engine."""
    return ("DeepSpeed's", args, model, config)
'''


@pytest.fixture
def package():
    module = types.ModuleType("deepspeed")
    exec(SOURCE, vars(module))
    return module


@pytest.fixture
def calls(monkeypatch, package):
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    seen = []
    monkeypatch.setattr(
        engine, "called_as_deepspeed", lambda args, kwargs: seen.append((args, kwargs)) or "ours"
    )
    return seen


def test_honour_reaches_names_that_were_bound_before(package, calls):
    bound, signature = package.initialize, inspect.signature(package.initialize)
    arguments = inspect.getfullargspec(bound)
    for _ in range(2):  # a second time nothing is changed
        hook.honour(package)
    assert (
        package.initialize is bound
        and bound(1, config=2) == "ours"
        and calls == [((1,), {"config": 2})]
    )
    assert inspect.signature(bound) == signature and bound.__doc__ == "Builds an engine."
    assert inspect.getfullargspec(bound) == arguments
    assert engine.original()(3) == ("DeepSpeed's", 3, None, None)


def test_honour_keeps_a_wrapper_of_another_library(package, calls):
    inner = package.initialize

    @functools.wraps(inner)
    def wrapper(*args, **kwargs):
        return "wrapped", inner(*args, **kwargs)

    package.initialize = wrapper
    hook.honour(package)
    assert package.initialize(1) == ("wrapped", "ours")
    assert engine.original()(1)[0] == "DeepSpeed's", (
        "no way back into the wrapper, which would not end"
    )


def test_honour_calls_what_another_library_put_there(package, calls):
    inner = package.initialize
    package.initialize = lambda *args: ("theirs", inner(*args))  # does not say what it wraps
    for _ in range(2):
        hook.honour(package)
        assert package.initialize(1) == "ours" and engine.original()(2)[0] == "theirs"
        assert engine.original()(2)[1][0] == "DeepSpeed's"


def test_honour_leaves_another_package_alone(package):
    for given in (None, types.SimpleNamespace()):
        package.initialize = given
        hook.honour(package)
        assert package.initialize is given
    hook.honour(types.ModuleType("deepspeed"))


def test_install_waits_for_the_import_and_survives_reloads(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text(SOURCE)
    program = """
        import importlib, importlib.util, sys
        import coat_dist
        assert importlib.util.find_spec("deepspeed").origin.endswith("__init__.py")
        assert "deepspeed" not in sys.modules
        from deepspeed import initialize
        import deepspeed
        from coat_dist.deepspeed import engine
        engine.called_as_deepspeed = lambda args, kwargs: "ours"
        reload = importlib.reload
        for again in (lambda: None, lambda: reload(coat_dist), lambda: reload(deepspeed)):
            again()
            assert initialize(1) == deepspeed.initialize(1) == "ours"
            assert deepspeed.initialize.__wrapped__(1)[0] == "DeepSpeed's"
        assert type(deepspeed.__spec__.loader).__name__ == "SourceFileLoader"
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
