"""The orders as a task of Airflow: it applies what is in the queue, and ends; put this file and `orders.py` into `dags/`.

    pip install apache-airflow
    airflow dags test orders

A task that failed or was killed is tried again by Airflow, and goes on from the ledger: what was applied is not applied
again, and a batch that was prepared is committed first. How often a *message* is tried, the ledger counts, not Airflow.
`max_active_runs` keeps two runs from taking over from each other (`Fenced`).
"""

from datetime import timedelta

from airflow.sdk import dag, task


@dag(schedule=timedelta(minutes=10), max_active_runs=1, catchup=False)
def orders():
    """One task."""

    @task(retries=3, retry_delay=timedelta(seconds=30))
    def apply() -> dict[str, int]:
        """Every order in the queue, applied once to the Delta table and to the Postgres table."""
        from orders import topology  # not while Airflow reads the file

        done = topology().run(until_idle=True)
        return {"batches": done.batches, "messages": done.messages, "dead_letters": done.dead_letters}

    apply()


orders()
