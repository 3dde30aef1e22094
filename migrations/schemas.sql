-- Stormproof's schemas: `stormproof` has the ledger, the list of queues and what is pending; `stormproof_queue` has a table
-- of messages for each queue, which is made with the queue.
create schema if not exists stormproof;
create schema if not exists stormproof_queue;

-- Which schema this is: one row.
create table stormproof.alembic_version (
  version_num varchar(32) not null,
  constraint alembic_version_pkc primary key (version_num)
);

-- The trigger of each table of messages: the server whose transaction numbers the messages carry takes more of them.
create or replace function stormproof_queue.require_server() returns trigger language plpgsql as $$
begin
  if (select system_identifier::text from pg_catalog.pg_control_system()) <> tg_argv[0] then
    raise exception using errcode = 'SP001',
      message = format('queue %s: its messages were put under server %s, and this is server %s: their transaction '
        || 'numbers do not compare, so nothing may be put before the queue is adopted', tg_table_name, tg_argv[0],
        (select system_identifier from pg_catalog.pg_control_system())),
      hint = format('run: stormproof queue adopt %s', tg_table_name);
  end if;
  return null;
end $$;
