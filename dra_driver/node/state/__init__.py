"""What is kept on disk: the ledger of claims, MIG state, CDI specs, metadata and profiles."""
