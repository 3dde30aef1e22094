"""Classes and functions show the path under which users import them (`stormproof.X`), in errors and in `help()`."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, TypeVar, cast, get_type_hints

import lazy_loader

PUBLIC: Final = "stormproof"

T = TypeVar("T")


def names_of_stub(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose names stand in its `__init__.pyi`, imported at first use.

    As `lazy_loader.attach_stub`, which does not find the stub of a package in an archive.
    """
    text = pkgutil.get_data(package, "__init__.pyi")
    if text is None:
        raise ImportError(f"{package} has lost its file __init__.pyi", name=package)
    names: dict[str, list[str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 1:
            names.setdefault(node.module, []).extend(alias.name for alias in node.names)
    attached: tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]
    attached = lazy_loader.attach(package, submod_attrs=names)
    return attached


def shown_as_public(thing: T) -> T:
    """The same class or function, shown as a name of `stormproof`; anything else is left as it is.

    A class's annotations are resolved first, since readers of them look for names in the module that the class shows. A
    class whose annotations cannot be resolved keeps the path of its own module.
    """
    if not isinstance(thing, (type, FunctionType)) or not thing.__module__.startswith(f"{PUBLIC}."):
        return thing
    home, thing.__module__ = thing.__module__, PUBLIC
    if isinstance(thing, type) and "__annotations__" in vars(thing):
        written = thing.__annotations__
        try:
            module = importlib.import_module(home)
            thing.__annotations__ = inspect.get_annotations(
                cast("type[Any]", thing), globals=vars(module), eval_str=True
            )
            get_type_hints(thing)
        except NameError:  # imported for type checkers alone, or a type that names itself
            thing.__module__, thing.__annotations__ = home, written
    return thing
