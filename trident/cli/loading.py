"""Loads what `FILE.py:NAME` names, a topology or a function that makes one from parameters; and imports plugins."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from stormproof.core.base.errors import StormproofError, UsageError
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.pending.source import PendingSource
from stormproof.trident.cli.output import TRACEBACK_VARIABLE

_OURS: Final = str(Path(__file__).parents[1])


def load_topology(target: str, parameters: Sequence[str]) -> tuple[TopologyGraph, ModuleType]:
    """The topology that `FILE.py:NAME` names, and the module that it is in.

    Raises:
        UsageError: no such file or name, a parameter that is missing, unknown or of the wrong type, or no topology.
    """
    value, module = _named(target, parameters, "topology", TopologyGraph)
    assert isinstance(value, TopologyGraph)
    return value, module


def load_source(target: str, parameters: Sequence[str]) -> tuple[Any, ModuleType]:
    """The source that `FILE.py:NAME` names, and the module that it is in.

    Raises:
        UsageError: as of `load_topology`; whether it is a source, the topology that it is given to says.
    """
    return _named(target, parameters, "source", PendingSource)


def _named(target: str, parameters: Sequence[str], what: str, kind: type[Any]) -> tuple[object, ModuleType]:
    file, colon, name = target.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        file = target if target.endswith(".py") else "orders.py"
        raise UsageError(f"{target!r}: write FILE.py:NAME, as in {file}:{what}; NAME is the {what}'s in the file")
    _require_file(file)
    given = parse_parameters(parameters)
    module = _loaded(file)
    if not hasattr(module, name):
        found = _of_kind(module, kind)
        raise UsageError(f"{file} has no {name!r}; it has {', '.join(found) or f'no {what}'}", file=file, name=name)
    value: object = getattr(module, name)
    if isinstance(value, kind):
        if given:
            raise UsageError(f"{target} is a {what}, not a function: it takes no --param ({', '.join(given)})")
        return value, module
    called = kind.__name__ if what == "source" else "Topology"
    if not callable(value):
        raise UsageError(f"{target} is a {type(value).__name__}, neither a {called} nor a function that returns one")
    arguments = bind_parameters(value, given, target)
    with _blaming_the_file(file, f"while {name}() built the {what}"):
        made: object = value(**arguments)
    if not isinstance(made, kind):
        raise UsageError(f"{target} returned a {type(made).__name__} instead of a {called}")
    return made, module


def import_plugins(plugins: str) -> None:
    """Import the modules that the setting `plugins` names, each once. A plugin registers its sinks when it is imported.

    Raises:
        UsageError: there is no such module or file, or importing it raised an error.
    """
    for plugin in filter(None, map(str.strip, plugins.split(","))):
        if plugin.endswith(".py"):
            if Path(plugin).stem not in sys.modules:
                _require_file(plugin)
                _loaded(plugin)
        else:
            with _blaming_the_file(plugin, f"while the plugin {plugin} was imported"):
                importlib.import_module(plugin)


def _require_file(file: str) -> None:
    path = Path(file)
    if not path.is_file():
        what = "this is a folder, not a file" if path.is_dir() else "there is no such file"
        raise UsageError(f"{file}: {what}", file=file)


def _loaded(file: str) -> ModuleType:
    with _blaming_the_file(file, "while the file was loaded"):
        return _load_module(Path(file).absolute())


def _of_kind(module: ModuleType, kind: type[Any]) -> list[str]:
    """The names of a module's objects of this kind and of functions annotated to return one; if there are none, of all
    functions.
    """
    functions = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    names = {kind.__name__, "Topology"} if kind is TopologyGraph else {one.__name__ for one in _heirs(kind)}
    makers = [n for n, f in functions.items() if any(name in str(f.__annotations__.get("return")) for name in names)]
    named = [n for n, value in vars(module).items() if isinstance(value, kind)]
    return sorted(n for n in [*named, *makers] or functions if not n.startswith("_"))


def _heirs(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for heir in kind.__subclasses__():
        yield from _heirs(heir)


@contextmanager
def _blaming_the_file(file: str, when: str) -> Generator[None]:
    """Turn what a user's file raises into an error that names the file, the line and the next step.

    An interrupt passes unchanged, and so do Stormproof's own errors, which say what is wrong themselves.
    """
    try:
        yield
    except (StormproofError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        where = _shown(error.filename or file)
        text = f": {error.text.strip()}" if error.text else ""
        raise UsageError(
            f"{where}, line {error.lineno}: {error.msg}{text}; repair it, and try again", file=where, line=error.lineno
        ) from error
    except SystemExit as error:
        raise UsageError(
            f"{_place(error, file)}: it ended the program (status {error.code}) {when}; put what is to happen only when the "
            "file itself is run under: if __name__ == '__main__':",
            file=file,
        ) from error
    except ImportError as error:
        raise UsageError(
            f"{_place(error, file)}: {type(error).__name__}: {error}; install it for {sys.executable}, or put it beside the "
            "file",
            file=file,
            module=error.name,
        ) from error
    except Exception as error:
        raise UsageError(
            f"{_place(error, file)}: {type(error).__name__}: {error}, raised {when}; {TRACEBACK_VARIABLE}=1 shows the whole "
            "way there",
            file=file,
            error=type(error).__name__,
        ) from error


def _place(error: BaseException, file: str) -> str:
    """The last line of a file in the user's folder that the error came through."""
    folder = str(Path(file).absolute().parent)
    own = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(f.filename).startswith(folder)]
    own = [f for f in own if f"{os.sep}site-packages{os.sep}" not in f.filename and _OURS not in f.filename] or own
    return f"{_shown(own[-1].filename)}, line {own[-1].lineno}" if own else file


def _shown(file: str) -> str:
    """A path, relative to the working folder if it is below that."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def parse_parameters(parameters: Sequence[str]) -> dict[str, str]:
    """Parameters given as `KEY=VALUE`.

    Raises:
        UsageError: one is not of this form, or a key is given twice.
    """
    given: dict[str, str] = {}
    for parameter in parameters:
        key, equals, value = parameter.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--param {parameter!r}: write KEY=VALUE")
        if key in given:
            raise UsageError(f"--param {key} stands twice; give it once")
        given[key] = value
    return given


def bind_parameters(function: Callable[..., Any], given: Mapping[str, str], target: str) -> dict[str, object]:
    """The function's arguments, converted to the annotated types.

    Raises:
        UsageError: one is unknown, missing, or not of its type; all names are listed.
    """
    try:
        signature = inspect.signature(function, eval_str=True).parameters
    except NameError as error:  # an annotation that is imported for type checkers only
        raise UsageError(
            f"{target}: its annotations cannot be read ({error}); import what they name, or use str, int, float, bool, Path"
        ) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{target} is not a function whose parameters are known: {error}") from error
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.values())
    named = {n: p for n, p in signature.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    known = ", ".join(named) or "none"
    unknown = [key for key in given if key not in named and not takes_any]
    if unknown:
        raise UsageError(f"{target} has no parameter {', '.join(unknown)}; known: {known}", parameters=[*unknown])
    missing = [n for n, p in named.items() if p.default is p.empty and n not in given]
    if missing:
        options = " ".join(f"--param {n}=..." for n in missing)
        raise UsageError(f"{target} needs {', '.join(missing)}: add {options}", parameters=[*missing])
    return {key: _converted(key, value, named[key].annotation if key in named else str) for key, value in given.items()}


def _converted(key: str, value: str, annotation: Any) -> object:
    """A parameter's text as a value of these types; of any other type, the text itself."""
    if annotation not in (int, float, bool, Path):
        return value
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        raise UsageError(f"--param {key}={value}: that is not of type {annotation.__name__}") from None


def _load_module(path: Path) -> ModuleType:
    """Load the file under its own name, as `python FILE` would find its neighbours."""
    name = path.stem
    if name in sys.modules or name in sys.stdlib_module_names:
        name = f"{name}_topology"
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be loaded as a Python module; name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
