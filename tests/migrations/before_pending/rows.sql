CREATE SCHEMA stormproof_sink;
CREATE TABLE public.files_committed (
    word text
);
CREATE TABLE public.files_dead (
    word text
);
CREATE TABLE public.files_halves (
    word text
);
CREATE TABLE public.files_open (
    word text
);
CREATE TABLE public.files_prepared (
    word text
);
CREATE TABLE public.files_retry_prepared (
    word text
);
CREATE TABLE public.files_retrying (
    word text
);
CREATE TABLE public.files_returned (
    word text
);
CREATE TABLE public.files_waiting (
    word text
);
CREATE TABLE public.queue_committed (
    word text
);
CREATE TABLE public.queue_dead (
    word text
);
CREATE TABLE public.queue_halves (
    word text
);
CREATE TABLE public.queue_open (
    word text
);
CREATE TABLE public.queue_prepared (
    word text
);
CREATE TABLE public.queue_retry_prepared (
    word text
);
CREATE TABLE public.queue_retrying (
    word text
);
CREATE TABLE public.queue_returned (
    word text
);
CREATE TABLE public.queue_waiting (
    word text
);
CREATE TABLE stormproof_queue.lines (
    xid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    id bigint NOT NULL,
    put_at timestamp with time zone DEFAULT now() NOT NULL,
    payload bytea NOT NULL
)
PARTITION BY RANGE (id);
CREATE TABLE stormproof_queue."lines.p1" (
    xid xid8 DEFAULT pg_current_xact_id() CONSTRAINT lines_xid_not_null NOT NULL,
    id bigint CONSTRAINT lines_id_not_null NOT NULL,
    put_at timestamp with time zone DEFAULT now() CONSTRAINT lines_put_at_not_null NOT NULL,
    payload bytea CONSTRAINT lines_payload_not_null NOT NULL
);
CREATE TABLE stormproof_queue."lines.rest" (
    xid xid8 DEFAULT pg_current_xact_id() CONSTRAINT lines_xid_not_null NOT NULL,
    id bigint CONSTRAINT lines_id_not_null NOT NULL,
    put_at timestamp with time zone DEFAULT now() CONSTRAINT lines_put_at_not_null NOT NULL,
    payload bytea CONSTRAINT lines_payload_not_null NOT NULL
);
ALTER TABLE stormproof_queue.lines ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME stormproof_queue.lines_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE stormproof_sink.backend (
    topology text NOT NULL,
    incarnation text NOT NULL,
    sink text NOT NULL,
    pid integer NOT NULL,
    backend_start timestamp with time zone NOT NULL,
    epoch bigint NOT NULL
);
CREATE TABLE stormproof_sink.evidence (
    topology text NOT NULL,
    incarnation text NOT NULL,
    sink text NOT NULL,
    txid bigint NOT NULL,
    rows bigint NOT NULL,
    digest text NOT NULL,
    epoch bigint NOT NULL,
    committed_at timestamp with time zone DEFAULT now() NOT NULL
);
CREATE TABLE stormproof_sink.fence (
    topology text NOT NULL,
    incarnation text NOT NULL,
    sink text NOT NULL,
    epoch bigint NOT NULL
);
CREATE TABLE stormproof_sink.guard (
    topology text NOT NULL,
    incarnation text NOT NULL,
    sink text NOT NULL,
    table_name text NOT NULL,
    table_id text NOT NULL,
    last_txid bigint,
    last_digest text,
    epoch bigint NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);
ALTER TABLE ONLY stormproof_queue.lines ATTACH PARTITION stormproof_queue."lines.p1" FOR VALUES FROM ('1') TO ('2000001');
ALTER TABLE ONLY stormproof_queue.lines ATTACH PARTITION stormproof_queue."lines.rest" DEFAULT;
INSERT INTO public.files_committed VALUES
	('ONE'),
	('TWO'),
	('THREE'),
	('FOUR'),
	('FIVE'),
	('SIX'),
	('SEVEN'),
	('EIGHT');
INSERT INTO public.files_dead VALUES
	('ONE'),
	('FIVE'),
	('SIX'),
	('EIGHT');
INSERT INTO public.files_prepared VALUES
	('ONE'),
	('TWO'),
	('THREE'),
	('FOUR');
INSERT INTO public.files_retry_prepared VALUES
	('ONE'),
	('THREE');
INSERT INTO public.files_retrying VALUES
	('ONE'),
	('THREE');
INSERT INTO public.files_waiting VALUES
	('ONE'),
	('THREE'),
	('FOUR'),
	('FIVE'),
	('SIX'),
	('SEVEN'),
	('EIGHT');
INSERT INTO public.queue_committed VALUES
	('ONE'),
	('TWO'),
	('THREE'),
	('FOUR'),
	('FIVE'),
	('SIX'),
	('SEVEN'),
	('EIGHT');
INSERT INTO public.queue_dead VALUES
	('ONE'),
	('FIVE'),
	('SIX'),
	('EIGHT');
INSERT INTO public.queue_prepared VALUES
	('ONE'),
	('TWO'),
	('THREE'),
	('FOUR');
INSERT INTO public.queue_retry_prepared VALUES
	('ONE'),
	('THREE');
INSERT INTO public.queue_retrying VALUES
	('ONE'),
	('THREE');
INSERT INTO public.queue_waiting VALUES
	('ONE'),
	('THREE'),
	('FOUR'),
	('FIVE'),
	('SIX'),
	('SEVEN'),
	('EIGHT');
INSERT INTO stormproof_queue."lines.p1" OVERRIDING SYSTEM VALUE VALUES
	('1189', 1, '2026-11-22 11:59:03.735447+00', '\x6f6e65'),
	('1189', 2, '2026-11-22 11:59:03.735447+00', '\x74776f'),
	('1189', 3, '2026-11-22 11:59:03.735447+00', '\x7468726565'),
	('1189', 4, '2026-11-22 11:59:03.735447+00', '\x666f7572'),
	('1189', 5, '2026-11-22 11:59:03.735447+00', '\x66697665'),
	('1189', 6, '2026-11-22 11:59:03.735447+00', '\x736978'),
	('1189', 7, '2026-11-22 11:59:03.735447+00', '\x736576656e'),
	('1189', 8, '2026-11-22 11:59:03.735447+00', '\x6569676874'),
	('1189', 9, '2026-11-22 11:59:03.735447+00', '\x6e696e65');
INSERT INTO stormproof_sink.backend VALUES
	('queue-open', 'af08aea7f5a2', 'postgres.queue_open', 25985, '2026-11-22 11:59:20.709963+00', 1),
	('queue-prepared', '40c1550cbb1f', 'postgres.queue_prepared', 26003, '2026-11-22 11:59:21.632788+00', 1),
	('queue-committed', '121f53404982', 'postgres.queue_committed', 26031, '2026-11-22 11:59:22.935355+00', 1),
	('queue-returned', '9bb0de27f999', 'postgres.queue_returned', 26085, '2026-11-22 11:59:25.566129+00', 2),
	('queue-waiting', '31f259eb37fe', 'postgres.queue_waiting', 26106, '2026-11-22 11:59:26.415799+00', 1),
	('queue-retrying', '80b9208120d6', 'postgres.queue_retrying', 26129, '2026-11-22 11:59:27.708026+00', 1),
	('queue-retry-prepared', 'bd7b2081e600', 'postgres.queue_retry_prepared', 26168, '2026-11-22 11:59:29.338611+00', 1),
	('queue-dead', 'f43d1289fbb8', 'postgres.queue_dead', 26202, '2026-11-22 11:59:31.490181+00', 1),
	('queue-halves', '3b86f7646d37', 'postgres.queue_halves', 26339, '2026-11-22 11:59:36.483278+00', 3),
	('files-open', '1509ed3e1a63', 'postgres.files_open', 26365, '2026-11-22 11:59:37.523624+00', 1),
	('files-prepared', 'b798dcf60ab2', 'postgres.files_prepared', 26381, '2026-11-22 11:59:38.500881+00', 1),
	('files-committed', '331567e2e6d6', 'postgres.files_committed', 26406, '2026-11-22 11:59:39.957185+00', 1),
	('files-returned', 'cde7fd7c42c1', 'postgres.files_returned', 26461, '2026-11-22 11:59:42.793146+00', 2),
	('files-waiting', '5f8eca1531c7', 'postgres.files_waiting', 26471, '2026-11-22 11:59:43.669169+00', 1),
	('files-retrying', '1f7110e1b5ad', 'postgres.files_retrying', 26497, '2026-11-22 11:59:45.150577+00', 1),
	('files-retry-prepared', '49c0400571c2', 'postgres.files_retry_prepared', 26523, '2026-11-22 11:59:46.443676+00', 1),
	('files-dead', '40e0a8266d01', 'postgres.files_dead', 26545, '2026-11-22 11:59:48.015165+00', 1),
	('files-halves', 'a7a1e8814b1a', 'postgres.files_halves', 26688, '2026-11-22 11:59:51.519327+00', 3);
INSERT INTO stormproof_sink.evidence VALUES
	('queue-prepared', '40c1550cbb1f', 'postgres.queue_prepared', 1, 4, 'ecc65ae8505e0be29b3546011efa277b94d5587e816449ea0b0aa99e94d990c9', 1, '2026-11-22 11:59:22.160516+00'),
	('queue-committed', '121f53404982', 'postgres.queue_committed', 1, 4, 'afced7ed2de4944b65781c468b9bbfc5426570fe6dbafdff51b46b7de1a48861', 1, '2026-11-22 11:59:23.56761+00'),
	('queue-committed', '121f53404982', 'postgres.queue_committed', 2, 4, 'cc10f99fe0a3f6671cd29b7aca23fea0f8e57535ad54cd845f2fc566c304b0ed', 1, '2026-11-22 11:59:23.765778+00'),
	('queue-waiting', '31f259eb37fe', 'postgres.queue_waiting', 1, 3, 'fc22d5e6e1834062ce1c5b5db0f5e79979676ebb877f8b669261e24e54e2ac68', 1, '2026-11-22 11:59:26.868681+00'),
	('queue-waiting', '31f259eb37fe', 'postgres.queue_waiting', 2, 4, '8f29f2f6f29bb135a60724c98e5c426bfabeb193566068a359e0783679001430', 1, '2026-11-22 11:59:27.095644+00'),
	('queue-retrying', '80b9208120d6', 'postgres.queue_retrying', 1, 2, 'ecae413c96d18f8a962ce036d71db55f9fd7e42626cab37c598d6e5c19913bfa', 1, '2026-11-22 11:59:28.42506+00'),
	('queue-retry-prepared', 'bd7b2081e600', 'postgres.queue_retry_prepared', 1, 2, '7c18f6f5436bbb6e4828f6d13c9ba90c4910d7d356b3fe14d11536133d605930', 1, '2026-11-22 11:59:30.277398+00'),
	('queue-dead', 'f43d1289fbb8', 'postgres.queue_dead', 1, 1, 'd305b7d4a9dc763b85adb5468caf4049a13f643c62935e35396118b9463ee0fd', 1, '2026-11-22 11:59:32.369675+00'),
	('queue-dead', 'f43d1289fbb8', 'postgres.queue_dead', 2, 3, 'c612fbe7a04fd860d8839f49c0f691128bb2652eb2da3742fbd3c76b5e6bca36', 1, '2026-11-22 11:59:32.59719+00'),
	('files-prepared', 'b798dcf60ab2', 'postgres.files_prepared', 1, 4, '2ca480ebcfec054c56d0cf374df79741f6908ebcff63d27b9f7261a2eb3fb90a', 1, '2026-11-22 11:59:38.951705+00'),
	('files-committed', '331567e2e6d6', 'postgres.files_committed', 1, 4, 'de1d8af5c3bf11aac49860397b938a177da13b4267483d7e5e116d179607ffc5', 1, '2026-11-22 11:59:40.602225+00'),
	('files-committed', '331567e2e6d6', 'postgres.files_committed', 2, 4, '06b8a3da61177a06c144db1bd139b4e1673d74523624e4bf2b2398b69f70d1ff', 1, '2026-11-22 11:59:40.886245+00'),
	('files-waiting', '5f8eca1531c7', 'postgres.files_waiting', 1, 3, '1b677a3b1933da2842b989d9adcd6620488581c13601270d47bfdda00328beea', 1, '2026-11-22 11:59:44.175547+00'),
	('files-waiting', '5f8eca1531c7', 'postgres.files_waiting', 2, 4, '10ebc616d55e06b02d5ea860cf493b8d464dd735f2aed1310cef62bd36ef3831', 1, '2026-11-22 11:59:44.395036+00'),
	('files-retrying', '1f7110e1b5ad', 'postgres.files_retrying', 1, 2, '5d83f8e7c18348867146d7a4f3199004b17ad3f02e9bd8b1a4c9d0187e24f0f3', 1, '2026-11-22 11:59:45.577361+00'),
	('files-retry-prepared', '49c0400571c2', 'postgres.files_retry_prepared', 1, 2, 'dacd1eba6b365bd6b081b8dc737eaf20a8e560acd545425be3e8632bc95a2a47', 1, '2026-11-22 11:59:46.984044+00'),
	('files-dead', '40e0a8266d01', 'postgres.files_dead', 1, 1, '385659361254c4dcfa08b32fc8ca52e988d6b63e41e6df4a12018eb43f7682a5', 1, '2026-11-22 11:59:48.391838+00'),
	('files-dead', '40e0a8266d01', 'postgres.files_dead', 2, 3, 'a4a80e153a3a95726dee242e6004262c613e1cef7695a3e3bbf5a0d923b10c5a', 1, '2026-11-22 11:59:48.583035+00');
INSERT INTO stormproof_sink.fence VALUES
	('queue-open', 'af08aea7f5a2', 'postgres.queue_open', 1),
	('queue-prepared', '40c1550cbb1f', 'postgres.queue_prepared', 1),
	('queue-committed', '121f53404982', 'postgres.queue_committed', 1),
	('queue-returned', '9bb0de27f999', 'postgres.queue_returned', 2),
	('queue-waiting', '31f259eb37fe', 'postgres.queue_waiting', 1),
	('queue-retrying', '80b9208120d6', 'postgres.queue_retrying', 1),
	('queue-retry-prepared', 'bd7b2081e600', 'postgres.queue_retry_prepared', 1),
	('queue-dead', 'f43d1289fbb8', 'postgres.queue_dead', 1),
	('queue-halves', '3b86f7646d37', 'postgres.queue_halves', 3),
	('files-open', '1509ed3e1a63', 'postgres.files_open', 1),
	('files-prepared', 'b798dcf60ab2', 'postgres.files_prepared', 1),
	('files-committed', '331567e2e6d6', 'postgres.files_committed', 1),
	('files-returned', 'cde7fd7c42c1', 'postgres.files_returned', 2),
	('files-waiting', '5f8eca1531c7', 'postgres.files_waiting', 1),
	('files-retrying', '1f7110e1b5ad', 'postgres.files_retrying', 1),
	('files-retry-prepared', '49c0400571c2', 'postgres.files_retry_prepared', 1),
	('files-dead', '40e0a8266d01', 'postgres.files_dead', 1),
	('files-halves', 'a7a1e8814b1a', 'postgres.files_halves', 3);
INSERT INTO stormproof_sink.guard VALUES
	('queue-open', 'af08aea7f5a2', 'postgres.queue_open', 'queue_open', '{server}/17337/17888', NULL, NULL, 1, '2026-11-22 11:59:20.813231+00'),
	('queue-prepared', '40c1550cbb1f', 'postgres.queue_prepared', 'queue_prepared', '{server}/17337/17893', 1, 'ecc65ae8505e0be29b3546011efa277b94d5587e816449ea0b0aa99e94d990c9', 1, '2026-11-22 11:59:22.160516+00'),
	('queue-committed', '121f53404982', 'postgres.queue_committed', 'queue_committed', '{server}/17337/17898', 2, 'cc10f99fe0a3f6671cd29b7aca23fea0f8e57535ad54cd845f2fc566c304b0ed', 1, '2026-11-22 11:59:23.765778+00'),
	('queue-returned', '9bb0de27f999', 'postgres.queue_returned', 'queue_returned', '{server}/17337/17903', NULL, NULL, 1, '2026-11-22 11:59:24.536692+00'),
	('files-halves', 'a7a1e8814b1a', 'postgres.files_halves', 'files_halves', '{server}/17337/17978', NULL, NULL, 1, '2026-11-22 11:59:49.392718+00'),
	('queue-waiting', '31f259eb37fe', 'postgres.queue_waiting', 'queue_waiting', '{server}/17337/17908', 2, '8f29f2f6f29bb135a60724c98e5c426bfabeb193566068a359e0783679001430', 1, '2026-11-22 11:59:27.095644+00'),
	('queue-retrying', '80b9208120d6', 'postgres.queue_retrying', 'queue_retrying', '{server}/17337/17913', 1, 'ecae413c96d18f8a962ce036d71db55f9fd7e42626cab37c598d6e5c19913bfa', 1, '2026-11-22 11:59:28.42506+00'),
	('queue-retry-prepared', 'bd7b2081e600', 'postgres.queue_retry_prepared', 'queue_retry_prepared', '{server}/17337/17918', 1, '7c18f6f5436bbb6e4828f6d13c9ba90c4910d7d356b3fe14d11536133d605930', 1, '2026-11-22 11:59:30.277398+00'),
	('queue-dead', 'f43d1289fbb8', 'postgres.queue_dead', 'queue_dead', '{server}/17337/17923', 2, 'c612fbe7a04fd860d8839f49c0f691128bb2652eb2da3742fbd3c76b5e6bca36', 1, '2026-11-22 11:59:32.59719+00'),
	('queue-halves', '3b86f7646d37', 'postgres.queue_halves', 'queue_halves', '{server}/17337/17932', NULL, NULL, 1, '2026-11-22 11:59:33.632971+00'),
	('files-open', '1509ed3e1a63', 'postgres.files_open', 'files_open', '{server}/17337/17937', NULL, NULL, 1, '2026-11-22 11:59:37.609201+00'),
	('files-prepared', 'b798dcf60ab2', 'postgres.files_prepared', 'files_prepared', '{server}/17337/17942', 1, '2ca480ebcfec054c56d0cf374df79741f6908ebcff63d27b9f7261a2eb3fb90a', 1, '2026-11-22 11:59:38.951705+00'),
	('files-committed', '331567e2e6d6', 'postgres.files_committed', 'files_committed', '{server}/17337/17947', 2, '06b8a3da61177a06c144db1bd139b4e1673d74523624e4bf2b2398b69f70d1ff', 1, '2026-11-22 11:59:40.886245+00'),
	('files-returned', 'cde7fd7c42c1', 'postgres.files_returned', 'files_returned', '{server}/17337/17952', NULL, NULL, 1, '2026-11-22 11:59:41.831601+00'),
	('files-waiting', '5f8eca1531c7', 'postgres.files_waiting', 'files_waiting', '{server}/17337/17957', 2, '10ebc616d55e06b02d5ea860cf493b8d464dd735f2aed1310cef62bd36ef3831', 1, '2026-11-22 11:59:44.395036+00'),
	('files-retrying', '1f7110e1b5ad', 'postgres.files_retrying', 'files_retrying', '{server}/17337/17962', 1, '5d83f8e7c18348867146d7a4f3199004b17ad3f02e9bd8b1a4c9d0187e24f0f3', 1, '2026-11-22 11:59:45.577361+00'),
	('files-retry-prepared', '49c0400571c2', 'postgres.files_retry_prepared', 'files_retry_prepared', '{server}/17337/17968', 1, 'dacd1eba6b365bd6b081b8dc737eaf20a8e560acd545425be3e8632bc95a2a47', 1, '2026-11-22 11:59:46.984044+00'),
	('files-dead', '40e0a8266d01', 'postgres.files_dead', 'files_dead', '{server}/17337/17973', 2, 'a4a80e153a3a95726dee242e6004262c613e1cef7695a3e3bbf5a0d923b10c5a', 1, '2026-11-22 11:59:48.583035+00');
SELECT pg_catalog.setval('stormproof_queue.lines_id_seq', 9, true);
ALTER TABLE ONLY stormproof_queue.lines
    ADD CONSTRAINT lines_pkey PRIMARY KEY (xid, id);
ALTER TABLE ONLY stormproof_queue."lines.p1"
    ADD CONSTRAINT "lines.p1_pkey" PRIMARY KEY (xid, id);
ALTER TABLE ONLY stormproof_queue."lines.rest"
    ADD CONSTRAINT "lines.rest_pkey" PRIMARY KEY (xid, id);
ALTER TABLE ONLY stormproof_sink.backend
    ADD CONSTRAINT backend_pkey PRIMARY KEY (topology, incarnation, sink, pid, backend_start);
ALTER TABLE ONLY stormproof_sink.evidence
    ADD CONSTRAINT evidence_pkey PRIMARY KEY (topology, incarnation, sink, txid);
ALTER TABLE ONLY stormproof_sink.fence
    ADD CONSTRAINT fence_pkey PRIMARY KEY (topology, incarnation, sink);
ALTER TABLE ONLY stormproof_sink.guard
    ADD CONSTRAINT guard_pkey PRIMARY KEY (topology, incarnation, sink);
ALTER INDEX stormproof_queue.lines_pkey ATTACH PARTITION stormproof_queue."lines.p1_pkey";
ALTER INDEX stormproof_queue.lines_pkey ATTACH PARTITION stormproof_queue."lines.rest_pkey";
CREATE TRIGGER stormproof_server BEFORE INSERT ON stormproof_queue.lines FOR EACH STATEMENT EXECUTE FUNCTION stormproof_queue.require_server('{server}');
INSERT INTO stormproof.attempt VALUES
	('af08aea7f5a2', 1, 1, 1, 2624989531201712629, '[]', 4, -7157823203705749453, '2026-11-22 11:59:20.939481+00', 'running', NULL),
	('40c1550cbb1f', 1, 1, 1, 2624989531201712629, '[]', 4, -7157823203705749453, '2026-11-22 11:59:21.819933+00', 'complete', NULL),
	('40c1550cbb1f', 2, 1, 1, 3699794560238578399, '[]', 4, -4193031703184139334, '2026-11-22 11:59:22.299218+00', 'complete', NULL),
	('121f53404982', 1, 1, 1, 2624989531201712629, '[]', 4, -7157823203705749453, '2026-11-22 11:59:23.174566+00', 'complete', NULL),
	('121f53404982', 2, 1, 1, 3699794560238578399, '[]', 4, -4193031703184139334, '2026-11-22 11:59:23.679318+00', 'complete', NULL),
	('9bb0de27f999', 1, 1, 1, 2624989531201712629, '[]', 4, -7157823203705749453, '2026-11-22 11:59:24.687063+00', 'dead', NULL),
	('31f259eb37fe', 1, 1, 1, 2624989531201712629, '[]', 4, -7157823203705749453, '2026-11-22 11:59:26.599683+00', 'complete', NULL),
	('31f259eb37fe', 2, 1, 1, 3699794560238578399, '[]', 4, -4193031703184139334, '2026-11-22 11:59:26.980837+00', 'complete', NULL),
	('80b9208120d6', 1, 1, 1, 2624989531201712629, '[]', 4, -7157823203705749453, '2026-11-22 11:59:28.012945+00', 'complete', NULL),
	('80b9208120d6', 2, 1, 1, 3699794560238578399, '[]', 2, -2245379181305949592, '2026-11-22 11:59:28.549797+00', 'running', NULL),
	('bd7b2081e600', 1, 1, 1, 2624989531201712629, '[]', 4, -7157823203705749453, '2026-11-22 11:59:29.715345+00', 'complete', NULL),
	('bd7b2081e600', 2, 1, 1, 3699794560238578399, '[]', 2, -2245379181305949592, '2026-11-22 11:59:30.423134+00', 'complete', NULL),
	('f43d1289fbb8', 1, 1, 1, 2624989531201712629, '[]', 4, -7157823203705749453, '2026-11-22 11:59:31.915671+00', 'complete', NULL),
	('f43d1289fbb8', 2, 1, 1, 3699794560238578399, '[]', 4, -4193031703184139334, '2026-11-22 11:59:32.51119+00', 'complete', NULL),
	('3b86f7646d37', 1, 1, 1, 2624989531201712629, '[]', 4, -7157823203705749453, '2026-11-22 11:59:33.887307+00', 'dead', NULL),
	('3b86f7646d37', 2, 1, 2, 2624989531201712629, '[]', 4, -7157823203705749453, '2026-11-22 11:59:35.49548+00', 'dead', NULL),
	('3b86f7646d37', 3, 1, 3, 2624989531201712629, '[]', 2, -6873066378741975728, '2026-11-22 11:59:36.818099+00', 'running', NULL),
	('1509ed3e1a63', 1, 1, 1, 2624989531201712629, '[]', 4, 8444487547678413569, '2026-11-22 11:59:37.847578+00', 'running', NULL),
	('b798dcf60ab2', 1, 1, 1, 2624989531201712629, '[]', 4, 8444487547678413569, '2026-11-22 11:59:38.795471+00', 'complete', NULL),
	('b798dcf60ab2', 2, 1, 1, 3699794560238578399, '[]', 4, -7334117593125845650, '2026-11-22 11:59:39.083588+00', 'complete', NULL),
	('331567e2e6d6', 1, 1, 1, 2624989531201712629, '[]', 4, 8444487547678413569, '2026-11-22 11:59:40.413699+00', 'complete', NULL),
	('331567e2e6d6', 2, 1, 1, 3699794560238578399, '[]', 4, -7334117593125845650, '2026-11-22 11:59:40.739378+00', 'complete', NULL),
	('cde7fd7c42c1', 1, 1, 1, 2624989531201712629, '[]', 4, 8444487547678413569, '2026-11-22 11:59:42.095384+00', 'dead', NULL),
	('5f8eca1531c7', 1, 1, 1, 2624989531201712629, '[]', 4, 8444487547678413569, '2026-11-22 11:59:44.022728+00', 'complete', NULL),
	('5f8eca1531c7', 2, 1, 1, 3699794560238578399, '[]', 4, -7334117593125845650, '2026-11-22 11:59:44.291279+00', 'complete', NULL),
	('1f7110e1b5ad', 1, 1, 1, 2624989531201712629, '[]', 4, 8444487547678413569, '2026-11-22 11:59:45.438593+00', 'complete', NULL),
	('1f7110e1b5ad', 2, 1, 1, 3699794560238578399, '[]', 2, 2762258386330929198, '2026-11-22 11:59:45.707904+00', 'running', NULL),
	('49c0400571c2', 1, 1, 1, 2624989531201712629, '[]', 4, 8444487547678413569, '2026-11-22 11:59:46.827372+00', 'complete', NULL),
	('49c0400571c2', 2, 1, 1, 3699794560238578399, '[]', 2, 2762258386330929198, '2026-11-22 11:59:47.135976+00', 'complete', NULL),
	('40e0a8266d01', 1, 1, 1, 2624989531201712629, '[]', 4, 8444487547678413569, '2026-11-22 11:59:48.282504+00', 'complete', NULL),
	('40e0a8266d01', 2, 1, 1, 3699794560238578399, '[]', 4, -7334117593125845650, '2026-11-22 11:59:48.492993+00', 'complete', NULL),
	('a7a1e8814b1a', 1, 1, 1, 2624989531201712629, '[]', 4, 8444487547678413569, '2026-11-22 11:59:49.708332+00', 'dead', NULL),
	('a7a1e8814b1a', 2, 1, 2, 2624989531201712629, '[]', 4, 8444487547678413569, '2026-11-22 11:59:50.91156+00', 'dead', NULL),
	('a7a1e8814b1a', 3, 1, 3, 2624989531201712629, '[]', 2, 843334639848739817, '2026-11-22 11:59:51.839803+00', 'running', NULL);
INSERT INTO stormproof.backend VALUES
	('af08aea7f5a2', 25982, '2026-11-22 11:59:20.489391+00', 1),
	('40c1550cbb1f', 26000, '2026-11-22 11:59:21.460932+00', 1),
	('121f53404982', 26028, '2026-11-22 11:59:22.724107+00', 1),
	('9bb0de27f999', 26081, '2026-11-22 11:59:25.299073+00', 2),
	('31f259eb37fe', 26102, '2026-11-22 11:59:26.221326+00', 1),
	('80b9208120d6', 26126, '2026-11-22 11:59:27.481478+00', 1),
	('bd7b2081e600', 26156, '2026-11-22 11:59:28.934943+00', 1),
	('f43d1289fbb8', 26191, '2026-11-22 11:59:31.011225+00', 1),
	('3b86f7646d37', 26316, '2026-11-22 11:59:36.165959+00', 3),
	('1509ed3e1a63', 26360, '2026-11-22 11:59:37.331351+00', 1),
	('b798dcf60ab2', 26372, '2026-11-22 11:59:38.186537+00', 1),
	('331567e2e6d6', 26404, '2026-11-22 11:59:39.65286+00', 1),
	('cde7fd7c42c1', 26458, '2026-11-22 11:59:42.555725+00', 2),
	('5f8eca1531c7', 26469, '2026-11-22 11:59:43.395978+00', 1),
	('1f7110e1b5ad', 26493, '2026-11-22 11:59:44.863878+00', 1),
	('49c0400571c2', 26514, '2026-11-22 11:59:46.121196+00', 1),
	('40e0a8266d01', 26542, '2026-11-22 11:59:47.722009+00', 1),
	('a7a1e8814b1a', 26649, '2026-11-22 11:59:51.301118+00', 3);
INSERT INTO stormproof.dead_letter OVERRIDING SYSTEM VALUE VALUES
	(1, 'lines', 'f43d1289fbb8', 2, '1189', '\x74776f', 'error', 'ValueError: two never works (moved.py:16 in __call__)', 1, 1, '[{"at": "2026-11-22T11:59:32.42996+00:00", "error": "ValueError: two never works (moved.py:16 in __call__)", "input": "{''line'': ''two''}", "owner": "f43d1289fbb8/1", "reason": "error", "component": "check"}]', '2026-11-22 11:59:32.430035+00', NULL, NULL, NULL, NULL, NULL),
	(2, 'lines', 'f43d1289fbb8', 3, '1189', '\x7468726565', 'error', 'ValueError: three never works (moved.py:16 in __call__)', 1, 1, '[{"at": "2026-11-22T11:59:32.431844+00:00", "error": "ValueError: three never works (moved.py:16 in __call__)", "input": "{''line'': ''three''}", "owner": "f43d1289fbb8/1", "reason": "error", "component": "check"}]', '2026-11-22 11:59:32.431861+00', 'drop', 'ann', 'no use', '2026-11-22 11:59:32.800565+00', NULL),
	(3, 'lines', 'f43d1289fbb8', 4, '1189', '\x666f7572', 'error', 'ValueError: four never works (moved.py:16 in __call__)', 1, 1, '[{"at": "2026-11-22T11:59:32.431877+00:00", "error": "ValueError: four never works (moved.py:16 in __call__)", "input": "{''line'': ''four''}", "owner": "f43d1289fbb8/1", "reason": "error", "component": "check"}]', '2026-11-22 11:59:32.431881+00', 'requeue', 'ann', 'again', '2026-11-22 11:59:32.803573+00', NULL),
	(4, 'lines', 'f43d1289fbb8', 7, '1189', '\x736576656e', 'error', 'ValueError: seven never works (moved.py:16 in __call__)', 1, 1, '[{"at": "2026-11-22T11:59:32.646052+00:00", "error": "ValueError: seven never works (moved.py:16 in __call__)", "input": "{''line'': ''seven''}", "owner": "f43d1289fbb8/2", "reason": "error", "component": "check"}]', '2026-11-22 11:59:32.646071+00', 'edit', 'ann', 'typing error', '2026-11-22 11:59:32.817853+00', '\x6d656e646564');
INSERT INTO stormproof.event VALUES
	(1, '9bb0de27f999', '2026-11-22 11:59:25.475435+00', 'take_over', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"from": "elsewhere:26051", "epoch": 1, "to_epoch": 2}'),
	(2, '9bb0de27f999', '2026-11-22 11:59:25.871222+00', 'recovery', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"epoch": 2, "aborted": [1], "in_hand": [], "abandoned": [], "suppressed": [], "files_swept": 2, "late_commits": [], "rolled_forward": [], "took_over_from": "elsewhere:26051", "confirms_repeated": []}'),
	(3, '31f259eb37fe', '2026-11-22 11:59:26.848385+00', 'failure', 1, 1, NULL, '1189-2', 2, 1189, 5477812791153652307, 'error', 'check', 'ValueError: two never works (moved.py:16 in __call__)', '{''line'': ''two''}', 'null'),
	(4, '80b9208120d6', '2026-11-22 11:59:28.403582+00', 'failure', 1, 1, NULL, '1189-2', 2, 1189, 5477812791153652307, 'error', 'check', 'ValueError: two never works (moved.py:16 in __call__)', '{''line'': ''two''}', 'null'),
	(5, '80b9208120d6', '2026-11-22 11:59:28.403582+00', 'failure', 1, 1, NULL, '1189-4', 4, 1189, 5529265894986109152, 'error', 'check', 'RuntimeError: not yet (moved.py:21 in __call__)', '{''line'': ''four''}', 'null'),
	(6, '80b9208120d6', '2026-11-22 11:59:28.550722+00', 'replay', 2, NULL, NULL, '1189-2', 2, 1189, NULL, NULL, NULL, NULL, NULL, 'null'),
	(7, '80b9208120d6', '2026-11-22 11:59:28.550722+00', 'replay', 2, NULL, NULL, '1189-4', 4, 1189, NULL, NULL, NULL, NULL, NULL, 'null'),
	(8, 'bd7b2081e600', '2026-11-22 11:59:30.244144+00', 'failure', 1, 1, NULL, '1189-2', 2, 1189, 5477812791153652307, 'error', 'check', 'ValueError: two never works (moved.py:16 in __call__)', '{''line'': ''two''}', 'null'),
	(9, 'bd7b2081e600', '2026-11-22 11:59:30.244144+00', 'failure', 1, 1, NULL, '1189-4', 4, 1189, 5529265894986109152, 'error', 'check', 'RuntimeError: not yet (moved.py:21 in __call__)', '{''line'': ''four''}', 'null'),
	(10, 'bd7b2081e600', '2026-11-22 11:59:30.431866+00', 'replay', 2, NULL, NULL, '1189-2', 2, 1189, NULL, NULL, NULL, NULL, NULL, 'null'),
	(11, 'bd7b2081e600', '2026-11-22 11:59:30.431866+00', 'replay', 2, NULL, NULL, '1189-4', 4, 1189, NULL, NULL, NULL, NULL, NULL, 'null'),
	(12, 'bd7b2081e600', '2026-11-22 11:59:30.547528+00', 'failure', 2, 1, NULL, '1189-2', 2, 1189, -8855480078178169115, 'error', 'check', 'ValueError: two never works (moved.py:16 in __call__)', '{''line'': ''two''}', 'null'),
	(13, 'f43d1289fbb8', '2026-11-22 11:59:32.339477+00', 'failure', 1, 1, NULL, '1189-2', 2, 1189, 5477812791153652307, 'error', 'check', 'ValueError: two never works (moved.py:16 in __call__)', '{''line'': ''two''}', 'null'),
	(14, 'f43d1289fbb8', '2026-11-22 11:59:32.339477+00', 'failure', 1, 1, NULL, '1189-3', 3, 1189, 8109959533618603395, 'error', 'check', 'ValueError: three never works (moved.py:16 in __call__)', '{''line'': ''three''}', 'null'),
	(15, 'f43d1289fbb8', '2026-11-22 11:59:32.339477+00', 'failure', 1, 1, NULL, '1189-4', 4, 1189, 5529265894986109152, 'error', 'check', 'ValueError: four never works (moved.py:16 in __call__)', '{''line'': ''four''}', 'null'),
	(16, 'f43d1289fbb8', '2026-11-22 11:59:32.445897+00', 'dead_letter', 1, NULL, NULL, '1189-2', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'null'),
	(17, 'f43d1289fbb8', '2026-11-22 11:59:32.445897+00', 'dead_letter', 1, NULL, NULL, '1189-3', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'null'),
	(18, 'f43d1289fbb8', '2026-11-22 11:59:32.445897+00', 'dead_letter', 1, NULL, NULL, '1189-4', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'null'),
	(19, 'f43d1289fbb8', '2026-11-22 11:59:32.58738+00', 'failure', 2, 1, NULL, '1189-7', 7, 1189, -1810432250786833058, 'error', 'check', 'ValueError: seven never works (moved.py:16 in __call__)', '{''line'': ''seven''}', 'null'),
	(20, 'f43d1289fbb8', '2026-11-22 11:59:32.66542+00', 'dead_letter', 2, NULL, NULL, '1189-7', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'null'),
	(21, '3b86f7646d37', '2026-11-22 11:59:34.807551+00', 'take_over', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"from": "elsewhere:26227", "epoch": 1, "to_epoch": 2}'),
	(22, '3b86f7646d37', '2026-11-22 11:59:35.448128+00', 'recovery', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"epoch": 2, "aborted": [1], "in_hand": [], "abandoned": [], "suppressed": [], "files_swept": 2, "late_commits": [], "rolled_forward": [], "took_over_from": "elsewhere:26227", "confirms_repeated": []}'),
	(23, '3b86f7646d37', '2026-11-22 11:59:36.351283+00', 'take_over', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"from": "elsewhere:26256", "epoch": 2, "to_epoch": 3}'),
	(24, '3b86f7646d37', '2026-11-22 11:59:36.781517+00', 'recovery', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"epoch": 3, "aborted": [2], "in_hand": [], "abandoned": [], "suppressed": [], "files_swept": 1, "late_commits": [], "rolled_forward": [], "took_over_from": "elsewhere:26256", "confirms_repeated": []}'),
	(25, 'cde7fd7c42c1', '2026-11-22 11:59:42.711325+00', 'take_over', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"from": "elsewhere:26431", "epoch": 1, "to_epoch": 2}'),
	(26, 'cde7fd7c42c1', '2026-11-22 11:59:43.056335+00', 'recovery', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"epoch": 2, "aborted": [1], "in_hand": [], "abandoned": [], "suppressed": [], "files_swept": 2, "late_commits": [], "rolled_forward": [], "took_over_from": "elsewhere:26431", "confirms_repeated": []}'),
	(27, '5f8eca1531c7', '2026-11-22 11:59:44.143153+00', 'failure', 1, 1, NULL, '1-1', 1, 1, -8797093614263022485, 'error', 'check', 'ValueError: two never works (moved.py:16 in __call__)', '{''line'': ''two''}', 'null'),
	(28, '1f7110e1b5ad', '2026-11-22 11:59:45.555583+00', 'failure', 1, 1, NULL, '1-1', 1, 1, -8797093614263022485, 'error', 'check', 'ValueError: two never works (moved.py:16 in __call__)', '{''line'': ''two''}', 'null'),
	(29, '1f7110e1b5ad', '2026-11-22 11:59:45.555583+00', 'failure', 1, 1, NULL, '1-3', 3, 1, 5641318342722137114, 'error', 'check', 'RuntimeError: not yet (moved.py:21 in __call__)', '{''line'': ''four''}', 'null'),
	(30, '1f7110e1b5ad', '2026-11-22 11:59:45.709296+00', 'replay', 2, NULL, NULL, '1-1', 1, 1, NULL, NULL, NULL, NULL, NULL, 'null'),
	(31, '1f7110e1b5ad', '2026-11-22 11:59:45.709296+00', 'replay', 2, NULL, NULL, '1-3', 3, 1, NULL, NULL, NULL, NULL, NULL, 'null'),
	(32, '49c0400571c2', '2026-11-22 11:59:46.963618+00', 'failure', 1, 1, NULL, '1-1', 1, 1, -8797093614263022485, 'error', 'check', 'ValueError: two never works (moved.py:16 in __call__)', '{''line'': ''two''}', 'null'),
	(33, '49c0400571c2', '2026-11-22 11:59:46.963618+00', 'failure', 1, 1, NULL, '1-3', 3, 1, 5641318342722137114, 'error', 'check', 'RuntimeError: not yet (moved.py:21 in __call__)', '{''line'': ''four''}', 'null'),
	(34, '49c0400571c2', '2026-11-22 11:59:47.139502+00', 'replay', 2, NULL, NULL, '1-1', 1, 1, NULL, NULL, NULL, NULL, NULL, 'null'),
	(35, '49c0400571c2', '2026-11-22 11:59:47.139502+00', 'replay', 2, NULL, NULL, '1-3', 3, 1, NULL, NULL, NULL, NULL, NULL, 'null'),
	(36, '49c0400571c2', '2026-11-22 11:59:47.300743+00', 'failure', 2, 1, NULL, '1-1', 1, 1, 6083757146611744018, 'error', 'check', 'ValueError: two never works (moved.py:16 in __call__)', '{''line'': ''two''}', 'null'),
	(37, '40e0a8266d01', '2026-11-22 11:59:48.366576+00', 'failure', 1, 1, NULL, '1-1', 1, 1, -8797093614263022485, 'error', 'check', 'ValueError: two never works (moved.py:16 in __call__)', '{''line'': ''two''}', 'null'),
	(38, '40e0a8266d01', '2026-11-22 11:59:48.366576+00', 'failure', 1, 1, NULL, '1-2', 2, 1, 3516473381354122482, 'error', 'check', 'ValueError: three never works (moved.py:16 in __call__)', '{''line'': ''three''}', 'null'),
	(39, '40e0a8266d01', '2026-11-22 11:59:48.366576+00', 'failure', 1, 1, NULL, '1-3', 3, 1, 5641318342722137114, 'error', 'check', 'ValueError: four never works (moved.py:16 in __call__)', '{''line'': ''four''}', 'null'),
	(40, '40e0a8266d01', '2026-11-22 11:59:48.458756+00', 'dead_letter', 1, NULL, NULL, '1-1', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'null'),
	(41, '40e0a8266d01', '2026-11-22 11:59:48.458756+00', 'dead_letter', 1, NULL, NULL, '1-2', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'null'),
	(42, '40e0a8266d01', '2026-11-22 11:59:48.458756+00', 'dead_letter', 1, NULL, NULL, '1-3', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'null'),
	(43, '40e0a8266d01', '2026-11-22 11:59:48.556493+00', 'failure', 2, 1, NULL, '1-6', 6, 1, 7985750841446962481, 'error', 'check', 'ValueError: seven never works (moved.py:16 in __call__)', '{''line'': ''seven''}', 'null'),
	(44, '40e0a8266d01', '2026-11-22 11:59:48.639353+00', 'dead_letter', 2, NULL, NULL, '1-6', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'null'),
	(45, 'a7a1e8814b1a', '2026-11-22 11:59:50.336121+00', 'take_over', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"from": "elsewhere:26569", "epoch": 1, "to_epoch": 2}'),
	(46, 'a7a1e8814b1a', '2026-11-22 11:59:50.863405+00', 'recovery', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"epoch": 2, "aborted": [1], "in_hand": [], "abandoned": [], "suppressed": [], "files_swept": 2, "late_commits": [], "rolled_forward": [], "took_over_from": "elsewhere:26569", "confirms_repeated": []}'),
	(47, 'a7a1e8814b1a', '2026-11-22 11:59:51.440078+00', 'take_over', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"from": "elsewhere:26613", "epoch": 2, "to_epoch": 3}'),
	(48, 'a7a1e8814b1a', '2026-11-22 11:59:51.787851+00', 'recovery', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{"epoch": 3, "aborted": [2], "in_hand": [], "abandoned": [], "suppressed": [], "files_swept": 1, "late_commits": [], "rolled_forward": [], "took_over_from": "elsewhere:26613", "confirms_repeated": []}');
INSERT INTO stormproof.file_dead_letter OVERRIDING SYSTEM VALUE VALUES
	(1, 'lines', '40e0a8266d01', 1, 1, '\x74776f', 'error', 'ValueError: two never works (moved.py:16 in __call__)', 1, 1, '[{"at": "2026-11-22T11:59:48.432807+00:00", "error": "ValueError: two never works (moved.py:16 in __call__)", "input": "{''line'': ''two''}", "owner": "40e0a8266d01/1", "reason": "error", "component": "check"}]', '2026-11-22 11:59:48.444063+00', NULL, NULL, NULL, NULL, NULL),
	(2, 'lines', '40e0a8266d01', 2, 1, '\x7468726565', 'error', 'ValueError: three never works (moved.py:16 in __call__)', 1, 1, '[{"at": "2026-11-22T11:59:48.432807+00:00", "error": "ValueError: three never works (moved.py:16 in __call__)", "input": "{''line'': ''three''}", "owner": "40e0a8266d01/1", "reason": "error", "component": "check"}]', '2026-11-22 11:59:48.444513+00', 'drop', 'ann', 'no use', '2026-11-22 11:59:48.761359+00', NULL),
	(3, 'lines', '40e0a8266d01', 3, 1, '\x666f7572', 'error', 'ValueError: four never works (moved.py:16 in __call__)', 1, 1, '[{"at": "2026-11-22T11:59:48.432807+00:00", "error": "ValueError: four never works (moved.py:16 in __call__)", "input": "{''line'': ''four''}", "owner": "40e0a8266d01/1", "reason": "error", "component": "check"}]', '2026-11-22 11:59:48.44458+00', 'requeue', 'ann', 'again', '2026-11-22 11:59:48.776846+00', NULL),
	(4, 'lines', '40e0a8266d01', 6, 1, '\x736576656e', 'error', 'ValueError: seven never works (moved.py:16 in __call__)', 1, 1, '[{"at": "2026-11-22T11:59:48.621528+00:00", "error": "ValueError: seven never works (moved.py:16 in __call__)", "input": "{''line'': ''seven''}", "owner": "40e0a8266d01/2", "reason": "error", "component": "check"}]', '2026-11-22 11:59:48.629586+00', 'edit', 'ann', 'typing error', '2026-11-22 11:59:48.78326+00', '\x6d656e646564');
INSERT INTO stormproof.file_subscription VALUES
	('lines', '1509ed3e1a63', 1, 'text', 4, '2026-11-22 11:59:37.481492+00'),
	('lines', 'b798dcf60ab2', 1, 'text', 8, '2026-11-22 11:59:38.431493+00'),
	('lines', '331567e2e6d6', 1, 'text', 8, '2026-11-22 11:59:39.894516+00'),
	('lines', 'cde7fd7c42c1', 2, 'text', 4, '2026-11-22 11:59:41.599645+00'),
	('lines', '5f8eca1531c7', 1, 'text', 8, '2026-11-22 11:59:43.611724+00'),
	('lines', '1f7110e1b5ad', 1, 'text', 4, '2026-11-22 11:59:45.104832+00'),
	('lines', '49c0400571c2', 1, 'text', 4, '2026-11-22 11:59:46.387553+00'),
	('lines', '40e0a8266d01', 1, 'text', 8, '2026-11-22 11:59:47.972271+00'),
	('lines', 'a7a1e8814b1a', 3, 'text', 4, '2026-11-22 11:59:49.183573+00');
INSERT INTO stormproof.file_entry VALUES
	('lines', '1509ed3e1a63', 1, '{folder}/lines.txt', 0, 9, 45, 1795348743761047224, '093606879c17891dfafbe7fc703f1118eaafb7955c591d87b4795296d5002f18', '\x00000000000000002d00000000000000', '2026-11-22 11:59:37.816137+00', '\x0b086b4f27025e2b', '{}'),
	('lines', 'b798dcf60ab2', 1, '{folder}/lines.txt', 0, 9, 45, 1795348743761047224, '093606879c17891dfafbe7fc703f1118eaafb7955c591d87b4795296d5002f18', '\x00000000000000002d00000000000000', '2026-11-22 11:59:38.774619+00', '\x0b086b4f27025e2b', '{}'),
	('lines', '331567e2e6d6', 1, '{folder}/lines.txt', 0, 9, 45, 1795348743761047224, '093606879c17891dfafbe7fc703f1118eaafb7955c591d87b4795296d5002f18', '\x00000000000000002d00000000000000', '2026-11-22 11:59:40.383822+00', '\x0b086b4f27025e2b', '{}'),
	('lines', 'cde7fd7c42c1', 1, '{folder}/lines.txt', 0, 9, 45, 1795348743761047224, '093606879c17891dfafbe7fc703f1118eaafb7955c591d87b4795296d5002f18', '\x00000000000000002d00000000000000', '2026-11-22 11:59:42.063743+00', '\x0b086b4f27025e2b', '{}'),
	('lines', '5f8eca1531c7', 1, '{folder}/lines.txt', 0, 9, 45, 1795348743761047224, '093606879c17891dfafbe7fc703f1118eaafb7955c591d87b4795296d5002f18', '\x00000000000000002d00000000000000', '2026-11-22 11:59:43.987409+00', '\x0b086b4f27025e2b', '{}'),
	('lines', '1f7110e1b5ad', 1, '{folder}/lines.txt', 0, 9, 45, 1795348743761047224, '093606879c17891dfafbe7fc703f1118eaafb7955c591d87b4795296d5002f18', '\x00000000000000002d00000000000000', '2026-11-22 11:59:45.420055+00', '\x0b086b4f27025e2b', '{}'),
	('lines', '49c0400571c2', 1, '{folder}/lines.txt', 0, 9, 45, 1795348743761047224, '093606879c17891dfafbe7fc703f1118eaafb7955c591d87b4795296d5002f18', '\x00000000000000002d00000000000000', '2026-11-22 11:59:46.79528+00', '\x0b086b4f27025e2b', '{}'),
	('lines', '40e0a8266d01', 1, '{folder}/lines.txt', 0, 9, 45, 1795348743761047224, '093606879c17891dfafbe7fc703f1118eaafb7955c591d87b4795296d5002f18', '\x00000000000000002d00000000000000', '2026-11-22 11:59:48.25757+00', '\x0b086b4f27025e2b', '{}'),
	('lines', 'a7a1e8814b1a', 1, '{folder}/lines.txt', 0, 9, 45, 1795348743761047224, '093606879c17891dfafbe7fc703f1118eaafb7955c591d87b4795296d5002f18', '\x00000000000000002d00000000000000', '2026-11-22 11:59:49.671001+00', '\x0b086b4f27025e2b', '{}');
INSERT INTO stormproof.file_retry VALUES
	('lines', '5f8eca1531c7', 1, 1, '\x74776f', 1, 1, '2026-11-22 12:46:46.818624+00', 'error', '[{"at": "2026-11-22T11:59:44.221025+00:00", "error": "ValueError: two never works (moved.py:16 in __call__)", "input": "{''line'': ''two''}", "owner": "5f8eca1531c7/1", "reason": "error", "component": "check"}]', NULL),
	('lines', '1f7110e1b5ad', 1, 1, '\x74776f', 1, 1, '2026-11-22 11:59:45.637482+00', 'error', '[{"at": "2026-11-22T11:59:45.635160+00:00", "error": "ValueError: two never works (moved.py:16 in __call__)", "input": "{''line'': ''two''}", "owner": "1f7110e1b5ad/1", "reason": "error", "component": "check"}]', 10),
	('lines', '1f7110e1b5ad', 3, 1, '\x666f7572', 1, 1, '2026-11-22 11:59:45.63776+00', 'error', '[{"at": "2026-11-22T11:59:45.635160+00:00", "error": "RuntimeError: not yet (moved.py:21 in __call__)", "input": "{''line'': ''four''}", "owner": "1f7110e1b5ad/1", "reason": "error", "component": "check"}]', 10),
	('lines', '49c0400571c2', 1, 1, '\x74776f', 1, 1, '2026-11-22 11:59:47.060772+00', 'error', '[{"at": "2026-11-22T11:59:47.050046+00:00", "error": "ValueError: two never works (moved.py:16 in __call__)", "input": "{''line'': ''two''}", "owner": "49c0400571c2/1", "reason": "error", "component": "check"}]', 12),
	('lines', '49c0400571c2', 3, 1, '\x666f7572', 1, 1, '2026-11-22 11:59:47.061102+00', 'error', '[{"at": "2026-11-22T11:59:47.050046+00:00", "error": "RuntimeError: not yet (moved.py:21 in __call__)", "input": "{''line'': ''four''}", "owner": "49c0400571c2/1", "reason": "error", "component": "check"}]', 12),
	('lines', '40e0a8266d01', 3, 1, '\x666f7572', 1, 0, '2026-11-22 11:59:48.776916+00', 'operator', '[{"at": "2026-11-22T11:59:48.432807+00:00", "error": "ValueError: four never works (moved.py:16 in __call__)", "input": "{''line'': ''four''}", "owner": "40e0a8266d01/1", "reason": "error", "component": "check"}, {"at": "2026-11-22T11:59:48.776846+00:00", "by": "ann", "why": "again", "reason": "requeue"}]', NULL),
	('lines', '40e0a8266d01', 6, 1, '\x6d656e646564', 1, 0, '2026-11-22 11:59:48.783325+00', 'operator', '[{"at": "2026-11-22T11:59:48.621528+00:00", "error": "ValueError: seven never works (moved.py:16 in __call__)", "input": "{''line'': ''seven''}", "owner": "40e0a8266d01/2", "reason": "error", "component": "check"}, {"at": "2026-11-22T11:59:48.78326+00:00", "by": "ann", "why": "typing error", "reason": "edit", "payload_sha256": "3ba8d02b16fd2a01c1a8ba1a1f036d7ce386ed953696fa57331c2ac48a80b255", "new_payload_sha256": "2481edd3b03fb258be1d053d556298e7cc5d7e3c2c9c6a04776b20505335d8b3"}]', NULL);
INSERT INTO stormproof.file_slice OVERRIDING SYSTEM VALUE VALUES
	(1, 'lines', '1509ed3e1a63', 0, 4, 4, 15, 'open', '1509ed3e1a63/1', 1, '2026-11-22 12:00:07.829551+00', 1, 0, false),
	(3, 'lines', 'b798dcf60ab2', 4, 8, 4, 17, 'held', 'b798dcf60ab2/2', 1, NULL, 1, 0, false),
	(5, 'lines', '331567e2e6d6', 4, 8, 4, 17, 'held', '331567e2e6d6/2', 1, NULL, 1, 0, false),
	(6, 'lines', 'cde7fd7c42c1', 0, 4, 4, 15, 'returned', NULL, 2, NULL, 1, 1, true),
	(10, 'lines', '1f7110e1b5ad', NULL, NULL, 2, 7, 'open', '1f7110e1b5ad/2', 1, '2026-11-22 12:00:15.695631+00', 1, 0, false),
	(12, 'lines', '49c0400571c2', NULL, NULL, 2, 7, 'held', '49c0400571c2/2', 1, NULL, 1, 0, false),
	(16, 'lines', 'a7a1e8814b1a', 2, 4, 2, 9, 'returned', NULL, 3, NULL, 2, 1, false),
	(15, 'lines', 'a7a1e8814b1a', 0, 2, 2, 6, 'open', 'a7a1e8814b1a/3', 3, '2026-11-22 12:00:21.830113+00', 3, 1, false);
INSERT INTO stormproof.graph VALUES
	('af08aea7f5a2', 1, 0, 'ab0c9b5b820f03234905c96a2bcca617cf045ee505b4e384fca3e1b8d546a576', '{"sinks": {"postgres.queue_open": {"keys": [], "folds": {}, "target": "queue_open at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.queue_open#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.queue_open#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:20.645992+00'),
	('40c1550cbb1f', 1, 0, '6244985350464cfd6c95277511bb66c87fc2c57cf73bf362ae460736aacc534f', '{"sinks": {"postgres.queue_prepared": {"keys": [], "folds": {}, "target": "queue_prepared at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.queue_prepared#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.queue_prepared#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:21.586569+00'),
	('121f53404982', 1, 0, '2ee91d4e5668ec1972d42e4cfb86b530c8cac6599824d181e4feb2a90651ab52', '{"sinks": {"postgres.queue_committed": {"keys": [], "folds": {}, "target": "queue_committed at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.queue_committed#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.queue_committed#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:22.876505+00'),
	('9bb0de27f999', 1, 0, 'db993ee09d7185499be2eb2786e8b1a728a37b2885cf0b5ac870b85f7f95b92d', '{"sinks": {"postgres.queue_returned": {"keys": [], "folds": {}, "target": "queue_returned at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.queue_returned#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.queue_returned#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:24.314665+00'),
	('31f259eb37fe', 1, 0, '377c893ee58178a1407d00cce9e8565e512a48a00fa5defb9255a58ae0fe165d', '{"sinks": {"postgres.queue_waiting": {"keys": [], "folds": {}, "target": "queue_waiting at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.queue_waiting#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.queue_waiting#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:26.3672+00'),
	('80b9208120d6', 1, 0, '6c75395166eb8b1cebb51150831226ab62b55aa7ed0b3406b4aa6ea98e45fc90', '{"sinks": {"postgres.queue_retrying": {"keys": [], "folds": {}, "target": "queue_retrying at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.queue_retrying#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.queue_retrying#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:27.635832+00'),
	('bd7b2081e600', 1, 0, '1dd77ea472c7ce60b37c30960c0744bf67e56a1f8b109a18017188d2fc322926', '{"sinks": {"postgres.queue_retry_prepared": {"keys": [], "folds": {}, "target": "queue_retry_prepared at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.queue_retry_prepared#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.queue_retry_prepared#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:29.216919+00'),
	('f43d1289fbb8', 1, 0, 'c66ae0f073f2b517d471f42ce2b58f2b7fdd9e41c861ea8045b3a2473c3873e9', '{"sinks": {"postgres.queue_dead": {"keys": [], "folds": {}, "target": "queue_dead at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.queue_dead#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.queue_dead#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:31.340747+00'),
	('3b86f7646d37', 1, 0, 'a86b198f97e4cd81a9b208ab5b7a84e6940d5920125091bb0b0ff3dc5fd514f7', '{"sinks": {"postgres.queue_halves": {"keys": [], "folds": {}, "target": "queue_halves at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.queue_halves#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.queue_halves#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:33.299639+00'),
	('1509ed3e1a63', 1, 0, '2c9605a01589a4df6335659797bd714f6de706497766148947159378a72ad9fb', '{"sinks": {"postgres.files_open": {"keys": [], "folds": {}, "target": "files_open at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.files_open#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.files_open#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:37.445555+00'),
	('b798dcf60ab2', 1, 0, 'd156f2fbf8e1d15880190aa690762cfe2548e2ac51f28d41afed200247e3bb62', '{"sinks": {"postgres.files_prepared": {"keys": [], "folds": {}, "target": "files_prepared at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.files_prepared#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.files_prepared#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:38.395171+00'),
	('331567e2e6d6', 1, 0, 'b54179104ca304f6dec909f6f6c2b83bb6a594dd5b0d3d56b5af0e6a3d15534a', '{"sinks": {"postgres.files_committed": {"keys": [], "folds": {}, "target": "files_committed at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.files_committed#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.files_committed#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:39.871714+00'),
	('cde7fd7c42c1', 1, 0, '1b5eada8f6afeaf67a81f4866f714f18bed4d66e4364c1be0764ed0f0d040ff5', '{"sinks": {"postgres.files_returned": {"keys": [], "folds": {}, "target": "files_returned at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.files_returned#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.files_returned#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:41.542166+00'),
	('5f8eca1531c7', 1, 0, 'e30581c97f4470e885316134330f0d44200be51e2c67d304625783f708b55eb4', '{"sinks": {"postgres.files_waiting": {"keys": [], "folds": {}, "target": "files_waiting at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.files_waiting#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.files_waiting#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:43.571055+00'),
	('1f7110e1b5ad', 1, 0, '3d031323936f1d32909865e8f4434673daf33b61abe1b1a90f42929840ab3019', '{"sinks": {"postgres.files_retrying": {"keys": [], "folds": {}, "target": "files_retrying at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.files_retrying#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.files_retrying#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:45.063706+00'),
	('49c0400571c2', 1, 0, 'd26f5d79fdabdba7b4c6f2ea985dcc7f8c97e4f6ae251e56669082f62dc2d9e8', '{"sinks": {"postgres.files_retry_prepared": {"keys": [], "folds": {}, "target": "files_retry_prepared at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.files_retry_prepared#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.files_retry_prepared#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:46.348045+00'),
	('40e0a8266d01', 1, 0, 'a27bb49f7b9728bf64d93d1813ee0adb39b562d1a034da18e02d7d29d512d2e5', '{"sinks": {"postgres.files_dead": {"keys": [], "folds": {}, "target": "files_dead at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.files_dead#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.files_dead#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:47.936674+00'),
	('a7a1e8814b1a', 1, 0, '464c79de10373a93a6377b0102fed76d511fbff65f09ad6475cda2fe1f8a43f8', '{"sinks": {"postgres.files_halves": {"keys": [], "folds": {}, "target": "files_halves at postgresql://postgres@/moved?host=/run/postgresql&port=5432", "columns": [["word", "string", true]]}}, "source": "lines", "components": {"check": {"to": ["check/default>postgres.files_halves#0"], "kind": "OperationNode", "stage": 0}, "lines/default@0": {"feeds": ["check"], "stage": 0}, "check/default>postgres.files_halves#0": {"to": [], "kind": "WriteNode", "stage": 0}}}', '2026-11-22 11:59:49.131407+00');
INSERT INTO stormproof.queue VALUES
	('lines', 2000000, '2026-11-22 11:59:03.691817+00', '{server}', 1, 0);
INSERT INTO stormproof.queue_subscription VALUES
	('lines', 'af08aea7f5a2', 1, '3:3:', '1204:1204:', '1189', 4, '{server}', 1, '2026-11-22 11:59:20.678412+00'),
	('lines', '40c1550cbb1f', 1, '3:3:', '1216:1216:', '1189', 8, '{server}', 1, '2026-11-22 11:59:21.60849+00'),
	('lines', '121f53404982', 1, '3:3:', '1233:1233:', '1189', 8, '{server}', 1, '2026-11-22 11:59:22.899292+00'),
	('lines', '9bb0de27f999', 2, '3:3:', '1251:1251:', '1189', 4, '{server}', 1, '2026-11-22 11:59:24.355398+00'),
	('lines', '31f259eb37fe', 1, '3:3:', '1275:1275:', '1189', 8, '{server}', 1, '2026-11-22 11:59:26.384738+00'),
	('lines', '80b9208120d6', 1, '3:3:', '1294:1294:', '1189', 4, '{server}', 1, '2026-11-22 11:59:27.668611+00'),
	('lines', 'bd7b2081e600', 1, '3:3:', '1310:1310:', '1189', 4, '{server}', 1, '2026-11-22 11:59:29.259974+00'),
	('lines', 'f43d1289fbb8', 1, '3:3:', '1337:1337:', '1189', 8, '{server}', 1, '2026-11-22 11:59:31.407675+00'),
	('lines', '3b86f7646d37', 3, '3:3:', '1359:1359:', '1189', 4, '{server}', 1, '2026-11-22 11:59:33.367875+00');
INSERT INTO stormproof.queue_retry VALUES
	('lines', '31f259eb37fe', 2, '1189', '\x74776f', 1, 1, '2026-11-22 12:58:21.432046+00', 'error', '[{"at": "2026-11-22T11:59:26.911972+00:00", "error": "ValueError: two never works (moved.py:16 in __call__)", "input": "{''line'': ''two''}", "owner": "31f259eb37fe/1", "reason": "error", "component": "check"}]', NULL),
	('lines', '80b9208120d6', 2, '1189', '\x74776f', 1, 1, '2026-11-22 11:59:28.486931+00', 'error', '[{"at": "2026-11-22T11:59:28.486146+00:00", "error": "ValueError: two never works (moved.py:16 in __call__)", "input": "{''line'': ''two''}", "owner": "80b9208120d6/1", "reason": "error", "component": "check"}]', 10),
	('lines', '80b9208120d6', 4, '1189', '\x666f7572', 1, 1, '2026-11-22 11:59:28.486911+00', 'error', '[{"at": "2026-11-22T11:59:28.486233+00:00", "error": "RuntimeError: not yet (moved.py:21 in __call__)", "input": "{''line'': ''four''}", "owner": "80b9208120d6/1", "reason": "error", "component": "check"}]', 10),
	('lines', 'bd7b2081e600', 2, '1189', '\x74776f', 1, 1, '2026-11-22 11:59:30.352782+00', 'error', '[{"at": "2026-11-22T11:59:30.352119+00:00", "error": "ValueError: two never works (moved.py:16 in __call__)", "input": "{''line'': ''two''}", "owner": "bd7b2081e600/1", "reason": "error", "component": "check"}]', 12),
	('lines', 'bd7b2081e600', 4, '1189', '\x666f7572', 1, 1, '2026-11-22 11:59:30.355428+00', 'error', '[{"at": "2026-11-22T11:59:30.3547+00:00", "error": "RuntimeError: not yet (moved.py:21 in __call__)", "input": "{''line'': ''four''}", "owner": "bd7b2081e600/1", "reason": "error", "component": "check"}]', 12),
	('lines', 'f43d1289fbb8', 4, '1189', '\x666f7572', 1, 0, '2026-11-22 11:59:32.804213+00', 'operator', '[{"at": "2026-11-22T11:59:32.431877+00:00", "error": "ValueError: four never works (moved.py:16 in __call__)", "input": "{''line'': ''four''}", "owner": "f43d1289fbb8/1", "reason": "error", "component": "check"}, {"at": "2026-11-22T11:59:32.803573+00:00", "by": "ann", "why": "again", "reason": "requeue"}]', NULL),
	('lines', 'f43d1289fbb8', 7, '1189', '\x6d656e646564', 1, 0, '2026-11-22 11:59:32.817953+00', 'operator', '[{"at": "2026-11-22T11:59:32.646052+00:00", "error": "ValueError: seven never works (moved.py:16 in __call__)", "input": "{''line'': ''seven''}", "owner": "f43d1289fbb8/2", "reason": "error", "component": "check"}, {"at": "2026-11-22T11:59:32.817853+00:00", "by": "ann", "why": "typing error", "reason": "edit", "payload_sha256": "3ba8d02b16fd2a01c1a8ba1a1f036d7ce386ed953696fa57331c2ac48a80b255", "new_payload_sha256": "2481edd3b03fb258be1d053d556298e7cc5d7e3c2c9c6a04776b20505335d8b3"}]', NULL);
INSERT INTO stormproof.queue_slice OVERRIDING SYSTEM VALUE VALUES
	(1, 'lines', 'af08aea7f5a2', 'main', '3:3:', '1204:1204:', NULL, NULL, '1189', 4, 4, 15, 1, 4, 'open', 'af08aea7f5a2/1', 1, '2026-11-22 11:59:50.932057+00', 1, 0, false),
	(3, 'lines', '40c1550cbb1f', 'main', '3:3:', '1216:1216:', '1189', 4, '1189', 8, 4, 17, 5, 8, 'held', '40c1550cbb1f/2', 1, NULL, 1, 0, false),
	(5, 'lines', '121f53404982', 'main', '3:3:', '1233:1233:', '1189', 4, '1189', 8, 4, 17, 5, 8, 'held', '121f53404982/2', 1, NULL, 1, 0, false),
	(15, 'lines', '3b86f7646d37', 'main', '3:3:', '1359:1359:', '1189', 2, '1189', 4, 2, 9, 1, 4, 'returned', NULL, 3, NULL, 2, 1, true),
	(6, 'lines', '9bb0de27f999', 'main', '3:3:', '1251:1251:', NULL, NULL, '1189', 4, 4, 15, 1, 4, 'returned', NULL, 2, NULL, 1, 1, true),
	(16, 'lines', '3b86f7646d37', 'main', '3:3:', '1359:1359:', NULL, NULL, '1189', 2, 2, 6, 1, 2, 'open', '3b86f7646d37/3', 3, '2026-11-22 12:00:06.8156+00', 3, 1, false),
	(10, 'lines', '80b9208120d6', 'retry', NULL, NULL, NULL, NULL, NULL, NULL, 2, 7, 4, 2, 'open', '80b9208120d6/2', 1, '2026-11-22 11:59:58.543358+00', 1, 0, false),
	(12, 'lines', 'bd7b2081e600', 'retry', NULL, NULL, NULL, NULL, NULL, NULL, 2, 7, 2, 4, 'held', 'bd7b2081e600/2', 1, NULL, 1, 0, false);
INSERT INTO stormproof.topology VALUES
	('queue-open', 'af08aea7f5a2', 1, '1275bf2936a4fd82e4baaac102efdc34c781e4d5672e40aaf725157f5a03f1c4', 'exactly-once', 'lines', '2026-11-22 11:59:20.615871+00', '2026-11-22 11:59:20.615871+00', 'elsewhere', 25981, 1795348760.21, NULL),
	('queue-prepared', '40c1550cbb1f', 1, '2553c57c8681b0dc2f790b433a4cec718e1896658b1e222394a86920711bda37', 'exactly-once', 'lines', '2026-11-22 11:59:21.572221+00', '2026-11-22 11:59:21.572221+00', 'elsewhere', 25998, 1795348761.23, NULL),
	('queue-committed', '121f53404982', 1, 'fb3941deae2abcdade385ef71c1afa59d3f48ef90591639b2bba9839b8df6512', 'exactly-once', 'lines', '2026-11-22 11:59:22.844595+00', '2026-11-22 11:59:22.844595+00', 'elsewhere', 26027, 1795348762.48, NULL),
	('queue-returned', '9bb0de27f999', 2, 'cd55a25a10dbb2f765808320630d265d8a1812ed86f0a6bd1315ad504b1b8ded', 'exactly-once', 'lines', '2026-11-22 11:59:24.279443+00', '2026-11-22 11:59:25.46051+00', 'elsewhere', 26080, 1795348765.03, NULL),
	('queue-waiting', '31f259eb37fe', 1, '09e83a8faaa9e6dfcd8e520b1ac86b7ac73bd58bdb9849584411ef90d0e3747f', 'exactly-once', 'lines', '2026-11-22 11:59:26.338268+00', '2026-11-22 11:59:26.338268+00', 'elsewhere', 26086, 1795348765.92, NULL),
	('queue-retrying', '80b9208120d6', 1, '1c63b754f7460fef8ca5d43e8aa8bb747ba90faff58a894740e914e03630562c', 'exactly-once', 'lines', '2026-11-22 11:59:27.606349+00', '2026-11-22 11:59:27.606349+00', 'elsewhere', 26125, 1795348767.21, NULL),
	('queue-retry-prepared', 'bd7b2081e600', 1, 'fe8bee50185cce78e681f9101cb3f6f963e7c3ff92e29153c306806749d7409b', 'exactly-once', 'lines', '2026-11-22 11:59:29.155614+00', '2026-11-22 11:59:29.155614+00', 'elsewhere', 26150, 1795348768.58, NULL),
	('queue-dead', 'f43d1289fbb8', 1, 'b6f52de82667d146584537f74fd395a7a92d95495ba906c5b45218f3b440e5b5', 'exactly-once', 'lines', '2026-11-22 11:59:31.279361+00', '2026-11-22 11:59:31.279361+00', 'elsewhere', 26190, 1795348770.63, NULL),
	('queue-halves', '3b86f7646d37', 3, '6d14ae04af87376205431b12501b7c049ff634072416810f33e48a57f618ef1f', 'exactly-once', 'lines', '2026-11-22 11:59:33.261568+00', '2026-11-22 11:59:36.340182+00', 'elsewhere', 26289, 1795348775.89, NULL),
	('files-open', '1509ed3e1a63', 1, '7989ba19b25f02b3c56913355ae4520e07f3c7bc24a3127920bc21312cea4503', 'exactly-once', 'lines', '2026-11-22 11:59:37.417751+00', '2026-11-22 11:59:37.417751+00', 'elsewhere', 26353, 1795348777.17, NULL),
	('files-prepared', 'b798dcf60ab2', 1, '0ddeb62d1c5c81b768363a0151d3c43560eaa06f0f37e72b83be958de7b7a9cd', 'exactly-once', 'lines', '2026-11-22 11:59:38.355507+00', '2026-11-22 11:59:38.355507+00', 'elsewhere', 26371, 1795348777.96, NULL),
	('files-committed', '331567e2e6d6', 1, '73dcbddbd738de5c27515239c0fd27eb85a6941079f55c83b86fd98ac0e65c40', 'exactly-once', 'lines', '2026-11-22 11:59:39.827972+00', '2026-11-22 11:59:39.827972+00', 'elsewhere', 26397, 1795348779.23, NULL),
	('files-returned', 'cde7fd7c42c1', 2, 'e98d17638b37bf217f267501323fdc0be1fc9b4c718cc65b9b14cd69d2acb6e0', 'exactly-once', 'lines', '2026-11-22 11:59:41.475487+00', '2026-11-22 11:59:42.695513+00', 'elsewhere', 26451, 1795348782.25, NULL),
	('files-waiting', '5f8eca1531c7', 1, 'f4f42bdaf144f52cf13cb4bdc4ed61ead693663d39c41109b983d0b6f9806c01', 'exactly-once', 'lines', '2026-11-22 11:59:43.532392+00', '2026-11-22 11:59:43.532392+00', 'elsewhere', 26462, 1795348783.1, NULL),
	('files-retrying', '1f7110e1b5ad', 1, '5cadff7581338e0381a702d6796720a26a1d732a33b5df0b36dda7b3f4ff5d16', 'exactly-once', 'lines', '2026-11-22 11:59:45.025492+00', '2026-11-22 11:59:45.025492+00', 'elsewhere', 26490, 1795348784.53, NULL),
	('files-retry-prepared', '49c0400571c2', 1, '80132e50e5fcd06f7a1df4f411174cba09236ef9b68f10ec87381aa72c2b0b27', 'exactly-once', 'lines', '2026-11-22 11:59:46.295803+00', '2026-11-22 11:59:46.295803+00', 'elsewhere', 26513, 1795348785.76, NULL),
	('files-dead', '40e0a8266d01', 1, '152db1c03c94512083fc86e3e9d703e5d846d4068e7a3384bc98b41d981e1f12', 'exactly-once', 'lines', '2026-11-22 11:59:47.888399+00', '2026-11-22 11:59:47.888399+00', 'elsewhere', 26535, 1795348787.38, NULL),
	('files-halves', 'a7a1e8814b1a', 3, '5674ce31f333273c1216e51554b854d40eaace982faa5e3a623f02ce922ba45e', 'exactly-once', 'lines', '2026-11-22 11:59:49.111756+00', '2026-11-22 11:59:51.427804+00', 'elsewhere', 26641, 1795348791.02, NULL);
INSERT INTO stormproof.topology_sink VALUES
	('af08aea7f5a2', 'postgres.queue_open', 'queue_open at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17888', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.queue_open", "folds": {}, "table": "queue_open", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:20.849081+00'),
	('40c1550cbb1f', 'postgres.queue_prepared', 'queue_prepared at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17893', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.queue_prepared", "folds": {}, "table": "queue_prepared", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:21.69554+00'),
	('121f53404982', 'postgres.queue_committed', 'queue_committed at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17898', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.queue_committed", "folds": {}, "table": "queue_committed", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:23.02751+00'),
	('9bb0de27f999', 'postgres.queue_returned', 'queue_returned at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17903', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.queue_returned", "folds": {}, "table": "queue_returned", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:24.556064+00'),
	('31f259eb37fe', 'postgres.queue_waiting', 'queue_waiting at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17908', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.queue_waiting", "folds": {}, "table": "queue_waiting", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:26.491834+00'),
	('80b9208120d6', 'postgres.queue_retrying', 'queue_retrying at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17913', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.queue_retrying", "folds": {}, "table": "queue_retrying", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:27.859789+00'),
	('bd7b2081e600', 'postgres.queue_retry_prepared', 'queue_retry_prepared at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17918', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.queue_retry_prepared", "folds": {}, "table": "queue_retry_prepared", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:29.539257+00'),
	('f43d1289fbb8', 'postgres.queue_dead', 'queue_dead at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17923', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.queue_dead", "folds": {}, "table": "queue_dead", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:31.723547+00'),
	('3b86f7646d37', 'postgres.queue_halves', 'queue_halves at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17932', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.queue_halves", "folds": {}, "table": "queue_halves", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:33.687749+00'),
	('1509ed3e1a63', 'postgres.files_open', 'files_open at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17937', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.files_open", "folds": {}, "table": "files_open", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:37.645781+00'),
	('b798dcf60ab2', 'postgres.files_prepared', 'files_prepared at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17942', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.files_prepared", "folds": {}, "table": "files_prepared", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:38.662922+00'),
	('331567e2e6d6', 'postgres.files_committed', 'files_committed at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17947', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.files_committed", "folds": {}, "table": "files_committed", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:40.168051+00'),
	('cde7fd7c42c1', 'postgres.files_returned', 'files_returned at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17952', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.files_returned", "folds": {}, "table": "files_returned", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:41.868022+00'),
	('5f8eca1531c7', 'postgres.files_waiting', 'files_waiting at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17957', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.files_waiting", "folds": {}, "table": "files_waiting", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:43.843602+00'),
	('1f7110e1b5ad', 'postgres.files_retrying', 'files_retrying at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17962', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.files_retrying", "folds": {}, "table": "files_retrying", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:45.278109+00'),
	('49c0400571c2', 'postgres.files_retry_prepared', 'files_retry_prepared at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17968', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.files_retry_prepared", "folds": {}, "table": "files_retry_prepared", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:46.629005+00'),
	('40e0a8266d01', 'postgres.files_dead', 'files_dead at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17973', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.files_dead", "folds": {}, "table": "files_dead", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:48.116346+00'),
	('a7a1e8814b1a', 'postgres.files_halves', 'files_halves at postgresql://postgres@/moved?host=/run/postgresql&port=5432', '{server}/17337/17978', '{"keys": [], "kind": "postgres", "mode": "append", "files": "{staging}/postgres.files_halves", "folds": {}, "table": "files_halves", "schema": "/////3AAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAAAAEFEAAAABwAAAAEAAAAAAAAAAQAAAB3b3JkAAAAAAQABAAEAAAA", "database": null}', '2026-11-22 11:59:49.443481+00');
INSERT INTO stormproof.txn VALUES
	('af08aea7f5a2', 1, 'open', 'exactly-once', 1, 1, 'lines', '{"ids": [1, 4], "span": {"end": "1204:1204:", "last": [1189, 4], "after": null, "start": "3:3:"}, "bytes": 15, "slice": 1, "deaths": 0, "opened": 1, "messages": 4, "replayed": []}', 4, 0, 0, 15, false, '2026-11-22 11:59:20.935119+00', NULL, NULL, NULL, NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('40c1550cbb1f', 1, 'committed', 'exactly-once', 1, 1, 'lines', '{"ids": [1, 4], "span": {"end": "1216:1216:", "last": [1189, 4], "after": null, "start": "3:3:"}, "bytes": 15, "slice": 2, "deaths": 0, "opened": 1, "messages": 4, "replayed": []}', 4, 0, 8, 15, false, '2026-11-22 11:59:21.817026+00', '2026-11-22 11:59:22.123325+00', '2026-11-22 11:59:22.240562+00', NULL, '{"job": 259.051, "open": 39.371, "commit": 51.112, "held_up": 51.144, "job.job": 253.803, "prepare": 72.727}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('121f53404982', 2, 'prepared', 'exactly-once', 1, 1, 'lines', '{"ids": [5, 8], "span": {"end": "1233:1233:", "last": [1189, 8], "after": [1189, 4], "start": "3:3:"}, "bytes": 17, "slice": 5, "deaths": 0, "opened": 1, "messages": 4, "replayed": []}', 4, 0, 8, 17, false, '2026-11-22 11:59:23.673749+00', '2026-11-22 11:59:23.755205+00', NULL, NULL, NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('40c1550cbb1f', 2, 'prepared', 'exactly-once', 1, 1, 'lines', '{"ids": [5, 8], "span": {"end": "1216:1216:", "last": [1189, 8], "after": [1189, 4], "start": "3:3:"}, "bytes": 17, "slice": 3, "deaths": 0, "opened": 1, "messages": 4, "replayed": []}', 4, 0, 8, 17, false, '2026-11-22 11:59:22.296229+00', '2026-11-22 11:59:22.403246+00', NULL, NULL, NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('9bb0de27f999', 1, 'aborted', 'exactly-once', 1, 1, 'lines', '{"ids": [1, 4], "span": {"end": "1251:1251:", "last": [1189, 4], "after": null, "start": "3:3:"}, "bytes": 15, "slice": 6, "deaths": 0, "opened": 1, "messages": 4, "replayed": []}', 4, 0, 0, 15, false, '2026-11-22 11:59:24.679483+00', NULL, '2026-11-22 11:59:25.726076+00', 'in flight when its driver ended', NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('121f53404982', 1, 'committed', 'exactly-once', 1, 1, 'lines', '{"ids": [1, 4], "span": {"end": "1233:1233:", "last": [1189, 4], "after": null, "start": "3:3:"}, "bytes": 15, "slice": 4, "deaths": 0, "opened": 1, "messages": 4, "replayed": []}', 4, 0, 8, 15, false, '2026-11-22 11:59:23.164103+00', '2026-11-22 11:59:23.553782+00', '2026-11-22 11:59:23.626711+00', NULL, '{"job": 355.772, "open": 71.525, "commit": 48.04, "held_up": 48.068, "job.job": 345.102, "prepare": 18.29}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('31f259eb37fe', 1, 'committed', 'exactly-once', 1, 1, 'lines', '{"ids": [1, 4], "span": {"end": "1275:1275:", "last": [1189, 4], "after": null, "start": "3:3:"}, "bytes": 15, "slice": 7, "deaths": 0, "opened": 1, "messages": 4, "replayed": []}', 4, 1, 7, 15, false, '2026-11-22 11:59:26.594805+00', '2026-11-22 11:59:26.858186+00', '2026-11-22 11:59:26.915038+00', NULL, '{"job": 222.934, "open": 47.733, "commit": 39.034, "held_up": 39.068, "job.job": 218.997, "prepare": 28.962}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('31f259eb37fe', 2, 'committed', 'exactly-once', 1, 1, 'lines', '{"ids": [5, 8], "span": {"end": "1275:1275:", "last": [1189, 8], "after": [1189, 4], "start": "3:3:"}, "bytes": 17, "slice": 8, "deaths": 0, "opened": 1, "messages": 4, "replayed": []}', 4, 0, 8, 17, false, '2026-11-22 11:59:26.979288+00', '2026-11-22 11:59:27.081914+00', '2026-11-22 11:59:27.147321+00', NULL, '{"job": 86.355, "open": 47.729, "commit": 38.801, "held_up": 38.835, "job.job": 73.404, "prepare": 19.898}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('80b9208120d6', 1, 'committed', 'exactly-once', 1, 1, 'lines', '{"ids": [1, 4], "span": {"end": "1294:1294:", "last": [1189, 4], "after": null, "start": "3:3:"}, "bytes": 15, "slice": 9, "deaths": 0, "opened": 1, "messages": 4, "replayed": []}', 4, 2, 6, 15, false, '2026-11-22 11:59:28.001622+00', '2026-11-22 11:59:28.408724+00', '2026-11-22 11:59:28.494045+00', NULL, '{"job": 356.373, "open": 57.682, "commit": 43.837, "held_up": 43.868, "job.job": 346.07, "prepare": 46.061}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('80b9208120d6', 2, 'open', 'exactly-once', 1, 1, 'lines', '{"ids": [2, 4], "span": null, "bytes": 7, "slice": 10, "deaths": 0, "opened": 1, "messages": 2, "replayed": [[1189, 2], [1189, 4]]}', 2, 0, 0, 7, true, '2026-11-22 11:59:28.544329+00', NULL, NULL, NULL, NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('bd7b2081e600', 1, 'committed', 'exactly-once', 1, 1, 'lines', '{"ids": [1, 4], "span": {"end": "1310:1310:", "last": [1189, 4], "after": null, "start": "3:3:"}, "bytes": 15, "slice": 11, "deaths": 0, "opened": 1, "messages": 4, "replayed": []}', 4, 2, 6, 15, false, '2026-11-22 11:59:29.707253+00', '2026-11-22 11:59:30.251613+00', '2026-11-22 11:59:30.367864+00', NULL, '{"job": 462.758, "open": 59.185, "commit": 50.844, "held_up": 50.876, "job.job": 448.887, "prepare": 80.256}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('bd7b2081e600', 2, 'prepared', 'exactly-once', 1, 1, 'lines', '{"ids": [2, 4], "span": null, "bytes": 7, "slice": 12, "deaths": 0, "opened": 1, "messages": 2, "replayed": [[1189, 2], [1189, 4]]}', 2, 1, 3, 7, true, '2026-11-22 11:59:30.420933+00', '2026-11-22 11:59:30.552745+00', NULL, NULL, NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('3b86f7646d37', 2, 'aborted', 'exactly-once', 2, 1, 'lines', '{"ids": [1, 4], "span": {"end": "1359:1359:", "last": [1189, 4], "after": null, "start": "3:3:"}, "bytes": 15, "slice": 15, "deaths": 1, "opened": 2, "messages": 4, "replayed": []}', 4, 0, 0, 15, false, '2026-11-22 11:59:35.485754+00', NULL, '2026-11-22 11:59:36.687886+00', 'in flight when its driver ended', NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('3b86f7646d37', 3, 'open', 'exactly-once', 3, 1, 'lines', '{"ids": [1, 2], "span": {"end": "1359:1359:", "last": [1189, 2], "after": null, "start": "3:3:"}, "bytes": 6, "slice": 16, "deaths": 1, "opened": 3, "messages": 2, "replayed": []}', 2, 0, 0, 6, false, '2026-11-22 11:59:36.816197+00', NULL, NULL, NULL, NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('f43d1289fbb8', 1, 'committed', 'exactly-once', 1, 1, 'lines', '{"ids": [1, 4], "span": {"end": "1337:1337:", "last": [1189, 4], "after": null, "start": "3:3:"}, "bytes": 15, "slice": 13, "deaths": 0, "opened": 1, "messages": 4, "replayed": []}', 4, 3, 5, 15, false, '2026-11-22 11:59:31.899135+00', '2026-11-22 11:59:32.351398+00', '2026-11-22 11:59:32.443298+00', NULL, '{"job": 372.646, "open": 85.602, "commit": 49.119, "held_up": 49.153, "job.job": 353.66, "prepare": 51.944}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('1509ed3e1a63', 1, 'open', 'exactly-once', 1, 1, 'lines', '{"bytes": 15, "range": [0, 4], "slice": 1, "deaths": 0, "opened": 1, "replayed": []}', 4, 0, 0, 15, false, '2026-11-22 11:59:37.843038+00', NULL, NULL, NULL, NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('f43d1289fbb8', 2, 'committed', 'exactly-once', 1, 1, 'lines', '{"ids": [5, 8], "span": {"end": "1337:1337:", "last": [1189, 8], "after": [1189, 4], "start": "3:3:"}, "bytes": 17, "slice": 14, "deaths": 0, "opened": 1, "messages": 4, "replayed": []}', 4, 1, 7, 17, false, '2026-11-22 11:59:32.506791+00', '2026-11-22 11:59:32.590493+00', '2026-11-22 11:59:32.663286+00', NULL, '{"job": 63.002, "open": 66.822, "commit": 34.305, "held_up": 34.335, "job.job": 47.736, "prepare": 14.447}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('3b86f7646d37', 1, 'aborted', 'exactly-once', 1, 1, 'lines', '{"ids": [1, 4], "span": {"end": "1359:1359:", "last": [1189, 4], "after": null, "start": "3:3:"}, "bytes": 15, "slice": 15, "deaths": 0, "opened": 1, "messages": 4, "replayed": []}', 4, 0, 0, 15, false, '2026-11-22 11:59:33.878098+00', NULL, '2026-11-22 11:59:35.3012+00', 'in flight when its driver ended', NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('331567e2e6d6', 1, 'committed', 'exactly-once', 1, 1, 'lines', '{"bytes": 15, "range": [0, 4], "slice": 4, "deaths": 0, "opened": 1, "replayed": []}', 4, 0, 8, 15, false, '2026-11-22 11:59:40.401618+00', '2026-11-22 11:59:40.579258+00', '2026-11-22 11:59:40.667341+00', NULL, '{"job": 131.006, "open": 92.152, "commit": 45.378, "held_up": 45.459, "job.job": 123.569, "prepare": 38.528}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('b798dcf60ab2', 2, 'prepared', 'exactly-once', 1, 1, 'lines', '{"bytes": 17, "range": [4, 8], "slice": 3, "deaths": 0, "opened": 1, "replayed": []}', 4, 0, 8, 17, false, '2026-11-22 11:59:39.071839+00', '2026-11-22 11:59:39.171078+00', NULL, NULL, NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('b798dcf60ab2', 1, 'committed', 'exactly-once', 1, 1, 'lines', '{"bytes": 15, "range": [0, 4], "slice": 2, "deaths": 0, "opened": 1, "replayed": []}', 4, 0, 8, 15, false, '2026-11-22 11:59:38.78874+00', '2026-11-22 11:59:38.935314+00', '2026-11-22 11:59:39.03116+00', NULL, '{"job": 99.819, "open": 44.52, "commit": 54.972, "held_up": 55.002, "job.job": 84.722, "prepare": 52.05}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('331567e2e6d6', 2, 'prepared', 'exactly-once', 1, 1, 'lines', '{"bytes": 17, "range": [4, 8], "slice": 5, "deaths": 0, "opened": 1, "replayed": []}', 4, 0, 8, 17, false, '2026-11-22 11:59:40.72416+00', '2026-11-22 11:59:40.870072+00', NULL, NULL, NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('cde7fd7c42c1', 1, 'aborted', 'exactly-once', 1, 1, 'lines', '{"bytes": 15, "range": [0, 4], "slice": 6, "deaths": 0, "opened": 1, "replayed": []}', 4, 0, 0, 15, false, '2026-11-22 11:59:42.086874+00', NULL, '2026-11-22 11:59:42.95092+00', 'in flight when its driver ended', NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('5f8eca1531c7', 1, 'committed', 'exactly-once', 1, 1, 'lines', '{"bytes": 15, "range": [0, 4], "slice": 7, "deaths": 0, "opened": 1, "replayed": []}', 4, 1, 7, 15, false, '2026-11-22 11:59:44.019723+00', '2026-11-22 11:59:44.147997+00', '2026-11-22 11:59:44.230111+00', NULL, '{"job": 80.929, "open": 83.267, "commit": 33.983, "held_up": 34.018, "job.job": 74.583, "prepare": 50.069}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('49c0400571c2', 1, 'committed', 'exactly-once', 1, 1, 'lines', '{"bytes": 15, "range": [0, 4], "slice": 11, "deaths": 0, "opened": 1, "replayed": []}', 4, 2, 6, 15, false, '2026-11-22 11:59:46.816949+00', '2026-11-22 11:59:46.971917+00', '2026-11-22 11:59:47.069676+00', NULL, '{"job": 107.284, "open": 81.096, "commit": 44.867, "held_up": 44.896, "job.job": 104.898, "prepare": 38.616}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('5f8eca1531c7', 2, 'committed', 'exactly-once', 1, 1, 'lines', '{"bytes": 17, "range": [4, 8], "slice": 8, "deaths": 0, "opened": 1, "replayed": []}', 4, 0, 8, 17, false, '2026-11-22 11:59:44.287213+00', '2026-11-22 11:59:44.372114+00', '2026-11-22 11:59:44.439682+00', NULL, '{"job": 51.39, "open": 51.23, "commit": 32.462, "held_up": 32.493, "job.job": 43.639, "prepare": 35.352}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('49c0400571c2', 2, 'prepared', 'exactly-once', 1, 1, 'lines', '{"bytes": 7, "range": null, "slice": 12, "deaths": 0, "opened": 1, "replayed": [[1, 1], [3, 1]]}', 2, 1, 3, 7, true, '2026-11-22 11:59:47.134628+00', '2026-11-22 11:59:47.310865+00', NULL, NULL, NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('1f7110e1b5ad', 1, 'committed', 'exactly-once', 1, 1, 'lines', '{"bytes": 15, "range": [0, 4], "slice": 9, "deaths": 0, "opened": 1, "replayed": []}', 4, 2, 6, 15, false, '2026-11-22 11:59:45.430462+00', '2026-11-22 11:59:45.560839+00', '2026-11-22 11:59:45.639729+00', NULL, '{"job": 100.285, "open": 52.706, "commit": 39.662, "held_up": 39.703, "job.job": 95.994, "prepare": 32.153}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('1f7110e1b5ad', 2, 'open', 'exactly-once', 1, 1, 'lines', '{"bytes": 7, "range": null, "slice": 10, "deaths": 0, "opened": 1, "replayed": [[1, 1], [3, 1]]}', 2, 0, 0, 7, true, '2026-11-22 11:59:45.696668+00', NULL, NULL, NULL, NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('a7a1e8814b1a', 2, 'aborted', 'exactly-once', 2, 1, 'lines', '{"bytes": 15, "range": [0, 4], "slice": 15, "deaths": 1, "opened": 2, "replayed": []}', 4, 0, 0, 15, false, '2026-11-22 11:59:50.905386+00', NULL, '2026-11-22 11:59:51.671205+00', 'in flight when its driver ended', NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('40e0a8266d01', 2, 'committed', 'exactly-once', 1, 1, 'lines', '{"bytes": 17, "range": [4, 8], "slice": 14, "deaths": 0, "opened": 1, "replayed": []}', 4, 1, 7, 17, false, '2026-11-22 11:59:48.491174+00', '2026-11-22 11:59:48.561249+00', '2026-11-22 11:59:48.631212+00', NULL, '{"job": 47.273, "open": 23.487, "commit": 35.742, "held_up": 35.772, "job.job": 33.558, "prepare": 36.011}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('40e0a8266d01', 1, 'committed', 'exactly-once', 1, 1, 'lines', '{"bytes": 15, "range": [0, 4], "slice": 13, "deaths": 0, "opened": 1, "replayed": []}', 4, 3, 5, 15, false, '2026-11-22 11:59:48.276763+00', '2026-11-22 11:59:48.376936+00', '2026-11-22 11:59:48.451242+00', NULL, '{"job": 53.763, "open": 56.073, "commit": 32.85, "held_up": 32.887, "job.job": 49.558, "prepare": 48.138}', 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('a7a1e8814b1a', 1, 'aborted', 'exactly-once', 1, 1, 'lines', '{"bytes": 15, "range": [0, 4], "slice": 15, "deaths": 0, "opened": 1, "replayed": []}', 4, 0, 0, 15, false, '2026-11-22 11:59:49.694884+00', NULL, '2026-11-22 11:59:50.732348+00', 'in flight when its driver ended', NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}'),
	('a7a1e8814b1a', 3, 'open', 'exactly-once', 3, 1, 'lines', '{"bytes": 6, "range": [0, 2], "slice": 15, "deaths": 1, "opened": 3, "replayed": []}', 2, 0, 0, 6, false, '2026-11-22 11:59:51.832156+00', NULL, NULL, NULL, NULL, 0, '{"why": "", "step": "", "bytes": 67108864, "floor_s": null, "messages": 4, "in_flight": 1, "in_flight_max": 1, "latency_target_s": null}');
INSERT INTO stormproof.txn_sink VALUES
	('40c1550cbb1f', 1, 'postgres.queue_prepared', NULL, 4, 873, 'ecc65ae8505e0be29b3546011efa277b94d5587e816449ea0b0aa99e94d990c9', '[{"path": "stormproof-40c1550cbb1f-1-1-0-50584b32.parquet", "rows": 2, "sink": "postgres.queue_prepared", "bytes": 432, "digest": "bc77fa81cd69f3f28492c7af06c33af3338c0332cc893e4054d34ef766a8a831", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"ONE\"},\"maxValues\":{\"word\":\"TWO\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-40c1550cbb1f-1-1-1-04051b17.parquet", "rows": 2, "sink": "postgres.queue_prepared", "bytes": 441, "digest": "19227b1058c72e720b64bf23a2b167374b6a653ceb59cf396b92503d5810c202", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FOUR\"},\"maxValues\":{\"word\":\"THREE\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:22.235756+00', 'applied'),
	('40c1550cbb1f', 2, 'postgres.queue_prepared', 1, 4, 879, 'e1dd884882b1daa04fecef70aa701036ace1254b47aedfc83838fff1a205b96c', '[{"path": "stormproof-40c1550cbb1f-2-1-0-76078c6e.parquet", "rows": 2, "sink": "postgres.queue_prepared", "bytes": 435, "digest": "e3ba3e01b3b906fa1bdff4844b2503e67b3c90a571e045c50363a7dfa5c4ddf3", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FIVE\"},\"maxValues\":{\"word\":\"SIX\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-40c1550cbb1f-2-1-1-72ff3d26.parquet", "rows": 2, "sink": "postgres.queue_prepared", "bytes": 444, "digest": "68e470c2279491e68ea5b78b3163f2bbbe49f979647ef024a684f43ed719b66b", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"EIGHT\"},\"maxValues\":{\"word\":\"SEVEN\"},\"nullCount\":{\"word\":0}}"}]', NULL, NULL),
	('121f53404982', 1, 'postgres.queue_committed', NULL, 4, 873, 'afced7ed2de4944b65781c468b9bbfc5426570fe6dbafdff51b46b7de1a48861', '[{"path": "stormproof-121f53404982-1-1-0-48702d85.parquet", "rows": 2, "sink": "postgres.queue_committed", "bytes": 432, "digest": "bc77fa81cd69f3f28492c7af06c33af3338c0332cc893e4054d34ef766a8a831", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"ONE\"},\"maxValues\":{\"word\":\"TWO\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-121f53404982-1-1-1-5f29d8fd.parquet", "rows": 2, "sink": "postgres.queue_committed", "bytes": 441, "digest": "19227b1058c72e720b64bf23a2b167374b6a653ceb59cf396b92503d5810c202", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FOUR\"},\"maxValues\":{\"word\":\"THREE\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:23.623598+00', 'applied'),
	('121f53404982', 2, 'postgres.queue_committed', 1, 4, 879, 'cc10f99fe0a3f6671cd29b7aca23fea0f8e57535ad54cd845f2fc566c304b0ed', '[{"path": "stormproof-121f53404982-2-1-0-2137949e.parquet", "rows": 2, "sink": "postgres.queue_committed", "bytes": 435, "digest": "e3ba3e01b3b906fa1bdff4844b2503e67b3c90a571e045c50363a7dfa5c4ddf3", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FIVE\"},\"maxValues\":{\"word\":\"SIX\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-121f53404982-2-1-1-24cb86d9.parquet", "rows": 2, "sink": "postgres.queue_committed", "bytes": 444, "digest": "68e470c2279491e68ea5b78b3163f2bbbe49f979647ef024a684f43ed719b66b", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"EIGHT\"},\"maxValues\":{\"word\":\"SEVEN\"},\"nullCount\":{\"word\":0}}"}]', NULL, NULL),
	('31f259eb37fe', 1, 'postgres.queue_waiting', NULL, 3, 864, 'fc22d5e6e1834062ce1c5b5db0f5e79979676ebb877f8b669261e24e54e2ac68', '[{"path": "stormproof-31f259eb37fe-1-1-0-371a092e.parquet", "rows": 1, "sink": "postgres.queue_waiting", "bytes": 423, "digest": "2a49fcbbcb67817ff0cad505bd080d4941ba2f1123232de83ecb0d635fde1af6", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"ONE\"},\"maxValues\":{\"word\":\"ONE\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-31f259eb37fe-1-1-1-8b03bd86.parquet", "rows": 2, "sink": "postgres.queue_waiting", "bytes": 441, "digest": "19227b1058c72e720b64bf23a2b167374b6a653ceb59cf396b92503d5810c202", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FOUR\"},\"maxValues\":{\"word\":\"THREE\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:26.913118+00', 'applied'),
	('31f259eb37fe', 2, 'postgres.queue_waiting', 1, 4, 879, '8f29f2f6f29bb135a60724c98e5c426bfabeb193566068a359e0783679001430', '[{"path": "stormproof-31f259eb37fe-2-1-0-9498fdd0.parquet", "rows": 2, "sink": "postgres.queue_waiting", "bytes": 435, "digest": "e3ba3e01b3b906fa1bdff4844b2503e67b3c90a571e045c50363a7dfa5c4ddf3", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FIVE\"},\"maxValues\":{\"word\":\"SIX\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-31f259eb37fe-2-1-1-9d821634.parquet", "rows": 2, "sink": "postgres.queue_waiting", "bytes": 444, "digest": "68e470c2279491e68ea5b78b3163f2bbbe49f979647ef024a684f43ed719b66b", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"EIGHT\"},\"maxValues\":{\"word\":\"SEVEN\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:27.142633+00', 'applied'),
	('80b9208120d6', 1, 'postgres.queue_retrying', NULL, 2, 858, 'ecae413c96d18f8a962ce036d71db55f9fd7e42626cab37c598d6e5c19913bfa', '[{"path": "stormproof-80b9208120d6-1-1-0-5f7b7415.parquet", "rows": 1, "sink": "postgres.queue_retrying", "bytes": 423, "digest": "2a49fcbbcb67817ff0cad505bd080d4941ba2f1123232de83ecb0d635fde1af6", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"ONE\"},\"maxValues\":{\"word\":\"ONE\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-80b9208120d6-1-1-1-7e892238.parquet", "rows": 1, "sink": "postgres.queue_retrying", "bytes": 435, "digest": "9005a4ffa8196f0d451e5fb6932ebb2089c6f44581b7cbd475f1b2e90c2384df", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"THREE\"},\"maxValues\":{\"word\":\"THREE\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:28.492635+00', 'applied'),
	('bd7b2081e600', 1, 'postgres.queue_retry_prepared', NULL, 2, 858, '7c18f6f5436bbb6e4828f6d13c9ba90c4910d7d356b3fe14d11536133d605930', '[{"path": "stormproof-bd7b2081e600-1-1-0-5700b3d1.parquet", "rows": 1, "sink": "postgres.queue_retry_prepared", "bytes": 423, "digest": "2a49fcbbcb67817ff0cad505bd080d4941ba2f1123232de83ecb0d635fde1af6", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"ONE\"},\"maxValues\":{\"word\":\"ONE\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-bd7b2081e600-1-1-1-2db42681.parquet", "rows": 1, "sink": "postgres.queue_retry_prepared", "bytes": 435, "digest": "9005a4ffa8196f0d451e5fb6932ebb2089c6f44581b7cbd475f1b2e90c2384df", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"THREE\"},\"maxValues\":{\"word\":\"THREE\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:30.363612+00', 'applied'),
	('bd7b2081e600', 2, 'postgres.queue_retry_prepared', 1, 1, 430, '4730a9c898ca89f8ea10698a9c73d0487cd5ba8af2d2d065b5e3d962cf4a7fea', '[{"path": "stormproof-bd7b2081e600-2-1-1-737885e5.parquet", "rows": 1, "sink": "postgres.queue_retry_prepared", "bytes": 430, "digest": "04fc37615166b66fb11fb0a33e98ea501d7c5f96de1c17bad1252fcb95e89f28", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"FOUR\"},\"maxValues\":{\"word\":\"FOUR\"},\"nullCount\":{\"word\":0}}"}]', NULL, NULL),
	('f43d1289fbb8', 1, 'postgres.queue_dead', NULL, 1, 423, 'd305b7d4a9dc763b85adb5468caf4049a13f643c62935e35396118b9463ee0fd', '[{"path": "stormproof-f43d1289fbb8-1-1-0-decc7e5f.parquet", "rows": 1, "sink": "postgres.queue_dead", "bytes": 423, "digest": "2a49fcbbcb67817ff0cad505bd080d4941ba2f1123232de83ecb0d635fde1af6", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"ONE\"},\"maxValues\":{\"word\":\"ONE\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:32.434899+00', 'applied'),
	('f43d1289fbb8', 2, 'postgres.queue_dead', 1, 3, 870, 'c612fbe7a04fd860d8839f49c0f691128bb2652eb2da3742fbd3c76b5e6bca36', '[{"path": "stormproof-f43d1289fbb8-2-1-0-01fbff6a.parquet", "rows": 2, "sink": "postgres.queue_dead", "bytes": 435, "digest": "e3ba3e01b3b906fa1bdff4844b2503e67b3c90a571e045c50363a7dfa5c4ddf3", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FIVE\"},\"maxValues\":{\"word\":\"SIX\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-f43d1289fbb8-2-1-1-08ee4a9d.parquet", "rows": 1, "sink": "postgres.queue_dead", "bytes": 435, "digest": "a9ae45b4d30fd2eeadef55fd1895e706489ce5a6791ec0e143ca0e87b1d859b5", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"EIGHT\"},\"maxValues\":{\"word\":\"EIGHT\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:32.65172+00', 'applied'),
	('b798dcf60ab2', 1, 'postgres.files_prepared', NULL, 4, 873, '2ca480ebcfec054c56d0cf374df79741f6908ebcff63d27b9f7261a2eb3fb90a', '[{"path": "stormproof-b798dcf60ab2-1-1-0-f02c7bdb.parquet", "rows": 2, "sink": "postgres.files_prepared", "bytes": 432, "digest": "bc77fa81cd69f3f28492c7af06c33af3338c0332cc893e4054d34ef766a8a831", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"ONE\"},\"maxValues\":{\"word\":\"TWO\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-b798dcf60ab2-1-1-1-ac08b3f7.parquet", "rows": 2, "sink": "postgres.files_prepared", "bytes": 441, "digest": "19227b1058c72e720b64bf23a2b167374b6a653ceb59cf396b92503d5810c202", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FOUR\"},\"maxValues\":{\"word\":\"THREE\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:39.027634+00', 'applied'),
	('b798dcf60ab2', 2, 'postgres.files_prepared', 1, 4, 879, 'e07914af552770abca279bc0d38f3a0635dcaab05d27c252adb78f63ec2148cc', '[{"path": "stormproof-b798dcf60ab2-2-1-0-6023a74a.parquet", "rows": 2, "sink": "postgres.files_prepared", "bytes": 435, "digest": "e3ba3e01b3b906fa1bdff4844b2503e67b3c90a571e045c50363a7dfa5c4ddf3", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FIVE\"},\"maxValues\":{\"word\":\"SIX\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-b798dcf60ab2-2-1-1-9356b64f.parquet", "rows": 2, "sink": "postgres.files_prepared", "bytes": 444, "digest": "68e470c2279491e68ea5b78b3163f2bbbe49f979647ef024a684f43ed719b66b", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"EIGHT\"},\"maxValues\":{\"word\":\"SEVEN\"},\"nullCount\":{\"word\":0}}"}]', NULL, NULL),
	('331567e2e6d6', 1, 'postgres.files_committed', NULL, 4, 873, 'de1d8af5c3bf11aac49860397b938a177da13b4267483d7e5e116d179607ffc5', '[{"path": "stormproof-331567e2e6d6-1-1-0-4b60c6a7.parquet", "rows": 2, "sink": "postgres.files_committed", "bytes": 432, "digest": "bc77fa81cd69f3f28492c7af06c33af3338c0332cc893e4054d34ef766a8a831", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"ONE\"},\"maxValues\":{\"word\":\"TWO\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-331567e2e6d6-1-1-1-b4de1ddb.parquet", "rows": 2, "sink": "postgres.files_committed", "bytes": 441, "digest": "19227b1058c72e720b64bf23a2b167374b6a653ceb59cf396b92503d5810c202", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FOUR\"},\"maxValues\":{\"word\":\"THREE\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:40.65637+00', 'applied'),
	('331567e2e6d6', 2, 'postgres.files_committed', 1, 4, 879, '06b8a3da61177a06c144db1bd139b4e1673d74523624e4bf2b2398b69f70d1ff', '[{"path": "stormproof-331567e2e6d6-2-1-0-e1944cc9.parquet", "rows": 2, "sink": "postgres.files_committed", "bytes": 435, "digest": "e3ba3e01b3b906fa1bdff4844b2503e67b3c90a571e045c50363a7dfa5c4ddf3", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FIVE\"},\"maxValues\":{\"word\":\"SIX\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-331567e2e6d6-2-1-1-acbe1e4e.parquet", "rows": 2, "sink": "postgres.files_committed", "bytes": 444, "digest": "68e470c2279491e68ea5b78b3163f2bbbe49f979647ef024a684f43ed719b66b", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"EIGHT\"},\"maxValues\":{\"word\":\"SEVEN\"},\"nullCount\":{\"word\":0}}"}]', NULL, NULL),
	('5f8eca1531c7', 1, 'postgres.files_waiting', NULL, 3, 864, '1b677a3b1933da2842b989d9adcd6620488581c13601270d47bfdda00328beea', '[{"path": "stormproof-5f8eca1531c7-1-1-0-2755a51d.parquet", "rows": 1, "sink": "postgres.files_waiting", "bytes": 423, "digest": "2a49fcbbcb67817ff0cad505bd080d4941ba2f1123232de83ecb0d635fde1af6", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"ONE\"},\"maxValues\":{\"word\":\"ONE\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-5f8eca1531c7-1-1-1-e00ffd89.parquet", "rows": 2, "sink": "postgres.files_waiting", "bytes": 441, "digest": "19227b1058c72e720b64bf23a2b167374b6a653ceb59cf396b92503d5810c202", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FOUR\"},\"maxValues\":{\"word\":\"THREE\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:44.22292+00', 'applied'),
	('5f8eca1531c7', 2, 'postgres.files_waiting', 1, 4, 879, '10ebc616d55e06b02d5ea860cf493b8d464dd735f2aed1310cef62bd36ef3831', '[{"path": "stormproof-5f8eca1531c7-2-1-0-200670f3.parquet", "rows": 2, "sink": "postgres.files_waiting", "bytes": 435, "digest": "e3ba3e01b3b906fa1bdff4844b2503e67b3c90a571e045c50363a7dfa5c4ddf3", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FIVE\"},\"maxValues\":{\"word\":\"SIX\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-5f8eca1531c7-2-1-1-d4c398c1.parquet", "rows": 2, "sink": "postgres.files_waiting", "bytes": 444, "digest": "68e470c2279491e68ea5b78b3163f2bbbe49f979647ef024a684f43ed719b66b", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"EIGHT\"},\"maxValues\":{\"word\":\"SEVEN\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:44.436388+00', 'applied'),
	('1f7110e1b5ad', 1, 'postgres.files_retrying', NULL, 2, 858, '5d83f8e7c18348867146d7a4f3199004b17ad3f02e9bd8b1a4c9d0187e24f0f3', '[{"path": "stormproof-1f7110e1b5ad-1-1-0-26f526fe.parquet", "rows": 1, "sink": "postgres.files_retrying", "bytes": 423, "digest": "2a49fcbbcb67817ff0cad505bd080d4941ba2f1123232de83ecb0d635fde1af6", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"ONE\"},\"maxValues\":{\"word\":\"ONE\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-1f7110e1b5ad-1-1-1-fdac75f5.parquet", "rows": 1, "sink": "postgres.files_retrying", "bytes": 435, "digest": "9005a4ffa8196f0d451e5fb6932ebb2089c6f44581b7cbd475f1b2e90c2384df", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"THREE\"},\"maxValues\":{\"word\":\"THREE\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:45.637808+00', 'applied'),
	('49c0400571c2', 1, 'postgres.files_retry_prepared', NULL, 2, 858, 'dacd1eba6b365bd6b081b8dc737eaf20a8e560acd545425be3e8632bc95a2a47', '[{"path": "stormproof-49c0400571c2-1-1-0-0850816e.parquet", "rows": 1, "sink": "postgres.files_retry_prepared", "bytes": 423, "digest": "2a49fcbbcb67817ff0cad505bd080d4941ba2f1123232de83ecb0d635fde1af6", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"ONE\"},\"maxValues\":{\"word\":\"ONE\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-49c0400571c2-1-1-1-14f2b549.parquet", "rows": 1, "sink": "postgres.files_retry_prepared", "bytes": 435, "digest": "9005a4ffa8196f0d451e5fb6932ebb2089c6f44581b7cbd475f1b2e90c2384df", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"THREE\"},\"maxValues\":{\"word\":\"THREE\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:47.063627+00', 'applied'),
	('49c0400571c2', 2, 'postgres.files_retry_prepared', 1, 1, 430, 'acbe441287374beb32e207b100b68dbc620e20d40bc03a54034b7630bab14f76', '[{"path": "stormproof-49c0400571c2-2-1-1-786a84cb.parquet", "rows": 1, "sink": "postgres.files_retry_prepared", "bytes": 430, "digest": "04fc37615166b66fb11fb0a33e98ea501d7c5f96de1c17bad1252fcb95e89f28", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"FOUR\"},\"maxValues\":{\"word\":\"FOUR\"},\"nullCount\":{\"word\":0}}"}]', NULL, NULL),
	('40e0a8266d01', 1, 'postgres.files_dead', NULL, 1, 423, '385659361254c4dcfa08b32fc8ca52e988d6b63e41e6df4a12018eb43f7682a5', '[{"path": "stormproof-40e0a8266d01-1-1-0-d81b81ba.parquet", "rows": 1, "sink": "postgres.files_dead", "bytes": 423, "digest": "2a49fcbbcb67817ff0cad505bd080d4941ba2f1123232de83ecb0d635fde1af6", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"ONE\"},\"maxValues\":{\"word\":\"ONE\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:48.445268+00', 'applied'),
	('40e0a8266d01', 2, 'postgres.files_dead', 1, 3, 870, 'a4a80e153a3a95726dee242e6004262c613e1cef7695a3e3bbf5a0d923b10c5a', '[{"path": "stormproof-40e0a8266d01-2-1-0-0135e6c5.parquet", "rows": 2, "sink": "postgres.files_dead", "bytes": 435, "digest": "e3ba3e01b3b906fa1bdff4844b2503e67b3c90a571e045c50363a7dfa5c4ddf3", "statistics": "{\"numRecords\":2,\"minValues\":{\"word\":\"FIVE\"},\"maxValues\":{\"word\":\"SIX\"},\"nullCount\":{\"word\":0}}"}, {"path": "stormproof-40e0a8266d01-2-1-1-579c88d4.parquet", "rows": 1, "sink": "postgres.files_dead", "bytes": 435, "digest": "a9ae45b4d30fd2eeadef55fd1895e706489ce5a6791ec0e143ca0e87b1d859b5", "statistics": "{\"numRecords\":1,\"minValues\":{\"word\":\"EIGHT\"},\"maxValues\":{\"word\":\"EIGHT\"},\"nullCount\":{\"word\":0}}"}]', '2026-11-22 11:59:48.630222+00', 'applied');
SELECT pg_catalog.setval('stormproof.dead_letter_number_seq', 4, true);
SELECT pg_catalog.setval('stormproof.event_id_seq', 48, true);
SELECT pg_catalog.setval('stormproof.file_dead_letter_number_seq', 4, true);
SELECT pg_catalog.setval('stormproof.file_slice_id_seq', 16, true);
SELECT pg_catalog.setval('stormproof.queue_adoption_number_seq', 1, false);
SELECT pg_catalog.setval('stormproof.queue_slice_id_seq', 16, true);
