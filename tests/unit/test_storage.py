"""Addresses of object stores, their options, and which of both are refused."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from stormproof import DeltaSink, FileSource
from stormproof.core.base.errors import TopologyError, UsageError
from stormproof.core.base.message import Guarantee
from stormproof.core.source.files.formats import File
from stormproof.core.source.files.reader import FileSliceReader, Segment
from stormproof.core.storage import protocol
from stormproof.core.storage.object_files import ObjectFiles
from stormproof.core.storage.protocol import StorageOptions, refusal_of_url, storage_options, use_storage
from stormproof.testing.sinks.harness import APPEND

VALUE = "wJalrXUtnFEMI-EXAMPLE"


@pytest.fixture(autouse=True)
def _no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_given", {})
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)


def check(url: str, **options: str) -> None:
    DeltaSink(url, name="t", storage_options=options).check(APPEND, Guarantee.EXACTLY_ONCE)


@pytest.mark.parametrize(
    "url",
    ["s3://lake/words", "s3a://lake/a/b=1/c", "abfss://box@account.dfs.core.windows.net/words", "gs://lake/words"],
)
def test_a_folder_in_a_store_is_served(url: str) -> None:
    check(url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://lake", "names no folder"),
        ("hdfs://host/words", "hdfs:// is not served"),
        ("http://host/words", "http:// is not served"),
        (f"s3://key:{VALUE}@lake/words", "holds a user or a password"),
        ("s3://lake/words?versionId=3", "a query"),
        ("s3://lake/wor%20ds", "spell in different ways"),
        ("s3://lake/w\u00f6rter", "spell in different ways"),
        ("s3://lake//words", "spell in different ways"),
    ],
)
def test_another_address_is_refused_by_name(url: str, why: str) -> None:
    with pytest.raises(TopologyError, match=why) as caught:
        check(url)
    assert VALUE not in str(caught.value)
    assert refusal_of_url(url) is not None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("AWS_S3_LOCKING_PROVIDER", "dynamodb"),
        ("aws_s3_allow_unsafe_rename", "true"),
        ("aws_conditional_put", "disabled"),
        ("AWS_COPY_IF_NOT_EXISTS", "dynamodb:locks"),
    ],
)
@pytest.mark.parametrize("by", ["options", "environment"])
def test_options_by_which_two_drivers_overwrite_each_other_are_refused(
    option: str, value: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "environment":
        monkeypatch.setenv(option.upper(), value)
    with pytest.raises(TopologyError, match=option.lower()):
        check("s3://lake/words", **({option: value} if by == "options" else {}))


def test_spark_as_the_committer_is_refused() -> None:
    sink = DeltaSink("s3://lake/words", name="t", committer="spark")
    with pytest.raises(TopologyError, match="committer='spark'"):
        sink.check(APPEND, Guarantee.EXACTLY_ONCE)


def test_options_are_those_of_the_nearest_address() -> None:
    use_storage("s3://lake", {"aws_region": "outer"})
    use_storage("s3://lake/inner", {"aws_region": "inner"})
    assert storage_options("s3://lake/inner/words/part-1.parquet") == {"aws_region": "inner"}
    assert storage_options("s3://lake/innermost") == {"aws_region": "outer"}
    assert storage_options("s3://other/words") == {}


def test_no_value_of_an_option_is_in_a_text() -> None:
    options = StorageOptions({"aws_secret_access_key": VALUE})
    sink = DeltaSink("s3://lake/words", name="t", storage_options=options)
    for text in (repr(options), str(options), f"{options}", repr(sink), str(sink.description(APPEND))):
        assert VALUE not in text


def test_an_option_that_the_client_does_not_know_is_refused_without_its_value() -> None:
    use_storage("s3://lake", {"aws_secret_acess_key": VALUE})
    with pytest.raises(UsageError, match="aws_secret_acess_key") as caught:
        ObjectFiles("s3://lake").store("s3://lake/words")
    assert VALUE not in str(caught.value)


@pytest.mark.parametrize("path", ["s3://b/data", "s3://b/data/*.parquet", "s3://b/data/a.parquet"])
def test_the_options_of_a_file_source_travel_with_its_readers_and_serve_no_other_folder(path: str) -> None:
    FileSource(path, storage_options={"aws_region": VALUE})
    file = File(1, "s3://b/data/a.parquet", "text", 0, 1, 2, 0, "", np.array([0, 2]))
    packed = pickle.dumps(FileSliceReader.of((Segment.of(file, 0, 1),), None))
    reader = pickle.loads(packed)  # noqa: S301 - made in the line before
    ((folder, options),) = reader.storage
    assert (folder, options["aws_region"]) == ("s3://b/data", VALUE)
    assert not storage_options("s3://b/other")
    assert VALUE not in repr(reader)


def test_a_reader_of_local_files_carries_no_options() -> None:
    file = File(1, "/data/a.txt", "text", 0, 1, 2, 0, "", np.array([0, 2]))
    assert FileSliceReader.of((Segment.of(file, 0, 1),), None).storage == ()


@pytest.mark.parametrize("end", ["\n", "\r", "\nx"])
@pytest.mark.parametrize(
    "name",
    [
        *("aws_session_token", "AWS_ACCESS_KEY_ID", "aws_secret_access_key", "azure_storage_account_key"),
        *("session_token", "token", "access_key_id", "secret_access_key"),
        *("azure_storage_sas_key", "account_key", "client_secret", "bearer_token", "sas_token", "azure_storage_token"),
    ],
)
def test_a_key_or_token_with_a_line_break_is_refused_unseen(
    name: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name.upper(), VALUE + end)
    use_storage("s3://other", {name: VALUE + end})
    for place in ("s3://lake/words", "s3://other/words"):
        with pytest.raises(UsageError, match=f"(?i){name} has a line break") as refused:
            storage_options(place)
        assert VALUE not in str(refused.value)


def test_other_values_may_have_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", '{\n"a": 1\n}')
    monkeypatch.setenv("SSH_KEY", "a\nb")
    monkeypatch.setenv("OTHER_TOKEN", "a\nb")
    assert storage_options("gs://lake/words") == {}
