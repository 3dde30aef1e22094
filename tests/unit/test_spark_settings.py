"""Which settings a Spark session gets, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stormproof.core.base.errors import SettingsError
from stormproof.core.engine.spark_settings import (
    ELSEWHERE,
    ON_ONE_MACHINE,
    REQUIRED_BY_QUERIES,
    SETTINGS,
    session_settings,
    without_secrets,
)
from stormproof.core.start.settings import Settings, spark_names

JARS = [Path("/jars/delta.jar")]


def test_tables_of_toml_become_whole_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stormproof.toml").write_text(
        'master = "local[2]"\nspark.executor.memory = "4g"\nspark.executor.cores = 2\nspark.ui.enabled = true\n'
        'spark."eventLog.dir" = "/x"\n[spark.hadoop.fs.s3a]\nendpoint = "http://127.0.0.1:9000"\n'
    )
    found = Settings().spark
    assert found == {
        "spark.executor.memory": "4g",
        "spark.executor.cores": "2",
        "spark.ui.enabled": "true",
        "spark.eventLog.dir": "/x",
        "spark.hadoop.fs.s3a.endpoint": "http://127.0.0.1:9000",
    }


def test_whole_names_are_taken_as_they_are_and_later_ones_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORMPROOF_SPARK", '{"spark.executor.memory": "4g", "spark.cores.max": 3}')
    settings = Settings().with_spark({"spark.executor.memory": "5g"})
    assert settings.spark == {"spark.executor.memory": "5g", "spark.cores.max": "3"}


def test_what_is_no_setting_is_refused_by_its_whole_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"spark\.a\.b is neither text nor a number"):
        spark_names({"a": {"b": [1]}})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stormproof.toml").write_text("spark.jars = [1]\n")
    with pytest.raises(SettingsError, match=r"spark in .*stormproof.toml: .*spark\.jars is neither text"):
        Settings()


def test_secrets_among_them_are_not_shown() -> None:
    settings = Settings(spark={"spark.hadoop.fs.s3a.secret.key": "hush"})
    assert "hush" not in repr(settings) + str(settings)


HIDDEN = {
    "spark.hadoop.fs.s3a.secret.key": "hush",
    "spark.hadoop.fs.s3a.access.key": "hush",
    "spark.hadoop.fs.s3a.session.token": "hush",
    "spark.hadoop.fs.s3a.encryption.key": "hush",
    "spark.hadoop.fs.azure.account.key.shop.dfs.core.windows.net": "hush",
    "spark.hadoop.fs.azure.sas.orders.shop.blob.core.windows.net": "hush",
    "spark.hadoop.fs.azure.sas.fixed.token.shop.dfs.core.windows.net": "hush",
    "spark.hadoop.fs.azure.account.oauth2.client.secret": "hush",
    "spark.hadoop.google.cloud.auth.service.account.private.key": "hush",
    "spark.ssl.keyPassword": "hush",
    "spark.executorEnv.STORMPROOF_DATABASE_URL": "hush",
    "spark.executorEnv.STORMPROOF_LINEAGE_API_KEY": "hush",
    "spark.executorEnv.STORMPROOF_STORAGE_OPTIONS": '{"AWS_SESSION": "hush"}',
    "spark.executorEnv.PGPASSWORD": "hush",
    "spark.executorEnv.AWS_SECRET_ACCESS_KEY": "hush",
    "spark.executorEnv.AZURE_STORAGE_KEY": "hush",
    "spark.executorEnv.AZURE_STORAGE_CONNECTION_STRING": "hush",
    "spark.executorEnv.LEDGER": "postgresql://shop:hush@db/shop",
    "spark.executorEnv.BROKER": "nats://hush@broker:4222",
    "spark.mine.jdbc": "jdbc:postgresql://db/shop?user=shop&password=hush",
    "spark.mine.blob": "https://shop.blob.core.windows.net/orders?sv=2024&sig=hush",
    "spark.mine.bus": "Endpoint=sb://shop/;SharedAccessKeyName=all;SharedAccessKey=hush",
}
PUBLIC = {
    "spark.executor.memory": "4g",
    "spark.eventLog.dir": "abfss://logs@shop.dfs.core.windows.net/spark",
    "spark.jars": "/home/token/a.jar",
    "spark.driver.extraJavaOptions": "-Djavax.net.ssl.trustStorePassword=changeit",  # the JVM reads it there alone
    "spark.kubernetes.container.image": "registry.example/shop@sha256:00",
    "spark.hadoop.fs.s3a.endpoint": "https://s3.example:9000",
}


def test_secrets_are_told_from_the_others_by_name_and_by_value() -> None:
    found = session_settings(Settings(spark=HIDDEN | PUBLIC), [], {})
    shown = without_secrets(found)
    assert found.items() >= HIDDEN.items()
    assert "hush" not in str(shown)
    assert shown.keys() == found.keys() - HIDDEN.keys()


@pytest.mark.parametrize("own", ["mine", "(?i)MINE", "(?:mine)|yours"])
def test_an_own_expression_for_secrets_is_added_to_ours(own: str) -> None:
    theirs = {"spark.redaction.regex": own, "spark.mine": "hush", "spark.token": "hush", "spark.a": "shown"}
    for found in (session_settings(Settings(spark=theirs), JARS, {}), session_settings(Settings(), JARS, theirs)):
        assert found["spark.redaction.regex"].startswith(own)
        assert "hush" not in str(without_secrets(found))
        assert without_secrets(found)["spark.a"] == "shown"


@pytest.mark.parametrize("own", ["(", "[", "*"])
def test_an_own_expression_that_is_none_is_refused(own: str) -> None:
    with pytest.raises(SettingsError, match=r"spark\.redaction\.regex"):
        session_settings(Settings(spark={"spark.redaction.regex": own}), JARS, {})


def test_a_users_setting_goes_before_ours_and_lists_are_joined() -> None:
    settings = Settings(spark={"spark.ui.enabled": "true", "spark.jars": "/mine.jar", "spark.sql.extensions": "a.B"})
    found = session_settings(settings, JARS, {})
    assert found["spark.ui.enabled"] == "true"
    assert found["spark.jars"] == "/jars/delta.jar,/mine.jar"
    assert found["spark.sql.extensions"] == f"{SETTINGS['spark.sql.extensions']},a.B"
    assert found["spark.driver.host"] == "127.0.0.1"


@pytest.mark.parametrize("name", REQUIRED_BY_QUERIES)
def test_a_topology_runs_with_what_only_queries_rest_on(name: str) -> None:
    other = "true" if REQUIRED_BY_QUERIES[name] == "false" else "false"
    assert session_settings(Settings(spark={name: other}), JARS, {})[name] == other
    assert session_settings(Settings(), JARS, {name: other})[name] == other
    assert session_settings(Settings(), JARS, {})[name] == REQUIRED_BY_QUERIES[name]


def test_the_master_has_one_place() -> None:
    with pytest.raises(SettingsError, match="STORMPROOF_MASTER"):
        session_settings(Settings(spark={"spark.master": "yarn"}), JARS, {})
    assert session_settings(Settings(master="local[3]"), JARS, {})["spark.master"] == "local[3]"
    assert session_settings(Settings(master="local[3]"), JARS, {"spark.master": "yarn"})["spark.master"] == "yarn"


@pytest.mark.parametrize(
    ("settings", "environment"),
    [
        ({"master": "sc://a:15002"}, {}),
        ({"spark": {"spark.remote": "sc://a"}}, {}),
        ({"spark": {"spark.api.mode": "Connect"}}, {}),
        ({}, {"SPARK_REMOTE": "sc://a"}),
        ({}, {"SPARK_API_MODE": "connect"}),
        ({}, {"SPARK_CONNECT_MODE_ENABLED": "1"}),
    ],
)
def test_spark_connect_is_refused_by_name(settings: dict[str, Any], environment: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"asks for Spark Connect, which is not supported.*STORMPROOF_MASTER"):
        session_settings(Settings(**settings), JARS, {}, environment)
    session_settings(Settings(spark={"spark.api.mode": "classic"}), JARS, {}, {"SPARK_API_MODE": "classic"})


def test_a_driver_elsewhere_is_refused_unless_spark_submit_has_put_it_there() -> None:
    mode = {"spark.submit.deployMode": "cluster"}
    with pytest.raises(SettingsError, match="this process is the driver"):
        session_settings(Settings(spark=mode), JARS, {})
    assert session_settings(Settings(), JARS, mode).items() >= mode.items()


@pytest.mark.parametrize("master", ["spark://a:7077", "yarn", "k8s://https://a", "local-cluster[2,1,1024]"])
def test_executors_elsewhere_are_not_bound_to_loopback(master: str) -> None:
    found = session_settings(Settings(master=master), JARS, {})
    assert ELSEWHERE.items() <= found.items()
    assert "spark.driver.host" not in found
    assert (
        session_settings(Settings(master=master), JARS, {"spark.network.timeout": "300s"})["spark.network.timeout"]
        == "300s"
    )


@pytest.mark.parametrize("master", ["local", "local[*]", "local[4]", "local[2, 3]"])
def test_a_local_master_stays_on_loopback(master: str) -> None:
    assert ON_ONE_MACHINE.items() <= session_settings(Settings(master=master), JARS, {}).items()
