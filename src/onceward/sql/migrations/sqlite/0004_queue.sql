-- The oldest code that works with what a migration made; NULL: none but its own.
ALTER TABLE onceward_schema ADD COLUMN since INTEGER;
