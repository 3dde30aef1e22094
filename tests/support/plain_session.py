"""A driver in a process of its own, on a SparkSession that the user made first, as in a notebook.

``python plain_session.py FOLDER DATABASE_URL WORKER_PYTHON`` prints the error's kind and message, and the job's wait.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import venv
from pathlib import Path


def python_without_the_package(folder: Path) -> Path:
    """A Python that has everything installed but this package: the folder of all others is on its path, and no `.pth`
    file in there counts.
    """
    import sysconfig

    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the driver's alone
    folder, url, worker = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ["PYSPARK_PYTHON"] = worker
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    from stormproof.core.base.errors import StormproofError
    from stormproof.core.postgres.database import Database
    from stormproof.core.start.settings import Settings
    from stormproof.trident.driver.run import run
    from support.environment import Site, topology

    logging.getLogger("stormproof").setLevel(logging.CRITICAL)
    site = Site(folder, Database.from_url(url))
    settings = Settings(database_url=url, home=site.home, outage_s=1.0)
    try:
        statistics = run(topology(site), settings=settings, until_idle=True)
        print(json.dumps({"messages": statistics.messages, "dead_letters": statistics.dead_letters}))
    except StormproofError as error:
        print(json.dumps({"kind": error.kind.value, "message": error.message, "details": dict(error.details)}))
    session.stop()


if __name__ == "__main__":
    main()
