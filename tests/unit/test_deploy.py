"""What lies in `deploy/` is taken by who reads it: units by systemd, manifests by their schemas, the image by a linter."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from support.command_line import CommandLine

from stormproof.core.engine.spark_settings import session_settings
from stormproof.core.start.settings import Settings
from stormproof.trident.cli.output import Exit

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
UNITS: Final = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS: Final = DEPLOY / "kubernetes" / "orders.yaml"
BACKEND: Final = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFESTS.read_text()))


def manifest(kind: str) -> dict[str, Any]:
    (found,) = (one for one in manifests() if one["kind"] == kind)
    return found


def verified(unit: Path) -> list[str]:
    """What systemd says of a unit; that a program is not on this machine does not count."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze here, so units are not verified")
    command = [program, "verify", "--man=no", "--recursive-errors=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return [line for line in done.stderr.splitlines() if "is not executable" not in line]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_each_unit(unit: Path) -> None:
    assert verified(unit) == []


def test_control_a_wrong_line_of_a_unit_is_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.service"
    wrong.write_text(UNITS[0].read_text().replace("Restart=always", "Restart=whenever\nRestartSeconds=5"))
    assert len(verified(wrong)) == 2


def test_a_drivers_unit_keeps_to_the_exit_statuses() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "systemd" / "stormproof@.service")
    service = parser["Service"]
    assert service["RestartPreventExitStatus"].split() == [str(int(Exit.USAGE)), str(int(Exit.FENCED))]
    assert service["SuccessExitStatus"] == str(int(Exit.INTERRUPTED))


def test_kubernetes_takes_each_manifest_and_no_unknown_field() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate here: schemas are not checked")
    executor = yaml.safe_load(manifest("ConfigMap")["data"]["executor.yaml"])
    executor["spec"]["containers"][0]["image"] = "spark names it"
    executor["metadata"]["name"] = "spark-names-it"
    for one in [*manifests(), executor]:
        validate.validate(one, validate.latest_version(), strict=True)
    wrong = manifest("Deployment")  # the control
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 120
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, validate.latest_version(), strict=True)


def test_the_manifests_agree_with_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, service, config = manifest("Deployment")["spec"], manifest("Service"), manifest("ConfigMap")
    pod = deployment["template"]
    (driver,) = pod["spec"]["containers"]
    assert (deployment["replicas"], deployment["strategy"]["type"]) == (1, "Recreate")
    assert service["spec"]["selector"] == deployment["selector"]["matchLabels"] == pod["metadata"]["labels"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stormproof.toml").write_text(config["data"]["stormproof.toml"])
    settings = Settings()
    assert settings.spark.keys() == tomllib.loads(config["data"]["stormproof.toml"])["spark"].keys()
    chosen = session_settings(settings, [], {})
    meta = service["metadata"]
    assert chosen["spark.driver.host"] == f"{meta['name']}.{meta['namespace']}.svc"
    ports = {port["port"] for port in service["spec"]["ports"]}
    assert {int(chosen["spark.driver.port"]), int(chosen["spark.driver.blockManager.port"])} == ports
    assert ports <= {port["containerPort"] for port in driver["ports"]}
    assert settings.metrics_port in {port["containerPort"] for port in driver["ports"]}
    assert chosen["spark.kubernetes.container.image"] == driver["image"]
    assert chosen["spark.kubernetes.authenticate.serviceAccountName"] == pod["spec"]["serviceAccountName"]
    executor = yaml.safe_load(config["data"]["executor.yaml"])["spec"]
    (mount,) = executor["containers"][0]["volumeMounts"]
    assert mount in driver["volumeMounts"]
    assert mount["mountPath"] == settings.staging_address
    (claim,) = executor["volumes"]
    assert claim in pod["spec"]["volumes"]
    assert claim["persistentVolumeClaim"]["claimName"] == manifest("PersistentVolumeClaim")["metadata"]["name"]
    assert manifest("PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]
    secret = next(e for e in driver["env"] if "secretKeyRef" in e.get("valueFrom", {}))
    assert secret["name"] == "STORMPROOF_DATABASE_URL"
    assert {"database_url", "lineage_api_key"}.isdisjoint(settings.model_fields_set)


def test_the_drivers_arguments_are_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    (driver,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    program, *arguments = driver["args"]
    assert program == "stormproof"
    error = CommandLine(capsys)(*arguments, "--engine", "inline", status=2)["error"]
    assert "orders.py: there is no such file" in error["message"]


def test_a_linter_finds_nothing_in_the_image(tmp_path: Path) -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    if program is None:
        pytest.skip("there is no hadolint here, so the container file is not linted")

    def linted(file: Path) -> str:
        done = subprocess.run([program, "--no-color", file], capture_output=True, text=True, check=False, timeout=60)
        return done.stdout

    assert linted(DEPLOY / "Dockerfile") == ""
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /tmp && apt-get install tini\n")  # the control
    assert "DL3006" in linted(tmp_path / "Dockerfile")


def test_the_image_runs_its_command_or_sparks_executor(tmp_path: Path) -> None:
    entry = str(DEPLOY / "entrypoint.sh")
    done = subprocess.run([entry, "echo", "a  b", "c"], capture_output=True, text=True, check=True)
    assert done.stdout == "a  b c\n"
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    java.chmod(0o755)
    names = ("DRIVER_URL", "EXECUTOR_ID", "EXECUTOR_CORES", "APPLICATION_ID", "EXECUTOR_POD_IP", "EXECUTOR_POD_NAME")
    environment = {f"SPARK_{name}": name.lower() for name in names} | {
        **{f"SPARK_JAVA_OPT_{number}": f"-Dn={number} x" for number in range(11)},
        "SPARK_EXECUTOR_MEMORY": "2g",
        "SPARK_RESOURCE_PROFILE_ID": "0",
        "SPARK_HOME": "/opt/spark",
        "JAVA_HOME": str(tmp_path),
        "PATH": os.defpath,
    }
    done = subprocess.run([entry, "executor"], capture_output=True, text=True, check=True, env=environment)
    told = done.stdout.splitlines()
    assert told[:11] == [f"-Dn={number} x" for number in range(11)]
    assert told[11:16] == ["-Xms2g", "-Xmx2g", "-cp", "/opt/spark/jars/*", BACKEND]
    assert told[16:] == [
        *("--driver-url", "driver_url", "--executor-id", "executor_id", "--cores", "executor_cores"),
        *("--app-id", "application_id", "--hostname", "executor_pod_ip", "--resourceProfileId", "0"),
        *("--podName", "executor_pod_name"),
    ]
    missing = {name: value for name, value in environment.items() if name != "SPARK_DRIVER_URL"}
    failed = subprocess.run([entry, "executor"], capture_output=True, text=True, check=False, env=missing)
    assert failed.returncode != 0
    assert "SPARK_DRIVER_URL" in failed.stderr
