-- A processed record is in one of these two: kept until its own time, or by age. Each new row pays for one of them.
DROP INDEX onceward_records_processed;
CREATE INDEX onceward_records_processed ON onceward_records (consumer, processed_at, identity)
    WHERE state = 'processed' AND expires_at IS NULL;
CREATE INDEX onceward_records_expiring ON onceward_records (consumer, expires_at, identity, processed_at)
    WHERE state = 'processed' AND expires_at IS NOT NULL;

-- The token of version 1 says which database this is, to whoever holds a connection and does not know.
ALTER TABLE onceward_schema ADD COLUMN token TEXT NOT NULL DEFAULT '';
UPDATE onceward_schema SET token = lower(hex(randomblob(16)));
