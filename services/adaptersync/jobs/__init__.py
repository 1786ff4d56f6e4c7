"""Work off the critical path, as rq jobs: idempotent, asked for by name, bounded in time."""
