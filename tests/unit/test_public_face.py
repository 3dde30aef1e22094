"""The public names: one list, each shown under the path from which users import it."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any, Final, get_type_hints

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import stormproof
from stormproof.core.base import errors
from stormproof.core.base.public_names import shown_as_public

SUBMODULES: Final = ("errors", "sink", "source", "state", "testing", "topology", "web")
OFFERED: list[tuple[str, Any]] = [
    (name, thing)
    for module in (stormproof, *(getattr(stormproof, name) for name in SUBMODULES))
    for name in module.__all__
    if inspect.isclass(thing := getattr(module, name)) or inspect.isfunction(thing)
    if module is not stormproof.testing
]
CLASSES = [thing for _, thing in OFFERED if inspect.isclass(thing)]
AT_HOME = {"DeadLetter", "Delivery", "SinkAddress", "Slice"}
"""Their annotations can be resolved in their own modules alone: a named tuple's, and those of a type that names itself."""


def test_the_first_name_space_is_what_a_topology_is_written_with() -> None:
    assert 40 <= len(vars(stormproof)["__all__"]) <= 46
    assert set(SUBMODULES) == set(dir(stormproof)) - set(vars(stormproof)["__all__"])


@pytest.mark.parametrize(("name", "thing"), OFFERED, ids=[name for name, _ in OFFERED])
def test_a_public_name_shows_its_public_path(name: str, thing: Any) -> None:
    assert thing.__qualname__ == name
    shown = importlib.import_module(thing.__module__)
    assert (name in vars(shown).get("__all__", ())) is (name not in AT_HOME)
    assert pickle.loads(pickle.dumps(thing)) is thing  # noqa: S301


@pytest.mark.parametrize("thing", CLASSES, ids=lambda thing: thing.__name__)
def test_the_annotations_of_a_public_class_can_be_read(thing: type) -> None:
    get_type_hints(thing)


def test_every_error_is_public() -> None:
    of_tree = {name for name, thing in vars(errors).items() if inspect.isclass(thing) and issubclass(thing, Exception)}
    assert of_tree == set(vars(stormproof.errors)["__all__"])


def test_a_traceback_names_an_error_as_users_import_it() -> None:
    program = "from stormproof.core.base.errors import UsageError\nraise UsageError('no')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stderr.strip().splitlines()[-1] == "stormproof.errors.UsageError: no"


def test_a_name_means_one_thing() -> None:
    """No other public class of the library has a public name."""
    homes: dict[str, set[str]] = {}
    for folder in ("core", "trident", "sinks"):
        for path in Path(stormproof.__file__).parent.joinpath(folder).rglob("*.py"):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, set()).add(f"{folder}/{path.name}")
    assert {one.__name__: found for one in CLASSES if len(found := homes.get(one.__name__, set())) > 1} == {}
    names = Counter(name for name, _ in OFFERED)
    assert {name: times for name, times in names.items() if times > 1} == {"StormproofError": 2}


def test_what_catches_every_error_is_at_the_top_too() -> None:
    assert stormproof.StormproofError is stormproof.errors.StormproofError


def test_what_is_not_public_keeps_its_home() -> None:
    class Own:
        """A class of a user's."""

    assert shown_as_public(Own, "stormproof").__module__ == __name__
    assert shown_as_public(errors.ErrorKind.FATAL, "stormproof") is errors.ErrorKind.FATAL


def test_a_class_whose_annotations_cannot_be_resolved_keeps_its_home() -> None:
    class Odd:
        """Annotated with a name that type checkers alone know."""

        value: NotThere  # type: ignore[name-defined] # noqa: F821

    Odd.__module__ = "stormproof.core.base.errors"
    assert shown_as_public(Odd, "stormproof").__module__ == "stormproof.core.base.errors"
    assert Odd.__annotations__ == {"value": "NotThere"}


def test_importing_the_package_imports_no_engine() -> None:
    program = (
        "import sys, stormproof, stormproof.testing; print([m for m in ('pyspark', 'sqlalchemy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def modules_of_extras() -> set[str]:
    """The top-level modules that only an optional dependency brings."""
    requirements = [Requirement(text) for text in metadata.requires("stormproof") or ()]
    optional = {canonicalize_name(r.name) for r in requirements if r.marker is not None} | {"hiredis"}
    base = {canonicalize_name(r.name) for r in requirements if r.marker is None}
    homes = metadata.packages_distributions().items()
    return {m for m, of in homes if {canonicalize_name(name) for name in of} <= optional - base}


def test_import_star_and_help_need_no_extra() -> None:
    blocked = modules_of_extras()
    assert {"starlette", "jinja2", "confluent_kafka", "pika", "obstore", "openlineage"} <= blocked
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(blocked)!r}))\n"
        "import stormproof\n"
        "from stormproof import *\n"
        "missing = set(stormproof.__all__) - set(globals())\n"
        "assert not missing, missing\n"
        "help(stormproof)\n"
        "help(stormproof.web)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert all(f"class {name}(" in ended.stdout for name in ("Topology", "WebUser", "DeltaSink"))
    assert "\nFUNCTIONS\n" in ended.stdout


def test_import_star_takes_no_submodule() -> None:
    names: dict[str, object] = {}
    exec("from stormproof import *", names)  # noqa: S102
    assert "Topology" in names
    assert not set(SUBMODULES) & set(names)


def test_a_name_of_a_submodule_is_refused_with_the_submodule() -> None:
    with pytest.raises(ImportError, match=r"stormproof has no name Slice: import it from stormproof\.source"):
        from stormproof import Slice  # type: ignore[attr-defined] # pyright: ignore # noqa: F401


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match="Topolgy"):
        _ = stormproof.Topolgy  # type: ignore[attr-defined] # pyright: ignore


@pytest.mark.parametrize("name", ["clock", "batches_max"])
def test_run_refuses_an_argument_that_it_does_not_have_by_its_own_name(name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"run\(\) got an unexpected keyword argument '{name}'; known: settings, engine"
    ):
        stormproof.run(stormproof.Topology("t"), **{name: 1})  # type: ignore[arg-type]
