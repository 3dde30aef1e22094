-- The tables of ledger, queues and pending messages.
-- Made from the code's declarations by tools/schema_sql.py: change those, and make this file anew.

CREATE TABLE stormproof.event (
  id BIGSERIAL NOT NULL,
  incarnation TEXT NOT NULL,
  at TIMESTAMP WITH TIME ZONE NOT NULL,
  kind TEXT NOT NULL,
  action TEXT,
  txid BIGINT,
  attempt INTEGER,
  sink TEXT,
  message TEXT,
  number BIGINT,
  origin BIGINT,
  token BIGINT,
  reason TEXT,
  component TEXT,
  error TEXT,
  input TEXT,
  detail JSONB,
  CONSTRAINT pk_event PRIMARY KEY (id),
  CONSTRAINT ck_event_action_known CHECK (action in ('retry', 'skip', 'skip_rows', 'adopt', 'adopt_table', 'accept_loss', 'release_table', 'accept_change', 'adopt_stream', 'adopt_queue', 'retry_reject', 'drop_reject', 'pause', 'resume', 'drain', 'stop', 'compact', 'vacuum', 'repair')),
  CONSTRAINT ck_event_kind_known CHECK (kind in ('failure', 'returned', 'dead_letter', 'replay', 'suppressed', 'attempt_failed', 'take_over', 'recovery', 'blocked', 'operator', 'reject', 'dropped', 'late_commit', 'graph', 'schema_changed', 'values_discarded', 'halved', 'stopped', 'start_refused'))
);
CREATE INDEX ix_event_incarnation_kind_id ON stormproof.event (incarnation, kind, id);
CREATE INDEX ix_event_incarnation_message ON stormproof.event (incarnation, message);
CREATE INDEX ix_event_incarnation_txid ON stormproof.event (incarnation, txid);
CREATE INDEX ix_event_why_again ON stormproof.event (incarnation, message, id) WHERE kind in ('failure', 'returned');
COMMENT ON TABLE stormproof.event IS 'append-only: failures, replays, suppressed duplicates, recoveries, operator actions';
COMMENT ON COLUMN stormproof.event.id IS 'later ones are higher';
COMMENT ON COLUMN stormproof.event.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.event.at IS 'when it was recorded';
COMMENT ON COLUMN stormproof.event.kind IS 'what happened';
COMMENT ON COLUMN stormproof.event.action IS 'what an operator decided';
COMMENT ON COLUMN stormproof.event.txid IS 'of the batch, where it is about one';
COMMENT ON COLUMN stormproof.event.attempt IS 'of the batch''s attempt';
COMMENT ON COLUMN stormproof.event.sink IS 'name of the sink, where it is about one';
COMMENT ON COLUMN stormproof.event.message IS 'a message''s id as people see it';
COMMENT ON COLUMN stormproof.event.number IS 'a message''s number in its source';
COMMENT ON COLUMN stormproof.event.origin IS 'what the source shows before the number';
COMMENT ON COLUMN stormproof.event.token IS 'the message''s token in that attempt';
COMMENT ON COLUMN stormproof.event.reason IS 'in a word, or a short phrase';
COMMENT ON COLUMN stormproof.event.component IS 'where the message failed';
COMMENT ON COLUMN stormproof.event.error IS 'class and text of the exception';
COMMENT ON COLUMN stormproof.event.input IS 'the beginning of the message''s payload';
COMMENT ON COLUMN stormproof.event.detail IS 'what else there is to know of this kind of event';

CREATE TABLE stormproof.forgotten (
  number BIGSERIAL NOT NULL,
  what TEXT NOT NULL,
  name TEXT NOT NULL,
  life TEXT NOT NULL,
  at TIMESTAMP WITH TIME ZONE NOT NULL,
  by TEXT NOT NULL,
  why TEXT NOT NULL,
  removed JSONB NOT NULL,
  kept JSONB NOT NULL,
  CONSTRAINT pk_forgotten PRIMARY KEY (number),
  CONSTRAINT ck_forgotten_what_known CHECK (what in ('topology', 'subscription'))
);
CREATE INDEX ix_forgotten_life ON stormproof.forgotten (life);
COMMENT ON TABLE stormproof.forgotten IS 'one row a topology or subscription that an operator had the ledger forget';
COMMENT ON COLUMN stormproof.forgotten.number IS 'later ones are higher';
COMMENT ON COLUMN stormproof.forgotten.what IS 'topology, or subscription: of a queue';
COMMENT ON COLUMN stormproof.forgotten.name IS 'the topology''s, or the queue''s';
COMMENT ON COLUMN stormproof.forgotten.life IS 'the topology''s incarnation, or the subscription';
COMMENT ON COLUMN stormproof.forgotten.at IS 'when';
COMMENT ON COLUMN stormproof.forgotten.by IS 'who';
COMMENT ON COLUMN stormproof.forgotten.why IS 'why, in that person''s words';
COMMENT ON COLUMN stormproof.forgotten.removed IS 'rows that were removed, by table';
COMMENT ON COLUMN stormproof.forgotten.kept IS 'what stayed outside of the ledger, as it was shown';

CREATE TABLE stormproof.reject (
  id BIGSERIAL NOT NULL,
  incarnation TEXT NOT NULL,
  txid BIGINT NOT NULL,
  sink TEXT NOT NULL,
  message TEXT,
  number BIGINT,
  origin BIGINT,
  rows BIGINT NOT NULL,
  sqlstate TEXT,
  error TEXT NOT NULL,
  row TEXT NOT NULL,
  payload BYTEA,
  at TIMESTAMP WITH TIME ZONE NOT NULL,
  state TEXT NOT NULL,
  decided_by TEXT,
  decided_why TEXT,
  decided_at TIMESTAMP WITH TIME ZONE,
  retried_in BIGINT,
  digest BYTEA,
  CONSTRAINT pk_reject PRIMARY KEY (id),
  CONSTRAINT ck_reject_state_known CHECK (state in ('open', 'retrying', 'retried', 'dropped')),
  CONSTRAINT ck_reject_decided CHECK ((state = 'open') = (decided_at is null)),
  CONSTRAINT ck_reject_retried CHECK ((state = 'retried') = (retried_in is not null))
);
CREATE INDEX ix_reject_incarnation_message ON stormproof.reject (incarnation, message);
CREATE INDEX ix_reject_incarnation_txid_sink ON stormproof.reject (incarnation, txid, sink);
CREATE INDEX ix_reject_open ON stormproof.reject (incarnation) WHERE state = 'open';
COMMENT ON TABLE stormproof.reject IS 'messages that a sink does not hold, since its table refuses a row of theirs; removed with their topology alone';
COMMENT ON COLUMN stormproof.reject.id IS 'later ones are higher';
COMMENT ON COLUMN stormproof.reject.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.reject.txid IS 'the batch in which the sink rejected it';
COMMENT ON COLUMN stormproof.reject.sink IS 'name of the sink';
COMMENT ON COLUMN stormproof.reject.message IS 'a message''s id as people see it; null: a row of no single message';
COMMENT ON COLUMN stormproof.reject.number IS 'the message''s number in its source';
COMMENT ON COLUMN stormproof.reject.origin IS 'what the source shows before the number';
COMMENT ON COLUMN stormproof.reject.rows IS 'of the message, which the sink does not hold';
COMMENT ON COLUMN stormproof.reject.sqlstate IS 'null: not refused by an error of Postgres';
COMMENT ON COLUMN stormproof.reject.error IS 'why the table refuses the row';
COMMENT ON COLUMN stormproof.reject.row IS 'the refused row, as JSON';
COMMENT ON COLUMN stormproof.reject.payload IS 'the message''s; null where its source gives none';
COMMENT ON COLUMN stormproof.reject.at IS 'when the batch was committed';
COMMENT ON COLUMN stormproof.reject.state IS 'open, retrying, retried or dropped';
COMMENT ON COLUMN stormproof.reject.decided_by IS 'who decided';
COMMENT ON COLUMN stormproof.reject.decided_why IS 'why, in that person''s words';
COMMENT ON COLUMN stormproof.reject.decided_at IS 'when';
COMMENT ON COLUMN stormproof.reject.retried_in IS 'the txid that wrote it anew to the sink, or rejected it again';
COMMENT ON COLUMN stormproof.reject.digest IS 'SHA-256 of payload and row when the message was set aside';

CREATE TABLE stormproof.topology (
  name TEXT NOT NULL,
  incarnation TEXT NOT NULL,
  epoch BIGINT NOT NULL,
  fingerprint TEXT NOT NULL,
  guarantee TEXT NOT NULL,
  source TEXT NOT NULL,
  created_at TIMESTAMP WITH TIME ZONE NOT NULL,
  started_at TIMESTAMP WITH TIME ZONE NOT NULL,
  driver_host TEXT NOT NULL,
  driver_pid BIGINT NOT NULL,
  driver_started DOUBLE PRECISION NOT NULL,
  stopped_at TIMESTAMP WITH TIME ZONE,
  CONSTRAINT pk_topology PRIMARY KEY (name),
  CONSTRAINT uq_topology_incarnation UNIQUE (incarnation)
);
COMMENT ON TABLE stormproof.topology IS 'one row a topology: the fence that every transaction locks first';
COMMENT ON COLUMN stormproof.topology.name IS 'as the program names it';
COMMENT ON COLUMN stormproof.topology.incarnation IS 'one life of this name';
COMMENT ON COLUMN stormproof.topology.epoch IS 'one run of its driver; fences older ones';
COMMENT ON COLUMN stormproof.topology.fingerprint IS 'hash of the graph''s shape, names and schemas';
COMMENT ON COLUMN stormproof.topology.guarantee IS 'of the newest run';
COMMENT ON COLUMN stormproof.topology.source IS 'what the topology reads; it cannot change';
COMMENT ON COLUMN stormproof.topology.created_at IS 'first start';
COMMENT ON COLUMN stormproof.topology.started_at IS 'of the present epoch';
COMMENT ON COLUMN stormproof.topology.driver_host IS 'of the present epoch''s driver';
COMMENT ON COLUMN stormproof.topology.driver_pid IS 'its process there';
COMMENT ON COLUMN stormproof.topology.driver_started IS 'start of that process, seconds since 1970';
COMMENT ON COLUMN stormproof.topology.stopped_at IS 'set when the driver of the present epoch ended in order';

CREATE TABLE stormproof.txn_component (
  incarnation TEXT NOT NULL,
  txid BIGINT NOT NULL,
  component TEXT NOT NULL,
  kind TEXT NOT NULL,
  at TIMESTAMP WITH TIME ZONE NOT NULL,
  executed BIGINT NOT NULL,
  emitted BIGINT NOT NULL,
  acked BIGINT NOT NULL,
  failed BIGINT NOT NULL,
  busy_ms DOUBLE PRECISION NOT NULL,
  CONSTRAINT pk_txn_component PRIMARY KEY (incarnation, txid, component),
  CONSTRAINT ck_txn_component_kind_known CHECK (kind in ('spout', 'operation', 'bolt', 'aggregate', 'join', 'sink', 'acker'))
);
COMMENT ON TABLE stormproof.txn_component IS 'what each component did in the attempt that fixed a batch''s content; an attempt before it has no row';
COMMENT ON COLUMN stormproof.txn_component.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.txn_component.txid IS 'of the batch';
COMMENT ON COLUMN stormproof.txn_component.component IS 'name of the component or sink; __acker is the tracking';
COMMENT ON COLUMN stormproof.txn_component.kind IS 'spout, operation, bolt, aggregate, join, sink or acker';
COMMENT ON COLUMN stormproof.txn_component.at IS 'when the batch''s content was fixed; of one whose messages all failed, when it ended';
COMMENT ON COLUMN stormproof.txn_component.executed IS 'tuples that it took in; of a spout, messages that were read; of the acker, acks';
COMMENT ON COLUMN stormproof.txn_component.emitted IS 'tuples that it made; of the acker, messages with a verdict';
COMMENT ON COLUMN stormproof.txn_component.acked IS 'tuples that it took in and did not fail; of spout and acker, messages that were complete';
COMMENT ON COLUMN stormproof.txn_component.failed IS 'messages that failed in it; of a spout and the acker, anywhere';
COMMENT ON COLUMN stormproof.txn_component.busy_ms IS 'time that it took, over all tasks';

CREATE TABLE stormproof.txn_edge (
  incarnation TEXT NOT NULL,
  txid BIGINT NOT NULL,
  origin TEXT NOT NULL,
  stream TEXT NOT NULL,
  target TEXT NOT NULL,
  tuples BIGINT NOT NULL,
  CONSTRAINT pk_txn_edge PRIMARY KEY (incarnation, txid, origin, stream, target)
);
COMMENT ON TABLE stormproof.txn_edge IS 'how many tuples of that attempt went from one component to another, or to a sink';
COMMENT ON COLUMN stormproof.txn_edge.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.txn_edge.txid IS 'of the batch';
COMMENT ON COLUMN stormproof.txn_edge.origin IS 'component that emitted them';
COMMENT ON COLUMN stormproof.txn_edge.stream IS 'stream that they were emitted to';
COMMENT ON COLUMN stormproof.txn_edge.target IS 'component or sink that took them';
COMMENT ON COLUMN stormproof.txn_edge.tuples IS 'how many; each copy that a grouping makes counts';

CREATE TABLE stormproof.txn_sink (
  incarnation TEXT NOT NULL,
  txid BIGINT NOT NULL,
  sink TEXT NOT NULL,
  previous BIGINT,
  rows BIGINT NOT NULL,
  bytes BIGINT NOT NULL,
  digest TEXT NOT NULL,
  files JSONB NOT NULL,
  committed_at TIMESTAMP WITH TIME ZONE,
  outcome TEXT,
  superseded BIGINT DEFAULT '0' NOT NULL,
  left_out JSONB,
  version BIGINT,
  CONSTRAINT pk_txn_sink PRIMARY KEY (incarnation, txid, sink),
  CONSTRAINT ck_txn_sink_outcome_known CHECK (outcome in ('applied', 'already_held', 'held_unfinished', 'skipped')),
  CONSTRAINT ck_txn_sink_counts CHECK (rows >= 0 and bytes >= 0 and superseded >= 0)
);
CREATE INDEX ix_txn_sink_held ON stormproof.txn_sink (incarnation, sink, txid) WHERE committed_at is not null;
CREATE INDEX ix_txn_sink_superseded ON stormproof.txn_sink (incarnation, sink, superseded) WHERE superseded > 0;
COMMENT ON TABLE stormproof.txn_sink IS 'what each batch writes to each sink, fixed before any sink is touched';
COMMENT ON COLUMN stormproof.txn_sink.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.txn_sink.txid IS 'of the batch';
COMMENT ON COLUMN stormproof.txn_sink.sink IS 'name of the sink';
COMMENT ON COLUMN stormproof.txn_sink.previous IS 'the txid that the sink must hold before';
COMMENT ON COLUMN stormproof.txn_sink.rows IS 'that its files have';
COMMENT ON COLUMN stormproof.txn_sink.bytes IS 'that its files have';
COMMENT ON COLUMN stormproof.txn_sink.digest IS 'SHA-256 over the files'' rows, digests, partitions and misfits';
COMMENT ON COLUMN stormproof.txn_sink.files IS 'the prepared files, each with rows, bytes and digest';
COMMENT ON COLUMN stormproof.txn_sink.committed_at IS 'set once the sink is known to hold it';
COMMENT ON COLUMN stormproof.txn_sink.outcome IS 'applied, already_held, held_unfinished, skipped';
COMMENT ON COLUMN stormproof.txn_sink.superseded IS 'rows of an upsert that changed nothing: a later one of their key was there';
COMMENT ON COLUMN stormproof.txn_sink.left_out IS 'refused rows of groups, whose messages its files have nothing of';
COMMENT ON COLUMN stormproof.txn_sink.version IS 'the table''s version that has it; null: it has none, or that is not known';

CREATE TABLE stormproof.backend (
  incarnation TEXT NOT NULL,
  pid BIGINT NOT NULL,
  started_at TIMESTAMP WITH TIME ZONE NOT NULL,
  epoch BIGINT NOT NULL,
  CONSTRAINT pk_backend PRIMARY KEY (incarnation, pid, started_at),
  CONSTRAINT fk_backend_topology FOREIGN KEY(incarnation) REFERENCES stormproof.topology (incarnation)
);
COMMENT ON TABLE stormproof.backend IS 'server processes of a driver''s connections; a take-over ends those of older epochs';
COMMENT ON COLUMN stormproof.backend.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.backend.pid IS 'of the server process';
COMMENT ON COLUMN stormproof.backend.started_at IS 'of the server process: pids come again';
COMMENT ON COLUMN stormproof.backend.epoch IS 'of the driver whose connection it is';

CREATE TABLE stormproof.confirmation (
  digest TEXT NOT NULL,
  incarnation TEXT NOT NULL,
  action TEXT NOT NULL,
  by TEXT NOT NULL,
  at TIMESTAMP WITH TIME ZONE NOT NULL,
  click TEXT NOT NULL,
  CONSTRAINT pk_confirmation PRIMARY KEY (digest),
  CONSTRAINT fk_confirmation_topology FOREIGN KEY(incarnation) REFERENCES stormproof.topology (incarnation)
);
CREATE INDEX ix_confirmation_incarnation_at ON stormproof.confirmation (incarnation, at);
COMMENT ON TABLE stormproof.confirmation IS 'forms of the page that were confirmed: each is good for one decision, whichever process gets it';
COMMENT ON COLUMN stormproof.confirmation.digest IS 'SHA-256 of the form''s secret';
COMMENT ON COLUMN stormproof.confirmation.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.confirmation.action IS 'the decision, by its name on the page';
COMMENT ON COLUMN stormproof.confirmation.by IS 'who decided';
COMMENT ON COLUMN stormproof.confirmation.at IS 'when';
COMMENT ON COLUMN stormproof.confirmation.click IS 'tells one sending of the form from another';

CREATE TABLE stormproof.control (
  incarnation TEXT NOT NULL,
  request BIGINT NOT NULL,
  paused BOOLEAN NOT NULL,
  ending TEXT,
  ending_epoch BIGINT,
  by TEXT NOT NULL,
  why TEXT NOT NULL,
  asked_at TIMESTAMP WITH TIME ZONE NOT NULL,
  heard_at TIMESTAMP WITH TIME ZONE,
  heard_epoch BIGINT,
  CONSTRAINT pk_control PRIMARY KEY (incarnation),
  CONSTRAINT ck_control_ending_known CHECK (ending in ('drain', 'stop')),
  CONSTRAINT ck_control_ending CHECK ((ending is null) = (ending_epoch is null)),
  CONSTRAINT fk_control_topology FOREIGN KEY(incarnation) REFERENCES stormproof.topology (incarnation)
);
COMMENT ON TABLE stormproof.control IS 'one row a topology: what an operator asked of its driver last';
COMMENT ON COLUMN stormproof.control.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.control.request IS 'number of the newest request';
COMMENT ON COLUMN stormproof.control.paused IS 'no driver opens a batch, until resume';
COMMENT ON COLUMN stormproof.control.ending IS 'how the driver of ending_epoch is to end';
COMMENT ON COLUMN stormproof.control.ending_epoch IS 'the one driver that is to end';
COMMENT ON COLUMN stormproof.control.by IS 'who asked last';
COMMENT ON COLUMN stormproof.control.why IS 'why, in that person''s words';
COMMENT ON COLUMN stormproof.control.asked_at IS 'by the database''s clock';
COMMENT ON COLUMN stormproof.control.heard_at IS 'when a driver took note of the newest request';
COMMENT ON COLUMN stormproof.control.heard_epoch IS 'of that driver';

CREATE TABLE stormproof.graph (
  incarnation TEXT NOT NULL,
  epoch BIGINT NOT NULL,
  after_txid BIGINT NOT NULL,
  fingerprint TEXT NOT NULL,
  description JSONB NOT NULL,
  at TIMESTAMP WITH TIME ZONE NOT NULL,
  CONSTRAINT pk_graph PRIMARY KEY (incarnation, epoch),
  CONSTRAINT fk_graph_topology FOREIGN KEY(incarnation) REFERENCES stormproof.topology (incarnation)
);
COMMENT ON TABLE stormproof.graph IS 'one row each time that a topology''s graph or its sinks changed';
COMMENT ON COLUMN stormproof.graph.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.graph.epoch IS 'the first run of this shape';
COMMENT ON COLUMN stormproof.graph.after_txid IS 'the highest txid that was allotted before';
COMMENT ON COLUMN stormproof.graph.fingerprint IS 'hash of the graph''s shape, names and schemas';
COMMENT ON COLUMN stormproof.graph.description IS 'source, components, sinks with their schemas';
COMMENT ON COLUMN stormproof.graph.at IS 'when that run began';

CREATE TABLE stormproof.handed_in (
  incarnation TEXT NOT NULL,
  number BIGINT NOT NULL,
  key TEXT NOT NULL,
  query TEXT,
  batch BIGINT,
  txid BIGINT,
  first_id BIGINT,
  stop_id BIGINT,
  adopted_from TEXT,
  plan TEXT,
  taken_at TIMESTAMP WITH TIME ZONE NOT NULL,
  CONSTRAINT pk_handed_in PRIMARY KEY (incarnation, number),
  CONSTRAINT ck_handed_in_batch_of_query CHECK ((query is null) = (batch is null)),
  CONSTRAINT ck_handed_in_job_has_txid CHECK (query is not null or txid is not null),
  CONSTRAINT fk_handed_in_topology FOREIGN KEY(incarnation) REFERENCES stormproof.topology (incarnation)
);
CREATE UNIQUE INDEX uq_handed_in_key ON stormproof.handed_in (incarnation, key) WHERE query is null;
COMMENT ON TABLE stormproof.handed_in IS 'jobs and micro-batches that are written, or will be: a job''s key that is here is never written again; the highest number is where a query stands';
COMMENT ON COLUMN stormproof.handed_in.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.handed_in.number IS 'the txid; where micro-batches feed a topology, from 1, as they were taken';
COMMENT ON COLUMN stormproof.handed_in.key IS 'a job''s, as its program gives it; a micro-batch''s is query:batch';
COMMENT ON COLUMN stormproof.handed_in.query IS 'the streaming query''s id, which its checkpoint keeps; null: it is a job';
COMMENT ON COLUMN stormproof.handed_in.batch IS 'the micro-batch''s id in that query, from 0';
COMMENT ON COLUMN stormproof.handed_in.txid IS 'the transaction that wrote, or is to write, its rows to the sinks';
COMMENT ON COLUMN stormproof.handed_in.first_id IS 'the first of its messages, where it feeds a topology';
COMMENT ON COLUMN stormproof.handed_in.stop_id IS 'the message behind its last one';
COMMENT ON COLUMN stormproof.handed_in.adopted_from IS 'the place that it follows by a person''s word: query:batch';
COMMENT ON COLUMN stormproof.handed_in.plan IS 'from what Spark planned it: its times, then the offset at which each source ends';
COMMENT ON COLUMN stormproof.handed_in.taken_at IS 'when its content was fixed';

CREATE TABLE stormproof.heartbeat (
  incarnation TEXT NOT NULL,
  epoch BIGINT NOT NULL,
  at TIMESTAMP WITH TIME ZONE NOT NULL,
  doing TEXT NOT NULL,
  in_flight INTEGER NOT NULL,
  job JSON,
  CONSTRAINT pk_heartbeat PRIMARY KEY (incarnation),
  CONSTRAINT ck_heartbeat_doing_known CHECK (doing in ('running', 'pausing', 'paused', 'draining', 'stopping')),
  CONSTRAINT fk_heartbeat_topology FOREIGN KEY(incarnation) REFERENCES stormproof.topology (incarnation)
);
COMMENT ON TABLE stormproof.heartbeat IS 'one row a topology: its driver''s newest sign of life';
COMMENT ON COLUMN stormproof.heartbeat.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.heartbeat.epoch IS 'of that driver';
COMMENT ON COLUMN stormproof.heartbeat.at IS 'by the database''s clock';
COMMENT ON COLUMN stormproof.heartbeat.doing IS 'running, pausing, paused, draining or stopping';
COMMENT ON COLUMN stormproof.heartbeat.in_flight IS 'batches that are open or prepared';
COMMENT ON COLUMN stormproof.heartbeat.job IS 'how far the job of the lowest of them is; null: none runs, or it began just now';

CREATE TABLE stormproof.prune (
  incarnation TEXT NOT NULL,
  upto BIGINT NOT NULL,
  at TIMESTAMP WITH TIME ZONE NOT NULL,
  by TEXT NOT NULL,
  ended_before TIMESTAMP WITH TIME ZONE NOT NULL,
  removed JSONB NOT NULL,
  why TEXT,
  CONSTRAINT pk_prune PRIMARY KEY (incarnation, upto),
  CONSTRAINT fk_prune_topology FOREIGN KEY(incarnation) REFERENCES stormproof.topology (incarnation)
);
COMMENT ON TABLE stormproof.prune IS 'one row a prune: how far the ledger''s own record was cut, when and by whom';
COMMENT ON COLUMN stormproof.prune.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.prune.upto IS 'nothing up to here is complete';
COMMENT ON COLUMN stormproof.prune.at IS 'when';
COMMENT ON COLUMN stormproof.prune.by IS 'who';
COMMENT ON COLUMN stormproof.prune.ended_before IS 'the horizon that was asked for';
COMMENT ON COLUMN stormproof.prune.removed IS 'number of rows by table';
COMMENT ON COLUMN stormproof.prune.why IS 'why, in that person''s words';

CREATE TABLE stormproof.topology_sink (
  incarnation TEXT NOT NULL,
  sink TEXT NOT NULL,
  target TEXT NOT NULL,
  table_id TEXT NOT NULL,
  description JSONB,
  first_at TIMESTAMP WITH TIME ZONE NOT NULL,
  CONSTRAINT pk_topology_sink PRIMARY KEY (incarnation, sink),
  CONSTRAINT fk_topology_sink_topology FOREIGN KEY(incarnation) REFERENCES stormproof.topology (incarnation)
);
COMMENT ON TABLE stormproof.topology_sink IS 'the table behind each sink';
COMMENT ON COLUMN stormproof.topology_sink.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.topology_sink.sink IS 'name of the sink';
COMMENT ON COLUMN stormproof.topology_sink.target IS 'the table, as the sink names it';
COMMENT ON COLUMN stormproof.topology_sink.table_id IS 'what tells the table from another one of its name';
COMMENT ON COLUMN stormproof.topology_sink.description IS 'how to open it for inspection; no secrets';
COMMENT ON COLUMN stormproof.topology_sink.first_at IS 'when the sink was bound to it';

CREATE TABLE stormproof.txn (
  incarnation TEXT NOT NULL,
  txid BIGINT NOT NULL,
  state TEXT NOT NULL,
  guarantee TEXT NOT NULL,
  epoch BIGINT NOT NULL,
  attempt INTEGER NOT NULL,
  source TEXT NOT NULL,
  position JSONB NOT NULL,
  messages BIGINT NOT NULL,
  failed BIGINT DEFAULT '0' NOT NULL,
  returned BIGINT DEFAULT '0' NOT NULL,
  rejected BIGINT DEFAULT '0' NOT NULL,
  tuples BIGINT DEFAULT '0' NOT NULL,
  bytes BIGINT NOT NULL,
  retry BOOLEAN NOT NULL,
  opened_at TIMESTAMP WITH TIME ZONE NOT NULL,
  prepared_at TIMESTAMP WITH TIME ZONE,
  ended_at TIMESTAMP WITH TIME ZONE,
  cause TEXT,
  reason TEXT,
  steps_ms JSONB,
  tuning JSONB,
  CONSTRAINT pk_txn PRIMARY KEY (incarnation, txid),
  CONSTRAINT ck_txn_state_known CHECK (state in ('open', 'prepared', 'blocked', 'committed', 'aborted', 'abandoned')),
  CONSTRAINT ck_txn_cause_known CHECK (cause in ('every_message_failed', 'driver_ended', 'job_failed', 'unverified', 'moot', 'sink_refused', 'file_lost', 'table_gone', 'too_many_rejects')),
  CONSTRAINT ck_txn_numbers CHECK (txid >= 1 and epoch >= 1 and attempt >= 1),
  CONSTRAINT ck_txn_ended CHECK ((ended_at is not null) = (state in ('committed', 'aborted', 'abandoned'))),
  CONSTRAINT ck_txn_prepared CHECK (prepared_at is not null or state not in ('prepared', 'blocked', 'committed')),
  CONSTRAINT ck_txn_explained CHECK (cause is not null and reason is not null or state not in ('blocked', 'aborted', 'abandoned')),
  CONSTRAINT ck_txn_counts CHECK (failed >= 0 and returned >= 0 and rejected >= 0 and failed + returned <= messages and rejected <= messages),
  CONSTRAINT fk_txn_topology FOREIGN KEY(incarnation) REFERENCES stormproof.topology (incarnation)
);
CREATE INDEX ix_txn_unresolved ON stormproof.txn (incarnation, txid) WHERE ended_at is null;
COMMENT ON TABLE stormproof.txn IS 'one row a batch';
COMMENT ON COLUMN stormproof.txn.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.txn.txid IS 'from 1, without gaps';
COMMENT ON COLUMN stormproof.txn.state IS 'open, prepared, blocked, committed, aborted or abandoned';
COMMENT ON COLUMN stormproof.txn.guarantee IS 'under which it ran';
COMMENT ON COLUMN stormproof.txn.epoch IS 'of the driver that opened it';
COMMENT ON COLUMN stormproof.txn.attempt IS 'the latest; the one that counts once prepared';
COMMENT ON COLUMN stormproof.txn.source IS 'where its messages are from';
COMMENT ON COLUMN stormproof.txn.position IS 'the slice, as its source describes it';
COMMENT ON COLUMN stormproof.txn.messages IS 'opened';
COMMENT ON COLUMN stormproof.txn.failed IS 'messages that failed in it';
COMMENT ON COLUMN stormproof.txn.returned IS 'went back with failed ones';
COMMENT ON COLUMN stormproof.txn.rejected IS 'messages that a sink rejected';
COMMENT ON COLUMN stormproof.txn.tuples IS 'that its components passed on';
COMMENT ON COLUMN stormproof.txn.bytes IS 'of its messages';
COMMENT ON COLUMN stormproof.txn.retry IS 'its messages failed before';
COMMENT ON COLUMN stormproof.txn.opened_at IS 'when its messages were leased';
COMMENT ON COLUMN stormproof.txn.prepared_at IS 'when its content was fixed';
COMMENT ON COLUMN stormproof.txn.ended_at IS 'when it was committed, aborted or abandoned';
COMMENT ON COLUMN stormproof.txn.cause IS 'kind of the reason why it is blocked, aborted or abandoned';
COMMENT ON COLUMN stormproof.txn.reason IS 'the same in words';
COMMENT ON COLUMN stormproof.txn.steps_ms IS 'how long each step took';
COMMENT ON COLUMN stormproof.txn.tuning IS 'how batches were to be when it was opened';

CREATE TABLE stormproof.verdict (
  id BIGINT GENERATED ALWAYS AS IDENTITY,
  incarnation TEXT NOT NULL,
  at TIMESTAMP WITH TIME ZONE NOT NULL,
  by TEXT NOT NULL,
  verdict TEXT NOT NULL,
  first_txid BIGINT NOT NULL,
  last_txid BIGINT,
  pruned_upto BIGINT NOT NULL,
  violations BIGINT NOT NULL,
  unknowns BIGINT NOT NULL,
  notices BIGINT NOT NULL,
  kinds JSONB NOT NULL,
  txids BIGINT NOT NULL,
  sinks BIGINT NOT NULL,
  evidence BIGINT NOT NULL,
  messages BIGINT NOT NULL,
  took_ms BIGINT NOT NULL,
  deep BOOLEAN DEFAULT false NOT NULL,
  tables JSONB,
  basis BIGINT,
  chain_from BIGINT,
  settled_upto BIGINT,
  furthest JSONB,
  CONSTRAINT pk_verdict PRIMARY KEY (id),
  CONSTRAINT ck_verdict_verdict_known CHECK (verdict in ('clean', 'violation', 'cannot_tell', 'not_compared')),
  CONSTRAINT ck_verdict_violations CHECK ((verdict = 'violation') = (violations > 0)),
  CONSTRAINT fk_verdict_topology FOREIGN KEY(incarnation) REFERENCES stormproof.topology (incarnation)
);
CREATE INDEX ix_verdict_incarnation_id ON stormproof.verdict (incarnation, id);
COMMENT ON TABLE stormproof.verdict IS 'one row a run of audit verify: what it looked at and what it found';
COMMENT ON COLUMN stormproof.verdict.id IS 'later ones are higher';
COMMENT ON COLUMN stormproof.verdict.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.verdict.at IS 'when the check ended';
COMMENT ON COLUMN stormproof.verdict.by IS 'who ran it';
COMMENT ON COLUMN stormproof.verdict.verdict IS 'clean, violation, cannot_tell or not_compared: of the scope alone';
COMMENT ON COLUMN stormproof.verdict.first_txid IS 'the first batch that was checked';
COMMENT ON COLUMN stormproof.verdict.last_txid IS 'null: there was none';
COMMENT ON COLUMN stormproof.verdict.pruned_upto IS 'batches up to here were no longer on record, and were not checked';
COMMENT ON COLUMN stormproof.verdict.violations IS 'how many things were wrong';
COMMENT ON COLUMN stormproof.verdict.unknowns IS 'how many questions the evidence left open';
COMMENT ON COLUMN stormproof.verdict.notices IS 'how many things there were to know';
COMMENT ON COLUMN stormproof.verdict.kinds IS 'violations and notices, counted by kind';
COMMENT ON COLUMN stormproof.verdict.txids IS 'batches that were checked';
COMMENT ON COLUMN stormproof.verdict.sinks IS 'sinks that were checked';
COMMENT ON COLUMN stormproof.verdict.evidence IS 'entries of the sinks'' own records that were compared';
COMMENT ON COLUMN stormproof.verdict.messages IS 'openings of messages that were checked';
COMMENT ON COLUMN stormproof.verdict.took_ms IS 'how long the check took, in milliseconds';
COMMENT ON COLUMN stormproof.verdict.deep IS 'whether the rows of the sinks'' tables were compared, too';
COMMENT ON COLUMN stormproof.verdict.tables IS 'how the tables were read: of which sinks, and whether other writers may add rows; null: they were not';
COMMENT ON COLUMN stormproof.verdict.basis IS 'number of the verdict that it continues (--since last); null: it stands by itself';
COMMENT ON COLUMN stormproof.verdict.chain_from IS 'the first batch that it covers, together with the clean verdicts that it continues';
COMMENT ON COLUMN stormproof.verdict.settled_upto IS 'the next one may begin behind this batch; null: none may continue it';
COMMENT ON COLUMN stormproof.verdict.furthest IS 'the batches that had read furthest into the source by then';

CREATE TABLE stormproof.attempt (
  incarnation TEXT NOT NULL,
  txid BIGINT NOT NULL,
  attempt INTEGER NOT NULL,
  epoch BIGINT NOT NULL,
  seed BIGINT NOT NULL,
  excluded JSONB NOT NULL,
  expected_messages BIGINT NOT NULL,
  expected_xor BIGINT NOT NULL,
  started_at TIMESTAMP WITH TIME ZONE NOT NULL,
  outcome TEXT NOT NULL,
  error TEXT,
  CONSTRAINT pk_attempt PRIMARY KEY (incarnation, txid, attempt),
  CONSTRAINT fk_attempt_txn FOREIGN KEY(incarnation, txid) REFERENCES stormproof.txn (incarnation, txid) ON DELETE CASCADE,
  CONSTRAINT ck_attempt_outcome_known CHECK (outcome in ('running', 'complete', 'job_failed', 'unverified', 'moot', 'dead')),
  CONSTRAINT ck_attempt_numbers CHECK (attempt >= 1)
);
COMMENT ON TABLE stormproof.attempt IS 'one try at a batch, written before its job runs';
COMMENT ON COLUMN stormproof.attempt.incarnation IS 'of the topology';
COMMENT ON COLUMN stormproof.attempt.txid IS 'of the batch';
COMMENT ON COLUMN stormproof.attempt.attempt IS 'from 1';
COMMENT ON COLUMN stormproof.attempt.epoch IS 'of the driver that began it';
COMMENT ON COLUMN stormproof.attempt.seed IS 'from which the tuples'' random numbers are drawn';
COMMENT ON COLUMN stormproof.attempt.excluded IS 'numbers of the messages left out';
COMMENT ON COLUMN stormproof.attempt.expected_messages IS 'the batch''s, less those left out';
COMMENT ON COLUMN stormproof.attempt.expected_xor IS 'of these messages'' tokens; the acker must come to the same';
COMMENT ON COLUMN stormproof.attempt.started_at IS 'when its job was begun';
COMMENT ON COLUMN stormproof.attempt.outcome IS 'running, complete, job_failed, unverified, moot, dead';
COMMENT ON COLUMN stormproof.attempt.error IS 'why it failed';

CREATE TABLE stormproof.queue (
  queue TEXT NOT NULL,
  partition_messages BIGINT NOT NULL,
  created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
  server TEXT NOT NULL,
  timeline BIGINT NOT NULL,
  xid_shift BIGINT DEFAULT 0 NOT NULL,
  schema TEXT,
  PRIMARY KEY (queue)
);
COMMENT ON TABLE stormproof.queue IS 'one row a queue';
COMMENT ON COLUMN stormproof.queue.queue IS 'name of the queue and of its table of messages';
COMMENT ON COLUMN stormproof.queue.partition_messages IS 'ids to a partition of the message table';
COMMENT ON COLUMN stormproof.queue.created_at IS 'when it was made';
COMMENT ON COLUMN stormproof.queue.server IS 'system identifier of the server whose numbers the messages carry';
COMMENT ON COLUMN stormproof.queue.timeline IS 'and its timeline';
COMMENT ON COLUMN stormproof.queue.xid_shift IS 'added to the server''s own transaction numbers: restored messages stay below new ones';
COMMENT ON COLUMN stormproof.queue.schema IS 'what its messages are, as its maker said; null: that was not said';

CREATE TABLE stormproof.queue_adoption (
  number BIGINT GENERATED ALWAYS AS IDENTITY,
  queue TEXT NOT NULL,
  at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
  by TEXT NOT NULL,
  why TEXT NOT NULL,
  was JSONB NOT NULL,
  now JSONB NOT NULL,
  unproven JSONB NOT NULL,
  PRIMARY KEY (number)
);
COMMENT ON TABLE stormproof.queue_adoption IS 'queues that an operator took over to another server or timeline';
COMMENT ON COLUMN stormproof.queue_adoption.number IS 'later ones are higher';
COMMENT ON COLUMN stormproof.queue_adoption.queue IS 'name of the queue';
COMMENT ON COLUMN stormproof.queue_adoption.at IS 'when';
COMMENT ON COLUMN stormproof.queue_adoption.by IS 'who';
COMMENT ON COLUMN stormproof.queue_adoption.why IS 'why, in that person''s words';
COMMENT ON COLUMN stormproof.queue_adoption.was IS 'server, timeline and xid_shift before';
COMMENT ON COLUMN stormproof.queue_adoption.now IS 'and since';
COMMENT ON COLUMN stormproof.queue_adoption.unproven IS 'what was accepted without a proof';

CREATE TABLE stormproof.file_entry (
  source TEXT NOT NULL,
  subscription TEXT NOT NULL,
  number BIGINT NOT NULL,
  path TEXT NOT NULL,
  first_id BIGINT NOT NULL,
  rows BIGINT NOT NULL,
  size_bytes BIGINT NOT NULL,
  modified_ns BIGINT NOT NULL,
  fingerprint TEXT NOT NULL,
  marks BYTEA NOT NULL,
  digests BYTEA NOT NULL,
  digested TEXT[] NOT NULL,
  registered_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
  PRIMARY KEY (source, subscription, number)
);
CREATE UNIQUE INDEX file_entry_path ON stormproof.file_entry (source, subscription, md5(path));
COMMENT ON TABLE stormproof.file_entry IS 'files as they were when they were found; they must not change any more';
COMMENT ON COLUMN stormproof.file_entry.source IS 'the source''s name';
COMMENT ON COLUMN stormproof.file_entry.subscription IS 'who reads it';
COMMENT ON COLUMN stormproof.file_entry.number IS 'from 1, as the files were found';
COMMENT ON COLUMN stormproof.file_entry.path IS 'where the file was found';
COMMENT ON COLUMN stormproof.file_entry.first_id IS 'number of its first row''s message';
COMMENT ON COLUMN stormproof.file_entry.rows IS 'how many messages it has';
COMMENT ON COLUMN stormproof.file_entry.size_bytes IS 'of the file';
COMMENT ON COLUMN stormproof.file_entry.modified_ns IS 'since 1970';
COMMENT ON COLUMN stormproof.file_entry.fingerprint IS 'SHA-256 of a Parquet file''s footer, of another''s digests';
COMMENT ON COLUMN stormproof.file_entry.marks IS 'where blocks of rows begin: 64-bit numbers, little-endian';
COMMENT ON COLUMN stormproof.file_entry.digests IS '8 bytes of the SHA-256 of each block of rows';
COMMENT ON COLUMN stormproof.file_entry.digested IS 'the columns of a Parquet file that the digests are of';
COMMENT ON COLUMN stormproof.file_entry.registered_at IS 'when it was found';

CREATE TABLE stormproof.dead_letter (
  number BIGINT GENERATED ALWAYS AS IDENTITY,
  kind TEXT NOT NULL,
  source TEXT NOT NULL,
  subscription TEXT NOT NULL,
  id BIGINT NOT NULL,
  origin BIGINT NOT NULL,
  payload BYTEA NOT NULL,
  reason TEXT NOT NULL,
  error TEXT NOT NULL,
  times_opened INTEGER NOT NULL,
  times_failed INTEGER NOT NULL,
  history JSONB NOT NULL,
  dead_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
  disposal TEXT,
  disposed_by TEXT,
  disposed_why TEXT,
  disposed_at TIMESTAMP WITH TIME ZONE,
  new_payload BYTEA,
  digest BYTEA,
  PRIMARY KEY (number),
  CONSTRAINT dead_letter_disposal CHECK (disposal in ('requeue', 'drop', 'edit')),
  CONSTRAINT dead_letter_disposed CHECK ((disposal is null) = (disposed_by is null) and (disposal is null) = (disposed_at is null)),
  CONSTRAINT dead_letter_edited CHECK ((new_payload is not null) = (disposal is not distinct from 'edit'))
);
CREATE INDEX dead_letter_waiting ON stormproof.dead_letter (kind, source, subscription, id) WHERE disposal is null;
COMMENT ON TABLE stormproof.dead_letter IS 'messages that failed too often; removed with their reader alone';
COMMENT ON COLUMN stormproof.dead_letter.number IS 'later ones are higher';
COMMENT ON COLUMN stormproof.dead_letter.kind IS 'the connector''s: queue, files, ...';
COMMENT ON COLUMN stormproof.dead_letter.source IS 'the source''s name among its kind';
COMMENT ON COLUMN stormproof.dead_letter.subscription IS 'who read it';
COMMENT ON COLUMN stormproof.dead_letter.id IS 'the message''s number in its source';
COMMENT ON COLUMN stormproof.dead_letter.origin IS 'what the source shows before the number';
COMMENT ON COLUMN stormproof.dead_letter.payload IS 'as the source delivered it';
COMMENT ON COLUMN stormproof.dead_letter.reason IS 'why it failed last, in a word';
COMMENT ON COLUMN stormproof.dead_letter.error IS 'class and text of the exception';
COMMENT ON COLUMN stormproof.dead_letter.times_opened IS 'how often it was opened';
COMMENT ON COLUMN stormproof.dead_letter.times_failed IS 'how often it failed';
COMMENT ON COLUMN stormproof.dead_letter.history IS 'its failures and what was decided about it';
COMMENT ON COLUMN stormproof.dead_letter.dead_at IS 'when it had failed too often';
COMMENT ON COLUMN stormproof.dead_letter.disposal IS 'requeue, drop or edit; null: nobody has decided';
COMMENT ON COLUMN stormproof.dead_letter.disposed_by IS 'who decided';
COMMENT ON COLUMN stormproof.dead_letter.disposed_why IS 'why, in that person''s words';
COMMENT ON COLUMN stormproof.dead_letter.disposed_at IS 'when';
COMMENT ON COLUMN stormproof.dead_letter.new_payload IS 'what an edit put in the place of the payload';
COMMENT ON COLUMN stormproof.dead_letter.digest IS 'SHA-256 of the payload when the message was set aside';

CREATE TABLE stormproof.pending_subscription (
  id BIGINT GENERATED ALWAYS AS IDENTITY,
  kind TEXT NOT NULL,
  source TEXT NOT NULL,
  subscription TEXT NOT NULL,
  epoch BIGINT NOT NULL,
  position JSONB NOT NULL,
  created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
  PRIMARY KEY (id),
  CONSTRAINT pending_subscription_name UNIQUE (kind, source, subscription)
);
COMMENT ON TABLE stormproof.pending_subscription IS 'how far each reader of a source is';
COMMENT ON COLUMN stormproof.pending_subscription.id IS 'what the other tables name it by';
COMMENT ON COLUMN stormproof.pending_subscription.kind IS 'the connector''s: queue, files, ...';
COMMENT ON COLUMN stormproof.pending_subscription.source IS 'the source''s name among its kind';
COMMENT ON COLUMN stormproof.pending_subscription.subscription IS 'who reads it: a topology''s incarnation, and its spout where there are several';
COMMENT ON COLUMN stormproof.pending_subscription.epoch IS 'the newest epoch that acts for the subscription';
COMMENT ON COLUMN stormproof.pending_subscription.position IS 'everything before it was opened once; the connector''s own words';
COMMENT ON COLUMN stormproof.pending_subscription.created_at IS 'when it was made';

CREATE TABLE stormproof.pending_lapse (
  subscription BIGINT NOT NULL,
  owner TEXT NOT NULL,
  epoch BIGINT NOT NULL,
  lapsed_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
  FOREIGN KEY(subscription) REFERENCES stormproof.pending_subscription (id) ON DELETE cascade
);
CREATE INDEX pending_lapse_key ON stormproof.pending_lapse (subscription, owner, epoch);
COMMENT ON TABLE stormproof.pending_lapse IS 'leases that ran out and whose messages were handed to another: their owners must not confirm';
COMMENT ON COLUMN stormproof.pending_lapse.subscription IS 'whose it is';
COMMENT ON COLUMN stormproof.pending_lapse.owner IS 'the batch that had the lease';
COMMENT ON COLUMN stormproof.pending_lapse.epoch IS 'of that batch''s driver';
COMMENT ON COLUMN stormproof.pending_lapse.lapsed_at IS 'when';

CREATE TABLE stormproof.pending_message (
  subscription BIGINT NOT NULL,
  number BIGINT NOT NULL,
  stable_id TEXT NOT NULL,
  payload BYTEA,
  digest BYTEA NOT NULL,
  received_at TIMESTAMP WITH TIME ZONE DEFAULT clock_timestamp() NOT NULL,
  resolved_at TIMESTAMP WITH TIME ZONE,
  owed BOOLEAN DEFAULT false NOT NULL,
  suppressed BIGINT DEFAULT 0 NOT NULL,
  PRIMARY KEY (subscription, number),
  CONSTRAINT pending_message_stable_id UNIQUE (subscription, stable_id),
  FOREIGN KEY(subscription) REFERENCES stormproof.pending_subscription (id) ON DELETE cascade
);
ALTER TABLE stormproof.pending_message SET (fillfactor = 50);
CREATE INDEX pending_message_payload ON stormproof.pending_message (subscription, number) WHERE payload is not null;
CREATE INDEX pending_message_suppressed ON stormproof.pending_message (subscription) WHERE suppressed > 0;
COMMENT ON TABLE stormproof.pending_message IS 'what servers delivered that cannot open a set of messages a second time';
COMMENT ON COLUMN stormproof.pending_message.subscription IS 'whose it is';
COMMENT ON COLUMN stormproof.pending_message.number IS 'without gaps, as they were received';
COMMENT ON COLUMN stormproof.pending_message.stable_id IS 'the message''s id at its server, the same each time it comes';
COMMENT ON COLUMN stormproof.pending_message.payload IS 'null some time after the message left its first slice';
COMMENT ON COLUMN stormproof.pending_message.digest IS 'SHA-256 of the payload: an id must not come with another';
COMMENT ON COLUMN stormproof.pending_message.received_at IS 'when the server delivered it first';
COMMENT ON COLUMN stormproof.pending_message.resolved_at IS 'when its first slice was confirmed; null until then';
COMMENT ON COLUMN stormproof.pending_message.owed IS 'the server waits for its confirmation';
COMMENT ON COLUMN stormproof.pending_message.suppressed IS 'how often it came again after that';

CREATE TABLE stormproof.pending_retry (
  subscription BIGINT NOT NULL,
  id BIGINT NOT NULL,
  origin BIGINT NOT NULL,
  payload BYTEA NOT NULL,
  times_opened INTEGER NOT NULL,
  times_failed INTEGER NOT NULL,
  not_before TIMESTAMP WITH TIME ZONE NOT NULL,
  reason TEXT NOT NULL,
  history JSONB NOT NULL,
  slice BIGINT,
  mates TEXT DEFAULT '' NOT NULL,
  mates_messages INTEGER DEFAULT 1 NOT NULL,
  digest BYTEA,
  PRIMARY KEY (subscription, id),
  FOREIGN KEY(subscription) REFERENCES stormproof.pending_subscription (id) ON DELETE cascade
);
CREATE INDEX pending_retry_slice ON stormproof.pending_retry (slice, id) WHERE slice is not null;
CREATE INDEX pending_retry_waiting ON stormproof.pending_retry (subscription, not_before) WHERE slice is null;
COMMENT ON TABLE stormproof.pending_retry IS 'failed messages, with their payloads: where they came from may be gone';
COMMENT ON COLUMN stormproof.pending_retry.subscription IS 'whose it is';
COMMENT ON COLUMN stormproof.pending_retry.id IS 'the message''s number in its source';
COMMENT ON COLUMN stormproof.pending_retry.origin IS 'what the source shows before the number';
COMMENT ON COLUMN stormproof.pending_retry.payload IS 'as the source delivered it';
COMMENT ON COLUMN stormproof.pending_retry.times_opened IS 'how often it was opened';
COMMENT ON COLUMN stormproof.pending_retry.times_failed IS 'how often it failed';
COMMENT ON COLUMN stormproof.pending_retry.not_before IS 'when it may be opened again';
COMMENT ON COLUMN stormproof.pending_retry.reason IS 'why it failed last, in a word';
COMMENT ON COLUMN stormproof.pending_retry.history IS 'its failures and what was decided about it';
COMMENT ON COLUMN stormproof.pending_retry.slice IS 'the slice that has it now; null while it waits';
COMMENT ON COLUMN stormproof.pending_retry.mates IS 'retries of one name come in one batch';
COMMENT ON COLUMN stormproof.pending_retry.mates_messages IS 'how many have that name';
COMMENT ON COLUMN stormproof.pending_retry.digest IS 'SHA-256 of the payload when the message was set aside';

CREATE TABLE stormproof.pending_slice (
  id BIGINT GENERATED ALWAYS AS IDENTITY,
  subscription BIGINT NOT NULL,
  at JSONB,
  path TEXT DEFAULT '' NOT NULL,
  mates TEXT DEFAULT '' NOT NULL,
  messages BIGINT NOT NULL,
  bytes BIGINT NOT NULL,
  state TEXT NOT NULL,
  owner TEXT,
  epoch BIGINT NOT NULL,
  expires_at TIMESTAMP WITH TIME ZONE,
  opened INTEGER DEFAULT 0 NOT NULL,
  deaths INTEGER DEFAULT 0 NOT NULL,
  death_counted BOOLEAN DEFAULT false NOT NULL,
  PRIMARY KEY (id),
  CONSTRAINT pending_slice_state CHECK (state in ('open', 'pinned', 'returned')),
  CONSTRAINT pending_slice_owner CHECK ((state = 'returned') = (owner is null)),
  FOREIGN KEY(subscription) REFERENCES stormproof.pending_subscription (id) ON DELETE cascade
);
CREATE UNIQUE INDEX pending_slice_owner_key ON stormproof.pending_slice (subscription, owner);
COMMENT ON TABLE stormproof.pending_slice IS 'messages that were opened and are not resolved: leased, or returned and to be opened again';
COMMENT ON COLUMN stormproof.pending_slice.id IS 'what the ledger calls the slice by';
COMMENT ON COLUMN stormproof.pending_slice.subscription IS 'whose it is';
COMMENT ON COLUMN stormproof.pending_slice.at IS 'which messages, in the connector''s own words; null: the retries that point here';
COMMENT ON COLUMN stormproof.pending_slice.path IS 'of a part: its place; else empty';
COMMENT ON COLUMN stormproof.pending_slice.mates IS 'slices of one name are opened together';
COMMENT ON COLUMN stormproof.pending_slice.messages IS 'how many it has';
COMMENT ON COLUMN stormproof.pending_slice.bytes IS 'of their payloads';
COMMENT ON COLUMN stormproof.pending_slice.state IS 'open, pinned (its batch is prepared) or returned';
COMMENT ON COLUMN stormproof.pending_slice.owner IS 'the batch that has it; null: returned';
COMMENT ON COLUMN stormproof.pending_slice.epoch IS 'of that batch''s driver';
COMMENT ON COLUMN stormproof.pending_slice.expires_at IS 'when the lease runs out; null: it does not';
COMMENT ON COLUMN stormproof.pending_slice.opened IS 'how often it was opened';
COMMENT ON COLUMN stormproof.pending_slice.deaths IS 'how many drivers died on it';
COMMENT ON COLUMN stormproof.pending_slice.death_counted IS 'for the present opening';
