"""From a user's DataLoader to committed shards: opening, order, seeding, producing, committing. Runs on c1.4."""
