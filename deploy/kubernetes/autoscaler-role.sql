-- The login that KEDA asks with: counts of work, and no text, no prompt, no name of a tenant.
-- Run after `specbatch migrate` by a login that may make roles (CREATEROLE) and is or has the tables'
-- owner; then give it a password:
--   ALTER ROLE specbatch_autoscaler PASSWORD '...';
DO $$ BEGIN
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'specbatch_autoscaler') THEN
    CREATE ROLE specbatch_autoscaler LOGIN CONNECTION LIMIT 8;
  END IF;
END $$;
ALTER ROLE specbatch_autoscaler SET default_transaction_read_only = on;
ALTER ROLE specbatch_autoscaler SET statement_timeout = '5s';
GRANT SELECT (job_id, stage, verifier, proposer, ingest_resumes_at) ON jobs TO specbatch_autoscaler;
GRANT SELECT (job_id, stage) ON groups TO specbatch_autoscaler;
