-- Where cleanup finds what is old. Rows come in the order of time, so the index grows at its right edge only.
CREATE INDEX onceward_records_processed ON onceward_records (consumer, processed_at, identity)
    WHERE state = 'processed';
