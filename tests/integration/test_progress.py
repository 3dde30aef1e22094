"""What a run tells of a batch's job while it runs."""

from __future__ import annotations

import json
import logging
import threading
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession
from support.brokers import free_port
from support.queues import prepared_database, put
from support.web import OPERATOR, page_of, signed_in

from stormproof import PostgresQueue, PostgresSink, Topology
from stormproof.core.engine.spark import SparkEngine
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.status import TopologyStatus, status
from stormproof.trident.cli.reports import show_status
from stormproof.trident.driver.run import EngineChoice
from stormproof.trident.ledger.control import JobProgress

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]

MESSAGES = 20
HALF = MESSAGES // 2


def run(database: Database, folder: Path, engine: EngineChoice, heard: Heard) -> None:
    put(prepared_database(database), "words", [b"w%d" % number for number in range(MESSAGES)])
    until = heard.until

    def work(word: str) -> str:
        while word == f"w{HALF}" and not until.exists():
            threading.Event().wait(0.01)  # a function that waits for a service
        return word

    topology = Topology("words")
    queue = PostgresQueue("words", schema="word string", database=database)
    topology.stream("words", queue).map(work, "word", schema="word string", name="work").into(
        PostgresSink("words", database=database)
    )
    settings = Settings(database_url=database.adbc_uri, staging_dir=str(folder), metrics_port=heard.port)
    topology.run(engine=engine, settings=settings, until_idle=True, on_progress=heard.told)


@pytest.fixture(autouse=True)
def its_ledger(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `stormproof status` reads."""
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)


class Heard:
    """Lets the function go on once the job was told of in its middle, and the ledger has that, too."""

    def __init__(self, until: Path, database: Database) -> None:
        self.until, self.all, self.shown = until, list[JobProgress](), list[TopologyStatus]()
        self._database, self.pages, self.told_ratio, self.port = database, dict[str, str](), list[float](), free_port()

    def told(self, job: JobProgress) -> None:
        self.all.append(job)
        self.shown.append(status_of(self._database))
        self.told_ratio.append(self.ratio())
        now = self.shown[-1].job
        if now is not None and now.through >= HALF and self.told_ratio[-1] and not self.until.exists():
            for as_json in (False, True):
                with suppress(SystemExit):
                    show_status("words", as_json=as_json)
            app = page_of(self._database)
            self.pages = {url: signed_in(app, OPERATOR).get(url).text for url in ("/topology?topology=words", "/")}
            app.close()
            self.until.touch()
        raise SystemExit("what it raises is logged")

    def ratio(self) -> float:
        """The metric, as it is scraped."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        (found,) = (line for line in text.splitlines() if line.startswith("stormproof_job_progress_ratio{"))
        return float(found.rpartition(" ")[2])


def status_of(database: Database) -> TopologyStatus:
    engine = sa.create_engine(database.sqlalchemy_url)
    (found,) = status(AuditLedger(engine)).topologies
    engine.dispose()
    return found


def require(heard: Heard, database: Database, told: str, caplog: pytest.LogCaptureFixture) -> None:
    through = [job.through for job in heard.all if job.component == "work"]
    assert through == sorted(through)
    assert HALF in through, "the messages before the one that waits"
    assert {(job.txid, job.attempt, job.total, job.unit) for job in heard.all} == {(1, 1, MESSAGES, "messages")}
    assert "on_progress raised at txid 1" in caplog.text
    shown = [one.job for one in heard.shown if one.job is not None]
    assert set(shown) <= set(heard.all)
    assert (shown[-1].component, shown[-1].through) == ("work", HALF)
    assert status_of(database).job is None, "no job runs any more"
    now = f"txid 1: {HALF} of {MESSAGES} messages through work"
    assert now in told
    job = json.loads(told[told.index("{") :])["topologies"][0]["job"]
    assert (job["txid"], job["component"], job["through"], job["total"]) == (1, "work", HALF, MESSAGES)
    assert all(now in page for page in heard.pages.values())
    assert len(heard.pages) == 2
    assert set(heard.told_ratio) <= {done / MESSAGES for done in range(MESSAGES + 1)}
    assert HALF / MESSAGES in heard.told_ratio


def test_a_job_is_told_of_while_it_runs(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = Heard(tmp_path / "go on", database)
    with caplog.at_level(logging.ERROR, "stormproof.job"):
        run(database, tmp_path, "inline", heard)
    require(heard, database, capsys.readouterr().out, caplog)


@pytest.mark.spark
def test_a_job_on_spark_is_told_of_while_it_runs(
    spark: SparkSession,
    database: Database,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard = Heard(tmp_path / "go on", database)
    with caplog.at_level(logging.ERROR, "stormproof.job"):
        run(database, tmp_path, SparkEngine(spark, 1), heard)
    require(heard, database, capsys.readouterr().out, caplog)
