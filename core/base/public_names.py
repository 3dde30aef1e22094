"""What users may import: the names in the stubs of `stormproof`, shown under the path from which they are imported."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, TypeVar, cast, get_type_hints

T = TypeVar("T")

_ROOMS: Final = ("stormproof.core.", "stormproof.sinks.", "stormproof.trident.")


def names_of_stub(module: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a module whose names stand in its stub, each imported at its first use.

    A name that a submodule has is refused with that submodule, as an ImportError. `__all__` is without submodules: their
    names are short enough to be a user's own variables.
    """
    homes, submodules = _read_stub(module)

    def get(name: str) -> object:
        if name in submodules:
            return importlib.import_module(f"{module}.{name}")
        if name not in homes:
            for submodule in submodules:
                if name in _read_stub(there := f"{module}.{submodule}")[0]:
                    # of an AttributeError the statement `from stormproof import ...` would not show the text
                    raise ImportError(f"{module} has no name {name}: import it from {there}", name=name)
            raise AttributeError(f"{module} has no name {name}", name=name)
        thing = shown_as_public(getattr(importlib.import_module(homes[name]), name), module)
        vars(sys.modules[module])[name] = thing
        return thing

    return get, lambda: sorted([*homes, *submodules]), sorted(homes)


def _read_stub(module: str) -> tuple[dict[str, str], list[str]]:
    """The names in a module's stub with the modules that define them; its submodules. Read also from an archive."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"{module} is not installed whole", name=module)
    text = cast(Any, spec.loader).get_data(f"{spec.origin}i")
    homes, submodules = dict[str, str](), list[str]()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if node.module is None:
                submodules += names
            else:
                home = importlib.util.resolve_name("." * node.level + node.module, spec.parent)
                homes |= dict.fromkeys(names, home)
    return homes, submodules


def shown_as_public(thing: T, module: str) -> T:
    """The same class or function, shown as a name of `module`; what is not defined in our rooms is left as it is.

    A class's annotations are resolved first, since readers of them look for names in the module that the class shows. A
    class whose annotations cannot be resolved keeps the path of its own module.
    """
    if not isinstance(thing, (type, FunctionType)) or not thing.__module__.startswith(_ROOMS):
        return thing
    home, thing.__module__ = thing.__module__, module
    if isinstance(thing, type) and "__annotations__" in vars(thing):
        written = thing.__annotations__
        try:
            defined_in = importlib.import_module(home)
            thing.__annotations__ = inspect.get_annotations(
                cast("type[Any]", thing), globals=vars(defined_in), eval_str=True
            )
            get_type_hints(thing)
        except NameError:  # imported for type checkers alone, or a type that names itself
            thing.__module__, thing.__annotations__ = home, written
    return thing
