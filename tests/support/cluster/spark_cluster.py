"""A standalone cluster of Spark on hosts of a network, without a shared disk, beside a Postgres and an object store.

Eight hosts: `postgres`, `store` (S3), `master`, `worker1`, `worker2`, `spare`, `driver1`, `driver2`. Workers have Spark and
this package's dependencies, but neither the package nor the repository; it comes with the driver, by `stormproof pack`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final

import psycopg

from stormproof.core.engine.java import find_java
from stormproof.core.postgres.binaries import find_binaries, run_as
from stormproof.core.postgres.database import Database
from support.brokers import skip_where_missing, until
from support.brokers.object_store import BUCKET, KEY, SECRET, SeaweedFS
from support.cluster.hosts import DISK, Host, Image, Network, skip_where_hosts_cannot_be_made
from support.databases import at, create_database
from support.jvm import SHORT_LIVED

REPOSITORY: Final = Path(__file__).parents[3]
VENV: Final = "/mnt/venv"
JAVA: Final = "/mnt/java"
PASSWORD: Final = "cluster-secret"  # noqa: S105 - of a server that lives for a test
POSTGRES_PORT: Final = 5432
S3_PORT: Final = 8333
MASTER_PORT: Final = 7077
START_S: Final = 180.0
WORKERS: Final = ("worker1", "worker2")
SPARE: Final = "spare"
"""A worker that runs only where a test starts it: a driver takes as many executors as `WORKERS` are at the most."""
DRIVERS: Final = ("driver1", "driver2")
EXECUTOR_MB: Final = 700
RECOVERY: Final = "FILESYSTEM"
"""How a master that is started anew knows running applications."""


_PUTS: Final = """
import sys, obstore
from obstore.store import S3Store
bucket, endpoint, key, secret = sys.argv[1:]
options = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}, "region": "us-east-1"}
obstore.put(S3Store(bucket, endpoint=endpoint, access_key_id=key, secret_access_key=secret, **options), "ready", b"")
"""


def _venv() -> Path:
    """The environment that these tests run in: interpreter and packages, by its prefix."""
    return Path(sys.prefix)


class HostedStore(SeaweedFS):
    """The object store, on its host."""

    START_S: ClassVar[float] = START_S

    def __init__(self, host: Host) -> None:
        super().__init__(host.folder)
        self.host, self.port = host, S3_PORT
        ports = iter(range(9_300, 9_400))
        self.ports = {name: next(ports) for name in self.ports}

    @property
    def endpoint(self) -> str:
        return f"http://{self.host.address}:{S3_PORT}"

    def options(self, port: int | None = None) -> dict[str, str]:
        assert port is None
        return {**super().options(), "AWS_ENDPOINT_URL": self.endpoint}

    def command(self) -> Sequence[str]:
        here, there = str(self.host.folder), DISK
        _, *arguments = super().command()
        program = f"{VENV}/bin/weed"
        placed = [word.replace(here, there).replace("127.0.0.1", self.host.address) for word in arguments]
        return self.host.inside(program, *placed)

    def answers(self) -> bool:
        if not listening(self.host, S3_PORT):
            return False
        done = self.host.run(f"{VENV}/bin/python", "-c", _PUTS, BUCKET, self.endpoint, KEY, SECRET, seconds=60)
        return done.returncode == 0


class HostedPostgres:
    """A Postgres on its host, reached there by TCP with a password, and from here by its socket."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        prefix, bin_ = run_as().prefix, find_binaries().folder
        data = self.host.folder / "data"
        command = [*prefix, str(bin_ / "initdb"), "-D", str(data), "-U", "postgres", "--auth=trust", "--locale=C"]
        done = subprocess.run([*command, "--encoding=UTF8"], capture_output=True, check=False, timeout=START_S)
        assert done.returncode == 0, done.stderr
        with (data / "pg_hba.conf").open("a") as file:
            file.write("host all all 10.77.0.0/24 scram-sha-256\n")

    def start(self) -> None:
        given = {
            "listen_addresses": self.host.address,
            "port": str(POSTGRES_PORT),
            "unix_socket_directories": DISK,
            "max_connections": "100",
            "log_line_prefix": "%m [%p] %r ",
        }
        options = [word for name, value in given.items() for word in ("-c", f"{name}={value}")]
        program = f"{VENV}{str(find_binaries().folder).removeprefix(str(_venv()))}/postgres"
        if not str(find_binaries().folder).startswith(str(_venv())):
            program = str(find_binaries().folder / "postgres")
        self.process = self.host.start("log", *run_as().prefix, program, "-D", f"{DISK}/data", *options)
        until(self._serves, "Postgres does not answer", START_S)
        with at(self.local("postgres")) as connection:
            connection.execute(f"alter role postgres password '{PASSWORD}'".encode())

    def _serves(self) -> bool:
        try:
            at(self.local("postgres")).close()
        except psycopg.OperationalError:  # it has no socket yet, or is starting
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        self.host.kill("postgres")

    @property
    def is_on(self) -> bool:
        """Whether its server runs."""
        return next(self.host.processes("postgres", "-D"), None) is not None

    def local(self, name: str) -> Database:
        """A database, for this process: by the socket on the host's disk."""
        where = {"host": str(self.host.folder), "port": str(POSTGRES_PORT), "user": "postgres", "dbname": name}
        return Database.of(where)

    def address(self, name: str) -> str:
        """A database's address on the network."""
        return f"postgresql://postgres:{PASSWORD}@postgres:{POSTGRES_PORT}/{name}"


def listening(host: Host, port: int) -> bool:
    """Whether somebody on the host listens at the port of its address."""
    return host.in_network("bash", "-c", f"exec 3<>/dev/tcp/{host.address}/{port}") == 0


class Cluster:
    """The hosts, and what runs on them. Made by `cluster`."""

    def __init__(self, network: Network) -> None:
        self.network = network
        drives = Image({VENV: _venv()}, kept=[REPOSITORY])
        java = find_java().home
        works = Image({VENV: _venv(), JAVA: java}, hidden=[REPOSITORY])
        serves = Image({VENV: _venv()})
        self.postgres = HostedPostgres(network.host("postgres", serves))
        self.store = HostedStore(network.host("store", serves))
        self.master = network.host("master", works)
        self.workers = {name: network.host(name, works) for name in WORKERS}
        self.spare = network.host(SPARE, works)
        self.drivers = {name: network.host(name, drives) for name in DRIVERS}
        self.java_home = java
        self._databases = 0

    def start(self) -> None:
        """Start all servers; the workers have come to the master when it returns."""
        self.postgres.prepare()
        self.store.prepare()
        self.start_master()
        for name in WORKERS:
            self.start_worker(name)
        self.store.start()
        self.postgres.start()
        until(lambda: self.alive_workers() == len(WORKERS), "the workers do not come to the master", START_S)

    def start_master(self) -> None:
        """Start the master; it knows the applications of an earlier one, as that of `deploy/systemd` does."""
        self._daemon(self.master, "master.Master", "--port", str(MASTER_PORT), "--webui-port", "8080")

    def start_worker(self, name: str) -> None:
        """Start a worker of one core."""
        offered = (
            "--cores",
            "1",
            "--memory",
            f"{EXECUTOR_MB + 300}m",
            "--work-dir",
            f"{DISK}/work",
            "--webui-port",
            "8081",
        )
        host = self.spare if name == SPARE else self.workers[name]
        self._daemon(host, "worker.Worker", *offered, f"spark://master:{MASTER_PORT}")

    def stop_worker(self, name: str) -> None:
        """End a worker that `heal` would not start again, and its executors."""
        assert name == SPARE
        self.spare.kill("worker.Worker")

    def _daemon(self, host: Host, name: str, *arguments: str) -> None:
        spark = self.spark_home
        environment = {
            "SPARK_HOME": spark,
            "JAVA_HOME": JAVA,
            "SPARK_LOCAL_IP": host.address,
            "SPARK_LOCAL_DIRS": f"{DISK}/local",
            "SPARK_DAEMON_MEMORY": "256m",
            # A worker that does not answer is given up, and one that lost its master comes back, within seconds.
            "SPARK_DAEMON_JAVA_OPTS": f"{SHORT_LIVED} -Dspark.worker.timeout=12",
            "SPARK_MASTER_OPTS": f"-Dspark.deploy.recoveryMode={RECOVERY} -Dspark.deploy.recoveryDirectory={DISK}/known",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        program = (f"{spark}/bin/spark-class", f"org.apache.spark.deploy.{name}", "--host", host.name)
        host.start("log", *program, *arguments, environment=environment)

    @property
    def spark_home(self) -> str:
        """Spark, on every host."""
        import pyspark

        return f"{VENV}{str(Path(pyspark.__file__).parent).removeprefix(str(_venv()))}"

    def alive_workers(self) -> int:
        """How many workers the master knows; 0 where it does not answer."""
        asks = "exec 3<>/dev/tcp/$0/8080 && printf 'GET /json/ HTTP/1.0\\r\\n\\r\\n' >&3 && cat <&3"
        done = self.master.in_network_said("bash", "-c", asks, self.master.address)
        _, _, body = done.replace("\r", "").partition("\n\n")
        return int(json.loads(body)["aliveworkers"]) if body.lstrip().startswith("{") else 0  # else it is starting

    def fresh_database(self) -> str:
        """The name of a new, empty database."""
        self._databases += 1
        name = f"words{self._databases}"
        create_database(self.postgres.local("postgres"), name)
        return name

    def heal(self) -> None:
        """Whatever was cut, killed or switched off of network, servers, master and workers is there again."""
        hosts = list(self.network.hosts.values())
        for host in hosts:
            if not host.is_on:
                host.switch_on()
                self.network.connect(host)
            self.network.plug_in(host)
            host.hear_all()
        if not next(self.master.processes("master.Master"), None):
            self.start_master()
        for name, host in self.workers.items():
            if not next(host.processes("worker.Worker"), None):
                self.start_worker(name)
        if not next(self.store.host.processes("weed"), None):
            self.store.start()
        if not self.postgres.is_on:
            self.postgres.start()


@contextmanager
def cluster(folder: Path) -> Generator[Cluster]:
    """A running cluster; skips the test where it cannot be made here, and says why."""
    skip_where_hosts_cannot_be_made()
    skip_where_missing(SeaweedFS)
    with Network(folder) as network:
        made = Cluster(network)
        try:
            made.start()
            yield made
        finally:
            made.store.kill()
