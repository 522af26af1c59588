"""Packages that a plain install leaves out, by the extras of setup.py."""

from __future__ import annotations

from importlib import import_module


def need(module: str, extra: str, user: str) -> None:
    """Import a module of an extra for ``user``, a public name; its absence is an error with the
    install line.
    """
    try:
        import_module(module)
    except ModuleNotFoundError as missing:
        line = f"{user} needs {missing.name}: pip install 'coat-dist[{extra}]'"
        raise ModuleNotFoundError(line, name=missing.name) from None
